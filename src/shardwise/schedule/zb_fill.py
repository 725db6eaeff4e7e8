"""Passes in turn with weights' gradients in the gaps: the heuristic of Qi et al. 2023, section 3."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.schedule.action import FORWARD, INPUT, WEIGHT, Action, Order, Slot
from shardwise.schedule.durations import Durations

SLOPES = (2.0, 1.0, 1.5, 1.25, 1.75, 3.0)  # passes ahead for each stage behind: 1 as in 1F1B and ZB-H1, 2 as in ZB-H2
MORE = (0, 1)  # passes ahead of all stages besides
FILLED = (1.0, 0.5, 0.01)  # the least gap that takes a W, in W
BUDGET = 150_000  # actions that are looked at in all, where three orders have no more: about a second


def filled_orders(p: int, m: int, durations: Durations, most: int) -> Iterator[Order]:
    """An order for each number of passes ahead and each least gap; every rank holds at most `most` micro-batches.

    With a large pipeline only the first of the grid are tried.
    """
    left = max(3, BUDGET // (3 * p * m))
    seen = set()
    for slope in SLOPES:
        for more in MORE:
            ahead = tuple(min(most, m, 1 + int(slope * (p - 1 - i)) + more) for i in range(p))
            if ahead in seen:
                continue
            seen.add(ahead)
            for least in FILLED:
                if left == 0:
                    return
                left -= 1
                yield _Filling(p, m, durations, ahead, most, least).order()


class _Filling:
    """One order in the making: each rank's next F or I follows from what it has run, W from the gap in front of it."""

    def __init__(self, p: int, m: int, durations: Durations, ahead: tuple[int, ...], most: int, least: float) -> None:
        self.p, self.m, self.durations, self.ahead, self.most, self.least = p, m, durations, ahead, most, least
        self.slots: list[list[Slot]] = [[] for _ in range(p)]
        self.now = [0.0] * p
        self.forward_end: list[list[float]] = [[] for _ in range(p)]
        self.input_end: list[list[float]] = [[] for _ in range(p)]
        self.num_weights = [0] * p

    def order(self) -> Order:
        """Run ranks in turn as far as they can, until all are done; then what is left of the weights' gradients."""
        ready = list(range(self.p))
        while ready:
            rank = ready.pop()
            moved = False
            while self._step(rank):
                moved = True
            if moved:
                ready += [near for near in (rank - 1, rank + 1) if 0 <= near < self.p and near not in ready]
        for rank in range(self.p):
            while self.num_weights[rank] < self.m:
                self._weight(rank)
        return tuple(tuple(slots) for slots in self.slots)

    def _step(self, rank: int) -> bool:
        """The next F or I of a rank, with W in front of it where there is time or no room; False where it has to wait."""
        forward, inputs = len(self.forward_end[rank]), len(self.input_end[rank])
        if inputs == self.m:
            return False
        is_forward = forward < self.m and forward - inputs < self.ahead[rank]
        arrival = self._arrival(rank, is_forward, forward if is_forward else inputs)
        if arrival is None:
            return False
        weight_s = self.durations.weight[rank]
        while self.num_weights[rank] < inputs:
            gap = arrival - self.now[rank]
            full = is_forward and forward - self.num_weights[rank] >= self.most
            if not full and (gap <= 0.0 or gap < self.least * weight_s):
                break
            self._weight(rank)
        self._run(rank, arrival, is_forward, forward if is_forward else inputs)
        return True

    def _arrival(self, rank: int, is_forward: bool, number: int) -> float | None:
        """When what a pass takes is there; None while that is not known."""
        delay = self.durations.message
        if is_forward:
            if rank == 0:
                return 0.0
            before = self.forward_end[rank - 1]
        elif rank == self.p - 1:
            before, delay = self.forward_end[rank], 0.0
        else:
            before = self.input_end[rank + 1]
        return before[number] + delay if number < len(before) else None

    def _run(self, rank: int, arrival: float, is_forward: bool, number: int) -> None:
        kind, seconds = (FORWARD, self.durations.forward) if is_forward else (INPUT, self.durations.input)
        self.now[rank] = max(self.now[rank], arrival) + seconds[rank]
        (self.forward_end if is_forward else self.input_end)[rank].append(self.now[rank])
        self.slots[rank].append((Action(kind, rank, number),))

    def _weight(self, rank: int) -> None:
        self.slots[rank].append((Action(WEIGHT, rank, self.num_weights[rank]),))
        self.num_weights[rank] += 1
        self.now[rank] += self.durations.weight[rank]
