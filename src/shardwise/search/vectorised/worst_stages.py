"""Pipeline stages that can be the slowest or the fullest, for each pair (pp, virtual stages)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from shardwise.layout.layers_per_stage import (
    MAX_EMPTY_STAGES,
    count_kinds,
    even_layers_by_virtual_stage,
    even_layers_on_placement,
    layer_ranges,
    num_recomputed_layers,
)
from shardwise.model import Architecture
from shardwise.pipeline import NATURAL, get_schedule, natural_schedule
from shardwise.pipeline.uneven_stage_costs import NO_UNEVEN_BUBBLE, UnevenBubble, uneven_bubble, uneven_in_flight
from shardwise.search.vectorised.candidates import FamilyKey, Space
from shardwise.search.vectorised.table_columns import Floats, Ints
from shardwise.values import Value

PipelineSizes = tuple[int, int]  # pp, virtual stages of a rank
DeviceLayers = tuple[range, ...]  # layers of each virtual stage of a device


class WorstStage(NamedTuple):
    """A stage that can be the slowest or the fullest.

    `first` and `last` say whether it is at an end of the pipeline; the other fields are over the numbers of (pp, virtual): its
    number, its layers by kind, and `holding`, how many times as many layers of micro-batches it holds as with equal virtual
    stages (None: as many everywhere). If micro-batches come from both ends it is a device with the layers of both of its
    stages, and the first is the last as well. `among_first` has for each kind, by [number of (pp, virtual), n], how many of the
    stage's first n layers it is; None where the kinds come one after the other, so that `layers` say it."""

    first: bool
    last: bool
    number: Ints
    layers: Mapping[str, Ints]
    holding: Floats | None
    among_first: Mapping[str, Ints] | None = None

    def layers_at(self, rows: Ints) -> dict[str, Value]:
        """Return the layers by kind for some numbers of (pp, virtual); a kind that no stage has is a plain 0."""
        return {kind: counts.take(rows) if counts.any() else 0 for kind, counts in self.layers.items()}

    def recomputed_at(self, rows: Ints, max_layers: Value) -> dict[str, Value]:
        """Return how many of them recompute, by kind: the first `max_layers` of the stage."""
        layers = self.layers_at(rows)
        if self.among_first is None:
            return num_recomputed_layers(layers, max_layers)
        number = np.minimum(max_layers, sum(layers.values()))
        return {kind: counts[rows, number] for kind, counts in self.among_first.items()}


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
    partly = any(policy.layers is not None for policy in space.choices.policies)
    for index in sorted({key.schedule for key in families}):
        schedule = space.choices.schedule[index]
        worst[index] = _worst_stages_of(architecture, schedule, sizes, used, partly=partly)
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
    architecture: Architecture, schedule: str, sizes: Sequence[PipelineSizes], used: Iterable[int], *, partly: bool
) -> tuple[WorstStage, ...]:
    """Return the same number of stages for each (pp, virtual), with the first and the last at their ends of the row.

    `partly`: a part of a stage's layers may recompute, so that their order counts."""
    uneven = _holding_ratios(architecture, schedule, sizes, used)
    rows = [
        _differing_stages(architecture, schedule, pipeline_sizes, uneven.get(number), ordered=partly)
        if architecture.layer_pattern
        else _worst_stage_numbers(architecture, schedule, *pipeline_sizes)
        for number, pipeline_sizes in enumerate(sizes)
    ]
    for number, ratios in uneven.items() if not architecture.layer_pattern else ():
        # Inserted behind the first stage: the first and the last keep the ends of the row.
        rows[number][1:1] = _fullest_stages(architecture, schedule, sizes[number], ratios)
    longest = max(map(len, rows))
    for row in rows:
        row[1:1] = row[:1] * (longest - len(row))
    device_layers = [
        [_device_layers(architecture, schedule, *pipeline_sizes)[stage] for stage in row]
        for pipeline_sizes, row in zip(sizes, rows, strict=True)
    ]
    numbers, holding = np.array(rows, dtype=np.int64), np.ones((len(rows), longest))
    for number, ratios in uneven.items():
        holding[number] = np.take(ratios, numbers[number])
    last = 0 if _has_both_ends(schedule) else longest - 1
    return tuple(
        WorstStage(
            i == 0, i == last, numbers[:, i], _layers_by_kind(architecture, [row[i] for row in device_layers]),
            holding[:, i] if uneven else None,
            _among_first(architecture, [row[i] for row in device_layers]) if partly and architecture.layer_pattern else None,
        )
        for i in range(longest)
    )  # fmt: skip


def _layers_by_kind(architecture: Architecture, device_layers: Sequence[DeviceLayers]) -> dict[str, Ints]:
    """Return the layers of some devices by kind."""
    counts = [count_kinds(architecture, layers) for layers in device_layers]
    return {kind: np.array([row[kind] for row in counts], dtype=np.int64) for kind in architecture.layer_counts}


def _among_first(architecture: Architecture, device_layers: Sequence[DeviceLayers]) -> dict[str, Ints]:
    """Return how many of the first n layers of some devices each kind is, by [device, n]."""
    max_layers = max(sum(map(len, layers)) for layers in device_layers)
    by_number = [
        _layers_by_kind(architecture, [_first_layers(layers, n) for layers in device_layers])
        for n in range(max_layers + 1)
    ]
    return {kind: np.stack([counts[kind] for counts in by_number], axis=1) for kind in architecture.layer_counts}


def _first_layers(stages: DeviceLayers, num_layers: int) -> DeviceLayers:
    first = []
    for layers in stages:
        first.append(layers[:num_layers])
        num_layers -= len(first[-1])
    return tuple(first)


class _StageContents(NamedTuple):
    """What the cost of an interior stage depends on beside its number; `order` is empty where that of its layers does not
    count."""

    counts: tuple[int, ...]
    order: tuple[str, ...]
    holding: float

    def covers(self, stage: _StageContents) -> bool:
        """Return whether a stage with these contents takes at least as long and holds at least as much as another."""
        at_least = all(mine >= its for mine, its in zip(self.counts, stage.counts, strict=True))
        return at_least and self.order == stage.order and self.holding >= stage.holding


def _differing_stages(
    architecture: Architecture, schedule: str, sizes: PipelineSizes, ratios: Sequence[float] | None, *, ordered: bool
) -> list[int]:
    """Return the stages of a model with a pattern that can be the slowest or the fullest: the first, the last, and of the others
    each that no earlier one covers; if the backward pass is split, also each that no later one covers."""
    pp, both_ends = sizes[0], _has_both_ends(schedule)
    end = max(pp // 2, 1) if get_schedule(schedule).bidirectional else pp
    device_layers, units = _device_layers(architecture, schedule, *sizes), architecture.layer_units
    contents = [
        _StageContents(
            tuple(count_kinds(architecture, layers).values()),
            tuple(units[layer] for stage in layers for layer in stage) if ordered else (),
            ratios[number] if ratios else 1.0,
        )
        for number, layers in enumerate(device_layers)
    ]
    inner = range(1, end if both_ends else end - 1)
    numbers = [0, *_uncovered(inner, contents)]
    if get_schedule(schedule).splits_backward:
        numbers += _uncovered(inner[::-1], contents)
    return numbers if both_ends else [*numbers, pp - 1]


def _uncovered(stages: Iterable[int], contents: Sequence[_StageContents]) -> list[int]:
    """Return the stages that none before them covers."""
    uncovered: list[int] = []
    for stage in stages:
        if not any(contents[earlier].covers(contents[stage]) for earlier in uncovered):
            uncovered.append(stage)
    return uncovered


def _fullest_stages(
    architecture: Architecture, schedule: str, sizes: PipelineSizes, ratios: Sequence[float]
) -> list[int]:
    """Return the interior stages that hold the most layers of micro-batches, for some number of these; without any the first.

    With few micro-batches a later stage may hold more."""
    pp, count = sizes
    inner = range(1, pp // 2 if get_schedule(schedule).bidirectional else pp - 1) or range(1)
    device_layers = _device_layers(architecture, schedule, pp, count)
    layers = [sum(map(len, device_layers[stage])) for stage in inner]
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
        device_layers = _device_layers(architecture, schedule, pp, num_virtual_stages)
        layers = [sum(map(len, device_layers[stage])) for stage in inner]
        numbers += [max(zip(layers, inner, strict=True))[1], inner[-1]]
    return numbers if _has_both_ends(schedule) else [*numbers, pp - 1]


def _resolve_natural(schedule: str, pp: int, num_virtual_stages: int) -> str:
    return natural_schedule(pp, num_virtual_stages) if schedule == NATURAL else schedule


def _has_both_ends(schedule: str) -> bool:
    """True if the first device of any pipeline has the first and the last stage of the model."""
    placement = get_schedule(schedule).placement(2, 2)
    return len(placement.ranks) - 1 in placement.stages_of_rank(0)


@lru_cache(maxsize=4096)
def _device_layers(
    architecture: Architecture, schedule: str, pp: int, num_virtual_stages: int
) -> tuple[DeviceLayers, ...]:
    """Return the layers of each device; none if the model has too few for so many stages."""
    placement = get_schedule(schedule).placement(pp, num_virtual_stages)
    if len(placement.ranks) > architecture.num_layers + MAX_EMPTY_STAGES:  # not legal
        return ((),) * pp
    ranges = layer_ranges(even_layers_on_placement(architecture, placement))
    return tuple(tuple(ranges[stage] for stage in placement.stages_of_rank(rank)) for rank in range(pp))
