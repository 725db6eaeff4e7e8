"""Zero-bubble schedules: backward passes are split, and weight gradients (W) fill what would be idle.

- ZB-H1: 1F1B whose weight gradients wait, with 1F1B's memory. On stage i, i micro-batches of the p in flight await W: p M_B on
  the first stage and (p - i) M_B + i M_W in the words of the source, which calls B what is left of the backward pass without
  W.
- ZB-H2: twice as many forward passes ahead as 1F1B, weight gradients twice as late as ZB-H1, no bubble. A stage holds (2p - 2i
  - 1) M_B + 2i M_W. Its optimizer step does not wait for all stages (section 4): from a stage's first pass to its last nothing
  is idle, while the step as a whole is still p - 1 forward passes longer than its work.
- ZB-V: two virtual stages on each rank, down the ranks and up again. No bubble from a rank's first pass to its last where F, I
  and W take alike, with 1F1B's memory on every rank; a step, whose optimizer waits for all ranks, is (p - 1) I longer than its
  work. Live memory and waiting are as counted in the list.
- Interleaved zero bubble: interleaved 1F1B with ZB-H1's order of weight gradients, and half as many passes ahead, because
  gradients of activations come back in half the time.

Sources: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", sections 2 and 6 and table 1; Qi et al. 2024, "Pipeline
Parallelism with Controllable Memory"; PyTorch, `ScheduleZBVZeroBubble` and `ScheduleInterleavedZeroBubble`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.pipeline.actions import ActionList, Slot, alternate_passes, loop_placement, slots_from_words, v_placement
from shardwise.pipeline.gpipe_1f1b import check_round
from shardwise.pipeline.schedule import (
    PassSeconds,
    PeakCandidates,
    Schedule,
    many_stages_each,
    one_stage_each,
    two_stages_each,
)
from shardwise.values.elementwise import Value, maximum, minimum, where


def zb_h1_actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Stage i runs p - i forward passes ahead; weights' gradients come i micro-batches behind."""
    order = alternate_passes(p, m, ahead=range(p, 0, -1), late=range(p))
    return ActionList(name="zb_h1", order=order, placement=loop_placement(p, v), num_micro_batches=m)


def zb_h1_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Seconds that a stage waits: (p - 1) (F + B - 2W), where F, W and the rest of B take alike."""
    return (p - 1) * maximum(passes.forward_s + passes.backward_s - 2.0 * passes.weight_s, 0.0)


ZB_H1 = Schedule(
    supports=one_stage_each, actions=zb_h1_actions, bubble="(p - 1) · (F + B - 2W)", bubble_s=zb_h1_bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, p), num_awaiting_weight_grads=lambda p, v, m, stage: minimum(m, stage),
    min_micro_batches=lambda p, v: p, splits_backward=True, aliases=("zb-h1", "zb1p"),
)  # fmt: skip


def zb_h2_actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Stage i runs 2 (p - i) - 1 forward passes ahead; weights' gradients come 2i micro-batches behind."""
    order = alternate_passes(p, m, ahead=range(2 * p - 1, 0, -2), late=range(0, 2 * p, 2))
    return ActionList(name="zb_h2", order=order, placement=loop_placement(p, v), num_micro_batches=m)


def zb_h2_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Seconds that a stage waits: (p - 1) (F + B - 3W), where F, W and the rest of B take alike."""
    return (p - 1) * maximum(passes.forward_s + passes.backward_s - 3.0 * passes.weight_s, 0.0)


ZB_H2 = Schedule(
    supports=one_stage_each, actions=zb_h2_actions, bubble="(p - 1) · (F + B - 3W)", bubble_s=zb_h2_bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, 2 * p - 1),
    num_awaiting_weight_grads=lambda p, v, m, stage: minimum(m, 2 * stage),
    min_micro_batches=lambda p, v: 2 * p - 1, splits_backward=True, aliases=("zb-h2", "zb2p"),
)  # fmt: skip


def zb_v_actions(p: int, m: int, v: int = 2, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """The order of 2p - 1 micro-batches at least; of fewer its first ones."""
    full = max(m, 2 * p - 1)
    order = tuple(tuple(_zb_v_slots(p, m, full, rank)) for rank in range(p))
    return ActionList(name="zb_v", order=order, placement=v_placement(p), num_micro_batches=m)


def _zb_v_slots(p: int, m: int, full: int, rank: int) -> Iterator[Slot]:
    words = _zb_v_words(p, full, rank)
    for slot in slots_from_words(words, stages=(rank, 2 * p - 1 - rank), first=(0, 0), apart=True):
        if slot[0].micro_batch < m:
            yield slot


def _zb_v_words(p: int, m: int, rank: int) -> Iterator[str]:
    """What a rank runs, 0 being its stage on the way down, 1 that on the way up."""
    left = p - rank
    yield from ["F0"] * (2 * left - 1)
    yield from ["F1", "F0"] * rank
    yield from ["F1", "I1", "W1"] * left
    ahead = m - (2 * left - 1) - rank  # forward passes on the way down that are left
    yield from ["F0", "I0", "W0", "F1", "I1", "W1"] * ahead
    yield from ["I0", "W0", "F1", "I1", "W1"] * (m - rank - left - ahead)
    yield from ["I0", "I1"] * rank
    yield from ["I0", "W0"] * left
    yield from ["W1"] * rank
    yield from ["W0"] * rank


def zb_v_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Seconds that a rank waits while the step lasts: the longest of the ways through the list, of passes of a virtual stage.

    It is (p - 1) I where F, I and W take alike, about 2 (p - 1) (I - W) where W is short, about (p - 1) (2F - I) or (p - 1) W
    where those are long; with fewer than 2p - 1 micro-batches, each that is missing leaves a gap that no W fills.

    The step is the played one to rounding for I of 0.8 to 3 F and W of 0.2 to 1.2 F, and for I of 0.8 to 4 F and any W up to 2 F
    at most 1.6% short, of fewer than 2p - 1 micro-batches 3.5% (tests/unit/schedule/test_timelines.py).
    """
    forward, weight = passes.forward_s / v, passes.weight_s / v
    given, others = passes.backward_s / v - weight, p - 1
    missing = maximum(2 * p - 1 - m, 0)
    few = maximum(missing * (forward + given), 2 * maximum(p - m, 0) * forward + 2 * others * given)
    return where(m > p, _zb_v_longest_path_s(others, minimum(missing, others), forward, given, weight), few)


def _zb_v_longest_path_s(others: Value, missing: Value, forward: Value, given: Value, weight: Value) -> Value:
    """That of more micro-batches than ranks: seconds beyond the passes of a rank of each way."""
    left = others - missing
    return maximum(
        missing * (forward + given),
        2 * missing * given,
        (others + missing) * given - missing * weight,
        2 * others * given - 2 * left * weight,
        (missing + 1) * maximum(forward, given) + (left - 1) * weight,
        (others + left - 1) * forward - (left - 1) * given,
        (others + left - 1) * forward + (missing - left + 1) * given - missing * weight,
        (others + left) * forward + (missing - left) * given - left * weight,
        (others + left - 1) * forward + (missing + 1) * given - 2 * left * weight,
    )


def zb_v_other_peaks(p: Value, v: Value, m: Value, stage: Value) -> PeakCandidates:
    """None while all are in flight; those of a rank's second virtual stage, when the first one's have ended. Of few micro-batches
    as many, while all are in flight."""
    full = minimum(minimum(m, p), (m + 1 + stage) / 2)
    return (full, 0), (where(m >= 2 * p - 1, (p + stage) / 2, full), minimum(maximum(m - p, 0), stage))


ZB_V = Schedule(
    supports=two_stages_each, actions=zb_v_actions, placement=v_placement, bubble_s=zb_v_bubble_s,
    bubble="(p - 1) · I / 2 where F = I = W, with I = B - W; the longest way through the list where not",
    in_flight=lambda p, v, m, stage: minimum(minimum(m, p), (m + 1 + stage) / 2),
    num_awaiting_weight_grads=lambda p, v, m, stage: minimum(maximum(m - p, 0), stage), other_peaks=zb_v_other_peaks,
    splits_backward=True, aliases=("zbv", "zbv_zero_bubble", "zb-v"),
)  # fmt: skip


def interleaved_zb_actions(
    p: int, m: int, v: int, durations: Any = None, memory_limit: float | None = None, *, round_size: int | None = None
) -> ActionList:  # fmt: skip
    """Rank i runs (v - 1) `round_size` + p - 1 - i virtual stages ahead; weights' gradients come i passes behind."""
    size = p if round_size is None else round_size
    check_round(p, m, size)
    ahead = [(v - 1) * size + p - i for i in range(p)]
    order = alternate_passes(p, m, v, ahead=ahead, late=range(p), round_size=size)
    return ActionList(name="interleaved_zb", order=order, placement=loop_placement(p, v), num_micro_batches=m)


def interleaved_zb_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Seconds that a rank waits while the step lasts, of p - 1 passes of a virtual stage: F until the last rank begins, or I at
    the end, or both less the W that fills them. The step is the played one for any F, I and W.
    """
    given = passes.backward_s - passes.weight_s
    return maximum(passes.forward_s, given, passes.forward_s + given - passes.weight_s) * ((p - 1) / v)


INTERLEAVED_ZB = Schedule(
    supports=many_stages_each, actions=interleaved_zb_actions, takes_round_size=True, bubble_s=interleaved_zb_bubble_s,
    bubble="(p - 1) / v · max(F, I, F + I - W) + u · (F + B), with I = B - W", in_flight=lambda p, v, m, stage: minimum(m, p),
    num_awaiting_weight_grads=lambda p, v, m, stage: stage / v, micro_batch_multiple=lambda p, v: p, splits_backward=True,
    aliases=("interleaved_zero_bubble",),
)  # fmt: skip
