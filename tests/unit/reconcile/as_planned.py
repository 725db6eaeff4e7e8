"""Traces of ranks that do exactly what their plan says, made of its simulated step; and what a test may change of them."""

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


def simulated(plan: Plan) -> SimulatedStep:
    return simulate(plan.problem, plan.layout).step


def as_planned(plan: Plan, num_ranks: int = 2, axis: str = "tp_kv") -> list[RankTrace]:
    """A trace of each rank of a group over an axis; of one stage, so that all do the same."""
    found = simulated(plan)
    events = tuple(_events(found))
    end = round(found.step_time_s * NS)
    coordinates = ({"pp": 0, "dp": 0, "fsdp": 0, "tp_kv": 0} | {axis: rank} for rank in range(num_ranks))
    return [
        RankTrace(
            rank=rank, step=3, device="cpu", coordinate=coordinate, begin_ns=0, step_ns=end, offset_ns=0, error_ns=0,
            events=events,
        )
        for rank, coordinate in enumerate(coordinates)
    ]  # fmt: skip


def _events(found: SimulatedStep) -> Iterator[TraceEvent]:
    numbers: Counter[tuple[str, ...]] = Counter()
    for slot, played, start, end in found.slots(0):
        action = str(slot[0])
        yield TraceEvent(
            kind=PASS, name=action, stream=PASSES, start_ns=round(start * NS), end_ns=round(end * NS),
            phase=slot[0].kind, action=action,
        )  # fmt: skip
        yield from _played(played, start, action, numbers)
    now = found.clock.ends[0][-1]
    for left in found.trailing[0]:  # for which the update waits
        if left.end > now:
            axes = AXES.get(left.transfer.axis, (left.transfer.axis,))
            yield TraceEvent(
                kind=WAIT, name=left.transfer.name, stream="compute", start_ns=round(now * NS), end_ns=round(left.end * NS),
                role=left.transfer.role, axes=axes, number=numbers[axes] - 1,
            )  # fmt: skip
            now = left.end
    yield from _played(found.updates[0], found.passes_s, "", numbers)


def _played(
    played: StreamTimeline, start: float, action: str, numbers: Counter[tuple[str, ...]]
) -> Iterator[TraceEvent]:
    now, moved = 0.0, {}
    for place, event in enumerate(played.events):
        what, begin, end = event.work, round((start + event.start) * NS), round((start + event.end) * NS)
        if isinstance(what, Transfer):
            axes = AXES.get(what.axis, (what.axis,))
            moved[place] = made = TraceEvent(
                kind=COLLECTIVE, name=what.name, stream=what.axis, start_ns=begin, end_ns=end, unit=what.unit, action=action,
                role=what.role, axes=axes, num_bytes=1, number=numbers[axes],
            )  # fmt: skip
            numbers[axes] += 1
            yield made
            continue
        yield from _wait(moved, event.cause, start + now, start + event.start)
        yield TraceEvent(
            kind=KERNEL, name=what.name, stream="compute", start_ns=begin, end_ns=end, path=what.unit, unit=what.unit,
            phase=what.phase, action=action, results=what.results, cpu_ns=end - begin,
        )  # fmt: skip
        now = event.end
    yield from _wait(moved, played.last, start + now, start + played.seconds)


def _wait(moved: dict[int, TraceEvent], cause: int, start: float, end: float) -> Iterator[TraceEvent]:
    if cause in moved and end > start:
        yield replace(moved[cause], kind=WAIT, stream="compute", start_ns=round(start * NS), end_ns=round(end * NS))


def slowed(trace: RankTrace, wanted: Callable[[TraceEvent], bool], times: float, on_core: float = 1.0) -> RankTrace:
    """Some kernels take so many times as long, for a part of which their thread has a core; all that follows is as much later."""
    later, found = 0, []
    for event in sorted(trace.events, key=lambda one: (one.start_ns, one.kind)):
        begins, more = event.start_ns + later, 0
        if event.kind == KERNEL and wanted(event):
            more = round((times - 1) * (event.end_ns - event.start_ns))
        length = event.end_ns - event.start_ns + more
        cpu_ns = round(length * on_core) if more else event.cpu_ns
        found.append(replace(event, start_ns=begins, end_ns=begins + length, cpu_ns=cpu_ns))
        later += more
    return replace(trace, events=tuple(found), step_ns=trace.step_ns + later)


def is_kernel(name: str) -> Callable[[TraceEvent], bool]:
    return lambda event: event.name == name
