"""A pipeline schedule as a record (supported stages, action list, closed forms), and schedules with whole backward passes.

Closed forms are those that the sources print, for numbers or arrays. Sources: S1, "pipeline parallelism"; Narayanan et
al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.3.

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

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

from shardwise.pipeline.actions import (
    ActionList,
    StagePlacement,
    alternate_passes,
    bidirectional_placement,
    loop_placement,
)
from shardwise.values import InputError, Value, argument_label, minimum, where

# Micro-batches that are held, and those of them that wait for weights' gradients, beside the one at work.
PeakCandidates = tuple[tuple[Value, Value], ...]


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch on one rank, through all of its virtual stages, exposed communication included.

    `backward_s` is the whole backward pass with recomputation, `weight_s` the part of it for weight gradients (0 where
    it is not needed), `overlapped_s` a forward and a backward pass that run together.
    """

    forward_s: Annotated[Value, "a micro-batch's forward pass, with its exposed traffic", "F"]
    backward_s: Annotated[Value, "its backward pass, with its exposed traffic", "B"]
    weight_s: Annotated[Value, "the part of B for the weights' gradients, where it can wait", "W"] = 0.0
    overlapped_s: Annotated[Value, "a forward and a backward pass that run together", "F&B"] = 0.0


def _no_closed_form(*arguments: Any) -> Value:
    raise InputError("schedule: this one has no closed form; `shardwise schedule` plays it")


def _no_overlap(p: Value, v: Value, m: Value) -> Value:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A pipeline schedule on p ranks with v virtual stages each, for m micro-batches; stages count from 0; numbers or arrays.

    Order: `actions(p, m, v, durations, memory_limit)` returns the action list, for numbers only; durations and limit
    are read by schedules that plan with them. One that `takes_round_size` has the keyword `round_size`: micro-batches
    of a virtual stage in a row. `placement(p, v)` returns the rank of each virtual stage, as in the list.

    Legality: `supports(p, v)` is True for numbers of stages that it runs on. Its closed forms hold from
    `min_micro_batches(p, v)` micro-batches on, in multiples of `micro_batch_multiple(p, v)`; its action list requires
    that minimum only if `requires_min`. `natural`: taken where no schedule is named and it supports the stages;
    `searched`: a search tries it too, without being asked.

    Cost: `bubble_s(p, v, m, passes)` are the seconds that a stage waits in a step, never negative; `bubble` is the same
    as text. It assumes equal stages, and of ZB-H2 an optimizer step that does not wait for all stages (Qi et al.,
    section 4). `num_overlapped(p, v, m)`: micro-batches whose forward pass runs together with a backward pass
    (`runs_pairs`). `splits_backward`: weight gradients wait. `unpriced_reason`: why a schedule has no closed forms, so
    that no layout may name it.

    Memory: `in_flight(p, v, m, stage)` are the micro-batches of which a stage holds something, of which
    `num_awaiting_weight_grads(p, v, m, stage)` may hold only the inputs of their weight gradients. `other_peaks(p, v, m,
    stage)`: further candidates for the peak, for schedules in which no weight gradient is pending while most micro-batches
    are in flight; empty: as many are pending then. `num_at_end(p, v, m)`: micro-batches between their forward and backward
    pass through the last virtual stage, which has the head; one, unless all forward passes come first.

    `aliases` are other names for it, as papers and engines write them.
    """

    supports: Callable[[Value, Value], Value]
    actions: Callable[..., ActionList]
    takes_round_size: bool = False
    placement: Callable[[int, int], StagePlacement] = loop_placement
    bubble_s: Callable[[Value, Value, Value, PassSeconds], Value] = _no_closed_form
    bubble: str = ""
    unpriced_reason: str = "it has no closed form that a layout could be priced by"
    in_flight: Callable[[Value, Value, Value, Value], Value] = _no_closed_form
    num_awaiting_weight_grads: Callable[[Value, Value, Value, Value], Value] = lambda p, v, m, stage: 0
    other_peaks: Callable[[Value, Value, Value, Value], PeakCandidates] = lambda p, v, m, stage: ()
    num_at_end: Callable[[Value, Value, Value], Value] = lambda p, v, m: 1
    num_overlapped: Callable[[Value, Value, Value], Value] = _no_overlap
    min_micro_batches: Callable[[Value, Value], Value] = lambda p, v: 1
    requires_min: bool = False
    micro_batch_multiple: Callable[[Value, Value], Value] = lambda p, v: 1
    natural: bool = False
    searched: bool = False
    splits_backward: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def has_closed_forms(self) -> bool:
        """True if layouts may name it, since it can be priced."""
        return self.bubble_s is not _no_closed_form

    @property
    def runs_pairs(self) -> bool:
        """True if a forward and a backward pass of different micro-batches run together."""
        return self.num_overlapped is not _no_overlap

    @property
    def bidirectional(self) -> bool:
        """True if micro-batches enter at both ends, so that each rank has a copy of its mirror rank's stage."""
        return self.placement is bidirectional_placement


def single_stage_each(p: Value, v: Value) -> Value:
    """Return True for pipelines with one stage on each rank."""
    return (p > 1) & (v == 1)


def many_stages_each(p: Value, v: Value) -> Value:
    """Return True for pipelines with more than one virtual stage per rank."""
    return (p > 1) & (v > 1)


def two_stages_each(p: Value, v: Value) -> Value:
    """Return True for pipelines with two virtual stages on each rank."""
    return (p > 1) & (v == 2)


def bubble_ratio(pp: Value, num_micro_batches: Value, num_virtual_stages: Value = 1) -> Value:
    """Return idle time over ideal time, (p - 1) / (v m): AFAB and 1F1B with v = 1, interleaved 1F1B with v > 1."""
    return (pp - 1) / (num_virtual_stages * num_micro_batches)


def in_flight_1f1b(pp: Value, num_micro_batches: Value, stage: Value) -> Value:
    """Return the micro-batches whose activations stage `stage` (from 0) holds at once: min(m, p - stage)."""
    return minimum(num_micro_batches, pp - stage)


def in_flight_interleaved(pp: Value, num_micro_batches: Value, num_virtual_stages: Value, stage: Value) -> Value:
    """Return the same for interleaved 1F1B, in units of a whole stage's activations.

    Warm-up runs 2 (p - stage - 1) + (v - 1) p virtual stages forward and one more is in the steady state, each 1/v of
    the stage: p (1 + (p - 1) / (p v)) on the first stage. Source: Megatron-LM's warm-up count; Korthikanti et al. 2022.
    """
    chunks = 2 * (pp - stage - 1) + (num_virtual_stages - 1) * pp + 1
    return minimum(num_micro_batches, chunks / num_virtual_stages)


def in_flight_afab(num_micro_batches: Value) -> Value:
    """Return the micro-batches in flight with all forward passes first: every one."""
    return num_micro_batches


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
