"""A pipeline schedule as a record: supported stages, action list and closed forms; the basic closed forms.

Closed forms are those that the sources print, for numbers or arrays. Sources: S1, "pipeline parallelism"; Narayanan et
al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from shardwise.pipeline.actions import ActionList, StagePlacement, bidirectional_placement, loop_placement
from shardwise.values import InputError, Value, minimum

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
