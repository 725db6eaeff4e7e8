"""Layers of each pipeline stage such that the slowest is as fast as possible and every device has room, by dynamic programming.

Equal stages count the embedding and the head as one layer each (`layout.layers_per_stage`), but their cost depends on the
vocabulary and on the layout. Devices get layers in turn; for each number of layers assigned so far, the split whose slowest
device is fastest is kept. This is exact for the price of a layout, which depends only on how many layers of each kind each
device has."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.hardware import Cluster
from shardwise.layout import Layout, stage_placement
from shardwise.layout.layers_per_stage import (
    BALANCED,
    BY_PRODUCTS,
    EVEN,
    count_kinds,
    equal_layers_by_stage,
    layers_by_products,
    min_layers_per_stage,
    natural_layers_by_stage,
)
from shardwise.model import Architecture, Job
from shardwise.price import MEMORY, Pricing, Problem
from shardwise.price.estimate import estimate
from shardwise.price.stage_contents import StageCosts
from shardwise.search.vectorised.search_layouts import PricedLayout, SearchResult

# Layouts within this factor of the best step are balanced: equal stages cost at most a third, as in DeepSeek-V3 on 16 stages.
NEAR_BEST = 1.35
NUM_BALANCED = 8  # the fastest of these are balanced: some ten milliseconds each


class LayerSplit(NamedTuple):
    """Layers of the first devices of a pipeline. Ordered: seconds of the slowest, then squares of the layer counts (of equally
    fast splits the most even), then the counts."""

    slowest_s: float
    squares: int
    layers: tuple[int, ...]


def balance_stages(pricing: Pricing, capacity_bytes: float) -> Layout:
    """Return the layout with the layers per stage that make its slowest stage fastest within the memory of each device.

    Returns the layout itself if no split is faster, and if it has virtual stages: other ranks would wait for uneven ones."""
    if pricing.layout.pp == 1 or pricing.layout.num_virtual_stages > 1:
        return pricing.layout
    splitter = _LayerSplitter(pricing, capacity_bytes)
    split = splitter.best_split()
    if split is None or split.slowest_s >= splitter.bound_s:
        return pricing.layout
    return _with_layers(pricing.architecture, pricing.layout, splitter.layers_of_stages(split.layers))


@dataclass(frozen=True)
class StageBalancer:
    """Deals layers out to the stages of layouts of one job, within `capacity_bytes` per device.

    `stages`: by cost ("balanced"), as many to each stage ("equal"), by matrix products ("by_products"), or as they are ("even").
    """

    architecture: Architecture
    cluster: Cluster
    job: Job
    capacity_bytes: float
    stages: str = BALANCED

    def balance_result(self, result: SearchResult) -> SearchResult:
        """Return a search result in which the fastest pipelines have stages as they are dealt out, without what does not fit."""
        if self.stages == EVEN:
            return result
        priced_layouts = (*result.best, *result.even, *result.by_factorisation)
        limit_s = result.best[0].step_time_s * NEAR_BEST
        near_best = (row for row in priced_layouts if row.layout.pp > 1 and row.step_time_s <= limit_s)
        rebalanced = list(dict.fromkeys(sorted(near_best, key=lambda row: row.step_time_s)))[:NUM_BALANCED]
        balanced = {row.layout: self.best(row) for row in rebalanced}

        def with_balanced(rows: Sequence[PricedLayout]) -> tuple[PricedLayout, ...]:
            dealt = (balanced.get(row.layout, row) for row in rows)
            if self.stages == BALANCED:  # splits within the memory
                return tuple(dealt)
            return tuple(row for row in dealt if row.memory_bytes <= self.capacity_bytes)

        best = sorted(
            {*with_balanced(rebalanced), *with_balanced(result.best)},
            key=lambda row: (row.step_time_s, str(row.layout)),
        )
        return replace(
            result, best=tuple(best) or result.best, even=with_balanced(result.even),
            by_factorisation=with_balanced(result.by_factorisation),
        )  # fmt: skip

    def balance_layout(self, layout: Layout) -> Layout:
        """Return a layout with its stages as they are dealt out."""
        return self.best(self._price(layout)).layout if layout.pp > 1 and self.stages != EVEN else layout

    def best(self, natural: PricedLayout) -> PricedLayout:
        """Return a priced layout with its stages as they are dealt out: balanced ones where they are faster than natural ones."""
        if self.stages != BALANCED:
            dealt = self._dealt(natural.layout)
            return natural if dealt == natural.layout else self._price(dealt)
        layout = balance_stages(
            Pricing(Problem(self.architecture, self.cluster, self.job), natural.layout), self.capacity_bytes
        )
        return (
            natural if layout == natural.layout else min(natural, self._price(layout), key=lambda row: row.step_time_s)
        )

    def _dealt(self, layout: Layout) -> Layout:
        if layout.num_virtual_stages > 1:
            return layout
        deal = layers_by_products if self.stages == BY_PRODUCTS else equal_layers_by_stage
        return _with_layers(self.architecture, layout, deal(self.architecture, layout.pp))

    def _price(self, layout: Layout) -> PricedLayout:
        priced = estimate(Problem(self.architecture, self.cluster, self.job), layout)
        return PricedLayout(layout, priced.step_time_s, priced.memory_bytes)


def _with_layers(architecture: Architecture, layout: Layout, layers: tuple[int, ...]) -> Layout:
    """Set the layers per stage; None if they are the natural ones."""
    natural_layers = natural_layers_by_stage(architecture, stage_placement(layout))
    return replace(layout, layers_per_stage=None if layers == natural_layers else layers)


@dataclass
class _LayerSplitter:
    """Splits layers over the devices of a pipeline. A device holds one stage, or a stage and its mirror image."""

    pricing: Pricing
    capacity_bytes: float

    def __post_init__(self) -> None:
        layout, pricing = self.pricing.layout, self.pricing
        self.both_ends = pricing.pipeline.ends > 1
        self.num_devices = layout.pp // 2 if self.both_ends else layout.pp
        min_layers, stages_of_rank = min_layers_per_stage(pricing.placement), pricing.placement.stages_of_rank
        self.min_layers = [
            sum(min_layers[stage] for stage in stages_of_rank(device)) for device in range(self.num_devices)
        ]
        self.costs = pricing.unit_costs()
        self.architecture = pricing.architecture
        self.memo: dict[Hashable, float] = {}
        self.bound_s = max(float(pricing.step(stage).total_s) for stage in pricing.stages(self.costs))

    @cached_property
    def last_change(self) -> int:
        """Number of the first layer from which on all layers are of one kind: where a stage begins after it does not matter."""
        layers = self.architecture.layer_units
        return next((number for number in range(len(layers), 0, -1) if layers[number - 1] != layers[-1]), 0)

    def best_split(self) -> LayerSplit | None:
        """Return the best split of all layers; None if none is faster than the layout's own within the memory."""
        num_layers = self.architecture.num_layers
        # By layers assigned so far, and how many of them are at the model's beginning, up to the last change of kind: all that
        # later devices and the price depend on.
        splits = {(0, 0): LayerSplit(0.0, 0, ())}
        for device in range(self.num_devices):
            reserved = sum(self.min_layers[device + 1 :])
            longer: dict[tuple[int, int], LayerSplit] = {}
            for (assigned, leading), split in splits.items():
                for count, seconds in self._layer_choices(device, assigned, leading, num_layers - assigned - reserved):
                    key = assigned + count, min(leading + self._layers_of_first(count), self.last_change)
                    extended = LayerSplit(
                        max(split.slowest_s, seconds), split.squares + count * count, (*split.layers, count)
                    )
                    if key not in longer or extended < longer[key]:
                        longer[key] = extended
            splits = self._drop_unreachable(longer, self.num_devices - device - 1)
        return min(splits.values(), default=None)

    def _layer_choices(self, device: int, assigned: int, leading: int, max_layers: int) -> Iterator[tuple[int, float]]:
        """Yield (layers, seconds) that a device can have after those that are assigned, `leading` of them before its first stage.

        At most `max_layers`, and none that does not fit or makes the device slower than the layout is."""
        for count in range(self.min_layers[device], max_layers + 1):
            layers = self._stage_layers(count, assigned, leading)
            seconds = self._seconds(device, layers)
            if seconds > self.bound_s or not self._fits(device, layers):
                return  # more layers only take longer, and more memory
            yield count, seconds

    def _stage_layers(self, count: int, assigned: int, leading: int) -> tuple[range, ...]:
        """Return the layers of a device's stages: of the next one from the beginning, and with both ends of one from the end."""
        first = self._layers_of_first(count)
        first_stage = range(leading, leading + first)
        if not self.both_ends:
            return (first_stage,)
        end = self.architecture.num_layers - (assigned - leading)
        return first_stage, range(end - (count - first), end)

    def _drop_unreachable(
        self, splits: dict[tuple[int, int], LayerSplit], num_later_devices: int
    ) -> dict[tuple[int, int], LayerSplit]:
        """Drop splits after which the later devices could not hold all remaining layers."""
        min_assigned = self.architecture.num_layers - num_later_devices * self._max_layers
        return {key: split for key, split in splits.items() if key[0] >= min_assigned}

    @cached_property
    def _max_layers(self) -> int:
        """Most successive layers with which a device without embedding and head is no slower than the layout."""
        num_layers, middle, count = self.architecture.num_layers, min(1, self.num_devices - 1), 1
        while count < num_layers and any(
            self._seconds(middle, (range(begin, begin + count + 1),)) <= self.bound_s
            for begin in range(min(num_layers - count, self.last_change + 1))
        ):
            count += 1
        return count

    def _layers_of_first(self, count: int) -> int:
        """Layers of a device that are on its stage nearer to the model's beginning."""
        return -(-count // 2) if self.both_ends else count

    def _stage(self, device: int, layers: tuple[range, ...]) -> StageCosts:
        return self.pricing.stage(self.pricing.counts_with(device, layers), self.costs)

    def _seconds(self, device: int, layers: tuple[range, ...]) -> float:
        """Step time of a device with these layers."""
        recomputed = self.pricing.layout.recompute_layers
        key = (
            device == 0, device == self.num_devices - 1, *count_kinds(self.architecture, layers).values(),
            *(() if recomputed is None else count_kinds(self.architecture, layers, recomputed).values()),
        )  # fmt: skip
        if key not in self.memo:
            self.memo[key] = float(self.pricing.step(self._stage(device, layers)).total_s)
        return self.memo[key]

    def _fits(self, device: int, layers: tuple[range, ...]) -> bool:
        memory = self.pricing.memory(self._stage(device, layers), device)
        return sum(MEMORY.values(memory).values()) <= self.capacity_bytes

    def layers_of_stages(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the layers of each stage, from those of each device."""
        if not self.both_ends:
            return layers
        return (*(-(-count // 2) for count in layers), *(count // 2 for count in reversed(layers)))
