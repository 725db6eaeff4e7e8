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
from shardwise.pipeline.schedule_definition import (
    PassSeconds,
    PeakCandidates,
    Schedule,
    check_round,
    many_stages_each,
    single_stage_each,
    two_stages_each,
)
from shardwise.values import Value, maximum, minimum, where


def zb_h1_actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Return the list in which stage i runs p - i forward passes ahead; weight gradients come i micro-batches late."""
    order = alternate_passes(p, m, ahead=range(p, 0, -1), late=range(p))
    return ActionList(name="zb_h1", order=order, placement=loop_placement(p, v), num_micro_batches=m)


def zb_h1_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Return the seconds that a stage waits: (p - 1) (F + B - 2W), where F, W and the rest of B are equal."""
    return (p - 1) * maximum(passes.forward_s + passes.backward_s - 2.0 * passes.weight_s, 0.0)


ZB_H1 = Schedule(
    supports=single_stage_each, actions=zb_h1_actions, bubble="(p - 1) · (F + B - 2W)", bubble_s=zb_h1_bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, p), num_awaiting_weight_grads=lambda p, v, m, stage: minimum(m, stage),
    min_micro_batches=lambda p, v: p, splits_backward=True, aliases=("zb-h1", "zb1p"),
)  # fmt: skip


def zb_h2_actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Return the list in which stage i runs 2 (p - i) - 1 forward passes ahead; weight gradients come 2i micro-batches late."""
    order = alternate_passes(p, m, ahead=range(2 * p - 1, 0, -2), late=range(0, 2 * p, 2))
    return ActionList(name="zb_h2", order=order, placement=loop_placement(p, v), num_micro_batches=m)


def zb_h2_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Return the seconds that a stage waits: (p - 1) (F + B - 3W), where F, W and the rest of B are equal."""
    return (p - 1) * maximum(passes.forward_s + passes.backward_s - 3.0 * passes.weight_s, 0.0)


ZB_H2 = Schedule(
    supports=single_stage_each, actions=zb_h2_actions, bubble="(p - 1) · (F + B - 3W)", bubble_s=zb_h2_bubble_s,
    in_flight=lambda p, v, m, stage: minimum(m, 2 * p - 1),
    num_awaiting_weight_grads=lambda p, v, m, stage: minimum(m, 2 * stage),
    min_micro_batches=lambda p, v: 2 * p - 1, splits_backward=True, aliases=("zb-h2", "zb2p"),
)  # fmt: skip


def zb_v_actions(p: int, m: int, v: int = 2, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Return the order for at least 2p - 1 micro-batches; with fewer, what is left of it when the others are dropped."""
    full = max(m, 2 * p - 1)
    order = tuple(tuple(_zb_v_slots(p, m, full, rank)) for rank in range(p))
    return ActionList(name="zb_v", order=order, placement=v_placement(p), num_micro_batches=m)


def _zb_v_slots(p: int, m: int, full: int, rank: int) -> Iterator[Slot]:
    slot_words = _zb_v_words(p, full, rank)
    for slot in slots_from_words(slot_words, stages=(rank, 2 * p - 1 - rank), first=(0, 0), apart=True):
        if slot[0].micro_batch < m:
            yield slot


def _zb_v_words(p: int, m: int, rank: int) -> Iterator[str]:
    """Yield the words of a rank: 0 is its stage on the way down, 1 that on the way up."""
    num_after = p - rank
    yield from ["F0"] * (2 * num_after - 1)
    yield from ["F1", "F0"] * rank
    yield from ["F1", "I1", "W1"] * num_after
    ahead = m - (2 * num_after - 1) - rank  # forward passes on the way down that are left
    yield from ["F0", "I0", "W0", "F1", "I1", "W1"] * ahead
    yield from ["I0", "W0", "F1", "I1", "W1"] * (m - rank - num_after - ahead)
    yield from ["I0", "I1"] * rank
    yield from ["I0", "W0"] * num_after
    yield from ["W1"] * rank
    yield from ["W0"] * rank


def zb_v_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Return the seconds that a rank waits during the step: the longest path through the list, of a virtual stage's passes.

    It is (p - 1) I where F, I and W take alike, about 2 (p - 1) (I - W) where W is short, about (p - 1) (2F - I) or (p - 1) W
    where those are long; with fewer than 2p - 1 micro-batches, each that is missing leaves a gap that no W fills.

    The step is the played one to rounding for I of 0.8 to 3 F and W of 0.2 to 1.2 F, and for I of 0.8 to 4 F and any W up to 2 F
    at most 1.6% short, of fewer than 2p - 1 micro-batches 3.5% (tests/unit/schedule/test_timelines.py).
    """
    forward_s, weight_s = passes.forward_s / v, passes.weight_s / v
    input_s, other_ranks = passes.backward_s / v - weight_s, p - 1
    missing = maximum(2 * p - 1 - m, 0)
    few = maximum(missing * (forward_s + input_s), 2 * maximum(p - m, 0) * forward_s + 2 * other_ranks * input_s)
    longest_s = _zb_v_longest_path_s(other_ranks, minimum(missing, other_ranks), forward_s, input_s, weight_s)
    return where(m > p, longest_s, few)


def _zb_v_longest_path_s(
    other_ranks: Value, missing: Value, forward_s: Value, input_s: Value, weight_s: Value
) -> Value:
    """Return the longest path with more micro-batches than ranks: seconds beyond a rank's own passes."""
    # Each line is a path through the list from one rank's passes to another's; the maximum was compared with played lists
    # over the range that `zb_v_bubble_s` states.
    present = other_ranks - missing
    return maximum(
        missing * (forward_s + input_s),
        2 * missing * input_s,
        (other_ranks + missing) * input_s - missing * weight_s,
        2 * other_ranks * input_s - 2 * present * weight_s,
        (missing + 1) * maximum(forward_s, input_s) + (present - 1) * weight_s,
        (other_ranks + present - 1) * forward_s - (present - 1) * input_s,
        (other_ranks + present - 1) * forward_s + (missing - present + 1) * input_s - missing * weight_s,
        (other_ranks + present) * forward_s + (missing - present) * input_s - present * weight_s,
        (other_ranks + present - 1) * forward_s + (missing + 1) * input_s - 2 * present * weight_s,
    )


def zb_v_other_peaks(p: Value, v: Value, m: Value, stage: Value) -> PeakCandidates:
    """Return the peak while all are in flight, and the one when passes of a rank's first virtual stage have ended.

    With few micro-batches the second is like the first, but weight gradients are pending.
    """
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
    """Return the list in which rank i runs (v - 1) `round_size` + p - i virtual stages ahead; weight gradients come i late."""
    size = p if round_size is None else round_size
    check_round(p, m, size)
    ahead = [(v - 1) * size + p - i for i in range(p)]
    order = alternate_passes(p, m, v, ahead=ahead, late=range(p), round_size=size)
    return ActionList(name="interleaved_zb", order=order, placement=loop_placement(p, v), num_micro_batches=m)


def interleaved_zb_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Return the seconds that a rank waits during the step, in p - 1 passes of a virtual stage.

    They are F until the last rank begins, or I at the end, or both less the W that fills them. The step is the played
    one for any F, I and W.
    """
    input_s = passes.backward_s - passes.weight_s
    return maximum(passes.forward_s, input_s, passes.forward_s + input_s - passes.weight_s) * ((p - 1) / v)


INTERLEAVED_ZB = Schedule(
    supports=many_stages_each, actions=interleaved_zb_actions, takes_round_size=True, bubble_s=interleaved_zb_bubble_s,
    bubble="(p - 1) / v · max(F, I, F + I - W) + u · (F + B), with I = B - W", in_flight=lambda p, v, m, stage: minimum(m, p),
    num_awaiting_weight_grads=lambda p, v, m, stage: stage / v, micro_batch_multiple=lambda p, v: p, splits_backward=True,
    aliases=("interleaved_zero_bubble",),
)  # fmt: skip
