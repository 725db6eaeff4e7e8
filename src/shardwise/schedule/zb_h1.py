"""ZB-H1: 1F1B whose weights' gradients wait and fill what would be idle at the end, with 1F1B's memory.

On stage i i micro-batches wait of p in flight: p M_B on the first and (p - i) M_B + i M_W in the words of the source, who
call B what is left of the backward pass without W. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2
and table 1.
"""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.form import Passes, Schedule, alone
from shardwise.schedule.rounds import one_then_one
from shardwise.symbolic import Value, maximum, minimum


def actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Stage i runs p - i forward passes ahead; weights' gradients come i micro-batches behind."""
    order = one_then_one(p, m, ahead=range(p, 0, -1), late=range(p))
    return ActionList(name="zb_h1", order=order, placement=loop(p, v), num_micro_batches=m)


def bubble_s(p: Value, v: Value, m: Value, passes: Passes) -> Value:
    """Seconds that a stage waits: (p - 1) (F + B - 2W), where F, W and the rest of B take alike."""
    return (p - 1) * maximum(passes.forward_s + passes.backward_s - 2.0 * passes.weight_s, 0.0)


SCHEDULE = Schedule(
    goes_with=alone, actions=actions, bubble="(p - 1) · (F + B - 2W)", bubble_s=bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, p), num_waiting=lambda p, v, m, stage: minimum(m, stage),
    fewest=lambda p, v: p, splits_backward=True, aliases=("zb-h1", "zb1p"),
)  # fmt: skip
