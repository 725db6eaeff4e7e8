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
    """Something that a stream of a process does from start to end, in seconds; `args` are shown beside it."""

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


def chrome_trace(processes: Sequence[str], events: Iterable[Event], arrows: Iterable[Arrow] = ()) -> str:
    """The trace as JSON; `processes` are the names of processes 0, 1, ..., in the order in which they are shown."""
    events = list(events)
    streams = {name: number for number, name in enumerate(dict.fromkeys(event.stream for event in events))}
    found: list[dict[str, Any]] = []
    for number, name in enumerate(processes):
        found += [_named("process_name", number, name=name), _named("process_sort_index", number, sort_index=number)]
        found += [_named("thread_name", number, thread, name=stream) for stream, thread in streams.items()]
    found += [
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
        found += [{**shared, **ends}, {**shared, **begins}]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})


def _named(what: str, process: int, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}


def events(found: SimulatedStep, rank: int) -> Iterator[tuple[StreamEvent, float, float]]:
    """The work of a rank's streams in the step, with start and end."""
    left = {(one.slot, one.event): one for one in found.trailing[rank]}
    for number, (_, played, begin, _) in enumerate(found.slots(rank)):
        for place, one in enumerate(played.events):
            late = left.get((number, place))
            yield one, late.start if late else begin + one.start, late.end if late else begin + one.end
    for one in found.updates[rank].events:
        yield one, found.passes_s + one.start, found.passes_s + one.end


def step_trace_text(found: SimulatedStep) -> str:
    """The step as a trace for Chrome and Perfetto: a process for each stage, with the passes, every kernel and every transfer
    on its stream; arrows are messages between stages. Raises `InputError` for more events than a browser opens.
    """
    ranks = range(found.actions.num_ranks)
    number = sum(len(played.events) for plays in found.slot_timelines for played in plays)
    if number > MOST_TRACED:
        raise InputError(
            f"--trace: found {number:,} kernels and transfers; at most {MOST_TRACED:,} are written: a plan of fewer micro-batches"
        )
    passes, done = planned_events(found)
    names = [f"stage {rank}" if len(ranks) > 1 else "device" for rank in ranks]
    return chrome_trace(names, [*passes.values(), *done], arrows_of(found.actions, passes))


def planned_events(found: SimulatedStep, first: int = 0) -> tuple[dict[Action, Event], list[Event]]:
    """The passes of all stages, and every kernel and transfer; the process of the first stage has the number `first`."""
    ranks = range(found.actions.num_ranks)
    passes = {
        one: Event(
            name=str(one), process=first + rank, stream="passes", start=start, end=end, category=one.kind,
            args={"stage": one.stage, "micro_batch": one.micro_batch},
        )
        for rank in ranks
        for slot, _, start, end in found.slots(rank)
        for one in slot
    }  # fmt: skip
    return passes, [_traced(one, first + rank, *times) for rank in ranks for one, *times in events(found, rank)]


def _traced(one: StreamEvent, rank: int, start: float, end: float) -> Event:
    what = one.work
    if isinstance(what, TimedKernel):
        return Event(
            name=what.name, process=rank, stream=one.stream, start=start, end=end, category=what.phase, args={"unit": what.unit}
        )  # fmt: skip
    return Event(
        name=what.name, process=rank, stream=one.stream, start=start, end=end, category="traffic",
        args={"unit": what.unit, "axis": what.axis},
    )  # fmt: skip


def schedule_trace_text(line: Timeline) -> str:
    """The list as a trace for Chrome and Perfetto: a process for each rank, an arrow for each message between ranks."""
    events = {
        action: Event(
            name=str(action), process=rank, stream="compute", start=start, end=end, category=action.kind,
            args={"stage": action.stage, "micro_batch": action.micro_batch, "together": _others(slot, action)},
        )
        for rank, slot, start, end in line.slots()
        for action in slot
    }  # fmt: skip
    names = [f"rank {rank}" for rank in range(line.actions.num_ranks)]
    return chrome_trace(names, events.values(), arrows_of(line.actions, events))


def arrows_of(actions: ActionList, events: Mapping[Action, Event]) -> Iterator[Arrow]:
    """An arrow for each message between ranks."""
    for action, event in events.items():
        for needed in remote_dependencies(actions, action):
            if needed in events and events[needed].process != event.process:
                yield Arrow(name=str(needed), source=events[needed], target=event)


def _others(slot: Slot, action: Action) -> list[str]:
    return [str(other) for other in slot if other != action]


ABOUT = ("path", "unit", "action", "role", "num_bytes")


def both_traces(step: TracedStep, planned: SimulatedStep) -> str:
    """The JSON of both: measured ranks first, then the planned stages."""
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
    found = {name: value for name in ABOUT if (value := getattr(event, name))}
    return {**found, "axis": event_axis(event)} if event.axes else found
