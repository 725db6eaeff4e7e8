"""ZB-H2: twice as many forward passes ahead as 1F1B, weights' gradients twice as late as ZB-H1, no bubble.

A stage holds (2p - 2i - 1) M_B + 2i M_W. Its optimizer step does not wait for all stages (the source, section 4): from a
stage's first pass to its last nothing is idle, while the step as a whole is still p - 1 forward passes longer than its
work. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2 and table 1.
"""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.form import Passes, Schedule, alone
from shardwise.schedule.rounds import one_then_one
from shardwise.symbolic import Value, maximum, minimum


def actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Stage i runs 2 (p - i) - 1 forward passes ahead; weights' gradients come 2i micro-batches behind."""
    order = one_then_one(p, m, ahead=range(2 * p - 1, 0, -2), late=range(0, 2 * p, 2))
    return ActionList(name="zb_h2", order=order, placement=loop(p, v), num_micro_batches=m)


def bubble_s(p: Value, v: Value, m: Value, passes: Passes) -> Value:
    """Seconds that a stage waits: (p - 1) (F + B - 3W), where F, W and the rest of B take alike."""
    return (p - 1) * maximum(passes.forward_s + passes.backward_s - 3.0 * passes.weight_s, 0.0)


SCHEDULE = Schedule(
    goes_with=alone, actions=actions, bubble="(p - 1) · (F + B - 3W)", bubble_s=bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, 2 * p - 1), num_waiting=lambda p, v, m, stage: minimum(m, 2 * stage),
    fewest=lambda p, v: 2 * p - 1, splits_backward=True, aliases=("zb-h2", "zb2p"),
)  # fmt: skip
