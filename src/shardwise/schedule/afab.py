"""All forward, all backward (AFAB): all forward passes, then all backward passes. Sources: Huang et al. 2018, GPipe; S1."""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.closed_form import in_flight_afab
from shardwise.schedule.form import Schedule, alone
from shardwise.schedule.one_f_one_b import whole_passes_s
from shardwise.schedule.rounds import one_then_one


def actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Every stage runs all micro-batches forward before the first one backward."""
    return ActionList(name="afab", order=one_then_one(p, m, ahead=(m,) * p), placement=loop(p, v), num_micro_batches=m)


SCHEDULE = Schedule(
    goes_with=alone, actions=actions, bubble_s=whole_passes_s, bubble="(p - 1) · (F + B) / v",
    in_flight=lambda p, v, m, stage: in_flight_afab(m), num_at_end=lambda p, v, m: m,
    aliases=("gpipe",),
)  # fmt: skip
