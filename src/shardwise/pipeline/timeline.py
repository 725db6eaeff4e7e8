"""A played action list: durations of passes, start and end of each slot, bubble, idle time, and peak activations.

How much ranks hold for their backward passes follows from the order alone; when they hold it, from the clock (`clock.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.pipeline.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, ActionList, Order, Slot
from shardwise.pipeline.clock import run_clock
from shardwise.values import Displayable, InputError, raise_problems

StageSeconds = tuple[float, ...]  # of each virtual stage in the model's order


class PassTimes(NamedTuple):
    """Seconds of a rank's whole part of the model, which its virtual stages share evenly, and of a message.

    A whole backward pass takes `input_s` and `weight_s`. `overlapped_s`: a forward and a whole backward pass at the same
    time; None: their sum.
    """

    forward_s: float = 1.0
    input_s: float = 1.0
    weight_s: float = 1.0
    overlapped_s: float | None = None
    message_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of each virtual stage's passes of one micro-batch, and of a message between two ranks.

    `forward`, `input` (the backward pass for activations) and `weight` (for weights) are in the model's order.
    `backward` is the whole backward pass, None: input and weight together. `overlapped` is a stage's forward and whole
    backward pass at the same time, None: their sum; a pair of two stages takes the mean of theirs. `message`: from the
    end of a pass until the next rank may use its output; the sending rank goes on meanwhile. Raises `InputError`.
    """

    forward: StageSeconds
    input: StageSeconds
    weight: StageSeconds
    backward: StageSeconds | None = None
    overlapped: StageSeconds | None = None
    message: float = 0.0

    def __post_init__(self) -> None:
        seconds_by_name = {
            "forward": self.forward,
            "input": self.input,
            "weight": self.weight,
            "message": (self.message,),
        }
        seconds_by_name |= {"backward": self.backward or (), "together": self.overlapped or ()}
        problems = [
            f"durations: {name} is {value!r}; a finite number of seconds, at least 0, is required"
            for name, values in seconds_by_name.items()
            for value in values
            if not 0.0 <= value < math.inf
        ]
        lengths = {len(values) for name, values in seconds_by_name.items() if values and name != "message"}
        problems += ["durations: each of the passes needs a value for every stage"] if len(lengths) > 1 else []
        raise_problems(problems)

    @classmethod
    def even(cls, num_stages: int, v: float = 1, times: PassTimes | None = None) -> Durations:
        """Return durations of equal stages; `times` are a whole rank's, of which each virtual stage has 1 / v.

        >>> Durations.even(4, 2, PassTimes(forward_s=1.0)).forward
        (0.5, 0.5, 0.5, 0.5)
        """
        times = times or PassTimes()
        return cls(
            forward=(times.forward_s / v,) * num_stages,
            input=(times.input_s / v,) * num_stages,
            weight=(times.weight_s / v,) * num_stages,
            overlapped=None if times.overlapped_s is None else (times.overlapped_s / v,) * num_stages,
            message=times.message_s,
        )

    @property
    def full_backward(self) -> StageSeconds:
        """Seconds of the whole backward pass, by stage."""
        return self.backward or tuple(i + w for i, w in zip(self.input, self.weight, strict=True))

    def by_kind(self) -> dict[str, StageSeconds]:
        """Return the seconds of each kind of action, by stage."""
        return {
            FORWARD: self.forward,
            FULL_BACKWARD: self.full_backward,
            BACKWARD_INPUT: self.input,
            BACKWARD_WEIGHT: self.weight,
        }

    def slot_seconds(self, order: Order) -> list[list[float]]:
        """Return the seconds of each slot of each rank."""
        by_kind = self.by_kind()
        return [
            [by_kind[slot[0].kind][slot[0].stage] if len(slot) == 1 else self.pair_seconds(slot) for slot in slots]
            for slots in order
        ]

    def pair_seconds(self, slot: Slot) -> float:
        """Return the seconds of a forward and a backward pass that run together."""
        if self.overlapped is not None:
            return sum(self.overlapped[action.stage] for action in slot) / len(slot)
        by_kind = self.by_kind()
        return sum(by_kind[action.kind][action.stage] for action in slot)

    def check_num_stages(self, num_stages: int) -> None:
        """Refuse durations of another number of stages. Raises `InputError`."""
        if len(self.forward) != num_stages:
            raise InputError(f"durations: found those of {len(self.forward)} stages; {num_stages} are required")


# What an action adds to what is saved for a backward pass, and to what waits for weights' gradients only. It is freed when its
# action ends, taken when its forward pass starts.
SAVED_CHANGE = {FORWARD: 1, FULL_BACKWARD: -1, BACKWARD_INPUT: -1, BACKWARD_WEIGHT: 0}
AWAITING_CHANGE = {FORWARD: 0, FULL_BACKWARD: 0, BACKWARD_INPUT: 1, BACKWARD_WEIGHT: -1}


class InFlightPeak(NamedTuple):
    """Peak of a rank, in virtual stages of a micro-batch: in all, and of what waits for weight gradients only."""

    peak: int
    peak_waiting: int


def peak_in_flight(actions: ActionList) -> tuple[InFlightPeak, ...]:
    """Return the peaks of each rank of a list.

    >>> from shardwise.pipeline.registry import build_actions
    >>> peak_in_flight(build_actions("zb_h1", 2, 4))
    (InFlightPeak(peak=2, peak_waiting=1), InFlightPeak(peak=2, peak_waiting=2))
    """
    return tuple(_rank_peak(slots) for slots in actions.order)


def _rank_peak(slots: Iterable[Slot]) -> InFlightPeak:
    saved = awaiting = peak = peak_waiting = 0
    for slot in slots:
        for kind, _, _ in slot:
            saved += SAVED_CHANGE[kind]
            awaiting += AWAITING_CHANGE[kind]
            if saved + awaiting > peak:
                peak = saved + awaiting
            if awaiting > peak_waiting:
                peak_waiting = awaiting
    return InFlightPeak(peak, peak_waiting)


def peak_layers(actions: ActionList, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the peak of each rank in layers, where virtual stages have these sizes, in the model's order.

    >>> from shardwise.pipeline.registry import build_actions
    >>> actions = build_actions("interleaved", 2, 4, 2)
    >>> peak_layers(actions, (1, 1, 1, 1)), peak_layers(actions, (3, 2, 1, 1))
    ((5, 3), (13, 6))
    """
    return tuple(_rank_peak_layers(slots, sizes) for slots in actions.order)


def _rank_peak_layers(slots: Iterable[Slot], sizes: Sequence[int]) -> int:
    layers = peak = 0
    for slot in slots:
        for kind, stage, _ in slot:
            layers += sizes[stage] * (SAVED_CHANGE[kind] + AWAITING_CHANGE[kind])
            peak = max(peak, layers)
    return peak


def in_flight_curve(slots: Iterable[tuple[Slot, float, float]], unit: float) -> list[tuple[float, float]]:
    """Return live memory over time, as (seconds, amount from then on), with `unit` for each pass, from slots with start
    and end."""
    changes: dict[float, int] = {0.0: 0}
    for slot, start, end in slots:
        for kind, _, _ in slot:
            change = SAVED_CHANGE[kind] + AWAITING_CHANGE[kind]
            if change:
                time = start if change > 0 else end
                changes[time] = changes.get(time, 0) + change
    in_flight, curve = 0, []
    for time in sorted(changes):
        in_flight += changes[time]
        curve.append((time, in_flight * unit))
    return curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline(Displayable):
    """A played list: `starts[rank][slot]` and `ends[rank][slot]` in seconds; the actions of a slot share them.

    `has_default_times`: the seconds of its passes were left out, and each takes 1.

    >>> import shardwise as sw
    >>> sw.schedule("gpipe", stages=2, micro_batches=2).makespan
    9.0
    """

    actions: ActionList
    durations: Durations
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    in_flight_peaks: tuple[InFlightPeak, ...] = field(repr=False)
    has_default_times: bool = False

    @property
    def makespan(self) -> float:
        """Seconds from the first action of any rank to the last one."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    def busy(self) -> tuple[float, ...]:
        """Return the seconds that each rank computes."""
        return tuple(
            sum(end - start for start, end in zip(*times, strict=True))
            for times in zip(self.starts, self.ends, strict=True)
        )

    def idle(self) -> tuple[float, ...]:
        """Return the seconds that each rank waits during the step."""
        return tuple(self.makespan - busy for busy in self.busy())

    def waits(self) -> tuple[float, ...]:
        """Return the seconds that each rank waits between its first action and its last, as the zero-bubble paper counts."""
        return tuple(
            ends[-1] - starts[0] - busy if ends else 0.0
            for starts, ends, busy in zip(self.starts, self.ends, self.busy(), strict=True)
        )

    @property
    def longest_wait(self) -> float:
        """Longest wait of a rank between its first action and its last, in seconds."""
        return max(self.waits())

    @property
    def bubble(self) -> float:
        """Idle over ideal time, S1's definition: the step takes so much longer than its busiest rank computes."""
        return self._over_ideal(min(self.idle()))

    @property
    def local_bubble(self) -> float:
        """Idle over ideal time of the rank that waits longest between its first action and its last.

        The bubble of a step whose optimizer does not wait for all ranks. Source: Qi et al. 2023, section 4.
        """
        return self._over_ideal(self.longest_wait)

    def _over_ideal(self, seconds: float) -> float:
        ideal = max(self.busy())
        return seconds / ideal if ideal else 0.0

    @property
    def idle_fraction(self) -> float:
        """Share of idle time, over all ranks."""
        return sum(self.idle()) / (self.makespan * len(self.starts)) if self.makespan else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Peak of each rank: 1 is a micro-batch on one of p even stages, so a virtual stage counts 1 / v."""
        return tuple(peak.peak / self.actions.num_virtual_stages for peak in self.in_flight_peaks)

    @property
    def peak_waiting(self) -> tuple[float, ...]:
        """Peak of each rank in what waits for its weight gradients only, in the unit of `peak_activations`."""
        return tuple(peak.peak_waiting / self.actions.num_virtual_stages for peak in self.in_flight_peaks)

    def slots(self) -> Iterator[tuple[int, Slot, float, float]]:
        """Yield rank, slot, start and end of every slot."""
        for rank, times in enumerate(zip(self.actions.order, self.starts, self.ends, strict=True)):
            for slot, start, end in zip(*times, strict=True):
                yield rank, slot, start, end

    def memory(self, rank: int) -> list[tuple[float, float]]:
        """Return what a rank holds over time: (seconds, activations from then on), in the unit of `peak_activations`."""
        times = zip(self.actions.order[rank], self.starts[rank], self.ends[rank], strict=True)
        return in_flight_curve(times, 1.0 / self.actions.num_virtual_stages)


def play_actions(actions: ActionList, durations: Durations | None = None) -> Timeline:
    """Play a list; by default every stage's F, I and W take a second (with v virtual stages 1 / v).

    Raises `InputError` for a list that does not end, with its first offending action, and for durations of other stages.

    >>> from shardwise.pipeline.registry import build_actions
    >>> line = play_actions(build_actions("1f1b", 4, 8))
    >>> line.makespan, line.bubble, line.peak_activations
    (33.0, 0.375, (4.0, 3.0, 2.0, 1.0))
    """
    durations = durations or Durations.even(actions.num_stages, actions.num_virtual_stages)
    durations.check_num_stages(actions.num_stages)
    clock = run_clock(actions, durations.slot_seconds(actions.order), durations.message)
    return Timeline(
        actions=actions, durations=durations, starts=clock.starts, ends=clock.ends,
        in_flight_peaks=peak_in_flight(actions),
    )  # fmt: skip
