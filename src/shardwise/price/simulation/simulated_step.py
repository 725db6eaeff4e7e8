"""A whole step: the passes of every rank played on streams, then the schedule on their seconds, then the update.

Ranks along `pp` that are alike share the passes that they run: each pass through a stage is played once for each kind, once
more as the first and as the last of the step, and pairs that run together likewise. Collectives are met by their peers: one
rank of each stage stands for all. A message leaves when its pass has ended, arrives `message_s` later, and delays only
the passes that wait for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.pipeline.actions import BACKWARD, FORWARD, WEIGHT, Action, ActionList, Slot
from shardwise.pipeline.clock import Clock, clock_of
from shardwise.pipeline.registry import build
from shardwise.price.layout_pricer import Pricing
from shardwise.price.overlap import HIDEABLE, HIDEABLE_TOGETHER
from shardwise.price.simulation.stage_passes import LIST, OVERLAPS, Pass, Passes
from shardwise.price.simulation.streams import CONTENTION, Played, Transfer, Work, play_streams
from shardwise.price.simulation.timed_instructions import Stage, UnitWorks, stages_of
from shardwise.values.errors import chosen, require


@dataclass(frozen=True)
class Simulated:
    """A step as it was simulated, in seconds.

    `clock` has when each slot of each rank starts and ends, `plays` what the streams do in it, from its start; `updates` what
    they do in each rank's update, from `passes_s`. `held`: the stages of each rank.
    """

    pricing: Pricing
    overlap: str
    contention: float
    actions: ActionList
    stages: tuple[Stage, ...]
    held: tuple[tuple[int, ...], ...]
    clock: Clock
    plays: tuple[tuple[Played, ...], ...]
    updates: tuple[Played, ...]
    message_s: float

    @cached_property
    def left(self) -> tuple[tuple[Left, ...], ...]:
        """What each rank's passes leave to be waited for in front of its update, by its end: on its stream beside the passes that
        follow, one after the other."""
        return tuple(tuple(sorted(self._left(rank), key=lambda one: one.end)) for rank in range(self.actions.num_ranks))

    def _left(self, rank: int) -> Iterator[Left]:
        free: dict[str, float] = {}
        for number, played in enumerate(self.plays[rank]):
            start = self.clock.starts[rank][number]
            for event_number in played.left:
                event = played.events[event_number]
                assert isinstance(event.what, Transfer)
                begin = max(start + event.start, free.get(event.stream, 0.0))
                free[event.stream] = begin + event.end - event.start
                yield Left(number, event_number, event.what, event.stream, begin, free[event.stream])

    @cached_property
    def ready(self) -> tuple[float, ...]:
        """When the gradients of each rank are complete."""
        ends = (ends[-1] for ends in self.clock.ends)
        return tuple(max(end, *(one.end for one in left), 0.0) for end, left in zip(ends, self.left, strict=True))

    @cached_property
    def passes_s(self) -> float:
        """When the gradients of all ranks are complete."""
        return max(self.ready)

    @cached_property
    def step_time_s(self) -> float:
        """Seconds of the whole step: the update, which sums a norm over all ranks, waits for the last pass."""
        return self.passes_s + max(update.seconds for update in self.updates)

    @cached_property
    def ranks(self) -> tuple[RankTime, ...]:
        """Where the seconds of each rank go."""
        return tuple(self._rank(rank) for rank in range(self.actions.num_ranks))

    @cached_property
    def busiest(self) -> int:
        """The rank that waits the least for other stages."""
        return min(range(len(self.ranks)), key=lambda rank: self.ranks[rank].bubble_s)

    def slots(self, rank: int) -> Iterable[tuple[Slot, Played, float, float]]:
        """The work of a rank, in order: what its streams run, with start and end."""
        order, clock = self.actions.order[rank], self.clock
        return zip(order, self.plays[rank], clock.starts[rank], clock.ends[rank], strict=True)

    def _rank(self, rank: int) -> RankTime:
        computed: dict[str, float] = {}
        exposed: dict[str, float] = {}
        for one, number in (*Counter(self.plays[rank]).items(), (self.updates[rank], 1)):
            for total, own in ((computed, one.computed), (exposed, one.exposed)):
                for name, seconds in own.items():
                    total[name] = total.get(name, 0.0) + seconds * number
        now = self.clock.ends[rank][-1]
        for moved in self.left[rank]:
            if moved.end > now:
                exposed[moved.what.axis] = exposed.get(moved.what.axis, 0.0) + moved.end - now
                now = moved.end
        bubble_s, late_s = self._between(rank)
        if late_s:
            exposed["pp"] = exposed.get("pp", 0.0) + late_s
        bubble_s += self.passes_s - self.ready[rank]
        bubble_s += max(update.seconds for update in self.updates) - self.updates[rank].seconds
        return RankTime(computed, exposed, bubble_s)

    def _between(self, rank: int) -> tuple[float, float]:
        """Seconds that a rank waits before its passes for other ranks, and for messages in transit."""
        idle, late, before, hops = 0.0, 0.0, 0.0, (*self.actions.hops(), False)
        for slot, start, end in zip(
            self.actions.order[rank], self.clock.starts[rank], self.clock.ends[rank], strict=True
        ):
            if start > before:
                comes = any(hops[one.stage + (one.kind != FORWARD)] for one in slot if one.kind != WEIGHT)
                late += min(start - before, self.message_s) if comes else 0.0
                idle += max(start - before - (self.message_s if comes else 0.0), 0.0)
            before = end
        return idle, late


class Left(NamedTuple):
    """A transfer that a slot of a rank begins and leaves: the numbers of the slot and of the event there, and when it runs."""

    slot: int
    event: int
    what: Transfer
    stream: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RankTime:
    """Seconds of a rank: kernels by phase, waits of its compute stream by axis, and waiting for other stages."""

    computed: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble_s: float


def simulated(pricing: Pricing, overlap: str = LIST, contention: float = CONTENTION) -> Simulated:
    """Simulate a step of a layout that is legal; see `result.simulate`.

    Raises `InputError` for an unknown overlap, and for a contention below 1.
    """
    chosen(dict.fromkeys(OVERLAPS), overlap, "overlap")
    require(
        [] if 1.0 <= contention < math.inf else [f"contention: found {contention}; a number of at least 1 is required"]
    )
    return Simulator(pricing, overlap, contention).run()


class Simulator:
    """Plays the passes of `stages` on streams, and the schedule on their seconds."""

    def __init__(self, pricing: Pricing, overlap: str, contention: float) -> None:
        self.pricing, self.overlap, self.contention = pricing, overlap, contention
        layout = pricing.layout
        self.actions = build(layout.schedule, layout.pp, pricing.num_micro_batches, layout.num_virtual_stages)
        self.works = UnitWorks(pricing)
        self.lists = Passes(self.works, reduces_after=pricing.pricer.rates.policy.reduction == "after")
        self.stages, self.held = stages_of(self.works, self.actions.placement)
        self.known: dict[tuple[Pass, ...], Played] = {}

    def run(self) -> Simulated:
        pp = self.pricing.layout.pp
        message_s = self.works.message_s() if pp > 1 and self.overlap == LIST else 0.0
        plays = tuple(tuple(self.plays(rank)) for rank in range(pp))
        clock = clock_of(self.actions, [[one.seconds for one in row] for row in plays], message_s)
        streams = [self.pricing.step(stage).stream_s for stage in self.pricing.stages(self.works.costs)]
        updates = tuple(
            self.play(self.lists.update([self.stages[n] for n in held], self.overlap, float(stream_s)))
            for held, stream_s in zip(self.held, streams, strict=True)
        )
        return Simulated(
            self.pricing, self.overlap, self.contention, self.actions, self.stages, self.held, clock, plays, updates, message_s
        )  # fmt: skip

    def plays(self, rank: int) -> Iterator[Played]:
        """The work of a rank's streams in each of its slots."""
        slots, num_stages = self.actions.order[rank], len(self.held[rank])
        first = _earliest(slots, (FORWARD,), num_stages)
        last = _earliest(reversed(slots), (BACKWARD, WEIGHT), num_stages)
        usual: dict[tuple[str, int], Played] = {}
        for slot in slots:
            one = slot[0]
            if len(slot) > 1 or one in first or one in last:
                yield self.played(tuple(Pass(self.stages[a.stage], a.kind, a in first, a in last) for a in slot))
                continue
            known = usual.get(one[:2])
            if known is None:
                known = usual[one[:2]] = self.played((Pass(self.stages[one.stage], one.kind),))
            yield known

    def played(self, passes: tuple[Pass, ...]) -> Played:
        if passes not in self.known:
            self.known[passes] = self.play(*self.works_of(passes))
        return self.known[passes]

    def works_of(self, passes: tuple[Pass, ...]) -> list[list[Work]]:
        if self.overlap == LIST:
            return [self.lists.listed(one.stage, one.kind, last=one.last) for one in passes]
        hideable = HIDEABLE if len(passes) == 1 else HIDEABLE_TOGETHER
        return [self.lists.by_convention(passes, self.overlap, hideable)]

    def play(self, *lists: list[Work]) -> Played:
        return play_streams(lists, self.contention)


def _earliest(slots: Iterable[Slot], kinds: tuple[str, ...], num_stages: int) -> set[Action]:
    """Of each of so many stages the first action of some kinds."""
    found: dict[int, Action] = {}
    for slot in slots:
        for one in slot:
            if one.kind in kinds:
                found.setdefault(one.stage, one)
        if len(found) == num_stages:
            break
    return set(found.values())
