"""The timeline of a step as one rank measured it: kernels, waits and collectives under the names of the planned step.

A file has a line of JSON for the rank, and then one for each event, in the order in which they began. Times are nanoseconds from
the beginning of the step on this rank, on its own clock; the first line says how far that clock is ahead of the first rank's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from shardwise.records.run_folder import RunFolder
from shardwise.sharding.spec import Axes
from shardwise.values.atomic_files import write_text_atomic
from shardwise.values.errors import InputError

SCHEMA = "shardwise.events/1"
KERNEL: Final = "kernel"
WAIT: Final = "wait"
COLLECTIVE: Final = "collective"
PASS: Final = "pass"
PASSES = "passes"  # the row of passes, which is no stream
TraceEventKind = Literal["kernel", "wait", "collective", "pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Something that a stream of a rank did, from `start_ns` to `end_ns`.

    `kind`: a kernel, a wait of the compute stream for a collective, a collective on the stream of its axis from when it was
    issued until it was done, or a pass. `name` is that of the planned step's instruction; `path` and `unit` say where in the
    model it stands ("layers.3", "block"), `phase` and `action` in which pass ("backward", "0B2"). `results` are the tensors that
    a kernel makes. `role`, `axes`, `num_bytes` and `number` are a collective's, and those of the one that is waited for: what it
    carries, and the number of those over the same axes that the rank issued before. `issued_ns`: when the host had come to it.
    `cpu_ns`: of a kernel on a CPU, how long the thread had a core.
    """

    kind: TraceEventKind
    name: str
    stream: str
    start_ns: int
    end_ns: int
    path: str = ""
    unit: str = ""
    phase: str = ""
    action: str = ""
    results: tuple[str, ...] = ()
    role: str = ""
    axes: Axes = ()
    num_bytes: int = 0
    number: int = 0
    issued_ns: int = 0
    cpu_ns: int = 0

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """A step on one rank, which took `step_ns`; `step` counts from 1. `coordinate` is the rank's place along the axes of the
    mesh. Its clock read `begin_ns` at the beginning, and is `offset_ns` ahead of the first rank's, give or take `error_ns`."""

    rank: int
    step: int
    device: str
    coordinate: Mapping[str, int]
    begin_ns: int
    step_ns: int
    offset_ns: int
    error_ns: int
    events: tuple[TraceEvent, ...] = field(repr=False)


EVENT_DEFAULTS = {one.name: one.default for one in fields(TraceEvent)}


def trace_path(run: RunFolder, step: int, rank: int) -> Path:
    """The file of a rank's step."""
    return run.trace / f"step-{step}" / f"rank-{rank}.jsonl"


def write_trace(run: RunFolder, trace: RankTrace) -> None:
    """Write a rank's step in the folder of its run."""
    path = trace_path(run, trace.step, trace.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in _format_lines(trace)))


def _format_lines(trace: RankTrace) -> Iterator[dict[str, Any]]:
    head = {one.name: getattr(trace, one.name) for one in fields(trace) if one.name != "events"}
    yield {"schema": SCHEMA, **head, "coordinate": dict(trace.coordinate)}
    for event in trace.events:
        yield {name: value for name, value in asdict(event).items() if value != EVENT_DEFAULTS[name]}


def list_traced_steps(run: RunFolder) -> dict[int, tuple[int, ...]]:
    """The steps of a run that were traced, each with the ranks that wrote theirs."""
    found: dict[int, list[int]] = {}
    for path in run.trace.glob("step-*/rank-*.jsonl"):
        step, rank = path.parent.name.partition("-")[2], path.stem.partition("-")[2]
        if step.isdecimal() and rank.isdecimal():
            found.setdefault(int(step), []).append(int(rank))
    return {step: tuple(sorted(found[step])) for step in sorted(found)}


def read_trace(path: Path) -> RankTrace:
    """A rank's step. Raises `InputError` for a file that is missing, damaged, or of another schema."""
    try:
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        values = json.loads(head)
        if values.pop("schema", None) != SCHEMA:
            raise InputError(f"{path}: found another schema; {SCHEMA!r} is required: trace the run again")
        return RankTrace(**values, events=tuple(_parse_event(json.loads(line)) for line in lines))
    except OSError as error:
        raise InputError(
            f"{path}: cannot read: {error.strerror}; a file as `train --profile` writes it is required"
        ) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: {error}; a file as `train --profile` writes it is required") from None


def _parse_event(line: dict[str, Any]) -> TraceEvent:
    return TraceEvent(**line | {name: tuple(line[name]) for name in ("results", "axes") if name in line})
