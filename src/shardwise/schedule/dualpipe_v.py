"""DualPipeV: DualPipe cut in half: two virtual stages on each rank, down the ranks and up again, every micro-batch from one end.

p ranks run the order of DualPipe's first p of 2p, so a rank holds one copy of its stages. Source: DeepSeek-AI 2025, DualPipe
(dualpipev.py); PyTorch, `ScheduleDualPipeV`.
"""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, v_shape
from shardwise.schedule.dual_words import dual_words, numbered
from shardwise.schedule.form import Passes, Schedule, two
from shardwise.symbolic import Value, maximum, where


def actions(p: int, m: int, v: int = 2, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Rank i runs stages i and 2p - 1 - i."""
    order = tuple(
        tuple(numbered(dual_words(p, rank, m), stages=(rank, 2 * p - 1 - rank), first=(0, 0))) for rank in range(p)
    )
    return ActionList(name="dualpipe_v", order=order, placement=v_shape(p), num_micro_batches=m)


def bubble_s(p: Value, v: Value, m: Value, passes: Passes) -> Value:
    """Seconds that the last rank waits, of passes of a virtual stage: (p - 1) (F&B + B - 3W), the source's, where F, W and the
    rest of B take alike, and the longest way through the list where they do not.

    The step is the played one to rounding for I = B - W of 0.8 to 3 F and W of 0.2 to 1.2 F, and at most 1.6% short for I of 0.8
    to 4 F and any W up to 2 F (tests/unit/schedule/test_timelines.py).
    """
    forward, backward, weight = passes.forward_s / v, passes.backward_s / v, passes.weight_s / v
    together, others = passes.overlapped_s / v, p - 1
    return maximum(
        others * (together + forward - 2.0 * weight),
        others * (together + backward - 3.0 * weight) - forward,
        others * (together + forward - backward),
        0.0,
    )


SCHEDULE = Schedule(
    goes_with=two, actions=actions, placement=v_shape, bubble_s=bubble_s,
    bubble="(p - 1) · (F&B + F - 2W) / 2; (F&B + B - 3W) or (F&B + F - B) in place of it where longer",
    in_flight=lambda p, v, m, stage: p + 0.5, num_waiting=lambda p, v, m, stage: (stage + 1) / 2,
    while_waiting=lambda p, v, m, stage: ((where(stage < p - 1, p, p / 2), 0), (p / 2, stage / 2)),
    num_overlapped=lambda p, v, m: m - p - 0.5,
    fewest=lambda p, v: 2 * p, needs_fewest=True, splits_backward=True, aliases=("dualpipev",),
)  # fmt: skip
