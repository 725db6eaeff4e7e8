"""Looped breadth-first: all micro-batches through one of a rank's virtual stages before the next one, forward, then backward.

It waits as interleaved 1F1B does and holds every micro-batch; weights are gathered once for each virtual stage and pass. Source:
Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism"; PyTorch, `ScheduleLoopedBFS`, which takes micro-batches backward from the
last to the first.
"""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.form import Schedule, several
from shardwise.schedule.one_f_one_b import whole_passes_s
from shardwise.schedule.rounds import one_then_one


def actions(p: int, m: int, v: int, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Every rank runs all of its forward passes before the first backward pass."""
    order = one_then_one(p, m, v, ahead=(m * v,) * p)
    return ActionList(name="looped_bfs", order=order, placement=loop(p, v), num_micro_batches=m)


SCHEDULE = Schedule(
    goes_with=several, actions=actions, fewest=lambda p, v: p, bubble_s=whole_passes_s, bubble="((p - 1) / v + u) · (F + B)",
    in_flight=lambda p, v, m, stage: m, num_at_end=lambda p, v, m: m,
)  # fmt: skip
