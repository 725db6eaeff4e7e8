"""A pipeline schedule as a record: the stages that it supports, its action list and closed forms; the basic closed forms.

Closed forms are those that the sources print, for numbers or arrays. Sources: S1, "pipeline parallelism"; Narayanan et al.
2021, section 2.2; Korthikanti et al. 2022, section 4.2.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardwise.pipeline.actions import ActionList, StagePlacement, bidirectional_placement, loop_placement
from shardwise.values.elementwise import Value, minimum
from shardwise.values.errors import InputError

# Micro-batches that are held, and those of them that wait for weights' gradients, beside the one at work.
PeakCandidates = tuple[tuple[Value, Value], ...]


class PassSeconds(NamedTuple):
    """Seconds of one micro-batch on one rank, through all of its virtual stages, with the traffic that shows.

    `backward_s` is the whole backward pass with what it recomputes, `weight_s` the part of it for the weights' gradients
    (0 where it is not needed), `overlapped_s` a forward and a backward pass that run together.
    """

    forward_s: Value
    backward_s: Value
    weight_s: Value = 0.0
    overlapped_s: Value = 0.0


def _no_closed_form(*given: Any) -> Value:
    raise InputError("schedule: this one has no closed form; `shardwise schedule` plays it")


def _no_overlap(p: Value, v: Value, m: Value) -> Value:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All that a schedule decides: p stages of v virtual ones, m micro-batches, a stage counted from 0; numbers or arrays.

    Order: `actions(p, m, v, durations, memory_limit)` is the action list, of numbers only; durations and limit are read by a
    schedule that plans with them. One that `takes_round_size` has the keyword `round_size`: micro-batches of a virtual stage in a
    row. `placement(p, v)`: on which rank each virtual stage is, which the list has too.

    Legality: `supports(p, v)` says whether it runs on so many stages, `min_micro_batches(p, v)` is the least number of
    micro-batches with which its closed forms hold, and they come in a `micro_batch_multiple(p, v)`; its action list asks for
    as many only where it `requires_min`. `natural`: it is taken where none is named and it goes with the stages; `searched`: a
    search tries it besides, without being asked.

    Cost: `bubble_s(p, v, m, passes)` are seconds that a stage waits in a step, for the first and the last micro-batch and
    between, never less than nothing; `bubble` writes it for people. It assumes stages that take alike, and of ZB-H2 an optimizer
    step that does not wait for all stages (Qi et al., section 4). `num_overlapped(p, v, m)`: micro-batches whose forward pass
    runs together with a backward pass; `runs_pairs`: there are such. `splits_backward`: the weights' gradients wait;
    `bidirectional`: micro-batches come in from both ends. `has_closed_forms`: they are there, so that layouts may name it;
    `unpriced_reason` says why not where they are not.

    Memory: `in_flight(p, v, m, stage)` are the micro-batches of which a stage holds something, of which
    `num_awaiting_weight_grads(p, v, m, stage)` may hold only what their weights' gradients are made of.
    `other_peaks(p, v, m, stage)`: moments beside the one at which the most are held, for schedules under which none waits
    then; empty: as many wait then. `num_at_end(p, v, m)`: those between their forward and backward pass through the last
    virtual stage, which has the head; one, unless all go forward first.

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
        """Whether it has closed forms."""
        return self.bubble_s is not _no_closed_form

    @property
    def runs_pairs(self) -> bool:
        """Whether a forward and a backward pass of different micro-batches run together."""
        return self.num_overlapped is not _no_overlap

    @property
    def bidirectional(self) -> bool:
        """Whether micro-batches come in from both ends, so that each rank has a copy of the opposite rank's stage."""
        return self.placement is bidirectional_placement


def one_stage_each(p: Value, v: Value) -> Value:
    """Of a pipeline with one stage on each rank."""
    return (p > 1) & (v == 1)


def many_stages_each(p: Value, v: Value) -> Value:
    """Of a pipeline with virtual stages."""
    return (p > 1) & (v > 1)


def two_stages_each(p: Value, v: Value) -> Value:
    """Of a pipeline with two virtual stages on each rank."""
    return (p > 1) & (v == 2)


def bubble_ratio(pp: Value, num_micro_batches: Value, num_virtual_stages: Value = 1) -> Value:
    """Idle time over ideal time, (p - 1) / (v m): AFAB and 1F1B with v = 1, interleaved 1F1B with v > 1."""
    return (pp - 1) / (num_virtual_stages * num_micro_batches)


def in_flight_1f1b(pp: Value, num_micro_batches: Value, stage: Value) -> Value:
    """Micro-batches whose activations stage `stage` (from 0) holds at once: min(m, p - stage)."""
    return minimum(num_micro_batches, pp - stage)


def in_flight_interleaved(pp: Value, num_micro_batches: Value, num_virtual_stages: Value, stage: Value) -> Value:
    """The same for interleaved 1F1B, in units of a whole stage's activations.

    Warm-up runs 2 (p - stage - 1) + (v - 1) p virtual stages forward and one more is in the steady state, each 1/v of
    the stage: p (1 + (p - 1) / (p v)) on the first stage. Source: Megatron-LM's warm-up count; Korthikanti et al. 2022.
    """
    chunks = 2 * (pp - stage - 1) + (num_virtual_stages - 1) * pp + 1
    return minimum(num_micro_batches, chunks / num_virtual_stages)


def in_flight_afab(num_micro_batches: Value) -> Value:
    """All-forward-all-backward holds every micro-batch."""
    return num_micro_batches
