"""The means that an update takes over rows, columns or all of a weight, in the order in which their partial sums move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

from shardwise.derive.walk import Communicate, Compute, Step
from shardwise.model.program import Role


def moves_mean(step: Step) -> TypeGuard[Communicate]:
    """Whether a step makes a mean of its partial sums."""
    return isinstance(step, Communicate) and step.tensor.role is Role.MEAN


def means_together(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps of an update, in an order in which means stand together: each with the first ones that move once it is there."""
    others = [step for step in steps if not moves_mean(step)]
    made = {
        name: place for place, step in enumerate(others) if isinstance(step, Compute) for name in step.operation.outputs
    }
    runs: dict[int, list[Step]] = {}  # by the place of the step that they stand in front of
    passed = 0
    for step in steps:
        if not moves_mean(step):
            passed += 1
            continue
        place = next((place for place in runs if place > made[step.tensor.name]), passed)
        runs.setdefault(place, []).append(step)
    return tuple(step for place, other in enumerate(others) for step in (*runs.get(place, ()), other))
