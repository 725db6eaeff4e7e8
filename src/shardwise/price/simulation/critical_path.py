"""The critical path of a simulated step: the parts of its length, from the first kernel of any rank to the last.

Each part starts when the one before it ends: kernels and transfers within a pass, passes on a rank, messages between ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.pipeline.actions import BACKWARD_WEIGHT, FORWARD, Slot
from shardwise.price.simulation.simulated_step import SimulatedStep, TrailingTransfer
from shardwise.price.simulation.streams import StreamTimeline, TimedKernel

MESSAGE_KEY = ("pp", "carry")  # the axis, and the unit that sends


class CriticalPass(NamedTuple):
    """A slot of a rank on the path; `message_s`: of the message that it waited for before. `trailing` are transfers that it began
    which the update waited for, and `last` the number of its event that the first of them waited for; None: its last one."""

    rank: int
    slot: Slot
    played: StreamTimeline
    start: float
    end: float
    message_s: float
    trailing: tuple[TrailingTransfer, ...] = ()
    last: int | None = None


class CriticalPart(NamedTuple):
    """Seconds of the path: of a unit's kernels in a phase, or of a unit's transfers over an axis."""

    unit: str
    phase: str
    axis: str
    seconds: float


def critical_passes(found: SimulatedStep) -> list[CriticalPass]:
    """The passes on the path, in order."""
    rank = max(range(len(found.gradients_ready_s)), key=lambda one: found.gradients_ready_s[one])
    number, left = len(found.clock.ends[rank]) - 1, _awaited_transfers(found, rank)
    number = left[0].slot if left else number
    path = [*_trace_back(found, rank, number)]
    if left:
        last = path[0].played.events[left[0].event].cause
        path[0] = path[0]._replace(trailing=left, last=last, end=left[-1].end)
    return path[::-1]


def _awaited_transfers(found: SimulatedStep, rank: int) -> tuple[TrailingTransfer, ...]:
    """The transfers that a rank's update waits for behind its last pass: from one that began as its slot let it, one after the
    other; none where the last pass ends later."""
    left, end = found.trailing[rank], found.gradients_ready_s[rank]
    if end <= found.clock.ends[rank][-1]:
        return ()
    chain = [next(one for one in left if one.end == end)]
    while before := [
        one for one in left if one.stream == chain[0].stream and one.end == chain[0].start and one is not chain[0]
    ]:
        chain.insert(0, before[0])
    return tuple(chain)


def find_critical_path(found: SimulatedStep) -> tuple[CriticalPart, ...]:
    """The path by unit, phase and axis, the longest part first. Its seconds add up to those of the step."""
    total: dict[tuple[str, str, str], float] = {}
    known: dict[StreamTimeline, dict[tuple[str, str, str], float]] = {}
    for leg in critical_passes(found):
        parts = known.get(leg.played) if leg.last is None else _path_seconds(leg.played, leg.last)
        if parts is None:
            parts = known[leg.played] = _path_seconds(leg.played)
        for one in leg.trailing:
            key = (one.what.unit, "", one.what.axis)
            total[key] = total.get(key, 0.0) + one.end - one.start
        for key, seconds in parts.items():
            total[key] = total.get(key, 0.0) + seconds
        if leg.message_s:
            axis, unit = MESSAGE_KEY
            total[unit, "", axis] = total.get((unit, "", axis), 0.0) + leg.message_s
    for key, seconds in _path_seconds(max(found.updates, key=lambda one: one.seconds)).items():
        total[key] = total.get(key, 0.0) + seconds
    return tuple(
        CriticalPart(*key, seconds) for key, seconds in sorted(total.items(), key=lambda one: -one[1]) if seconds
    )


def _path_seconds(played: StreamTimeline, last: int | None = None) -> dict[tuple[str, str, str], float]:
    """The path of a pass, summed by unit, phase and axis."""
    total: dict[tuple[str, str, str], float] = {}
    for event in played.path(last):
        what = event.what
        key = (what.unit, what.phase, "") if isinstance(what, TimedKernel) else (what.unit, "", what.axis)
        total[key] = total.get(key, 0.0) + event.end - event.start
    return total


def _trace_back(found: SimulatedStep, rank: int, number: int) -> Iterator[CriticalPass]:
    """The passes of the path, backward from a slot of a rank to the first."""
    clock, order = found.clock, found.actions.order
    while True:
        slot, start = order[rank][number], clock.starts[rank][number]
        before = clock.ends[rank][number - 1] if number else 0.0
        source = _awaited_slot(found, slot, start) if start > before else None
        message_s = start - clock.ends[source[0]][source[1]] if source else 0.0
        yield CriticalPass(rank, slot, found.slot_timelines[rank][number], start, clock.ends[rank][number], message_s)
        if source is None and number == 0:
            return
        rank, number = source if source else (rank, number - 1)


def _awaited_slot(found: SimulatedStep, slot: Slot, start: float) -> tuple[int, int]:
    """The slot of another rank whose end a slot has waited for."""
    clock, actions = found.clock, found.actions
    m, hops = actions.num_micro_batches, (*actions.crosses_ranks(), False)
    for kind, stage, micro_batch in slot:
        if kind == BACKWARD_WEIGHT:
            continue
        needed = stage - 1 if kind == FORWARD else stage + 1
        if not 0 <= needed < actions.num_stages:
            continue
        end = (clock.forward_end if kind == FORWARD else clock.backward_end)[needed * m + micro_batch]
        delay = found.message_s if hops[max(needed, stage)] else 0.0
        if end + delay == start:
            rank = actions.rank_of(needed, micro_batch)
            number = bisect_left(clock.ends[rank], end)
            while not any((one.stage, one.micro_batch) == (needed, micro_batch) for one in actions.order[rank][number]):
                number += 1
            return rank, number
    raise AssertionError(f"{slot} starts at {start} for no reason")
