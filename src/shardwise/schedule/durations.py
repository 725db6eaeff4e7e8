"""How long the passes of a pipeline take, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.errors import InputError, require
from shardwise.schedule.action import BACKWARD, FORWARD, INPUT, WEIGHT, Order, Slot

Seconds = tuple[float, ...]  # of each virtual stage in the model's order


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of each virtual stage's passes of one micro-batch, and of a message between two ranks.

    `forward`, `input` (the backward pass for activations) and `weight` (for weights), in the model's order. `backward` is
    the whole backward pass, input and weight together where it is None. `together` is a stage's forward and whole
    backward pass run at the same time, their sum where it is None; a pair of two stages takes the mean of theirs.
    `message`: from the end of a pass to the moment at which the next rank may take what it gave; the rank that sends goes
    on. Raises `InputError`.
    """

    forward: Seconds
    input: Seconds
    weight: Seconds
    backward: Seconds | None = None
    together: Seconds | None = None
    message: float = 0.0

    def __post_init__(self) -> None:
        given = {"forward": self.forward, "input": self.input, "weight": self.weight, "message": (self.message,)}
        given |= {"backward": self.backward or (), "together": self.together or ()}
        problems = [
            f"durations: {name} is {value!r}; a finite number of seconds, at least 0, is required"
            for name, values in given.items()
            for value in values
            if not 0.0 <= value < math.inf
        ]
        lengths = {len(values) for name, values in given.items() if values and name != "message"}
        problems += ["durations: each of the passes needs a value for every stage"] if len(lengths) > 1 else []
        require(problems)

    @classmethod
    def even(
        cls, num_stages: int, v: float = 1, *,
        forward: float = 1.0, input: float = 1.0, weight: float = 1.0, together: float | None = None, message: float = 0.0,
    ) -> Durations:  # fmt: skip
        """Stages that take alike; the seconds are of a whole rank's part of the model, of which a virtual stage has a v-th.

        >>> Durations.even(4, 2, forward=1.0).forward
        (0.5, 0.5, 0.5, 0.5)
        """
        return cls(
            forward=(forward / v,) * num_stages,
            input=(input / v,) * num_stages,
            weight=(weight / v,) * num_stages,
            together=None if together is None else (together / v,) * num_stages,
            message=message,
        )

    @property
    def whole(self) -> Seconds:
        """The whole backward pass."""
        return self.backward or tuple(i + w for i, w in zip(self.input, self.weight, strict=True))

    def by_kind(self) -> dict[str, Seconds]:
        """Seconds of each kind of action."""
        return {FORWARD: self.forward, BACKWARD: self.whole, INPUT: self.input, WEIGHT: self.weight}

    def of_slots(self, order: Order) -> list[list[float]]:
        """Seconds of each slot of each rank."""
        by_kind = self.by_kind()
        return [
            [by_kind[slot[0].kind][slot[0].stage] if len(slot) == 1 else self.of_pair(slot) for slot in slots]
            for slots in order
        ]

    def of_pair(self, slot: Slot) -> float:
        """Seconds of a forward and a backward pass that run together."""
        if self.together is not None:
            return sum(self.together[action.stage] for action in slot) / len(slot)
        by_kind = self.by_kind()
        return sum(by_kind[action.kind][action.stage] for action in slot)

    def check(self, num_stages: int) -> None:
        """Refuse durations of another number of stages. Raises `InputError`."""
        if len(self.forward) != num_stages:
            raise InputError(f"durations: found those of {len(self.forward)} stages; {num_stages} are required")
