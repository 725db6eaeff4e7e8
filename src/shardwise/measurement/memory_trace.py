"""The memory of the first steps of a run over time, by the terms of a plan: a file for each rank and step."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from shardwise.errors import InputError
from shardwise.measurement.folder import RunFolder, read_json, write_json
from shardwise.measurement.inspection import Inspection, MemorySample

SCHEMA = "shardwise.memory_trace/1"
STEPS = 4  # as many as S1 shows of its anatomy of a step: the first has no optimizer state yet, the others are alike


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """A step, counted from 1, on a rank: the names of the terms, and samples of the bytes of each."""

    step: int
    rank: int
    terms: tuple[str, ...]
    samples: tuple[MemorySample, ...]

    @property
    def peak_bytes(self) -> int:
        """The most that was held."""
        return max((sum(sample.held) for sample in self.samples), default=0)


def memory_of(step: int, rank: int, seen: Inspection) -> MemoryTrace:
    """What was seen of a step."""
    return MemoryTrace(step=step, rank=rank, terms=tuple(seen.memory.at_peak), samples=seen.curve)


def write_memory(run: RunFolder, trace: MemoryTrace) -> None:
    """Write a rank's step in the folder of its run."""
    folder = run.trace / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"step-{trace.step}-rank-{trace.rank}.json", {"schema": SCHEMA, **asdict(trace)})


def read_memory(run: RunFolder) -> tuple[MemoryTrace, ...]:
    """The steps of the fullest rank, in order. Raises `InputError` where none was recorded, and for a damaged file."""
    found = [_parsed(read_json(path), str(path)) for path in (run.trace / "memory").glob("step-*-rank-*.json")]
    if not found:
        raise InputError(
            f"--memory: {run.path} holds no memory of its first steps; a run with `shardwise train --profile A:B` is required"
        )
    fullest = max(found, key=lambda one: one.peak_bytes).rank
    return tuple(sorted((one for one in found if one.rank == fullest), key=lambda one: one.step))


def _parsed(payload: dict[str, object], where: str) -> MemoryTrace:
    if payload.pop("schema", None) != SCHEMA:
        raise InputError(f"{where}: found another schema; {SCHEMA!r} is required: run again with --profile")
    try:
        samples = tuple(MemorySample(seconds, tuple(held)) for seconds, held in payload["samples"])  # type: ignore[attr-defined]
        return MemoryTrace(step=payload["step"], rank=payload["rank"], terms=tuple(payload["terms"]), samples=samples)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: {error!r}; a file as `train --profile` writes it is required") from None
