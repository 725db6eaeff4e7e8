"""DualPipe and DualPipeV: a forward and a backward pass of different micro-batches run together.

- DualPipe: micro-batches enter at both ends, and each rank holds two stages. Pending weight gradients on the ranks i and
  p - 1 - i, and pairs on those in the middle, are as counted in the list. The ranks in the middle wait as long as the closed form
  says; ranks at the ends have fewer pairs and wait less. It requires 2p micro-batches and an even number of them, half of
  which enter at either end. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", table 2; its published implementation.
- DualPipeV: DualPipe cut in half: two virtual stages on each rank, down the ranks and up again, every micro-batch from one
  end. p ranks run the order of DualPipe's first p of 2p, so a rank holds one copy of its stages. Source: DeepSeek-AI 2025,
  DualPipe (dualpipev.py); PyTorch, `ScheduleDualPipeV`.

Both are the same order, written as words, on other stages. A word is a slot: F0 a forward pass of way 0, I1 a backward
pass of way 1 for activations alone, F0B1 a forward and a whole backward pass together, W the oldest pending weight
gradient. The two ways of a rank are its two virtual stages, or its two copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.pipeline.actions import ActionList, bidirectional_placement, slots_from_words, v_placement
from shardwise.pipeline.schedule_definition import (
    PassSeconds,
    PeakCandidates,
    Schedule,
    single_stage_each,
    two_stages_each,
)
from shardwise.values import Value, maximum, minimum, where


def dualpipe_actions(
    p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None
) -> ActionList:
    """Return the list in which rank i runs stage i of the first half of the micro-batches, and stage p - 1 - i of the second."""
    order = []
    for rank in range(p):
        distance, ways = min(rank, p - 1 - rank), ((rank, 0), (p - 1 - rank, m // 2))
        stages, first = zip(*(ways if 2 * rank < p else ways[::-1]), strict=True)
        order.append(tuple(slots_from_words(dualpipe_words(p // 2, distance, m // 2), stages=stages, first=first)))
    return ActionList(name="dualpipe", order=tuple(order), placement=bidirectional_placement(p), num_micro_batches=m)


def dualpipe_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Return the seconds that the middle ranks wait: (p/2 - 1) (F&B + B - 3W), where F, W and the rest of B are equal."""
    return (p / 2.0 - 1.0) * maximum(passes.overlapped_s + passes.backward_s - 3.0 * passes.weight_s, 0.0)


def dualpipe_other_peaks(p: Value, v: Value, m: Value, stage: Value) -> PeakCandidates:
    """Return the peaks while weight gradients are pending, which is when forward passes end.

    One is pending beside p micro-batches (none on the middle ranks), all of a rank's beside p/2.
    """
    distance = minimum(stage, p - 1 - stage)
    return (where(distance + 1 < p / 2, p, p / 2), 0), (p / 2, distance)


DUALPIPE = Schedule(
    supports=single_stage_each, actions=dualpipe_actions, bubble="(p/2 - 1) · (F&B + B - 3W)", bubble_s=dualpipe_bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, p + 1), other_peaks=dualpipe_other_peaks,
    num_awaiting_weight_grads=lambda p, v, m, stage: minimum(stage, p - 1 - stage) + 1, num_overlapped=lambda p, v, m: m - p - 1,
    min_micro_batches=lambda p, v: 2 * p, requires_min=True, micro_batch_multiple=lambda p, v: 2, splits_backward=True,
    placement=bidirectional_placement,
)  # fmt: skip


def dualpipe_v_actions(
    p: int, m: int, v: int = 2, durations: Any = None, memory_limit: float | None = None
) -> ActionList:
    """Return the list in which rank i runs stages i and 2p - 1 - i."""
    order = tuple(
        tuple(slots_from_words(dualpipe_words(p, rank, m), stages=(rank, 2 * p - 1 - rank), first=(0, 0)))
        for rank in range(p)
    )
    return ActionList(name="dualpipe_v", order=order, placement=v_placement(p), num_micro_batches=m)


def dualpipe_v_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Return the seconds that the last rank waits: (p - 1) (F&B + B - 3W) of a virtual stage's passes, as in the source.

    That is where F, W and the rest of B are equal; elsewhere it is the longest path through the list. The step equals
    the played one to rounding for I = B - W of 0.8 to 3 F and W of 0.2 to 1.2 F, and is at most 1.6% short for I of 0.8
    to 4 F and any W up to 2 F (tests/unit/schedule/test_timelines.py).
    """
    forward, backward, weight = passes.forward_s / v, passes.backward_s / v, passes.weight_s / v
    overlapped, other_ranks = passes.overlapped_s / v, p - 1
    return maximum(
        other_ranks * (overlapped + forward - 2.0 * weight),
        other_ranks * (overlapped + backward - 3.0 * weight) - forward,
        other_ranks * (overlapped + forward - backward),
        0.0,
    )


DUALPIPE_V = Schedule(
    supports=two_stages_each, actions=dualpipe_v_actions, placement=v_placement, bubble_s=dualpipe_v_bubble_s,
    bubble="(p - 1) · (F&B + F - 2W) / 2; (F&B + B - 3W) or (F&B + F - B) in place of it where longer",
    in_flight=lambda p, v, m, stage: p + 0.5, num_awaiting_weight_grads=lambda p, v, m, stage: (stage + 1) / 2,
    other_peaks=lambda p, v, m, stage: ((where(stage < p - 1, p, p / 2), 0), (p / 2, stage / 2)),
    num_overlapped=lambda p, v, m: m - p - 0.5,
    min_micro_batches=lambda p, v: 2 * p, requires_min=True, splits_backward=True, aliases=("dualpipev",),
)  # fmt: skip


def dualpipe_words(half: int, distance: int, num_rounds: int) -> Iterator[str]:
    """Yield the words of a rank `distance` ranks from an end, with `half` ranks from an end to the middle.

    Each way has `num_rounds` micro-batches; those of way 0 enter at the nearer end. Source: DeepSeek-AI 2025, DualPipe
    (dualpipe.py and dualpipev.py), whose eight steps these lines are.
    """
    to_middle = half - 1 - distance
    yield from ["F0"] * 2 * to_middle
    yield from ["F0", "F1"] * (distance + 1)
    yield from ["I1", "W", "F1"] * to_middle
    # The rank in the middle would only wait for its first pair.
    yield from ["F0B1", "F1B0"] if to_middle else ["F0", "B1", "F1B0"]
    yield from ["F0B1", "F1B0"] * (num_rounds - 2 * half + distance)
    yield from ["B1", "F1B0"] * to_middle
    yield from _last_pairs(distance)
    yield from ["W", "I0"] * to_middle
    yield from ["W"] * (distance + 1)


def _last_pairs(distance: int) -> Iterator[str]:
    """Yield backward passes of both ways; those of the second half leave their weight gradients for later."""
    for number in range(2 * (distance + 1)):
        yield f"{'B' if number <= distance else 'I'}{1 - number % 2}"
