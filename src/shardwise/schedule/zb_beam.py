"""A beam search over active schedules of F, I and W.

A schedule is active if no pass could run earlier without delaying another one; one of them is optimal. Giffler and
Thompson's branching makes them all: of the passes that could run next the one that would end first is found, and on its
rank every pass that could begin before that end is tried. States that have run as many passes are compared by a lower
bound of their makespan, and the best `width` are kept. Micro-batches are alike, so they keep their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from typing import NamedTuple

from shardwise.schedule.action import FORWARD, INPUT, WEIGHT, Action, Order, Slot
from shardwise.schedule.durations import Durations

BUDGET = 20_000  # states that are kept in all, with eight ranks about half a second
WIDEST = 300

Ends = tuple[tuple[float, ...], ...]


class State(NamedTuple):
    """What has run: the end of each rank's last pass, ends of its forward passes and of its inputs', how many weights'."""

    free: tuple[float, ...]
    forward: Ends
    input: Ends
    num_weights: tuple[int, ...]
    idle: float
    last: tuple[int, str] | None = None  # the rank and the kind that ran last
    before: State | None = None


def beam_width(p: int, m: int) -> int:
    """States that are kept, so that some two children of each make as many as the budget allows."""
    return max(1, min(WIDEST, BUDGET // (3 * p * m * 2)))


def beam_order(p: int, m: int, durations: Durations, most: int) -> Order:
    """The order with the least makespan that the beam finds; every rank holds at most `most` micro-batches."""
    search = Beam(p, m, durations, most)
    width = beam_width(p, m)
    states = [State((0.0,) * p, ((),) * p, ((),) * p, (0,) * p, 0.0)]
    for _ in range(3 * p * m):
        children = {
            (child.free, child.forward, child.input, child.num_weights): child
            for state in states
            for child in search.children(state)
        }
        states = nsmallest(width, children.values(), key=lambda child: (search.bound(child), child.idle))
    return _order(min(states, key=lambda state: max(state.free)), p)


def _order(state: State, p: int) -> Order:
    """The slots of a state's past."""
    past: list[tuple[int, str]] = []
    at: State | None = state
    while at is not None and at.last is not None:
        past.append(at.last)
        at = at.before
    slots: list[list[Slot]] = [[] for _ in range(p)]
    count: dict[tuple[int, str], int] = {}
    for rank, kind in reversed(past):
        number = count[rank, kind] = count.get((rank, kind), -1) + 1
        slots[rank].append((Action(kind, rank, number),))
    return tuple(tuple(found) for found in slots)


class Beam:
    """What may run next, and how short what is left can be at best; every rank holds at most `most` micro-batches."""

    def __init__(self, p: int, m: int, durations: Durations, most: int) -> None:
        self.p, self.m, self.message, self.most = p, m, durations.message, most
        self.seconds = {FORWARD: durations.forward, INPUT: durations.input, WEIGHT: durations.weight}
        down, up = [0.0] * p, [0.0] * p  # behind a rank's last F until its gradient is back; behind its last I
        for rank in range(1, p):
            up[rank] = up[rank - 1] + durations.input[rank - 1] + self.message
        for rank in range(p - 2, -1, -1):
            there, back = durations.forward[rank + 1], durations.input[rank + 1]
            down[rank] = down[rank + 1] + there + back + 2 * self.message
        self.behind_forward = [down[i] + durations.input[i] + up[i] for i in range(p)]
        self.behind_input = up
        self.last_weight = durations.weight[0] if p else 0.0

    def children(self, state: State) -> Iterator[State]:
        """What may run next, by Giffler and Thompson's rule."""
        options = [option for rank in range(self.p) for option in self._options(state, rank)]
        first_end, _, rank, _ = min(options)
        for _, start, own, kind in options:
            if own == rank and (start < first_end or start == first_end == state.free[rank]):
                yield self._child(state, rank, kind, start)

    def _options(self, state: State, rank: int) -> Iterator[tuple[float, float, int, str]]:
        """(end, start, rank, kind) of each pass that a rank can run next."""
        forward, inputs, weights = len(state.forward[rank]), len(state.input[rank]), state.num_weights[rank]
        arrivals: list[tuple[str, float]] = []
        if weights < inputs:
            arrivals.append((WEIGHT, 0.0))
        if forward < self.m and forward - weights < self.most:
            if rank == 0:
                arrivals.append((FORWARD, 0.0))
            elif forward < len(state.forward[rank - 1]):
                arrivals.append((FORWARD, state.forward[rank - 1][forward] + self.message))
        if inputs < forward:
            if rank == self.p - 1:
                arrivals.append((INPUT, state.forward[rank][inputs]))
            elif inputs < len(state.input[rank + 1]):
                arrivals.append((INPUT, state.input[rank + 1][inputs] + self.message))
        for kind, arrival in arrivals:
            start = max(arrival, state.free[rank])
            yield start + self.seconds[kind][rank], start, rank, kind

    def _child(self, state: State, rank: int, kind: str, start: float) -> State:
        end = start + self.seconds[kind][rank]
        forward, inputs, weights = state.forward, state.input, state.num_weights
        if kind == FORWARD:
            forward = (*forward[:rank], (*forward[rank], end), *forward[rank + 1 :])
        elif kind == INPUT:
            inputs = (*inputs[:rank], (*inputs[rank], end), *inputs[rank + 1 :])
        else:
            weights = (*weights[:rank], weights[rank] + 1, *weights[rank + 1 :])
        free = (*state.free[:rank], end, *state.free[rank + 1 :])
        return State(free, forward, inputs, weights, state.idle + start - state.free[rank], (rank, kind), state)

    def bound(self, state: State) -> float:
        """A makespan that nothing behind this state is under: of each rank what it still has to run, and what must follow."""
        found = 0.0
        for rank in range(self.p):
            forward = (self.m - len(state.forward[rank])) * self.seconds[FORWARD][rank]
            inputs = (self.m - len(state.input[rank])) * self.seconds[INPUT][rank]
            weights = (self.m - state.num_weights[rank]) * self.seconds[WEIGHT][rank]
            free = state.free[rank]
            found = max(found, free + forward + inputs + weights)
            if forward:
                found = max(found, free + forward + self.behind_forward[rank] + self.last_weight)
            if inputs:
                found = max(found, free + forward + inputs + self.behind_input[rank] + self.last_weight)
        return found
