"""The stages of pipelines that can be the slowest or the fullest, over numbers of (pp, virtual stages)."""

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
from shardwise.model.architecture import Architecture
from shardwise.pipeline.registry import NATURAL, get_schedule, natural_schedule
from shardwise.pipeline.uneven_stages import NO_UNEVEN_BUBBLE, UnevenBubble, uneven_bubble, uneven_in_flight
from shardwise.search.vectorised.table_columns import Floats, Ints
from shardwise.search.vectorised.table_inputs import TableInputs
from shardwise.values.elementwise import Value

PipelineSizes = tuple[int, int]  # pp, virtual stages of a rank


class WorstStage(NamedTuple):
    """A stage that can be the slowest or the fullest: whether it is the first or the last one, its number, its layers by kind,
    and how many times as many of them it holds as with virtual stages that are alike (None: as many, everywhere).

    All but the first two are over numbers of (pp, virtual). Where micro-batches come from both ends it is a device, with the
    layers of both of its stages, and the first is the last as well.
    """

    first: bool
    last: bool
    number: Ints
    layers: Mapping[str, Value]
    holding: Floats | None


class StageTables:
    """The stages of each schedule that families have."""

    def __init__(self, inputs: TableInputs) -> None:
        self.architecture, self.space, self.families = inputs.architecture, inputs.space, inputs.families

    def worst_stages(self) -> tuple[dict[int, tuple[WorstStage, ...]], dict[int, UnevenBubble | None], Ints]:
        """The stages of each schedule that can be the worst, what uneven ones add to its bubble, and the number of (pp, virtual)
        of each row."""
        pps, number = np.unique(self.space.degrees["pp"], return_inverse=True)
        virtual = self.space.choices.num_virtual_stages
        every = [(pp, count) for pp in pps.tolist() for count in virtual]
        row = number[:, None] * len(virtual) + np.arange(len(virtual))[None, :]
        schedules = sorted({key.schedule for key in self.families})
        used = np.unique(row[self.space.factorisation, self.space.virtual]).tolist()
        worst = {one: self._worst(self.space.choices.schedule[one], every, used) for one in schedules}
        names = {one: self.space.choices.schedule[one] for one in schedules}
        return worst, {one: self._waiting(name, every, used) for one, name in names.items()}, row

    def _waiting(self, schedule: str, every: Sequence[PipelineSizes], used: Iterable[int]) -> UnevenBubble | None:
        """What uneven virtual stages add for each (pp, virtual) that layouts have."""
        found = [NO_UNEVEN_BUBBLE] * len(every)
        for number in used:
            if layers := self._virtual_stages(schedule, *every[number]):
                found[number] = uneven_bubble(_resolve_natural(schedule, *every[number]), layers, every[number][0])
        return UnevenBubble(*np.array(found).T) if any(map(any, found)) else None

    def _holding(
        self, schedule: str, every: Sequence[PipelineSizes], used: Iterable[int]
    ) -> dict[int, tuple[float, ...]]:
        """By number of (pp, virtual), how many times as many layers its stages hold as virtual stages that are alike would;
        without those that are."""
        asked = {number: self._virtual_stages(schedule, *every[number]) for number in used}
        found = {
            number: uneven_in_flight(_resolve_natural(schedule, *every[number]), layers, every[number][0])
            for number, layers in asked.items()
            if layers
        }
        return {number: times for number, times in found.items() if set(times) != {1.0}}

    def _virtual_stages(self, schedule: str, pp: int, count: int) -> tuple[int, ...]:
        """Layers of each stage of which a rank has several; none where it has one, or the model has too few layers."""
        several = count > 1 or get_schedule(schedule).bidirectional
        if pp == 1 or not several or pp * count > self.architecture.num_layers + MAX_EMPTY_STAGES:
            return ()
        return even_layers_by_virtual_stage(self.architecture, pp, count)

    def _worst(self, schedule: str, every: Sequence[PipelineSizes], used: Iterable[int]) -> tuple[WorstStage, ...]:
        """For each (pp, virtual) the same number of stages, the first and the last at their ends of the row."""
        found = [_worst_stage_numbers(self.architecture, schedule, pp, count) for pp, count in every]
        times = self._holding(schedule, every, used)
        fullest = {number: self._fullest(schedule, every[number], own) for number, own in times.items()}
        most = max(map(len, fullest.values()), default=0)
        for number, stages in enumerate(found):
            inserted = fullest.get(number, [])
            stages[1:1] = [*inserted, *stages[:1] * (most - len(inserted))]
        held = [
            _layers_per_device(self.architecture, schedule, *key, own) for key, own in zip(every, found, strict=True)
        ]
        numbers, layers = np.array(found, dtype=np.int64), np.array(held, dtype=np.int64)
        holds = np.ones(numbers.shape)
        for number, of_stages in times.items():
            holds[number] = np.take(of_stages, numbers[number])
        last = 0 if _has_both_ends(schedule) else numbers.shape[1] - 1
        return tuple(
            WorstStage(
                position == 0, position == last, numbers[:, position], self._by_kind(layers[:, position]),
                holds[:, position] if times else None,
            )
            for position in range(numbers.shape[1])
        )  # fmt: skip

    def _fullest(self, schedule: str, sizes: PipelineSizes, times: Sequence[float]) -> list[int]:
        """The interior stages that hold the most layers of micro-batches, if there are any, else the first: with any number of
        these, for of few a later stage may hold more."""
        pp, count = sizes
        inner = range(1, pp // 2 if get_schedule(schedule).bidirectional else pp - 1) or range(1)
        layers = [layers for layers, _ in _layers_per_device(self.architecture, schedule, pp, count, inner)]
        form = get_schedule(_resolve_natural(schedule, pp, count))

        def held(stage: int, num_micro_batches: int) -> float:
            in_flight = float(form.in_flight(pp, count, num_micro_batches, stage)) * times[stage]
            return layers[stage - inner[0]] * min(in_flight, num_micro_batches)

        return sorted({max(inner, key=lambda stage: held(stage, few)) for few in (*range(1, 2 * pp + 1), 4 * pp)})

    def _by_kind(self, layers: Ints) -> dict[str, Value]:
        dense = layers[:, 1] if self.architecture.num_dense_layers else 0
        return {"dense_block": dense, "block": layers[:, 0] - dense}


def _worst_stage_numbers(architecture: Architecture, schedule: str, pp: int, num_virtual_stages: int) -> list[int]:
    """Those with dense layers, the one after, and the last; in a pipeline with fewer, the last interior one again.

    Where the backward pass is split, more micro-batches wait for their weight gradients the later the stage: then also the
    last interior stage, and the last with as many layers as any. Of devices that hold a stage and its mirror image the first half
    stands for the other. Where the first holds the last stage too, all behind it are interior.
    """
    early = range(max(architecture.num_dense_layers, 1) + 1)
    end = max(pp // 2, 1) if get_schedule(schedule).bidirectional else pp
    found = [min(stage, end - 1) for stage in early]
    if get_schedule(schedule).splits_backward:
        inner = range(early.stop, end if _has_both_ends(schedule) else end - 1) or range(end - 1, end)
        layers = [layers for layers, _ in _layers_per_device(architecture, schedule, pp, num_virtual_stages, inner)]
        found += [max(zip(layers, inner, strict=True))[1], inner[-1]]
    return found if _has_both_ends(schedule) else [*found, pp - 1]


def _resolve_natural(schedule: str, pp: int, num_virtual_stages: int) -> str:
    return natural_schedule(pp, num_virtual_stages) if schedule == NATURAL else schedule


def _has_both_ends(schedule: str) -> bool:
    """Whether the first device of any pipeline has the first and the last stage of the model."""
    usual = get_schedule(schedule).placement(2, 2)
    return len(usual.ranks) - 1 in usual.stages_of_rank(0)


def _layers_per_device(
    architecture: Architecture, schedule: str, pp: int, num_virtual_stages: int, stages: Sequence[int]
) -> list[tuple[int, int]]:
    """(all, dense) layers that some devices hold."""
    placement = get_schedule(schedule).placement(pp, num_virtual_stages)
    if len(placement.ranks) > architecture.num_layers + MAX_EMPTY_STAGES:  # not legal
        return [(0, 0)] * len(stages)
    every = even_layers_on_placement(architecture, placement)
    dense = dense_layers_by_stage(architecture, every)
    held = [placement.stages_of_rank(stage) for stage in stages]
    return [(sum(every[one] for one in own), sum(dense[one] for one in own)) for own in held]
