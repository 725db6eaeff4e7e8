"""ZB-V: two virtual stages on each rank, down the ranks and up again, with split backward passes.

No bubble from a rank's first pass to its last where F, I and W take alike, with 1F1B's memory on every rank; a step, whose
optimizer waits for all ranks, is (p - 1) I longer than its work. Live memory and waiting are as counted in the list. Source:
Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"; Qi et al. 2023, section 6; PyTorch, `ScheduleZBVZeroBubble`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.schedule.action import ActionList, Slot, v_shape
from shardwise.schedule.dual_words import numbered
from shardwise.schedule.form import Moments, Passes, Schedule, two
from shardwise.symbolic import Value, maximum, minimum, where


def actions(p: int, m: int, v: int = 2, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """The order of 2p - 1 micro-batches at least; of fewer its first ones."""
    full = max(m, 2 * p - 1)
    order = tuple(tuple(_rank(p, m, full, rank)) for rank in range(p))
    return ActionList(name="zb_v", order=order, placement=v_shape(p), num_micro_batches=m)


def _rank(p: int, m: int, full: int, rank: int) -> Iterator[Slot]:
    words = _words(p, full, rank)
    for slot in numbered(words, stages=(rank, 2 * p - 1 - rank), first=(0, 0), apart=True):
        if slot[0].micro_batch < m:
            yield slot


def _words(p: int, m: int, rank: int) -> Iterator[str]:
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


def bubble_s(p: Value, v: Value, m: Value, passes: Passes) -> Value:
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
    return where(m > p, _from_p_on(others, minimum(missing, others), forward, given, weight), few)


def _from_p_on(others: Value, missing: Value, forward: Value, given: Value, weight: Value) -> Value:
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


def while_waiting(p: Value, v: Value, m: Value, stage: Value) -> Moments:
    """None while all are in flight; those of a rank's second virtual stage, when the first one's have ended. Of few micro-batches
    as many, while all are in flight."""
    full = minimum(minimum(m, p), (m + 1 + stage) / 2)
    return (full, 0), (where(m >= 2 * p - 1, (p + stage) / 2, full), minimum(maximum(m - p, 0), stage))


SCHEDULE = Schedule(
    goes_with=two, actions=actions, placement=v_shape, bubble_s=bubble_s,
    bubble="(p - 1) · I / 2 where F = I = W, with I = B - W; the longest way through the list where not",
    in_flight=lambda p, v, m, stage: minimum(minimum(m, p), (m + 1 + stage) / 2),
    num_waiting=lambda p, v, m, stage: minimum(maximum(m - p, 0), stage), while_waiting=while_waiting, splits_backward=True,
    aliases=("zbv", "zbv_zero_bubble", "zb-v"),
)  # fmt: skip
