"""An inspected step of a run: memory, collectives, timeline; and the speed of the machine before and after the run.

`measured.json` has one inspected step: memory by term, the issued collectives, and seconds of the same short work before and
after the run. Files below `trace/memory` have the memory of the first steps over time, one for each rank and step. An
inspected step is one of the run's, but slower for it, so its seconds do not count.

The timeline of a rank has kernels, waits and collectives under the names of the planned step. Its file has a line of JSON for the
rank, and then one for each event, in the order in which they began. Times are nanoseconds from the beginning of the step on this
rank, on its own clock; the first line says how far that clock is ahead of the first rank's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from shardwise.records.run_folder import RunFolder, read_json
from shardwise.sharding import Axes, CollectiveKind, IssuedCollective
from shardwise.values import (
    FileMessages,
    InputError,
    parse_dataclass,
    parse_json_line,
    read_text,
    write_json_atomic,
    write_text_atomic,
)

INSPECTION_SCHEMA = "shardwise.measured/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Bytes of one step on one device.

    `at_peak` adds up to `peak_bytes`, by term: tensors saved for the backward pass are activations, and unnamed tensors are
    workspace. `largest` has the maximum of each term over the step; for activations it is what was alive between a forward
    pass and its backward pass. `undeclared_bytes` are of tensors that were made with the engine and have no term; at the peak
    they are among the inputs.
    """

    peak_bytes: int
    at_peak: Mapping[str, int]
    largest: Mapping[str, int]
    undeclared_bytes: int = 0


class ProcessMemory(NamedTuple):
    """Bytes reported by the operating system and by the device's allocator, each the maximum since the process began, or
    since `torch.cuda.reset_peak_memory_stats`; `allocated_bytes` is None on a device without an allocator of its own."""

    resident_bytes: int
    allocated_bytes: int | None
    reserved_bytes: int | None


class MemorySample(NamedTuple):
    """Sample of a step's memory: seconds from the first tensor, and the bytes of each term of `MeasuredMemory.at_peak`."""

    seconds: float
    bytes_by_term: tuple[int, ...]


class StepInspection(NamedTuple):
    """Inspection of a step on one process: bytes by term, at the peak and over time, and how often each collective was
    issued."""

    memory: MeasuredMemory
    collectives: Counter[IssuedCollective]
    curve: tuple[MemorySample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedRank:
    """Result of one rank that ran a step of some micro-batches alone, on meta tensors.

    `coordinate` is its position along each axis of the mesh, `groups` the ranks that it has collectives with, by axes;
    `seconds` are those of building the engine and running the step.
    """

    rank: int
    coordinate: Mapping[str, int]
    groups: Mapping[Axes, tuple[int, ...]]
    num_micro_batches: int
    seconds: float
    inspection: StepInspection


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInspection:
    """Inspection of a run since its latest start: machine probes, and memory and collectives of one step.

    `device` is "cpu" or "cuda", `machine` its description. `before` and `after` are seconds of the same short work, by name,
    on the slowest rank; `after` is empty for a run that has not ended. `step` is the number of the inspected step (from 1;
    None: not reached yet). `memory` and `process` are of the fullest rank, `rank`; `collectives` are those of the first.
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
        """Return by how much each piece of work takes longer after the run than before: 0.14 is 14% longer."""
        return {name: self.after[name] / self.before[name] - 1 for name in self.before if name in self.after}


def inspection_payload(inspection: RunInspection) -> dict[str, Any]:
    """Return the contents of `measured.json`."""
    memory, process = inspection.memory, inspection.process
    return {
        "schema": INSPECTION_SCHEMA, "device": inspection.device, "machine": inspection.machine, "step": inspection.step,
        "rank": inspection.rank, "before": dict(inspection.before), "after": dict(inspection.after),
        "memory": asdict(memory) if memory else None, "process": process._asdict() if process else None,
        "collectives": [
            {
                "kind": str(collective.kind), "axes": list(collective.axes), "dtype": collective.dtype,
                "num_bytes": collective.num_bytes, "count": count,
            }
            for collective, count in sorted(inspection.collectives.items())
        ],
    }  # fmt: skip


def parse_inspection(payload: Mapping[str, Any], where: str) -> RunInspection:
    """Parse the contents of `measured.json`. Raises `InputError` for another schema and for a malformed payload."""
    if payload.get("schema") != INSPECTION_SCHEMA:
        raise InputError(f"{where}: found schema {payload.get('schema')!r}; {INSPECTION_SCHEMA!r} is required")
    try:
        memory, process = payload["memory"], payload["process"]
        return RunInspection(
            device=str(payload["device"]), machine=str(payload["machine"]),
            before=parse_dataclass(dict[str, float], payload["before"], where),
            after=parse_dataclass(dict[str, float], payload["after"], where),
            step=None if payload["step"] is None else parse_dataclass(int, payload["step"], where),
            rank=parse_dataclass(int, payload["rank"], where),
            memory=parse_dataclass(MeasuredMemory, memory, where) if memory else None,
            process=parse_dataclass(ProcessMemory, process, where) if process else None,
            collectives=Counter({
                _parse_collective(collective): parse_dataclass(int, collective["count"], where)
                for collective in payload["collectives"]
            }),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{where}: {error!r}; a file as `train` writes it is required") from None


def _parse_collective(collective: Mapping[str, Any]) -> IssuedCollective:
    return IssuedCollective(
        CollectiveKind(collective["kind"]),
        parse_dataclass(tuple[str, ...], collective["axes"], "axes"),
        str(collective["dtype"]),
        parse_dataclass(int, collective["num_bytes"], "num_bytes"),
        "",
    )


MEMORY_TRACE_SCHEMA = "shardwise.memory_trace/1"
# As many as S1 shows in its anatomy of a step: the first has no optimizer state yet, the others are alike.
NUM_RECORDED_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTrace:
    """Memory of a step, counted from 1, on a rank: the names of the terms, and samples of the bytes of each."""

    step: int
    rank: int
    terms: tuple[str, ...]
    samples: tuple[MemorySample, ...]

    @property
    def peak_bytes(self) -> int:
        """Largest sum over the terms."""
        return max((sum(sample.bytes_by_term) for sample in self.samples), default=0)


def build_memory_trace(step: int, rank: int, inspection: StepInspection) -> MemoryTrace:
    """Return the memory trace of an inspected step."""
    return MemoryTrace(step=step, rank=rank, terms=tuple(inspection.memory.at_peak), samples=inspection.curve)


def write_memory_trace(run: RunFolder, trace: MemoryTrace) -> None:
    """Write a rank's memory trace in the folder of its run."""
    folder = run.trace / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(
        folder / f"step-{trace.step}-rank-{trace.rank}.json", {"schema": MEMORY_TRACE_SCHEMA, **asdict(trace)}
    )


def read_memory_traces(run: RunFolder) -> tuple[MemoryTrace, ...]:
    """Return the memory traces of the fullest rank, in order. Raises `InputError` if there are none, and for a damaged file."""
    traces = [
        _parse_memory_trace(read_json(path), str(path)) for path in (run.trace / "memory").glob("step-*-rank-*.json")
    ]
    if not traces:
        raise InputError(
            f"--memory: {run.path} holds no memory of its first steps; a run with `shardwise train --profile A:B` is required"
        )
    fullest_rank = max(traces, key=lambda trace: trace.peak_bytes).rank
    return tuple(sorted((trace for trace in traces if trace.rank == fullest_rank), key=lambda trace: trace.step))


def _parse_memory_trace(payload: dict[str, object], where: str) -> MemoryTrace:
    if payload.pop("schema", None) != MEMORY_TRACE_SCHEMA:
        raise InputError(
            f"{where}: found another schema; {MEMORY_TRACE_SCHEMA!r} is required: run again with --profile"
        )
    try:
        samples = tuple(MemorySample(seconds, tuple(term_bytes)) for seconds, term_bytes in payload["samples"])  # type: ignore[attr-defined]
        return MemoryTrace(step=payload["step"], rank=payload["rank"], terms=tuple(payload["terms"]), samples=samples)  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where}: {error!r}; a file as `train --profile` writes it is required") from None


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


MAX_CLOCK_NS = 10**19  # of any event: 300 years
MAX_TRACE_BYTES = 256_000_000  # of a rank's step


def read_trace(path: Path) -> RankTrace:
    """Read a rank's step. Raises `InputError` for a file that is missing, damaged, or of another schema."""
    messages = FileMessages(fix="a file as `train --profile` writes it is required")
    try:
        head, *lines = read_text(path, messages, MAX_TRACE_BYTES).splitlines()
        values = parse_json_line(head)
        if values.pop("schema", None) != SCHEMA:
            raise InputError(f"{path}: found another schema; {SCHEMA!r} is required: trace the run again")
        trace = parse_dataclass(RankTrace, {**values, "events": list(map(parse_json_line, lines))}, str(path))
        clocks = [trace.begin_ns, trace.step_ns, trace.offset_ns, trace.error_ns]
        clocks += [clock for event in trace.events for clock in (event.start_ns, event.end_ns, event.cpu_ns)]
        if max(map(abs, clocks)) > MAX_CLOCK_NS:
            raise ValueError(f"found a clock beyond {MAX_CLOCK_NS:g} ns; one of the run is required")
        return trace
    except (ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise messages.fail(f"{path}: {error}") from None
