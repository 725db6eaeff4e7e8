"""Interleaved 1F1B with split backward passes: ZB-H1's order of weights' gradients over virtual stages.

Half as many passes ahead as interleaved 1F1B, for gradients of activations come back in half the time. Source: PyTorch,
`ScheduleInterleavedZeroBubble`; Qi et al. 2023.
"""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.form import Passes, Schedule, several
from shardwise.schedule.interleaved import check_round
from shardwise.schedule.rounds import one_then_one
from shardwise.symbolic import Value, maximum, minimum


def actions(
    p: int, m: int, v: int, durations: Any = None, memory_limit: float | None = None, *, round_size: int | None = None
) -> ActionList:  # fmt: skip
    """Rank i runs (v - 1) `round_size` + p - 1 - i virtual stages ahead; weights' gradients come i passes behind."""
    size = p if round_size is None else round_size
    check_round(p, m, size)
    ahead = [(v - 1) * size + p - i for i in range(p)]
    order = one_then_one(p, m, v, ahead=ahead, late=range(p), round_size=size)
    return ActionList(name="interleaved_zb", order=order, placement=loop(p, v), num_micro_batches=m)


def bubble_s(p: Value, v: Value, m: Value, passes: Passes) -> Value:
    """Seconds that a rank waits while the step lasts, of p - 1 passes of a virtual stage: F until the last rank begins, or I at
    the end, or both less the W that fills them. The step is the played one for any F, I and W.
    """
    given = passes.backward_s - passes.weight_s
    return maximum(passes.forward_s, given, passes.forward_s + given - passes.weight_s) * ((p - 1) / v)


SCHEDULE = Schedule(
    goes_with=several, actions=actions, takes_round_size=True, bubble_s=bubble_s,
    bubble="(p - 1) / v · max(F, I, F + I - W) + u · (F + B), with I = B - W", in_flight=lambda p, v, m, stage: minimum(m, p),
    num_waiting=lambda p, v, m, stage: stage / v, multiple=lambda p, v: p, splits_backward=True,
    aliases=("interleaved_zero_bubble",),
)  # fmt: skip
