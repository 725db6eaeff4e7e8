"""Pipeline stages that can be the slowest or the fullest, for each pair (pp, virtual stages)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwise.layout.layers_per_stage import (
    MAX_EMPTY_STAGES,
    dense_layers_by_stage,
    even_layers_by_virtual_stage,
    even_layers_on_placement,
)
from shardwise.model import Architecture
from shardwise.pipeline import NATURAL, get_schedule, natural_schedule
from shardwise.pipeline.uneven_stage_costs import NO_UNEVEN_BUBBLE, UnevenBubble, uneven_bubble, uneven_in_flight
from shardwise.search.vectorised.candidates import FamilyKey, Space
from shardwise.search.vectorised.table_columns import Floats, Ints
from shardwise.values import Value

PipelineSizes = tuple[int, int]  # pp, virtual stages of a rank


class WorstStage(NamedTuple):
    """A stage that can be the slowest or the fullest.

    `first` and `last` say whether it is at an end of the pipeline; the other fields are over the numbers of (pp, virtual): its
    number, its layers by kind, and `holding`, how many times as many layers of micro-batches it holds as with equal virtual
    stages (None: as many everywhere). If micro-batches come from both ends it is a device with the layers of both of its
    stages, and the first is the last as well."""

    first: bool
    last: bool
    number: Ints
    layers: Mapping[str, Value]
    holding: Floats | None


def worst_stages(
    architecture: Architecture, space: Space, families: Iterable[FamilyKey]
) -> tuple[dict[int, tuple[WorstStage, ...]], dict[int, UnevenBubble | None], Ints]:
    """Return by schedule the worst stages and the bubble of uneven ones, and the number of (pp, virtual) of each row."""
    pps, number = np.unique(space.degrees["pp"], return_inverse=True)
    virtual = space.choices.num_virtual_stages
    sizes = [(pp, count) for pp in pps.tolist() for count in virtual]
    row = number[:, None] * len(virtual) + np.arange(len(virtual))[None, :]
    used = np.unique(row[space.factorisation, space.virtual]).tolist()
    worst, bubbles = {}, {}
    for index in sorted({key.schedule for key in families}):
        schedule = space.choices.schedule[index]
        worst[index] = _worst_stages_of(architecture, schedule, sizes, used)
        bubbles[index] = _uneven_bubbles(architecture, schedule, sizes, used)
    return worst, bubbles, row


def _uneven_bubbles(
    architecture: Architecture, schedule: str, sizes: Sequence[PipelineSizes], used: Iterable[int]
) -> UnevenBubble | None:
    """Return what uneven virtual stages add to the bubble for each (pp, virtual) in use; None if nothing."""
    bubbles = [NO_UNEVEN_BUBBLE] * len(sizes)
    for number in used:
        if layers := _virtual_stage_layers(architecture, schedule, *sizes[number]):
            bubbles[number] = uneven_bubble(_resolve_natural(schedule, *sizes[number]), layers, sizes[number][0])
    return UnevenBubble(*np.array(bubbles).T) if any(map(any, bubbles)) else None


def _holding_ratios(
    architecture: Architecture, schedule: str, sizes: Sequence[PipelineSizes], used: Iterable[int]
) -> dict[int, tuple[float, ...]]:
    """Return by number of (pp, virtual) how many times as many layers each stage holds as with equal virtual stages.

    Only for those whose stages are not equal."""
    ratios_by_number = {}
    for number in used:
        if layers := _virtual_stage_layers(architecture, schedule, *sizes[number]):
            ratios = uneven_in_flight(_resolve_natural(schedule, *sizes[number]), layers, sizes[number][0])
            if set(ratios) != {1.0}:
                ratios_by_number[number] = ratios
    return ratios_by_number


def _virtual_stage_layers(architecture: Architecture, schedule: str, pp: int, count: int) -> tuple[int, ...]:
    """Layers of each virtual stage; empty if a rank has one stage, or the model has too few layers."""
    has_several_stages = count > 1 or get_schedule(schedule).bidirectional
    if pp == 1 or not has_several_stages or pp * count > architecture.num_layers + MAX_EMPTY_STAGES:
        return ()
    return even_layers_by_virtual_stage(architecture, pp, count)


def _worst_stages_of(
    architecture: Architecture, schedule: str, sizes: Sequence[PipelineSizes], used: Iterable[int]
) -> tuple[WorstStage, ...]:
    """Return the same number of stages for each (pp, virtual), with the first and the last at their ends of the row."""
    stage_numbers = [_worst_stage_numbers(architecture, schedule, pp, count) for pp, count in sizes]
    uneven = _holding_ratios(architecture, schedule, sizes, used)
    fullest = {
        number: _fullest_stages(architecture, schedule, sizes[number], ratios) for number, ratios in uneven.items()
    }
    max_fullest = max(map(len, fullest.values()), default=0)
    for number, row in enumerate(stage_numbers):
        # Inserted behind the first stage: the first and the last keep the ends of the row. Others repeat the first.
        inserted = fullest.get(number, [])
        row[1:1] = [*inserted, *row[:1] * (max_fullest - len(inserted))]
    device_layers = [
        _layers_per_device(architecture, schedule, *pipeline_sizes, row)
        for pipeline_sizes, row in zip(sizes, stage_numbers, strict=True)
    ]
    numbers, layers = np.array(stage_numbers, dtype=np.int64), np.array(device_layers, dtype=np.int64)
    holding = np.ones(numbers.shape)
    for number, stage_ratios in uneven.items():
        holding[number] = np.take(stage_ratios, numbers[number])
    last = 0 if _has_both_ends(schedule) else numbers.shape[1] - 1
    stages = []
    for i in range(numbers.shape[1]):
        dense = layers[:, i, 1] if architecture.num_dense_layers else 0
        by_kind = {"dense_block": dense, "block": layers[:, i, 0] - dense}
        stages.append(WorstStage(i == 0, i == last, numbers[:, i], by_kind, holding[:, i] if uneven else None))
    return tuple(stages)


def _fullest_stages(
    architecture: Architecture, schedule: str, sizes: PipelineSizes, ratios: Sequence[float]
) -> list[int]:
    """Return the interior stages that hold the most layers of micro-batches, for some number of these; without any the first.

    With few micro-batches a later stage may hold more."""
    pp, count = sizes
    inner = range(1, pp // 2 if get_schedule(schedule).bidirectional else pp - 1) or range(1)
    layers = [layers for layers, _ in _layers_per_device(architecture, schedule, pp, count, inner)]
    resolved_schedule = get_schedule(_resolve_natural(schedule, pp, count))

    def layers_in_flight(stage: int, num_micro_batches: int) -> float:
        in_flight = float(resolved_schedule.in_flight(pp, count, num_micro_batches, stage)) * ratios[stage]
        return layers[stage - inner[0]] * min(in_flight, num_micro_batches)

    # No schedule but all-forward-all-backward, which orders its stages the same for any number, holds more than 2 · pp in
    # flight; 4 · pp stands for all larger numbers.
    return sorted(
        {max(inner, key=lambda stage: layers_in_flight(stage, batches)) for batches in (*range(1, 2 * pp + 1), 4 * pp)}
    )


def _worst_stage_numbers(architecture: Architecture, schedule: str, pp: int, num_virtual_stages: int) -> list[int]:
    """Return the stages that can be the slowest: those with dense layers, the next, and the last.

    Missing ones repeat the last interior stage. If the backward pass is split, later stages hold more micro-batches that wait
    for their weight gradients: then also the last interior stage, and the last with as many layers as any. If devices hold a
    stage and its mirror image, the first half stands for the other. If the first device holds the last stage too, all later
    ones are interior."""
    early = range(max(architecture.num_dense_layers, 1) + 1)
    end = max(pp // 2, 1) if get_schedule(schedule).bidirectional else pp
    numbers = [min(stage, end - 1) for stage in early]
    if get_schedule(schedule).splits_backward:
        inner = range(early.stop, end if _has_both_ends(schedule) else end - 1) or range(end - 1, end)
        layers = [layers for layers, _ in _layers_per_device(architecture, schedule, pp, num_virtual_stages, inner)]
        numbers += [max(zip(layers, inner, strict=True))[1], inner[-1]]
    return numbers if _has_both_ends(schedule) else [*numbers, pp - 1]


def _resolve_natural(schedule: str, pp: int, num_virtual_stages: int) -> str:
    return natural_schedule(pp, num_virtual_stages) if schedule == NATURAL else schedule


def _has_both_ends(schedule: str) -> bool:
    """True if the first device of any pipeline has the first and the last stage of the model."""
    placement = get_schedule(schedule).placement(2, 2)
    return len(placement.ranks) - 1 in placement.stages_of_rank(0)


def _layers_per_device(
    architecture: Architecture, schedule: str, pp: int, num_virtual_stages: int, stages: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (all, dense) layers of some devices."""
    placement = get_schedule(schedule).placement(pp, num_virtual_stages)
    if len(placement.ranks) > architecture.num_layers + MAX_EMPTY_STAGES:  # not legal
        return [(0, 0)] * len(stages)
    layers = even_layers_on_placement(architecture, placement)
    dense = dense_layers_by_stage(architecture, layers)
    groups = [placement.stages_of_rank(stage) for stage in stages]
    return [(sum(layers[stage] for stage in group), sum(dense[stage] for stage in group)) for group in groups]
