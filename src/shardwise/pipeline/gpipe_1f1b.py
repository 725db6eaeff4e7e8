"""Schedules with whole backward passes: no pipeline, naive, GPipe, 1F1B, interleaved 1F1B and looped breadth-first.

- Naive: one micro-batch at a time through all stages; one stage works, the others wait. Source: S1.
- GPipe, or all forward, all backward (AFAB): all forward passes, then all backward passes. Sources: Huang et al. 2018; S1.
- 1F1B: a forward pass for each stage that follows, then one forward and one backward pass in turn. Sources: Narayanan et al.
  2019, PipeDream, and 2021, section 2.2.1 ("PipeDream-Flush"); S1, "One forward, one backward".
- Interleaved 1F1B: each rank has v virtual stages, p apart, which take turns of `round_size` micro-batches. `round_size` = p
  is depth-first, as in Megatron-LM: micro-batches leave the model as early as they can. As many as there are micro-batches is
  breadth-first. In between is Llama 3.1's: more in a row hide more of the messages, and hold more activations. Sources:
  Narayanan et al. 2021, section 2.2.2; Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2; Megatron-LM,
  `--microbatch-group-size-per-virtual-pipeline-stage`, whose rule for a shorter last round this is; PyTorch,
  `microbatches_per_round`.
- Looped breadth-first: all micro-batches through one virtual stage of a rank before the next one, forward, then backward. Its
  bubble is that of interleaved 1F1B and it holds every micro-batch; weights are gathered once for each virtual stage and pass.
  Sources: Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism"; PyTorch, `ScheduleLoopedBFS`, which takes micro-batches
  backward from the last to the first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.pipeline.actions import ActionList, alternate_passes, loop_placement
from shardwise.pipeline.schedule_definition import (
    PassSeconds,
    Schedule,
    in_flight_1f1b,
    in_flight_afab,
    in_flight_interleaved,
    many_stages_each,
    single_stage_each,
)
from shardwise.values import InputError, Value, argument_label, minimum, where


def no_pipeline_actions(
    p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None
) -> ActionList:
    """Return the list of a single rank, through all of its virtual stages."""
    order = alternate_passes(p, m, v, ahead=(v,), round_size=1)
    return ActionList(name="none", order=order, placement=loop_placement(p, v), num_micro_batches=m)


def in_flight_one_f_one_b(p: Value, v: Value, m: Value, stage: Value) -> Value:
    """Return the micro-batches in flight under 1F1B, interleaved if v > 1; 1 without a pipeline."""
    return where(v > 1, in_flight_interleaved(p, m, v, stage), in_flight_1f1b(p, m, stage))


def full_backward_bubble_s(p: Value, v: Value, m: Value, passes: PassSeconds) -> Value:
    """Return the seconds that a stage waits with whole backward passes: for p - 1 virtual stages, forward and backward.

    Assumes equal stages and micro-batches, and messages that take no time; otherwise the played list is right.
    """
    return (passes.forward_s + passes.backward_s) * ((p - 1) / v)


NO_PIPELINE = Schedule(
    supports=lambda p, v: p == 1, actions=no_pipeline_actions, natural=True,
    bubble_s=full_backward_bubble_s, bubble="(p - 1) · (F + B) / v", in_flight=in_flight_one_f_one_b,
)  # fmt: skip


def naive_actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Return the list in which a micro-batch passes all stages before the next one starts; idle over ideal time is p - 1."""
    return ActionList(
        name="naive", order=alternate_passes(p, m, ahead=(1,) * p), placement=loop_placement(p, v), num_micro_batches=m
    )


NAIVE = Schedule(
    supports=single_stage_each, actions=naive_actions,
    unpriced_reason="it waits in every micro-batch, and closed forms have what is waited for at the ends of a step",
)  # fmt: skip


def gpipe_actions(p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Return the list in which every stage runs all micro-batches forward before the first one backward."""
    return ActionList(
        name="afab", order=alternate_passes(p, m, ahead=(m,) * p), placement=loop_placement(p, v), num_micro_batches=m
    )


GPIPE = Schedule(
    supports=single_stage_each, actions=gpipe_actions, bubble_s=full_backward_bubble_s, bubble="(p - 1) · (F + B) / v",
    in_flight=lambda p, v, m, stage: in_flight_afab(m), num_at_end=lambda p, v, m: m,
    aliases=("gpipe",),
)  # fmt: skip


def one_f_one_b_actions(
    p: int, m: int, v: int = 1, durations: Any = None, memory_limit: float | None = None
) -> ActionList:
    """Return the list in which stage i runs p - i forward passes ahead."""
    order = alternate_passes(p, m, ahead=range(p, 0, -1))
    return ActionList(name="1f1b", order=order, placement=loop_placement(p, v), num_micro_batches=m)


ONE_F_ONE_B = Schedule(
    supports=single_stage_each, actions=one_f_one_b_actions, natural=True,
    bubble_s=full_backward_bubble_s, bubble="(p - 1) · (F + B) / v",
    in_flight=in_flight_one_f_one_b, aliases=("pipedream_flush", "one_forward_one_backward"),
)  # fmt: skip


def interleaved_actions(
    p: int, m: int, v: int, durations: Any = None, memory_limit: float | None = None, *, round_size: int | None = None
) -> ActionList:  # fmt: skip
    """Return the list in which rank i runs (v - 1) `round_size` + 2 (p - 1 - i) + 1 virtual stages ahead, then alternates."""
    size = p if round_size is None else round_size
    check_round(p, m, size)
    order = alternate_passes(p, m, v, ahead=[(v - 1) * size + 2 * (p - 1 - i) + 1 for i in range(p)], round_size=size)
    return ActionList(name="interleaved", order=order, placement=loop_placement(p, v), num_micro_batches=m)


def check_round(p: int, m: int, size: int) -> None:
    """Refuse rounds with fewer micro-batches than ranks, unless there is only one: the next virtual stage would wait
    for them.

    Raises `InputError`.
    """
    short = m % size if size < m else 0
    if size < min(p, m) or 0 < short < p:
        raise InputError(
            f"micro-batches: found {m} in rounds of {size} on {p} stages; rounds of at least {p}, the last one too, are "
            f"required: a multiple of {max(size, p)} micro-batches, or another {argument_label('round_size', '--round-size')}"
        )


INTERLEAVED = Schedule(
    supports=lambda p, v: v > 1, actions=interleaved_actions, takes_round_size=True, micro_batch_multiple=lambda p, v: p,
    natural=True, bubble_s=full_backward_bubble_s, bubble="((p - 1) / v + u) · (F + B)", in_flight=in_flight_one_f_one_b,
    aliases=("interleaved_1f1b", "depth_first"),
)  # fmt: skip


def breadth_first_actions(
    p: int, m: int, v: int, durations: Any = None, memory_limit: float | None = None, *, round_size: int | None = None
) -> ActionList:  # fmt: skip
    """Return interleaved 1F1B with one round of m micro-batches."""
    actions = interleaved_actions(p, m, v, round_size=m if round_size is None else round_size)
    return replace(actions, name="interleaved_breadth_first")


BREADTH_FIRST = Schedule(
    supports=many_stages_each, actions=breadth_first_actions, takes_round_size=True,
    min_micro_batches=lambda p, v: p, bubble_s=full_backward_bubble_s,
    bubble="((p - 1) / v + u) · (F + B)",
    in_flight=lambda p, v, m, stage: minimum(m, ((v - 1) * m + 2 * (p - 1 - stage) + 1) / v), aliases=("breadth_first",),
)  # fmt: skip


def looped_bfs_actions(p: int, m: int, v: int, durations: Any = None, memory_limit: float | None = None) -> ActionList:
    """Return the list in which every rank runs all of its forward passes before the first backward pass."""
    order = alternate_passes(p, m, v, ahead=(m * v,) * p)
    return ActionList(name="looped_bfs", order=order, placement=loop_placement(p, v), num_micro_batches=m)


LOOPED_BFS = Schedule(
    supports=many_stages_each, actions=looped_bfs_actions, min_micro_batches=lambda p, v: p, bubble_s=full_backward_bubble_s,
    bubble="((p - 1) / v + u) · (F + B)", in_flight=lambda p, v, m, stage: m, num_at_end=lambda p, v, m: m,
)  # fmt: skip
