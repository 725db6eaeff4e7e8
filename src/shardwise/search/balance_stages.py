"""Layers of each pipeline stage so that the slowest is as fast as can be and every device has room, by dynamic programming.

Even stages count the embedding and the head as a layer each (`layout.layers_per_stage`); what they take depends on
the vocabulary and on
the layout. Each device of a pipeline gets layers in turn; for each number of layers that the devices so far have, the division
whose slowest device takes least is kept. That is exact for the price of a layout, which asks of a device how many layers of
either kind it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.hardware.cluster import Cluster
from shardwise.layout.layers_per_stage import min_layers_per_stage, natural_layers_by_stage, stage_placement
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price.estimate import estimate
from shardwise.price.estimate_terms import MEMORY
from shardwise.price.layout_pricer import Pricing
from shardwise.price.stage_contents import StageCosts
from shardwise.search.vectorised.search_layouts import PricedLayout, SearchResult

NEAR_BEST = (
    1.35  # times the best step: even stages of those behind cost at most a third, as in DeepSeek-V3 on 16 of them
)
NUM_BALANCED = 8  # of these the fastest: some ten milliseconds each


class LayerSplit(NamedTuple):
    """Layers of some devices: the seconds of the slowest, the squares of the numbers (of equals, the most even), the numbers."""

    slowest_s: float
    squares: int
    layers: tuple[int, ...]


def balance_stages(pricing: Pricing, capacity_bytes: float) -> Layout:
    """The layout with layers per stage that make its slowest stage as fast as possible within the given memory of each device;
    the layout itself where none is faster, and where virtual stages, which others would wait for, are as even as possible."""
    if pricing.layout.pp == 1 or pricing.layout.num_virtual_stages > 1:
        return pricing.layout
    devices = _LayerSplitter(pricing, capacity_bytes)
    found = devices.best_split()
    if found is None or found.slowest_s >= devices.bound_s:
        return pricing.layout
    return _with_layers(pricing.architecture, pricing.layout, devices.layers_of_stages(found.layers))


@dataclass(frozen=True)
class StageBalancer:
    """Layers of each stage for layouts of a job, within a given memory per device."""

    architecture: Architecture
    cluster: Cluster
    job: Job
    capacity_bytes: float

    def balance_result(self, found: SearchResult) -> SearchResult:
        """A search's result, with the best stages for the pipelines among the fastest layouts."""
        rows = (*found.best, *found.even, *found.by_factorisation)
        within = found.best[0].step_time_s * NEAR_BEST
        near = (row for row in rows if row.layout.pp > 1 and row.step_time_s <= within)
        tried = list(dict.fromkeys(sorted(near, key=lambda row: row.step_time_s)))[:NUM_BALANCED]
        better = {row.layout: self.best(row) for row in tried}

        def changed(rows: Sequence[PricedLayout]) -> tuple[PricedLayout, ...]:
            return tuple(better.get(row.layout, row) for row in rows)

        best = sorted({*better.values(), *changed(found.best)}, key=lambda row: (row.step_time_s, str(row.layout)))
        return replace(
            found, best=tuple(best), even=changed(found.even), by_factorisation=changed(found.by_factorisation)
        )

    def balance_layout(self, layout: Layout) -> Layout:
        """A layout with its best stages."""
        return self.best(self._price(layout)).layout if layout.pp > 1 else layout

    def best(self, row: PricedLayout) -> PricedLayout:
        """The faster of a row and it with balanced stages."""
        layout = balance_stages(Pricing(self.architecture, self.cluster, self.job, row.layout), self.capacity_bytes)
        return row if layout == row.layout else min(row, self._price(layout), key=lambda one: one.step_time_s)

    def _price(self, layout: Layout) -> PricedLayout:
        priced = estimate(self.architecture, self.cluster, self.job, layout)
        return PricedLayout(layout, priced.step_time_s, priced.memory_bytes)


def _with_layers(architecture: Architecture, layout: Layout, layers: tuple[int, ...]) -> Layout:
    """The layout with layers per stage; None for them where these are the even ones."""
    even = natural_layers_by_stage(architecture, stage_placement(layout))
    return replace(layout, layers_per_stage=None if layers == even else layers)


@dataclass
class _LayerSplitter:
    """The devices of a pipeline, each with the layers of one stage, or of a stage and its mirror image."""

    pricing: Pricing
    capacity_bytes: float

    def __post_init__(self) -> None:
        layout, pricing = self.pricing.layout, self.pricing
        self.both_ends = pricing.pipeline.ends > 1
        self.num_devices = layout.pp // 2 if self.both_ends else layout.pp
        fewest, held = min_layers_per_stage(pricing.placement), pricing.placement.stages_of_rank
        self.fewest = [sum(fewest[stage] for stage in held(d)) for d in range(self.num_devices)]
        self.costs = pricing.unit_costs()
        self.known: dict[tuple[bool, bool, int, int], float] = {}
        self.bound_s = max(float(pricing.step(stage).total_s) for stage in pricing.stages(self.costs))

    def best_split(self) -> LayerSplit | None:
        """The best division of all layers; None where none is faster than the layout's own within the memory."""
        num_layers = self.pricing.architecture.num_layers
        best = {(0, 0): LayerSplit(0.0, 0, ())}
        for device in range(self.num_devices):
            left = sum(self.fewest[device + 1 :])
            following: dict[tuple[int, int], LayerSplit] = {}
            for (held, dense), before in best.items():
                for count, own_dense, seconds in self._layer_choices(device, num_layers - held - left, dense):
                    key = held + count, dense + own_dense
                    found = LayerSplit(
                        max(before.slowest_s, seconds), before.squares + count * count, (*before.layers, count)
                    )
                    if key not in following or found < following[key]:
                        following[key] = found
            best = self._drop_unreachable(following, self.num_devices - device - 1)
        return min(best.values(), default=None)

    def _layer_choices(self, device: int, most: int, dense: int) -> Iterator[tuple[int, int, float]]:
        """The numbers of layers that a device can have, how many of them are leading dense ones, and its time: `most` at most,
        and none that makes it slower than the layout is, or that does not fit."""
        for count in range(self.fewest[device], most + 1):
            own_dense = min(self.pricing.architecture.num_dense_layers - dense, self._layers_of_first(count))
            seconds = self._seconds(device, count, own_dense)
            if seconds > self.bound_s or not self._fits(device, count, own_dense):
                return
            yield count, own_dense, seconds

    def _drop_unreachable(
        self, found: dict[tuple[int, int], LayerSplit], num_left: int
    ) -> dict[tuple[int, int], LayerSplit]:
        """The numbers from which so many devices can hold all remaining layers: none takes more than `_max_layers`. Behind the
        last device these are all layers."""
        least = self.pricing.architecture.num_layers - num_left * self._max_layers
        return {key: one for key, one in found.items() if key[0] >= least}

    @cached_property
    def _max_layers(self) -> int:
        """The most layers, all of the faster kind, with which a device without embedding and head is as fast as the layout."""
        architecture = self.pricing.architecture
        middle = min(1, self.num_devices - 1)
        count = 1
        while count < architecture.num_layers and any(
            self._seconds(middle, count + 1, dense) <= self.bound_s
            for dense in {0, min(count + 1, architecture.num_dense_layers)}
        ):
            count += 1
        return count

    def _layers_of_first(self, count: int) -> int:
        """How many of a device's layers are on the stage nearer to the model's beginning."""
        return -(-count // 2) if self.both_ends else count

    def _stage(self, device: int, count: int, dense: int) -> StageCosts:
        return self.pricing.stage(self.pricing.counts_with(device, count, dense), self.costs)

    def _seconds(self, device: int, count: int, dense: int) -> float:
        """The step of a device with so many layers."""
        key = device == 0, device == self.num_devices - 1, count, dense
        if key not in self.known:
            self.known[key] = float(self.pricing.step(self._stage(device, count, dense)).total_s)
        return self.known[key]

    def _fits(self, device: int, count: int, dense: int) -> bool:
        memory = self.pricing.memory(self._stage(device, count, dense), device)
        return sum(MEMORY.values(memory).values()) <= self.capacity_bytes

    def layers_of_stages(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of each stage, from those of each device."""
        if not self.both_ends:
            return layers
        return (*(-(-count // 2) for count in layers), *(count // 2 for count in reversed(layers)))
