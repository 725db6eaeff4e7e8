"""Traces in the JSON format of Chrome and Perfetto: a process for each worker, a thread for each stream, arrows for messages.

Source: "Trace Event Format", Chromium: complete events (X), metadata (M), flow events (s, f); times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.measure.reconcile.aligned_traces import TracedStep, event_axis
from shardwise.pipeline import Action, ActionList, Slot, Timeline
from shardwise.pipeline.messages import remote_dependencies
from shardwise.price import SimulatedStep, TimedKernel
from shardwise.price.simulation.streams import StreamEvent
from shardwise.records import COLLECTIVE, WAIT, TraceEvent
from shardwise.values import InputError

US = 1e6  # microseconds of a second
MOST_TRACED = 1_000_000  # events: a trace of them is 200 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An action of a stream of a process from start to end, in seconds; `args` are shown beside it."""

    name: str
    process: int
    stream: str
    start: float
    end: float
    category: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A message from inside of one event (its end) to another (its start)."""

    name: str
    source: Event
    target: Event


def merge_spans(
    spans: Iterable[tuple[float, float, str]], resolution_s: float
) -> Iterator[tuple[float, float, str, float]]:
    """Yield spans (start, end, name) in order with their busy seconds; those of a name nearer than the resolution are one span.

    >>> list(merge_spans([(0.0, 1.0, "tp"), (1.5, 2.0, "tp"), (4.0, 5.0, "tp")], 1.0))
    [(0.0, 2.0, 'tp', 1.5), (4.0, 5.0, 'tp', 1.0)]
    """
    last: tuple[float, float, str, float] | None = None
    for start, end, name in sorted(spans):
        if last and name == last[2] and start - last[1] <= resolution_s:
            last = (last[0], max(last[1], end), name, last[3] + end - start)
            continue
        if last:
            yield last
        last = (start, end, name, end - start)
    if last:
        yield last


def chrome_trace(processes: Sequence[str], events: Iterable[Event], arrows: Iterable[Arrow] = ()) -> str:
    """Return the trace as JSON; `processes` are the names of processes 0, 1, ..., in the order in which they are shown."""
    events = list(events)
    streams = {name: number for number, name in enumerate(dict.fromkeys(event.stream for event in events))}
    trace_events: list[dict[str, Any]] = []
    for number, name in enumerate(processes):
        trace_events += [
            _metadata_event("process_name", number, name=name),
            _metadata_event("process_sort_index", number, sort_index=number),
        ]
        trace_events += [
            _metadata_event("thread_name", number, thread, name=stream) for stream, thread in streams.items()
        ]
    trace_events += [
        {
            "name": event.name, "cat": event.category, "ph": "X", "pid": event.process, "tid": streams[event.stream],
            "ts": event.start * US, "dur": (event.end - event.start) * US, "args": dict(event.args),
        }
        for event in events
    ]  # fmt: skip
    for number, arrow in enumerate(arrows):
        shared = {"name": arrow.name, "cat": "message", "id": number}
        source, target = arrow.source, arrow.target
        ends = {"ph": "s", "pid": source.process, "tid": streams[source.stream], "ts": source.end * US}
        begins = {"ph": "f", "bp": "e", "pid": target.process, "tid": streams[target.stream], "ts": target.start * US}
        trace_events += [{**shared, **ends}, {**shared, **begins}]
    return json.dumps({"traceEvents": trace_events, "displayTimeUnit": "ms"})


def _metadata_event(kind: str, process: int, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": args}


def events(step: SimulatedStep, rank: int) -> Iterator[tuple[StreamEvent, float, float]]:
    """Yield the work of a rank's streams in the step, with start and end."""
    trailing_transfers = {(transfer.slot, transfer.event): transfer for transfer in step.trailing[rank]}
    for number, (_, played, begin, _) in enumerate(step.slots(rank)):
        for place, event in enumerate(played.events):
            late = trailing_transfers.get((number, place))
            yield event, late.start if late else begin + event.start, late.end if late else begin + event.end
    for event in step.updates[rank].events:
        yield event, step.passes_s + event.start, step.passes_s + event.end


def step_trace_text(step: SimulatedStep) -> str:
    """Return the step as a trace for Chrome and Perfetto: a process for each stage, with the passes, every kernel and every
    transfer on its stream; arrows are messages between stages. Raises `InputError` for more events than a browser opens.
    """
    ranks = range(step.actions.num_ranks)
    number = sum(len(played.events) for plays in step.slot_timelines for played in plays)
    if number > MOST_TRACED:
        raise InputError(
            f"--trace: found {number:,} kernels and transfers; at most {MOST_TRACED:,} are written: a plan of fewer micro-batches"
        )
    passes, stream_events = planned_events(step)
    names = [f"stage {rank}" if len(ranks) > 1 else "device" for rank in ranks]
    return chrome_trace(names, [*passes.values(), *stream_events], arrows_of(step.actions, passes))


def planned_events(step: SimulatedStep, first: int = 0) -> tuple[dict[Action, Event], list[Event]]:
    """Return the passes of all stages, and every kernel and transfer; `first` is the number of the first stage's process."""
    ranks = range(step.actions.num_ranks)
    passes = {
        action: Event(
            name=str(action), process=first + rank, stream="passes", start=start, end=end, category=action.kind,
            args={"stage": action.stage, "micro_batch": action.micro_batch},
        )
        for rank in ranks
        for slot, _, start, end in step.slots(rank)
        for action in slot
    }  # fmt: skip
    return passes, [_traced(event, first + rank, *times) for rank in ranks for event, *times in events(step, rank)]


def _traced(event: StreamEvent, rank: int, start: float, end: float) -> Event:
    work = event.work
    if isinstance(work, TimedKernel):
        return Event(
            name=work.name, process=rank, stream=event.stream, start=start, end=end, category=work.phase, args={"unit": work.unit}
        )  # fmt: skip
    return Event(
        name=work.name, process=rank, stream=event.stream, start=start, end=end, category="traffic",
        args={"unit": work.unit, "axis": work.axis},
    )  # fmt: skip


def schedule_trace_text(line: Timeline) -> str:
    """Return the list as a trace for Chrome and Perfetto: a process for each rank, an arrow for each message between ranks."""
    events = {
        action: Event(
            name=str(action), process=rank, stream="compute", start=start, end=end, category=action.kind,
            args={"stage": action.stage, "micro_batch": action.micro_batch, "together": _concurrent_actions(slot, action)},
        )
        for rank, slot, start, end in line.slots()
        for action in slot
    }  # fmt: skip
    names = [f"rank {rank}" for rank in range(line.actions.num_ranks)]
    return chrome_trace(names, events.values(), arrows_of(line.actions, events))


def arrows_of(actions: ActionList, events: Mapping[Action, Event]) -> Iterator[Arrow]:
    """Yield an arrow for each message between ranks."""
    for action, event in events.items():
        for dependency in remote_dependencies(actions, action):
            if dependency in events and events[dependency].process != event.process:
                yield Arrow(name=str(dependency), source=events[dependency], target=event)


def _concurrent_actions(slot: Slot, action: Action) -> list[str]:
    return [str(concurrent) for concurrent in slot if concurrent != action]


ABOUT = ("path", "unit", "action", "role", "num_bytes")


def both_traces(step: TracedStep, planned: SimulatedStep) -> str:
    """Return one trace of both steps as JSON: the measured ranks first, then the planned stages."""
    num_ranks = len(step.ranks)
    names = [f"rank {rank.trace.rank}, measured" for rank in step.ranks]
    stages = planned.actions.num_ranks
    names += [f"stage {stage}, planned" if stages > 1 else "planned" for stage in range(stages)]
    passes, events = planned_events(planned, first=num_ranks)
    return chrome_trace(names, [*_measured(step), *passes.values(), *events])


def _measured(step: TracedStep) -> Iterator[Event]:
    for process, rank in enumerate(step.ranks):
        for span in rank.spans:
            event = span.event
            yield Event(
                name=f"wait {event.name}" if event.kind == WAIT else event.name, process=process, stream=event.stream,
                start=span.start, end=span.end, category="traffic" if event.kind == COLLECTIVE else event.phase or event.kind,
                args=_about(event),
            )  # fmt: skip


def _about(event: TraceEvent) -> dict[str, Any]:
    arguments = {name: value for name in ABOUT if (value := getattr(event, name))}
    return {**arguments, "axis": event_axis(event)} if event.axes else arguments
