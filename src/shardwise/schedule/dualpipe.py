"""DualPipe: micro-batches come in from both ends, each rank holds two stages, and a forward and a backward pass run together.

Waiting on the ranks i and p - 1 - i, and pairs on those in the middle, are as counted in the list. The middle waits for
as long as the closed form says; ranks at the ends have fewer pairs and wait less. It requires 2p micro-batches and an
even number of them, half of which come in at either end. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", table
2; its published implementation.
"""

from __future__ import annotations

from typing import Any

from shardwise.schedule.action import ActionList, from_both_ends
from shardwise.schedule.dual_words import dual_words, numbered
from shardwise.schedule.form import Moments, Passes, Schedule, alone
from shardwise.symbolic import Value, maximum, minimum, where


def actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Rank i runs stage i of the first half of the micro-batches, and stage p - 1 - i of the second half."""
    found = []
    for rank in range(p):
        near, ways = min(rank, p - 1 - rank), ((rank, 0), (p - 1 - rank, m // 2))
        stages, first = zip(*(ways if 2 * rank < p else ways[::-1]), strict=True)
        found.append(tuple(numbered(dual_words(p // 2, near, m // 2), stages=stages, first=first)))
    return ActionList(name="dualpipe", order=tuple(found), placement=from_both_ends(p), num_micro_batches=m)


def bubble_s(p: Value, v: Value, m: Value, passes: Passes) -> Value:
    """Seconds that the ranks in the middle wait: (p/2 - 1) (F&B + B - 3W), where F, W and the rest of B take alike."""
    return (p / 2.0 - 1.0) * maximum(passes.overlapped_s + passes.backward_s - 3.0 * passes.weight_s, 0.0)


def while_waiting(p: Value, v: Value, m: Value, stage: Value) -> Moments:
    """Weights' gradients wait where forward passes come to an end: one beside p micro-batches (on the ranks in the middle none),
    all of a rank's beside p/2."""
    near = minimum(stage, p - 1 - stage)
    return (where(near + 1 < p / 2, p, p / 2), 0), (p / 2, near)


SCHEDULE = Schedule(
    goes_with=alone, actions=actions, bubble="(p/2 - 1) · (F&B + B - 3W)", bubble_s=bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, p + 1), while_waiting=while_waiting,
    num_waiting=lambda p, v, m, stage: minimum(stage, p - 1 - stage) + 1, num_overlapped=lambda p, v, m: m - p - 1,
    fewest=lambda p, v: 2 * p, needs_fewest=True, multiple=lambda p, v: 2, splits_backward=True,
    placement=from_both_ends,
)  # fmt: skip
