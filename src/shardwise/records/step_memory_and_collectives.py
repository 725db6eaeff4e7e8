"""Memory and collectives of inspected steps, and the speed of the machine before and after a run.

`measured.json` has one inspected step: memory by term, the collectives that were issued, and seconds of the same short work
before and after the run. Files below `trace/memory` have the memory of the first steps over time, one for each rank and step. An
inspected step is one of the run's, but slower for it, so its seconds do not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from shardwise.records.run_folder import RunFolder, read_json
from shardwise.sharding.collectives import CollectiveKind, IssuedCollective
from shardwise.sharding.spec import Axes
from shardwise.values.atomic_files import write_json_atomic
from shardwise.values.errors import InputError

INSPECTION_SCHEMA = "shardwise.measured/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Bytes of one step on one device.

    `at_peak` adds up to `peak_bytes`, by term: what was saved for the backward pass, and is there at the peak, is among its
    activations, what else is there without a name is workspace. `largest` has the most that each term ever had; of activations
    it is what was alive between a forward pass and its backward pass.
    """

    peak_bytes: int
    at_peak: Mapping[str, int]
    largest: Mapping[str, int]


class ProcessMemory(NamedTuple):
    """What the operating system and the device's allocator say, in bytes. Each is the most since the process began, or since
    `torch.cuda.reset_peak_memory_stats`; `allocated_bytes` is None on a device that has no allocator of its own."""

    resident_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None


class MemorySample(NamedTuple):
    """A moment of a step in seconds from the first tensor that was seen, and the bytes of each term of
    `MeasuredMemory.at_peak`."""

    seconds: float
    bytes_by_term: tuple[int, ...]


class StepInspection(NamedTuple):
    """What was seen of a step on one process: bytes by term, at the peak and over time, and how often each collective was
    issued."""

    memory: MeasuredMemory
    collectives: Counter[IssuedCollective]
    curve: tuple[MemorySample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedRank:
    """What a rank did that ran a step of so many micro-batches by itself, on tensors without data.

    `coordinate` is its place along each axis of the mesh, `groups` the ranks that it has collectives with, by axes; `seconds`
    are those of making the engine and running the step.
    """

    rank: int
    coordinate: Mapping[str, int]
    groups: Mapping[Axes, tuple[int, ...]]
    num_micro_batches: int
    seconds: float
    inspection: StepInspection


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInspection:
    """What was seen of a run from its latest start on.

    `device` is "cpu" or "cuda", `machine` says which. `before` and `after` are seconds of the same short work, by name, on the
    slowest rank; `after` is empty for a run that has not ended. `step` is the number of the watched step (from 1; None: it has
    not come to one). `memory` and `process` are of the fullest rank, `rank`; `collectives` are those of the first.
    """

    device: str
    machine: str
    before: Mapping[str, float]
    after: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    rank: int = 0
    memory: MeasuredMemory | None = None
    process: ProcessMemory | None = None
    collectives: Counter[IssuedCollective] = field(default_factory=Counter)

    def relative_changes(self) -> dict[str, float]:
        """By how much each piece of work takes longer after the run than before: 0.14 is 14% longer."""
        return {name: self.after[name] / self.before[name] - 1 for name in self.before if name in self.after}


def inspection_payload(measured: RunInspection) -> dict[str, Any]:
    """As measured.json has it."""
    memory, process = measured.memory, measured.process
    return {
        "schema": INSPECTION_SCHEMA, "device": measured.device, "machine": measured.machine, "step": measured.step,
        "rank": measured.rank, "before": dict(measured.before), "after": dict(measured.after),
        "memory": asdict(memory) if memory else None, "process": process._asdict() if process else None,
        "collectives": [
            {"kind": str(one.kind), "axes": list(one.axes), "dtype": one.dtype, "num_bytes": one.num_bytes, "count": count}
            for one, count in sorted(measured.collectives.items())
        ],
    }  # fmt: skip


def parse_inspection(payload: Mapping[str, Any], where: str) -> RunInspection:
    """What measured.json says. Raises `InputError` for another schema, and for what is not as it was written."""
    if payload.get("schema") != INSPECTION_SCHEMA:
        raise InputError(f"{where}: found schema {payload.get('schema')!r}; {INSPECTION_SCHEMA!r} is required")
    try:
        memory, process = payload["memory"], payload["process"]
        return RunInspection(
            device=payload["device"], machine=payload["machine"], before=payload["before"], after=payload["after"],
            step=payload["step"], rank=payload["rank"], memory=MeasuredMemory(**memory) if memory else None,
            process=ProcessMemory(**process) if process else None,
            collectives=Counter({_parse_collective(one): one["count"] for one in payload["collectives"]}),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where}: {error!r}; a file as `train` writes it is required") from None


def _parse_collective(one: Mapping[str, Any]) -> IssuedCollective:
    return IssuedCollective(CollectiveKind(one["kind"]), tuple(one["axes"]), one["dtype"], one["num_bytes"], "")


MEMORY_TRACE_SCHEMA = "shardwise.memory_trace/1"
NUM_RECORDED_STEPS = (
    4  # as many as S1 shows of its anatomy of a step: the first has no optimizer state yet, the others are alike
)


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
        return max((sum(sample.bytes_by_term) for sample in self.samples), default=0)


def build_memory_trace(step: int, rank: int, seen: StepInspection) -> MemoryTrace:
    """What was seen of a step."""
    return MemoryTrace(step=step, rank=rank, terms=tuple(seen.memory.at_peak), samples=seen.curve)


def write_memory_trace(run: RunFolder, trace: MemoryTrace) -> None:
    """Write a rank's step in the folder of its run."""
    folder = run.trace / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(
        folder / f"step-{trace.step}-rank-{trace.rank}.json", {"schema": MEMORY_TRACE_SCHEMA, **asdict(trace)}
    )


def read_memory_traces(run: RunFolder) -> tuple[MemoryTrace, ...]:
    """The steps of the fullest rank, in order. Raises `InputError` where none was recorded, and for a damaged file."""
    found = [
        _parse_memory_trace(read_json(path), str(path)) for path in (run.trace / "memory").glob("step-*-rank-*.json")
    ]
    if not found:
        raise InputError(
            f"--memory: {run.path} holds no memory of its first steps; a run with `shardwise train --profile A:B` is required"
        )
    fullest = max(found, key=lambda one: one.peak_bytes).rank
    return tuple(sorted((one for one in found if one.rank == fullest), key=lambda one: one.step))


def _parse_memory_trace(payload: dict[str, object], where: str) -> MemoryTrace:
    if payload.pop("schema", None) != MEMORY_TRACE_SCHEMA:
        raise InputError(
            f"{where}: found another schema; {MEMORY_TRACE_SCHEMA!r} is required: run again with --profile"
        )
    try:
        samples = tuple(MemorySample(seconds, tuple(held)) for seconds, held in payload["samples"])  # type: ignore[attr-defined]
        return MemoryTrace(step=payload["step"], rank=payload["rank"], terms=tuple(payload["terms"]), samples=samples)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: {error!r}; a file as `train --profile` writes it is required") from None
