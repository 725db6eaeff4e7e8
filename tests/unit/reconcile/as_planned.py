"""Traces of ranks that follow their plan exactly, built from its simulated step, and changes that tests make to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwise.price.simulation.result import simulate
from shardwise.price.simulation.simulated_step import SimulatedStep
from shardwise.price.simulation.streams import StreamTimeline, Transfer
from shardwise.records.step_inspection import COLLECTIVE, KERNEL, PASS, PASSES, WAIT, RankTrace, TraceEvent
from shardwise.search.plan import Plan

AXES = {"tp": ("tp_kv",), "control": ("dp",)}  # of an axis group its atomic axis, where it has another name
NS = 1e9


def simulate_plan(plan: Plan) -> SimulatedStep:
    return simulate(plan.problem, plan.layout).step


def as_planned(plan: Plan, num_ranks: int = 2, axis: str = "tp_kv") -> list[RankTrace]:
    """A trace of each rank of a group over an axis; of one stage, so that all do the same."""
    simulation = simulate_plan(plan)
    events = tuple(_events(simulation))
    end = round(simulation.step_time_s * NS)
    coordinates = ({"pp": 0, "dp": 0, "fsdp": 0, "tp_kv": 0} | {axis: rank} for rank in range(num_ranks))
    return [
        RankTrace(
            rank=rank, step=3, device="cpu", coordinate=coordinate, begin_ns=0, step_ns=end, offset_ns=0, error_ns=0,
            events=events,
        )
        for rank, coordinate in enumerate(coordinates)
    ]  # fmt: skip


def _events(step: SimulatedStep) -> Iterator[TraceEvent]:
    numbers: Counter[tuple[str, ...]] = Counter()
    for slot, timeline, start, end in step.slots(0):
        action = str(slot[0])
        yield TraceEvent(
            kind=PASS, name=action, stream=PASSES, start_ns=round(start * NS), end_ns=round(end * NS),
            phase=slot[0].kind, action=action,
        )  # fmt: skip
        yield from _timeline_events(timeline, start, action, numbers)
    now = step.clock.ends[0][-1]
    for event in step.trailing[0]:  # for which the update waits
        if event.end > now:
            axes = AXES.get(event.transfer.axis, (event.transfer.axis,))
            yield TraceEvent(
                kind=WAIT, name=event.transfer.name, stream="compute", start_ns=round(now * NS), end_ns=round(event.end * NS),
                role=event.transfer.role, axes=axes, number=numbers[axes] - 1,
            )  # fmt: skip
            now = event.end
    yield from _timeline_events(step.updates[0], step.passes_s, "", numbers)


def _timeline_events(
    timeline: StreamTimeline, start: float, action: str, numbers: Counter[tuple[str, ...]]
) -> Iterator[TraceEvent]:
    now, collectives = 0.0, {}
    for place, event in enumerate(timeline.events):
        work, begin, end = event.work, round((start + event.start) * NS), round((start + event.end) * NS)
        if isinstance(work, Transfer):
            axes = AXES.get(work.axis, (work.axis,))
            collectives[place] = collective = TraceEvent(
                kind=COLLECTIVE, name=work.name, stream=work.axis, start_ns=begin, end_ns=end, unit=work.unit, action=action,
                role=work.role, axes=axes, num_bytes=1, number=numbers[axes],
            )  # fmt: skip
            numbers[axes] += 1
            yield collective
            continue
        yield from _wait(collectives, event.cause, start + now, start + event.start)
        yield TraceEvent(
            kind=KERNEL, name=work.name, stream="compute", start_ns=begin, end_ns=end, path=work.unit, unit=work.unit,
            phase=work.phase, action=action, results=work.results, cpu_ns=end - begin,
        )  # fmt: skip
        now = event.end
    yield from _wait(collectives, timeline.last, start + now, start + timeline.seconds)


def _wait(moved: dict[int, TraceEvent], cause: int, start: float, end: float) -> Iterator[TraceEvent]:
    if cause in moved and end > start:
        yield replace(moved[cause], kind=WAIT, stream="compute", start_ns=round(start * NS), end_ns=round(end * NS))


def slowed(trace: RankTrace, selects: Callable[[TraceEvent], bool], times: float, on_core: float = 1.0) -> RankTrace:
    """Return a trace whose selected kernels take `times` as long, with a core for the share `on_core`; later events shift."""
    later, events = 0, []
    for event in sorted(trace.events, key=lambda event: (event.start_ns, event.kind)):
        begins, more = event.start_ns + later, 0
        if event.kind == KERNEL and selects(event):
            more = round((times - 1) * (event.end_ns - event.start_ns))
        length = event.end_ns - event.start_ns + more
        cpu_ns = round(length * on_core) if more else event.cpu_ns
        events.append(replace(event, start_ns=begins, end_ns=begins + length, cpu_ns=cpu_ns))
        later += more
    return replace(trace, events=tuple(events), step_ns=trace.step_ns + later)


def is_kernel(name: str) -> Callable[[TraceEvent], bool]:
    return lambda event: event.name == name
