"""The automatic zero-bubble scheduler: searches an order of F, I and W for given durations, messages and memory.

The best of three searches is taken: by makespan, then by what a rank waits between its first pass and its last (the source's
measure, for optimizers that do not wait for all ranks), then by live memory.

- Gap filling (Qi et al. 2023, section 3): forward passes to warm up as far as memory allows, or fewer, then one forward and
  one backward pass for activations in turn; weight gradients fill gaps and make room. The number of passes ahead and the share
  of W that a gap must have are tried over a grid.
- A beam search over active schedules, as wide as its budget allows: exact or near it where there are few passes, none where
  there are many. A schedule is active if no pass could run earlier without delaying another one; one of them is optimal.
  Giffler and Thompson's branching makes them all: of the passes that could run next the one that would end first is found, and
  on its rank every pass that could begin before that end is tried. States that have run as many passes are compared by a lower
  bound of their makespan, and the best are kept. Micro-batches are alike, so they keep their order.
- ZB-H1 and ZB-H2 as they are, where they fit into the memory: the answer is never worse than theirs.

For passes that take alike the answer is ZB-H2's order, so no layout names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from typing import NamedTuple

from shardwise.pipeline import zero_bubble
from shardwise.pipeline.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    ActionList,
    Order,
    Slot,
    loop_placement,
)
from shardwise.pipeline.schedule_definition import Schedule, single_stage_each
from shardwise.pipeline.timeline import Durations, Timeline, peak_in_flight, play_actions
from shardwise.values import InputError


def zb_auto_actions(
    p: int, m: int, v: int = 1, durations: Durations | None = None, memory_limit: float | None = None
) -> ActionList:  # fmt: skip
    """Return the best order found. `memory_limit`: in activations of 1F1B's first stage, 1.0 is p micro-batches, None
    no limit.

    Raises `InputError` for a limit under one micro-batch.
    """
    durations = durations or Durations.even(p)
    durations.check_num_stages(p)
    max_in_flight = m if memory_limit is None else min(m, int(memory_limit * p * (1 + 1e-9)))
    if max_in_flight < 1:
        raise InputError(
            f"memory limit: found {memory_limit:.3g} of what 1F1B's first of {p} stages holds; at least {1 / p:.3g}, "
            "one micro-batch, is required"
        )
    lists = (
        ActionList(name="zb_auto", order=order, placement=loop_placement(p, v), num_micro_batches=m)
        for order in _candidate_orders(p, m, durations, max_in_flight)
    )
    fitting = (actions for actions in lists if max(peak.peak for peak in peak_in_flight(actions)) <= max_in_flight)
    return min((play_actions(actions, durations) for actions in fitting), key=_rank_timeline).actions


def _rank_timeline(timeline: Timeline) -> tuple[float, float, int]:
    return timeline.makespan, timeline.longest_wait, sum(peak.peak for peak in timeline.in_flight_peaks)


def _candidate_orders(p: int, m: int, durations: Durations, max_in_flight: int) -> Iterator[Order]:
    yield zero_bubble.zb_h1_actions(p, m).order
    yield zero_bubble.zb_h2_actions(p, m).order
    yield from gap_filling_orders(p, m, durations, max_in_flight)
    if beam_width(p, m) > 1:
        yield find_beam_order(p, m, durations, max_in_flight)


ZB_AUTO = Schedule(
    supports=single_stage_each, actions=zb_auto_actions, splits_backward=True, aliases=("zero_bubble", "zb_heuristic"),
    unpriced_reason="its order is made for seconds and memory that are given, and a layout is neither",
)  # fmt: skip

# Passes ahead for each stage behind: 1 as in 1F1B and ZB-H1, 2 as in ZB-H2.
AHEAD_SLOPES = (2.0, 1.0, 1.5, 1.25, 1.75, 3.0)
EXTRA_AHEAD = (0, 1)  # passes ahead of all stages besides
MIN_GAPS = (1.0, 0.5, 0.01)  # the least gap that takes a W, in W
FILL_BUDGET = 150_000  # actions that are looked at in all, where three orders have no more: about a second


def gap_filling_orders(p: int, m: int, durations: Durations, max_in_flight: int) -> Iterator[Order]:
    """Yield an order for each number of passes ahead and each smallest gap, within the limit of micro-batches in flight.

    With a large pipeline only the first of the grid are tried.
    """
    num_left = max(3, FILL_BUDGET // (3 * p * m))
    tried = set()
    for slope in AHEAD_SLOPES:
        for extra in EXTRA_AHEAD:
            ahead = tuple(min(max_in_flight, m, 1 + int(slope * (p - 1 - i)) + extra) for i in range(p))
            if ahead in tried:
                continue
            tried.add(ahead)
            for min_gap in MIN_GAPS:
                if num_left == 0:
                    return
                num_left -= 1
                yield _GapFiller(p, m, durations, ahead, max_in_flight, min_gap).order()


class _GapFiller:
    """Builds one order: each rank's next F or I follows from what it has run, W from the gap before it."""

    def __init__(
        self, p: int, m: int, durations: Durations, ahead: tuple[int, ...], max_in_flight: int, min_gap: float
    ) -> None:
        self.p, self.m, self.durations = p, m, durations
        self.ahead, self.max_in_flight, self.min_gap = ahead, max_in_flight, min_gap
        self.slots: list[list[Slot]] = [[] for _ in range(p)]
        self.now = [0.0] * p
        self.forward_end: list[list[float]] = [[] for _ in range(p)]
        self.input_end: list[list[float]] = [[] for _ in range(p)]
        self.num_weights = [0] * p

    def order(self) -> Order:
        """Run ranks in turn as far as they can, until all are done; then the remaining weight gradients."""
        ready = list(range(self.p))
        while ready:
            rank = ready.pop()
            progressed = False
            while self._step(rank):
                progressed = True
            if progressed:
                neighbours = (near for near in (rank - 1, rank + 1) if 0 <= near < self.p)
                ready += [neighbour for neighbour in neighbours if neighbour not in ready]
        for rank in range(self.p):
            while self.num_weights[rank] < self.m:
                self._weight(rank)
        return tuple(tuple(slots) for slots in self.slots)

    def _step(self, rank: int) -> bool:
        """Run the next F or I of a rank, with W before it where there is time or no room; return False if it has to wait."""
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
            full = is_forward and forward - self.num_weights[rank] >= self.max_in_flight
            if not full and (gap <= 0.0 or gap < self.min_gap * weight_s):
                break
            self._weight(rank)
        self._run(rank, arrival, is_forward, forward if is_forward else inputs)
        return True

    def _arrival(self, rank: int, is_forward: bool, number: int) -> float | None:
        """Return when the input of a pass arrives; None while that is not known."""
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
        kind, seconds = (FORWARD, self.durations.forward) if is_forward else (BACKWARD_INPUT, self.durations.input)
        self.now[rank] = max(self.now[rank], arrival) + seconds[rank]
        (self.forward_end if is_forward else self.input_end)[rank].append(self.now[rank])
        self.slots[rank].append((Action(kind, rank, number),))

    def _weight(self, rank: int) -> None:
        self.slots[rank].append((Action(BACKWARD_WEIGHT, rank, self.num_weights[rank]),))
        self.num_weights[rank] += 1
        self.now[rank] += self.durations.weight[rank]


BEAM_BUDGET = 20_000  # states that are kept in all, with eight ranks about half a second
MAX_BEAM_WIDTH = 300

EndTimes = tuple[tuple[float, ...], ...]


class BeamState(NamedTuple):
    """Passes that have run: the end of each rank's last one, ends of F and of I by rank, and the number of W."""

    free: tuple[float, ...]
    forward: EndTimes
    input: EndTimes
    num_weights: tuple[int, ...]
    idle: float
    last: tuple[int, str] | None = None  # the rank and the kind that ran last
    before: BeamState | None = None


def beam_width(p: int, m: int) -> int:
    """Return the number of states to keep, so that about two children of each stay within the budget."""
    return max(1, min(MAX_BEAM_WIDTH, BEAM_BUDGET // (3 * p * m * 2)))


def find_beam_order(p: int, m: int, durations: Durations, max_in_flight: int) -> Order:
    """Return the order with the shortest makespan that the beam finds, with at most `max_in_flight` micro-batches on a rank."""
    search = BeamSearch(p, m, durations, max_in_flight)
    width = beam_width(p, m)
    states = [BeamState((0.0,) * p, ((),) * p, ((),) * p, (0,) * p, 0.0)]
    for _ in range(3 * p * m):
        children = {
            (child.free, child.forward, child.input, child.num_weights): child
            for state in states
            for child in search.children(state)
        }
        states = nsmallest(width, children.values(), key=lambda child: (search.bound(child), child.idle))
    return _trace_order(min(states, key=lambda state: max(state.free)), p)


def _trace_order(state: BeamState, p: int) -> Order:
    """Return the slots of a state's history."""
    past: list[tuple[int, str]] = []
    current: BeamState | None = state
    while current is not None and current.last is not None:
        past.append(current.last)
        current = current.before
    slots: list[list[Slot]] = [[] for _ in range(p)]
    count: dict[tuple[int, str], int] = {}
    for rank, kind in reversed(past):
        number = count[rank, kind] = count.get((rank, kind), -1) + 1
        slots[rank].append((Action(kind, rank, number),))
    return tuple(tuple(rank_slots) for rank_slots in slots)


class BeamSearch:
    """Successors of a state, and a lower bound of its makespan."""

    def __init__(self, p: int, m: int, durations: Durations, max_in_flight: int) -> None:
        self.p, self.m, self.message, self.max_in_flight = p, m, durations.message, max_in_flight
        self.seconds = {FORWARD: durations.forward, BACKWARD_INPUT: durations.input, BACKWARD_WEIGHT: durations.weight}
        down, up = [0.0] * p, [0.0] * p  # behind a rank's last F until its gradient is back; behind its last I
        for rank in range(1, p):
            up[rank] = up[rank - 1] + durations.input[rank - 1] + self.message
        for rank in range(p - 2, -1, -1):
            forward_s, input_s = durations.forward[rank + 1], durations.input[rank + 1]
            down[rank] = down[rank + 1] + forward_s + input_s + 2 * self.message
        self.behind_forward = [down[i] + durations.input[i] + up[i] for i in range(p)]
        self.behind_input = up
        self.last_weight = durations.weight[0] if p else 0.0

    def children(self, state: BeamState) -> Iterator[BeamState]:
        """Yield the states that may follow, by Giffler and Thompson's rule."""
        options = [option for rank in range(self.p) for option in self._options(state, rank)]
        first_end, _, rank, _ = min(options)
        for _, start, option_rank, kind in options:
            if option_rank == rank and (start < first_end or start == first_end == state.free[rank]):
                yield self._child(state, rank, kind, start)

    def _options(self, state: BeamState, rank: int) -> Iterator[tuple[float, float, int, str]]:
        """Yield (end, start, rank, kind) of each pass that a rank can run next."""
        forward, inputs, weights = len(state.forward[rank]), len(state.input[rank]), state.num_weights[rank]
        arrivals: list[tuple[str, float]] = []
        if weights < inputs:
            arrivals.append((BACKWARD_WEIGHT, 0.0))
        if forward < self.m and forward - weights < self.max_in_flight:
            if rank == 0:
                arrivals.append((FORWARD, 0.0))
            elif forward < len(state.forward[rank - 1]):
                arrivals.append((FORWARD, state.forward[rank - 1][forward] + self.message))
        if inputs < forward:
            if rank == self.p - 1:
                arrivals.append((BACKWARD_INPUT, state.forward[rank][inputs]))
            elif inputs < len(state.input[rank + 1]):
                arrivals.append((BACKWARD_INPUT, state.input[rank + 1][inputs] + self.message))
        for kind, arrival in arrivals:
            start = max(arrival, state.free[rank])
            yield start + self.seconds[kind][rank], start, rank, kind

    def _child(self, state: BeamState, rank: int, kind: str, start: float) -> BeamState:
        end = start + self.seconds[kind][rank]
        forward, inputs, weights = state.forward, state.input, state.num_weights
        if kind == FORWARD:
            forward = (*forward[:rank], (*forward[rank], end), *forward[rank + 1 :])
        elif kind == BACKWARD_INPUT:
            inputs = (*inputs[:rank], (*inputs[rank], end), *inputs[rank + 1 :])
        else:
            weights = (*weights[:rank], weights[rank] + 1, *weights[rank + 1 :])
        free = (*state.free[:rank], end, *state.free[rank + 1 :])
        return BeamState(free, forward, inputs, weights, state.idle + start - state.free[rank], (rank, kind), state)

    def bound(self, state: BeamState) -> float:
        """Return a lower bound of the makespan: for each rank what it still has to run, and what must follow on other ranks."""
        makespan = 0.0
        for rank in range(self.p):
            forward = (self.m - len(state.forward[rank])) * self.seconds[FORWARD][rank]
            inputs = (self.m - len(state.input[rank])) * self.seconds[BACKWARD_INPUT][rank]
            weights = (self.m - state.num_weights[rank]) * self.seconds[BACKWARD_WEIGHT][rank]
            free = state.free[rank]
            makespan = max(makespan, free + forward + inputs + weights)
            if forward:
                makespan = max(makespan, free + forward + self.behind_forward[rank] + self.last_weight)
            if inputs:
                makespan = max(makespan, free + forward + inputs + self.behind_input[rank] + self.last_weight)
        return makespan
