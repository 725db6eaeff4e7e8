"""A simulated step: the passes of every rank played on streams, then the schedule on their seconds, then the update.

Ranks along `pp` that are alike share the passes that they run: each pass through a stage is played once for each kind,
once more as the first and as the last of the step, and pairs that run together likewise. Peers of a collective are
assumed ready: one rank of each stage stands for all. A message leaves when its pass has ended, arrives `message_s`
later, and delays only the passes that wait for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.pipeline import BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action, ActionList, Slot, build_actions
from shardwise.pipeline.clock import ScheduleClock, run_clock
from shardwise.price.layout_pricer import Pricing
from shardwise.price.overlap import HIDEABLE, HIDEABLE_TOGETHER
from shardwise.price.simulation.contention import NO_CONTENTION
from shardwise.price.simulation.stage_passes import LIST, OVERLAP_CHOICES, PassLists, StagePass
from shardwise.price.simulation.streams import StreamTimeline, TimedInstruction, Transfer, play_streams
from shardwise.price.simulation.unit_timings import UnitTimings, VirtualStage, build_virtual_stages
from shardwise.values import lookup, raise_problems


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step, in seconds.

    `clock` has start and end of each slot of each rank, `slot_timelines` what the streams do in it, from its start;
    `updates` what they do in each rank's update, from `passes_s`. `rank_stages`: the stages of each rank.
    """

    pricing: Pricing
    overlap: str
    contention: float
    actions: ActionList
    stages: tuple[VirtualStage, ...]
    rank_stages: tuple[tuple[int, ...], ...]
    clock: ScheduleClock
    slot_timelines: tuple[tuple[StreamTimeline, ...], ...]
    updates: tuple[StreamTimeline, ...]
    message_s: float

    @cached_property
    def trailing(self) -> tuple[tuple[TrailingTransfer, ...], ...]:
        """Transfers that each rank's passes leave for the update to wait for, by their end.

        They run on their stream beside the passes that follow, one after the other.
        """
        return tuple(
            tuple(sorted(self._trailing_transfers(rank), key=lambda transfer: transfer.end))
            for rank in range(self.actions.num_ranks)
        )

    def _trailing_transfers(self, rank: int) -> Iterator[TrailingTransfer]:
        free: dict[str, float] = {}
        for number, timeline in enumerate(self.slot_timelines[rank]):
            start = self.clock.starts[rank][number]
            for event_number in timeline.trailing:
                event = timeline.events[event_number]
                assert isinstance(event.work, Transfer)
                begin = max(start + event.start, free.get(event.stream, 0.0))
                free[event.stream] = begin + event.end - event.start
                yield TrailingTransfer(number, event_number, event.work, event.stream, begin, free[event.stream])

    @cached_property
    def gradients_ready_s(self) -> tuple[float, ...]:
        """Seconds at which the gradients of each rank are complete."""
        ends = (ends[-1] for ends in self.clock.ends)
        pairs = zip(ends, self.trailing, strict=True)
        return tuple(max(end, *(transfer.end for transfer in transfers), 0.0) for end, transfers in pairs)

    @cached_property
    def passes_s(self) -> float:
        """Seconds at which the gradients of all ranks are complete."""
        return max(self.gradients_ready_s)

    @cached_property
    def step_time_s(self) -> float:
        """Seconds of the whole step: the update, which sums a norm over all ranks, waits for the last pass."""
        return self.passes_s + max(update.seconds for update in self.updates)

    @cached_property
    def ranks(self) -> tuple[RankTime, ...]:
        """Breakdown of the seconds of each rank."""
        return tuple(self._rank(rank) for rank in range(self.actions.num_ranks))

    @cached_property
    def busiest(self) -> int:
        """The rank that waits the least for other stages."""
        return min(range(len(self.ranks)), key=lambda rank: self.ranks[rank].bubble_s)

    def slots(self, rank: int) -> Iterable[tuple[Slot, StreamTimeline, float, float]]:
        """Return the slots of a rank in order, with stream timeline, start and end."""
        order, clock = self.actions.order[rank], self.clock
        return zip(order, self.slot_timelines[rank], clock.starts[rank], clock.ends[rank], strict=True)

    def _rank(self, rank: int) -> RankTime:
        computed: dict[str, float] = {}
        exposed: dict[str, float] = {}
        for timeline, number in (*Counter(self.slot_timelines[rank]).items(), (self.updates[rank], 1)):
            for total, seconds_by_name in ((computed, timeline.computed), (exposed, timeline.exposed)):
                for name, seconds in seconds_by_name.items():
                    total[name] = total.get(name, 0.0) + seconds * number
        now = self.clock.ends[rank][-1]
        for trailing in self.trailing[rank]:
            if trailing.end > now:
                axis = trailing.transfer.axis
                exposed[axis] = exposed.get(axis, 0.0) + trailing.end - now
                now = trailing.end
        bubble_s, late_s = self._waits_between_passes(rank)
        if late_s:
            exposed["pp"] = exposed.get("pp", 0.0) + late_s
        bubble_s += self.passes_s - self.gradients_ready_s[rank]
        bubble_s += max(update.seconds for update in self.updates) - self.updates[rank].seconds
        return RankTime(computed, exposed, bubble_s)

    def _waits_between_passes(self, rank: int) -> tuple[float, float]:
        """Return the seconds that a rank waits before its passes for other ranks, and for messages in transit."""
        idle, late, previous_end, hops = 0.0, 0.0, 0.0, (*self.actions.crosses_ranks(), False)
        for slot, start, end in zip(
            self.actions.order[rank], self.clock.starts[rank], self.clock.ends[rank], strict=True
        ):
            if start > previous_end:
                receiving = (action for action in slot if action.kind != BACKWARD_WEIGHT)
                comes = any(hops[action.stage + (action.kind != FORWARD)] for action in receiving)
                late += min(start - previous_end, self.message_s) if comes else 0.0
                idle += max(start - previous_end - (self.message_s if comes else 0.0), 0.0)
            previous_end = end
        return idle, late


class TrailingTransfer(NamedTuple):
    """A transfer that outlasts the slot that started it: the indices of slot and event, and when it runs."""

    slot: int
    event: int
    transfer: Transfer
    stream: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class RankTime:
    """Seconds of a rank: kernels by phase, waits of its compute stream by axis, and waiting for other stages."""

    computed: Mapping[str, float]
    exposed: Mapping[str, float]
    bubble_s: float


def simulate_step(pricing: Pricing, overlap: str = LIST, contention: float = NO_CONTENTION) -> SimulatedStep:
    """Simulate a step of a layout that is legal; see `result.simulate`.

    Raises `InputError` for an unknown overlap, and for a contention below 1.
    """
    lookup(dict.fromkeys(OVERLAP_CHOICES), overlap, "overlap")
    raise_problems(
        [] if 1.0 <= contention < math.inf else [f"contention: found {contention}; a number of at least 1 is required"]
    )
    return StepSimulator(pricing, overlap, contention).run()


class StepSimulator:
    """Plays the passes of the stages on streams, and the schedule on their seconds."""

    def __init__(self, pricing: Pricing, overlap: str, contention: float) -> None:
        self.pricing, self.overlap, self.contention = pricing, overlap, contention
        layout = pricing.layout
        self.actions = build_actions(layout.schedule, layout.pp, pricing.num_micro_batches, layout.num_virtual_stages)
        self.missing = float(pricing.missing_share)
        self.works = UnitTimings(pricing)
        self.lists = PassLists(self.works, reduces_after=pricing.pricer.rates.policy.reduction == "after")
        self.stages, self.rank_stages = build_virtual_stages(self.works, self.actions.placement)
        self.cache: dict[tuple[StagePass, ...], StreamTimeline] = {}

    def run(self) -> SimulatedStep:
        pp = self.pricing.layout.pp
        message_s = self.works.message_s() if pp > 1 and self.overlap == LIST else 0.0
        timelines = tuple(tuple(self.slot_timelines(rank)) for rank in range(pp))
        clock = run_clock(self.actions, [[timeline.seconds for timeline in row] for row in timelines], message_s)
        streams = [self.pricing.step(stage).stream_s for stage in self.pricing.stages(self.works.costs)]
        updates = tuple(
            self.play(self.lists.update([self.stages[n] for n in stage_numbers], self.overlap, float(stream_s)))
            for stage_numbers, stream_s in zip(self.rank_stages, streams, strict=True)
        )
        return SimulatedStep(
            self.pricing, self.overlap, self.contention, self.actions, self.stages, self.rank_stages, clock, timelines, updates,
            message_s,
        )  # fmt: skip

    def slot_timelines(self, rank: int) -> Iterator[StreamTimeline]:
        """Yield what a rank's streams do in each of its slots."""
        slots, num_stages = self.actions.order[rank], len(self.rank_stages[rank])
        first = _first_actions(slots, (FORWARD,), num_stages)
        last = _first_actions(reversed(slots), (FULL_BACKWARD, BACKWARD_WEIGHT), num_stages)
        steady: dict[tuple[str, int], StreamTimeline] = {}
        for slot in slots:
            action = slot[0]
            if len(slot) > 1 or action in first or action in last or self.share_of(action) != 1.0:
                yield self.play_passes(
                    tuple(
                        StagePass(self.stages[a.stage], a.kind, a in first, a in last, self.share_of(a)) for a in slot
                    )
                )
                continue
            timeline = steady.get(action[:2])
            if timeline is None:
                timeline = steady[action[:2]] = self.play_passes((StagePass(self.stages[action.stage], action.kind),))
            yield timeline

    def share_of(self, action: Action) -> float:
        """Return the sequences of a pass over those of a full micro-batch: the last one of a step may have fewer."""
        is_last = action.micro_batch == self.actions.num_micro_batches - 1
        return 1.0 - self.missing if is_last else 1.0

    def play_passes(self, passes: tuple[StagePass, ...]) -> StreamTimeline:
        if passes not in self.cache:
            self.cache[passes] = self.play(*self.pass_lists(passes))
        return self.cache[passes]

    def pass_lists(self, passes: tuple[StagePass, ...]) -> list[list[TimedInstruction]]:
        if self.overlap == LIST:
            return [self.lists.engine_order(stage_pass) for stage_pass in passes]
        hideable = HIDEABLE if len(passes) == 1 else HIDEABLE_TOGETHER
        return [self.lists.convention_order(passes, self.overlap, hideable)]

    def play(self, *lists: list[TimedInstruction]) -> StreamTimeline:
        return play_streams(lists, self.contention)


def _first_actions(slots: Iterable[Slot], kinds: tuple[str, ...], num_stages: int) -> set[Action]:
    """Return the first action of these kinds on each stage; `num_stages` ends the search."""
    first_actions: dict[int, Action] = {}
    for slot in slots:
        for action in slot:
            if action.kind in kinds:
                first_actions.setdefault(action.stage, action)
        if len(first_actions) == num_stages:
            break
    return set(first_actions.values())
