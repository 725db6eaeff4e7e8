"""The clock of an action list: when each pass begins and ends, what ranks wait, what they hold, what they send.

A rank runs its slots in order, each as soon as it is free and what the slot takes is there: from the stage before for a forward
pass, from the stage behind for a backward pass. Messages do not keep the rank that sends, nor each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardwise.draw.notebook import Pictured, Shown
from shardwise.schedule.action import FORWARD, WEIGHT, ActionList, Slot
from shardwise.schedule.durations import Durations
from shardwise.schedule.held import Held, held_by_rank, step_curve

NEVER = -1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(Pictured):
    """A played list: `starts[rank][slot]` and `ends[rank][slot]` in seconds; the actions of a slot share them."""

    actions: ActionList
    durations: Durations
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    held: tuple[Held, ...] = field(repr=False)

    def shown(self) -> Shown:
        from shardwise.schedule.picture import shown_timeline

        return shown_timeline(self)

    @property
    def makespan(self) -> float:
        """Seconds from the first action of any rank to the last one."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(
            sum(end - start for start, end in zip(*times, strict=True))
            for times in zip(self.starts, self.ends, strict=True)
        )

    def idle(self) -> tuple[float, ...]:
        """Seconds that each rank waits while the step lasts."""
        return tuple(self.makespan - busy for busy in self.busy())

    def waits(self) -> tuple[float, ...]:
        """Seconds that each rank waits between its first action and its last, as the zero-bubble paper counts."""
        return tuple(
            ends[-1] - starts[0] - busy if ends else 0.0
            for starts, ends, busy in zip(self.starts, self.ends, self.busy(), strict=True)
        )

    @property
    def longest_wait(self) -> float:
        """The most seconds that a rank waits between its first action and its last."""
        return max(self.waits())

    @property
    def bubble(self) -> float:
        """Idle over ideal time, S1's definition: a step lasts as long as its busiest rank computes, and so much longer."""
        return self._over_ideal(min(self.idle()))

    @property
    def local_bubble(self) -> float:
        """The same for the rank that waits longest between its first action and its last.

        It is that of a step whose optimizer does not wait for all ranks. Source: Qi et al. 2023, section 4.
        """
        return self._over_ideal(self.longest_wait)

    def _over_ideal(self, seconds: float) -> float:
        ideal = max(self.busy())
        return seconds / ideal if ideal else 0.0

    @property
    def idle_fraction(self) -> float:
        """Idle over whole time, all ranks together."""
        return sum(self.idle()) / (self.makespan * len(self.starts)) if self.makespan else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """The most that each rank holds: 1 is a micro-batch on one of p even stages, so a virtual stage counts 1 / v."""
        return tuple(held.peak / self.actions.num_virtual_stages for held in self.held)

    @property
    def peak_waiting(self) -> tuple[float, ...]:
        """The most of it that waits for its weights' gradients only, in the same unit."""
        return tuple(held.peak_waiting / self.actions.num_virtual_stages for held in self.held)

    def slots(self) -> Iterator[tuple[int, Slot, float, float]]:
        """Rank, slot, start and end of every slot."""
        for rank, times in enumerate(zip(self.actions.order, self.starts, self.ends, strict=True)):
            for slot, start, end in zip(*times, strict=True):
                yield rank, slot, start, end

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """What a rank holds over time: (seconds, activations from then on), in the unit of `peak_activations`."""
        times = zip(self.actions.order[rank], self.starts[rank], self.ends[rank], strict=True)
        return step_curve(times, 1.0 / self.actions.num_virtual_stages)


def play(actions: ActionList, durations: Durations | None = None) -> Timeline:
    """The timeline of a list; without durations every stage's F, I and W take a second (of v virtual stages a v-th).

    Raises `InputError` for a list that does not end, with its first offending action, and for durations of other stages.

    >>> from shardwise.schedule.build import build
    >>> line = play(build("1f1b", 4, 8))
    >>> line.makespan, line.bubble, line.peak_activations
    (33.0, 0.375, (4.0, 3.0, 2.0, 1.0))
    """
    durations = durations or Durations.even(actions.num_stages, actions.num_virtual_stages)
    durations.check(actions.num_stages)
    clock = clock_of(actions, durations.of_slots(actions.order), durations.message)
    return Timeline(
        actions=actions, durations=durations, starts=clock.starts, ends=clock.ends, held=held_by_rank(actions)
    )


def clock_of(actions: ActionList, seconds: Sequence[Sequence[float]], message: float) -> Clock:
    """The clock of a list at its end. `seconds[rank][slot]`: of each slot, `message`: of a message between two ranks.

    Raises `InputError` for a list that does not end, with its first offending action.
    """
    clock = Clock(actions, seconds, message)
    if not clock.run():
        from shardwise.schedule.check import check

        check(actions)
    return clock


class Clock:
    """One pass over a list in an order that its dependencies allow. A rank that cannot go on is taken up again by the end of
    what it waits for, so each action is looked at twice at most."""

    def __init__(self, actions: ActionList, seconds: Sequence[Sequence[float]], message: float = 0.0) -> None:
        self.actions, self.seconds = actions, seconds
        self.starts: list[list[float]] = [[] for _ in actions.order]
        self.ends: list[list[float]] = [[] for _ in actions.order]
        size = actions.num_stages * actions.num_micro_batches
        self.forward_end, self.backward_end = [NEVER] * size, [NEVER] * size  # by stage * micro-batches + micro-batch
        self.blocked: dict[tuple[bool, int], int] = {}  # (backward?, place): the rank that waits for it
        self.delay = [message if hops else 0.0 for hops in (*actions.hops(), False)]

    def run(self) -> bool:
        """Play everything that can be played; whether that is everything."""
        ready = list(range(self.actions.num_ranks - 1, -1, -1))
        while ready:
            self._play(ready.pop(), ready)
        return all(len(ends) == len(slots) for ends, slots in zip(self.ends, self.actions.order, strict=True))

    def _play(self, rank: int, ready: list[int]) -> None:
        """The slots of a rank up to one that has to wait; ranks that wait for them become ready."""
        slots, starts, ends = self.actions.order[rank], self.starts[rank], self.ends[rank]
        now = ends[-1] if ends else 0.0
        seconds, m, blocked = self.seconds[rank], self.actions.num_micro_batches, self.blocked
        for number in range(len(ends), len(slots)):
            slot = slots[number]
            start = self._start(slot, now, rank)
            if start < 0.0:
                return
            now = start + seconds[number]
            starts.append(start)
            ends.append(now)
            for kind, stage, micro_batch in slot:
                if kind != WEIGHT:
                    backward, place = kind != FORWARD, stage * m + micro_batch
                    (self.backward_end if backward else self.forward_end)[place] = now
                    waiting = blocked.pop((backward, place), None) if blocked else None
                    if waiting is not None:
                        ready.append(waiting)

    def _start(self, slot: Slot, now: float, rank: int) -> float:
        """When a slot can begin; `NEVER` where something that it takes is not there yet, and the rank waits for that."""
        m, last = self.actions.num_micro_batches, self.actions.num_stages - 1
        for kind, stage, micro_batch in slot:
            if kind == FORWARD:
                if stage == 0:
                    continue
                backward, place, delay = False, (stage - 1) * m + micro_batch, self.delay[stage]
            elif kind == WEIGHT:
                backward, place, delay = True, stage * m + micro_batch, 0.0
            elif stage == last:
                backward, place, delay = False, stage * m + micro_batch, 0.0
            else:
                backward, place, delay = True, (stage + 1) * m + micro_batch, self.delay[stage + 1]
            there = (self.backward_end if backward else self.forward_end)[place]
            if there < 0.0:
                self.blocked[backward, place] = rank
                return NEVER
            now = max(now, there + delay)
        return now
