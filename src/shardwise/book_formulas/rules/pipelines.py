"""Pipelines: how long their stages wait, what these send, and which layers they have.

Letters: p pipeline stages (pp); m micro-batches (num_micro_batches); v virtual stages of a stage (num_virtual_stages); f
seconds of a micro-batch's forward pass (forward_s); b seconds of its backward pass (backward_s); T tokens of a micro-batch
(tokens); D model width (d_model).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.pipeline import PassSeconds, get_schedule
from shardwise.pipeline.registry import schedule_names_by_alias
from shardwise.pipeline.schedule_definition import bubble_ratio
from shardwise.values import InputError, lookup


def pipeline_busy_fraction(pp: float, num_micro_batches: float = 1) -> float:
    """Part of a step that a stage of AFAB or 1F1B computes.

    Formula: m / (m + p - 1). Source: the book, "Training", pipelining.
    """
    return num_micro_batches / (num_micro_batches + pp - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """A pipeline's step: bubble over ideal time, its length, and the idle part of that."""

    bubble_ratio: float
    makespan_s: float
    idle_fraction: float


def pipeline_times(
    pp: int, num_micro_batches: int, forward_s: float, backward_s: float, num_virtual_stages: int = 1
) -> PipelineTimes:
    """A step of AFAB, 1F1B or interleaved 1F1B whose stages take the same time for each micro-batch.

    Formula: m·(f + b)·(1 + r) with r of `bubble_ratio`; idle r / (1 + r). Source: the playbook, "Pipeline parallelism".
    """
    ratio = float(bubble_ratio(pp, num_micro_batches, num_virtual_stages))
    ideal = num_micro_batches * (forward_s + backward_s)
    return PipelineTimes(bubble_ratio=ratio, makespan_s=ideal * (1 + ratio), idle_fraction=ratio / (1 + ratio))


def pipeline_bubble_s(
    schedule: str, pp: int, forward_s: float, backward_s: float, weight_s: float = 0.0, overlapped_s: float = 0.0
) -> float:  # fmt: skip
    """Seconds that a stage waits in a step of many micro-batches under a schedule (by any of its names); see `Schedule`.

    backward_s: the whole backward pass of a micro-batch; weight_s, where it is split: its part for the weights' gradients;
    overlapped_s, of DualPipe: a forward and a backward pass run together.
    Formula: that of the schedule; (p - 1)·(f + b) of 1F1B. Source: the playbook, "Zero bubble and DualPipe"; DualPipe's README.
    """
    passes = PassSeconds(forward_s, backward_s, weight_s, overlapped_s)
    form = get_schedule(lookup(schedule_names_by_alias(), schedule, "schedule"))
    return float(form.bubble_s(pp, 1, math.inf, passes))


def pp_elements(num_micro_batches: float, tokens: float, d_model: float, num_virtual_stages: float = 1) -> float:
    """Elements that a stage of a pipeline sends and receives, forward and backward, for micro-batches of T tokens.

    Formula: 4·m·T·D·v with v virtual stages. Unit: elements. Source: the playbook, A3; "Interleaving stages" for v.
    """
    return 4.0 * num_micro_batches * tokens * d_model * num_virtual_stages


def stage_layers(num_layers: int, pp: int, num_virtual_stages: int = 1) -> tuple[tuple[int, ...], ...]:
    """Numbers (from 1) of the layers on each stage: runs of equal length dealt out in turn, `num_virtual_stages` to a stage.

    Source: the playbook, "Interleaving stages". Differs: `layers_per_stage` weighs embedding and head.
    """
    count = pp * num_virtual_stages
    if num_layers % count:
        raise InputError(
            f"layers: found {num_layers} for {pp} stages of {num_virtual_stages}; a multiple of {count} is required"
        )
    run_length = num_layers // count
    starts = ([(turn * pp + stage) * run_length for turn in range(num_virtual_stages)] for stage in range(pp))
    return tuple(tuple(start + i + 1 for start in stage_starts for i in range(run_length)) for stage_starts in starts)
