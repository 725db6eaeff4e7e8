"""One micro-batch at a time through all stages, forward and backward: one stage works, the others wait. Source: S1."""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.form import Schedule, alone
from shardwise.schedule.rounds import one_then_one


def actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Every stage runs a micro-batch's forward pass, waits, and runs its backward pass; idle over ideal time is p - 1."""
    return ActionList(name="naive", order=one_then_one(p, m, ahead=(1,) * p), placement=loop(p, v), num_micro_batches=m)


SCHEDULE = Schedule(
    goes_with=alone, actions=actions,
    unpriced="it waits in every micro-batch, and closed forms have what is waited for at the ends of a step",
)  # fmt: skip
