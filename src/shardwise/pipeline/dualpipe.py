"""DualPipe and DualPipeV: a forward and a backward pass of different micro-batches run together.

- DualPipe: micro-batches come in from both ends, and each rank holds two stages. Awaiting weight gradients on the ranks i and
  p - 1 - i, and pairs on those in the middle, are as counted in the list. The middle waits for as long as the closed form
  says; ranks at the ends have fewer pairs and wait less. It requires 2p micro-batches and an even number of them, half of
  which come in at either end. Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", table 2; its published implementation.
- DualPipeV: DualPipe cut in half: two virtual stages on each rank, down the ranks and up again, every micro-batch from one
  end. p ranks run the order of DualPipe's first p of 2p, so a rank holds one copy of its stages. Source: DeepSeek-AI 2025,
  DualPipe (dualpipev.py); PyTorch, `ScheduleDualPipeV`.

Both are the same order, written as words, on other stages. A word is a slot: F0 a forward pass of way 0, I1 a backward pass of
way 1 for activations alone, F0B1 a forward and a whole backward pass together, W the oldest weight gradient that waits. A rank
has two ways: its two virtual stages, or its two copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.pipeline.actions import ActionList, bidirectional_placement, slots_from_words, v_placement
from shardwise.pipeline.schedule import PassSeconds, PeakCandidates, Schedule, one_stage_each, two_stages_each
from shardwise.values.elementwise import Value, maximum, minimum, where


def dualpipe_actions(
    p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None
) -> ActionList:
    """Rank i runs stage i of the first half of the micro-batches, and stage p - 1 - i of the second half."""
    found = []
    for rank in range(p):
        near, ways = min(rank, p - 1 - rank), ((rank, 0), (p - 1 - rank, m // 2))
        stages, first = zip(*(ways if 2 * rank < p else ways[::-1]), strict=True)
        found.append(tuple(slots_from_words(dualpipe_words(p // 2, near, m // 2), stages=stages, first=first)))
    return ActionList(name="dualpipe", order=tuple(found), placement=bidirectional_placement(p), num_micro_batches=m)


def dualpipe_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Seconds that the ranks in the middle wait: (p/2 - 1) (F&B + B - 3W), where F, W and the rest of B take alike."""
    return (p / 2.0 - 1.0) * maximum(passes.overlapped_s + passes.backward_s - 3.0 * passes.weight_s, 0.0)


def dualpipe_other_peaks(p: Value, v: Value, m: Value, stage: Value) -> PeakCandidates:
    """Weights' gradients wait where forward passes come to an end: one beside p micro-batches (on the ranks in the middle none),
    all of a rank's beside p/2."""
    near = minimum(stage, p - 1 - stage)
    return (where(near + 1 < p / 2, p, p / 2), 0), (p / 2, near)


DUALPIPE = Schedule(
    supports=one_stage_each, actions=dualpipe_actions, bubble="(p/2 - 1) · (F&B + B - 3W)", bubble_s=dualpipe_bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, p + 1), other_peaks=dualpipe_other_peaks,
    num_awaiting_weight_grads=lambda p, v, m, stage: minimum(stage, p - 1 - stage) + 1, num_overlapped=lambda p, v, m: m - p - 1,
    min_micro_batches=lambda p, v: 2 * p, requires_min=True, micro_batch_multiple=lambda p, v: 2, splits_backward=True,
    placement=bidirectional_placement,
)  # fmt: skip


def dualpipe_v_actions(
    p: int, m: int, v: int = 2, durations: Any = None, memory_limit: float | None = None
) -> ActionList:
    """Rank i runs stages i and 2p - 1 - i."""
    order = tuple(
        tuple(slots_from_words(dualpipe_words(p, rank, m), stages=(rank, 2 * p - 1 - rank), first=(0, 0)))
        for rank in range(p)
    )
    return ActionList(name="dualpipe_v", order=order, placement=v_placement(p), num_micro_batches=m)


def dualpipe_v_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
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


DUALPIPE_V = Schedule(
    supports=two_stages_each, actions=dualpipe_v_actions, placement=v_placement, bubble_s=dualpipe_v_bubble_s,
    bubble="(p - 1) · (F&B + F - 2W) / 2; (F&B + B - 3W) or (F&B + F - B) in place of it where longer",
    in_flight=lambda p, v, m, stage: p + 0.5, num_awaiting_weight_grads=lambda p, v, m, stage: (stage + 1) / 2,
    other_peaks=lambda p, v, m, stage: ((where(stage < p - 1, p, p / 2), 0), (p / 2, stage / 2)),
    num_overlapped=lambda p, v, m: m - p - 0.5,
    min_micro_batches=lambda p, v: 2 * p, requires_min=True, splits_backward=True, aliases=("dualpipev",),
)  # fmt: skip


def dualpipe_words(half: int, near: int, num_rounds: int) -> Iterator[str]:
    """What a rank runs that is `near` ranks from an end, of `half` ranks from an end to the middle, in words.

    Each way has `num_rounds` micro-batches; way 0 comes in nearer. Source: DeepSeek-AI 2025, DualPipe
    (dualpipe.py and dualpipev.py), whose eight steps these lines are.
    """
    to_middle = half - 1 - near
    yield from ["F0"] * 2 * to_middle
    yield from ["F0", "F1"] * (near + 1)
    yield from ["I1", "W", "F1"] * to_middle
    # The rank in the middle would only wait for its first pair.
    yield from ["F0B1", "F1B0"] if to_middle else ["F0", "B1", "F1B0"]
    yield from ["F0B1", "F1B0"] * (num_rounds - 2 * half + near)
    yield from ["B1", "F1B0"] * to_middle
    yield from _last_pairs(near)
    yield from ["W", "I0"] * to_middle
    yield from ["W"] * (near + 1)


def _last_pairs(near: int) -> Iterator[str]:
    """Backward passes of both ways, from the middle of them on without weights' gradients."""
    for number in range(2 * (near + 1)):
        yield f"{'B' if number <= near else 'I'}{1 - number % 2}"
