"""A traced step beside the planned one, in one file for Chrome and Perfetto: a process for each rank and each planned stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.measure.reconcile.aligned_traces import TracedStep, event_axis
from shardwise.present.draw.trace import Event, chrome_trace
from shardwise.present.pictures.simulated_step_timeline import planned_events
from shardwise.price import SimulatedStep
from shardwise.records import COLLECTIVE, WAIT, TraceEvent

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
