"""DualPipeV: DualPipe cut in half: two virtual stages on each rank, down the ranks and up again, every micro-batch from one end.

p ranks run the order of DualPipe's first p of 2p, so a rank holds one copy of its stages. Source: DeepSeek-AI 2025, DualPipe
(dualpipev.py); PyTorch, `ScheduleDualPipeV`.
"""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, v_shape
from shardwise.schedule.dual_words import dual_words, numbered
from shardwise.schedule.form import Schedule, two


def actions(p: int, m: int, v: int = 2, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Rank i runs stages i and 2p - 1 - i."""
    order = tuple(
        tuple(numbered(dual_words(p, rank, m), stages=(rank, 2 * p - 1 - rank), first=(0, 0))) for rank in range(p)
    )
    return ActionList(name="dualpipe_v", order=order, placement=v_shape(p), num_micro_batches=m)


SCHEDULE = Schedule(
    goes_with=two, actions=actions, fewest=lambda p, v: 2 * p, needs_fewest=True, splits_backward=True,
    aliases=("dualpipev",),
)  # fmt: skip
