"""Critical path of a simulated step: the parts of its length, from the first kernel of any rank to the last.

Each part starts when the one before it ends: kernels and transfers within a pass, passes on a rank, messages between ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from shardwise.pipeline import BACKWARD_WEIGHT, FORWARD, Slot
from shardwise.price.simulation.simulated_step import SimulatedStep, TrailingTransfer
from shardwise.price.simulation.streams import StreamTimeline, TimedKernel

MESSAGE_KEY = ("pp", "carry")  # the axis, and the unit that sends


class CriticalPass(NamedTuple):
    """A slot of a rank on the path.

    `message_s`: seconds of the message that it waited for. `trailing` are transfers that it started and the update
    waited for, and `last` the index of its event that the first of them waited for; None: its last event.
    """

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


def critical_passes(step: SimulatedStep) -> list[CriticalPass]:
    """Return the passes on the path, in order."""
    rank = max(range(len(step.gradients_ready_s)), key=lambda candidate: step.gradients_ready_s[candidate])
    number, awaited = len(step.clock.ends[rank]) - 1, _awaited_transfers(step, rank)
    number = awaited[0].slot if awaited else number
    path = [*_trace_back(step, rank, number)]
    if awaited:
        last = path[0].played.events[awaited[0].event].cause
        path[0] = path[0]._replace(trailing=awaited, last=last, end=awaited[-1].end)
    return path[::-1]


def _awaited_transfers(step: SimulatedStep, rank: int) -> tuple[TrailingTransfer, ...]:
    """Return the chain of transfers that a rank's update waits for after its last pass; empty where the last pass ends later."""
    trailing, end = step.trailing[rank], step.gradients_ready_s[rank]
    if end <= step.clock.ends[rank][-1]:
        return ()
    chain = [next(transfer for transfer in trailing if transfer.end == end)]
    while before := [transfer for transfer in trailing if _follows(chain[0], transfer)]:
        chain.insert(0, before[0])
    return tuple(chain)


def _follows(transfer: TrailingTransfer, earlier: TrailingTransfer) -> bool:
    return earlier.stream == transfer.stream and earlier.end == transfer.start and earlier is not transfer


def find_critical_path(step: SimulatedStep) -> tuple[CriticalPart, ...]:
    """Return the path by unit, phase and axis, the longest part first. Its seconds add up to those of the step."""
    total: dict[tuple[str, str, str], float] = {}
    seconds_by_timeline: dict[StreamTimeline, dict[tuple[str, str, str], float]] = {}
    for leg in critical_passes(step):
        parts = seconds_by_timeline.get(leg.played) if leg.last is None else _path_seconds(leg.played, leg.last)
        if parts is None:
            parts = seconds_by_timeline[leg.played] = _path_seconds(leg.played)
        for trailing in leg.trailing:
            key = (trailing.transfer.unit, "", trailing.transfer.axis)
            total[key] = total.get(key, 0.0) + trailing.end - trailing.start
        for key, seconds in parts.items():
            total[key] = total.get(key, 0.0) + seconds
        if leg.message_s:
            axis, unit = MESSAGE_KEY
            total[unit, "", axis] = total.get((unit, "", axis), 0.0) + leg.message_s
    for key, seconds in _path_seconds(max(step.updates, key=lambda update: update.seconds)).items():
        total[key] = total.get(key, 0.0) + seconds
    return tuple(
        CriticalPart(*key, seconds) for key, seconds in sorted(total.items(), key=lambda pair: -pair[1]) if seconds
    )


def _path_seconds(played: StreamTimeline, last: int | None = None) -> dict[tuple[str, str, str], float]:
    """Return the path of a pass, summed by unit, phase and axis."""
    total: dict[tuple[str, str, str], float] = {}
    for event in played.path(last):
        work = event.work
        key = (work.unit, work.phase, "") if isinstance(work, TimedKernel) else (work.unit, "", work.axis)
        total[key] = total.get(key, 0.0) + event.end - event.start
    return total


def _trace_back(step: SimulatedStep, rank: int, number: int) -> Iterator[CriticalPass]:
    """Yield the passes of the path, backward from a slot of a rank to the first."""
    clock, order = step.clock, step.actions.order
    while True:
        slot, start = order[rank][number], clock.starts[rank][number]
        before = clock.ends[rank][number - 1] if number else 0.0
        source = _awaited_slot(step, slot, start) if start > before else None
        message_s = start - clock.ends[source[0]][source[1]] if source else 0.0
        yield CriticalPass(rank, slot, step.slot_timelines[rank][number], start, clock.ends[rank][number], message_s)
        if source is None and number == 0:
            return
        rank, number = source if source else (rank, number - 1)


def _awaited_slot(step: SimulatedStep, slot: Slot, start: float) -> tuple[int, int]:
    """Return the slot of another rank whose end a slot waited for."""
    clock, actions = step.clock, step.actions
    m, hops = actions.num_micro_batches, (*actions.crosses_ranks(), False)
    for kind, stage, micro_batch in slot:
        if kind == BACKWARD_WEIGHT:
            continue
        source_stage = stage - 1 if kind == FORWARD else stage + 1
        if not 0 <= source_stage < actions.num_stages:
            continue
        end = (clock.forward_end if kind == FORWARD else clock.backward_end)[source_stage * m + micro_batch]
        delay = step.message_s if hops[max(source_stage, stage)] else 0.0
        if end + delay == start:
            rank = actions.rank_of(source_stage, micro_batch)
            number = bisect_left(clock.ends[rank], end)
            while (source_stage, micro_batch) not in {action[1:] for action in actions.order[rank][number]}:
                number += 1
            return rank, number
    raise AssertionError(f"{slot} starts at {start} for no reason")
