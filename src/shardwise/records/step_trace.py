"""Timeline of a step as one rank measured it: kernels, waits and collectives under the names of the planned step.

A file has a line of JSON for the rank, and then one for each event, in the order in which they began. Times are nanoseconds
from the beginning of the step on this rank, on its own clock; the first line says how far that clock is ahead of the first
rank's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from shardwise.records.run_folder import RunFolder
from shardwise.sharding import Axes
from shardwise.values import InputError, write_text_atomic

SCHEMA = "shardwise.events/1"
KERNEL: Final = "kernel"
WAIT: Final = "wait"
COLLECTIVE: Final = "collective"
PASS: Final = "pass"
PASSES = "passes"  # row of the forward and backward passes, which is no stream
TraceEventKind = Literal["kernel", "wait", "collective", "pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEvent:
    """Event on a stream of a rank, from `start_ns` to `end_ns`.

    `kind`: a kernel, a wait of the compute stream for a collective, a collective on the stream of its axis from its issue to
    its end, or a pass. `name` is that of the planned step's instruction; `path` and `unit` are the place in the model
    ("layers.3", "block"), `phase` and `action` the pass ("backward", "0B2"). `results` are the tensors that a kernel
    computes. `role`, `axes`, `num_bytes` and `number` are those of a collective, or of the one that is waited for: its
    content, and the number of collectives over the same axes that the rank issued before. `issued_ns`: when the host issued
    it. `cpu_ns`: for a kernel on a CPU, how long the thread had a core.
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
    """A step (from 1) on one rank, which took `step_ns`. `coordinate` is the rank's position along the axes of the mesh. Its
    clock read `begin_ns` at the start of the step, and is `offset_ns` ahead of the first rank's, within `error_ns`."""

    rank: int
    step: int
    device: str
    coordinate: Mapping[str, int]
    begin_ns: int
    step_ns: int
    offset_ns: int
    error_ns: int
    events: tuple[TraceEvent, ...] = field(repr=False)


EVENT_DEFAULTS = {event_field.name: event_field.default for event_field in fields(TraceEvent)}


def trace_path(run: RunFolder, step: int, rank: int) -> Path:
    """Return the file of a rank's step."""
    return run.trace / f"step-{step}" / f"rank-{rank}.jsonl"


def write_trace(run: RunFolder, trace: RankTrace) -> None:
    """Write a rank's step in the folder of its run."""
    path = trace_path(run, trace.step, trace.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(path, "".join(f"{json.dumps(line, separators=(',', ':'))}\n" for line in _format_lines(trace)))


def _format_lines(trace: RankTrace) -> Iterator[dict[str, Any]]:
    head = {
        trace_field.name: getattr(trace, trace_field.name)
        for trace_field in fields(trace)
        if trace_field.name != "events"
    }
    yield {"schema": SCHEMA, **head, "coordinate": dict(trace.coordinate)}
    for event in trace.events:
        yield {name: value for name, value in asdict(event).items() if value != EVENT_DEFAULTS[name]}


def list_traced_steps(run: RunFolder) -> dict[int, tuple[int, ...]]:
    """Return the traced steps of a run, each with the ranks that wrote a file."""
    ranks_by_step: dict[int, list[int]] = {}
    for path in run.trace.glob("step-*/rank-*.jsonl"):
        step, rank = path.parent.name.partition("-")[2], path.stem.partition("-")[2]
        if step.isdecimal() and rank.isdecimal():
            ranks_by_step.setdefault(int(step), []).append(int(rank))
    return {step: tuple(sorted(ranks_by_step[step])) for step in sorted(ranks_by_step)}


def read_trace(path: Path) -> RankTrace:
    """Read a rank's step. Raises `InputError` for a file that is missing, damaged, or of another schema."""
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
