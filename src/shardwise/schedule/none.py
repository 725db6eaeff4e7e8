"""No pipeline: micro-batches one after the other, forward and backward."""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.form import Schedule
from shardwise.schedule.one_f_one_b import in_flight, whole_passes_s
from shardwise.schedule.rounds import one_then_one


def actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """The list of a single rank, through all of its virtual stages."""
    order = one_then_one(p, m, v, ahead=(v,), round_size=1)
    return ActionList(name="none", order=order, placement=loop(p, v), num_micro_batches=m)


SCHEDULE = Schedule(
    goes_with=lambda p, v: p == 1, actions=actions, natural=True,
    bubble_s=whole_passes_s, bubble="(p - 1) · (F + B) / v", in_flight=in_flight,
)  # fmt: skip
