"""What ranks hold for their backward passes, which follows from the order alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardwise.schedule.action import BACKWARD, FORWARD, INPUT, WEIGHT, ActionList, Slot

# What an action adds to what is saved for a backward pass, and to what waits for weights' gradients only. It is freed when its
# action ends, taken when its forward pass starts.
SAVED = {FORWARD: 1, BACKWARD: -1, INPUT: -1, WEIGHT: 0}
WAITING = {FORWARD: 0, BACKWARD: 0, INPUT: 1, WEIGHT: -1}


class Held(NamedTuple):
    """The most that a rank holds, in virtual stages of a micro-batch: in all, and what waits for weights' gradients only."""

    peak: int
    peak_waiting: int


def held_by_rank(actions: ActionList) -> tuple[Held, ...]:
    """Peaks of each rank of a list.

    >>> from shardwise.schedule.build import build
    >>> held_by_rank(build("zb_h1", 2, 4))
    (Held(peak=2, peak_waiting=1), Held(peak=2, peak_waiting=2))
    """
    return tuple(_held(slots) for slots in actions.order)


def _held(slots: Iterable[Slot]) -> Held:
    saved = waiting = peak = peak_waiting = 0
    for slot in slots:
        for kind, _, _ in slot:
            saved += SAVED[kind]
            waiting += WAITING[kind]
            if saved + waiting > peak:
                peak = saved + waiting
            if waiting > peak_waiting:
                peak_waiting = waiting
    return Held(peak, peak_waiting)


def most_held(actions: ActionList, sizes: Sequence[int]) -> tuple[int, ...]:
    """The most that each rank of a list holds where virtual stages have these sizes, in the model's order.

    >>> from shardwise.schedule.build import build
    >>> most_held(build("interleaved", 2, 4, 2), (1, 1, 1, 1)), most_held(build("interleaved", 2, 4, 2), (3, 2, 1, 1))
    ((5, 3), (13, 6))
    """
    return tuple(_most(slots, sizes) for slots in actions.order)


def _most(slots: Iterable[Slot], sizes: Sequence[int]) -> int:
    held = most = 0
    for slot in slots:
        for kind, stage, _ in slot:
            held += sizes[stage] * (SAVED[kind] + WAITING[kind])
            most = max(most, held)
    return most


def step_curve(slots: Iterable[tuple[Slot, float, float]], unit: float) -> list[tuple[float, float]]:
    """Live memory over time, from slots with their starts and ends: (seconds, how much from then on), `unit` for each pass."""
    changes: dict[float, int] = {0.0: 0}
    for slot, start, end in slots:
        for kind, _, _ in slot:
            change = SAVED[kind] + WAITING[kind]
            if change:
                when = start if change > 0 else end
                changes[when] = changes.get(when, 0) + change
    held, found = 0, []
    for when in sorted(changes):
        held += changes[when]
        found.append((when, held * unit))
    return found
