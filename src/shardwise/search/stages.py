"""Layers of each pipeline stage so that the slowest is as fast as can be and every device has room, by dynamic programming.

Even stages count the embedding and the head as a layer each (`layout.stages`); what they take depends on the vocabulary and on
the layout. Each device of a pipeline gets layers in turn; for each number of layers that the devices so far have, the division
whose slowest device takes least is kept. That is exact for the price of a layout, which asks of a device how many layers of
either kind it has, as long as leading dense layers are on the first virtual stage of their device, as in published models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.cluster.cluster import Cluster
from shardwise.cost.estimate import estimate
from shardwise.cost.memory_terms import MEMORY
from shardwise.cost.pricing import Pricing
from shardwise.cost.stage import Stage
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.stages import fewest_layers
from shardwise.model.architecture import Architecture
from shardwise.search.search import Found, SearchResult

NEAR = 1.35  # times the best step: even stages of those behind cost at most a third, as in DeepSeek-V3 on 16 of them
NUM_NEAR = 16  # of these the fastest: a few milliseconds each


class Division(NamedTuple):
    """Layers of some devices: the seconds of the slowest, the squares of the numbers (of equals, the most even), the numbers."""

    slowest_s: float
    squares: int
    layers: tuple[int, ...]


def balanced(pricing: Pricing, capacity_bytes: float) -> Layout:
    """The layout with layers of each stage that make its slowest stage as fast as can be with so much memory on each device; the
    layout itself where none is faster."""
    if pricing.layout.pp == 1:
        return pricing.layout
    devices = _Devices(pricing, capacity_bytes)
    found = devices.divided()
    if found is None or found.slowest_s >= devices.bound_s:
        return pricing.layout
    return replace(pricing.layout, layers_per_stage=devices.of_stages(found.layers))


def with_balanced_stages(
    architecture: Architecture, cluster: Cluster, job: Job, found: SearchResult, capacity_bytes: float
) -> SearchResult:
    """What a search found, the pipelines among the fastest layouts with balanced stages."""
    rows = (*found.best, *found.even, *found.by_factorisation)
    within = found.best[0].step_time_s * NEAR
    near = sorted(
        (row for row in rows if row.layout.pp > 1 and row.step_time_s <= within), key=lambda row: row.step_time_s
    )
    tried = list(dict.fromkeys(near))[:NUM_NEAR]
    better = {row.layout: _balanced_row(architecture, cluster, job, row, capacity_bytes) for row in tried}

    def changed(rows: Sequence[Found]) -> tuple[Found, ...]:
        return tuple(better.get(row.layout, row) for row in rows)

    best = sorted({*better.values(), *changed(found.best)}, key=lambda row: (row.step_time_s, str(row.layout)))
    return replace(found, best=tuple(best), even=changed(found.even), by_factorisation=changed(found.by_factorisation))


def _balanced_row(architecture: Architecture, cluster: Cluster, job: Job, row: Found, capacity_bytes: float) -> Found:
    """The fastest that fits of a row, it with balanced stages, and with as many layers on each virtual stage."""
    pricing = Pricing(architecture, cluster, job, row.layout)
    layouts = {balanced(pricing, capacity_bytes), *_alike(architecture, row.layout)}
    priced = {
        layout: estimate(architecture, cluster, job, layout)
        for layout in layouts
        if layout.layers_per_stage not in (None, pricing.layers)
    }
    found = (Found(layout, one.step_time_s, one.memory_bytes) for layout, one in priced.items())
    return min((row, *(one for one in found if one.memory_bytes <= capacity_bytes)), key=lambda one: one.step_time_s)


def _alike(architecture: Architecture, layout: Layout) -> Iterator[Layout]:
    """The layout with as many layers on each virtual stage, where these come out even: then none waits for another."""
    layers, rest = divmod(architecture.num_layers, layout.pp)
    if not rest and not layers % layout.num_virtual_stages:
        yield replace(layout, layers_per_stage=(layers,) * layout.pp)


@dataclass
class _Devices:
    """The devices of a pipeline, each with the layers of one stage, or of a stage and its mirror image.

    `first[d]` are the stages with which device d begins.
    """

    pricing: Pricing
    capacity_bytes: float

    def __post_init__(self) -> None:
        layout, pricing = self.pricing.layout, self.pricing
        self.both_ends = pricing.pipeline.ends > 1
        self.num_devices = layout.pp // 2 if self.both_ends else layout.pp
        fewest = fewest_layers(layout.pp, layout.num_virtual_stages)
        self.fewest = [fewest[d] + (fewest[-1 - d] if self.both_ends else 0) for d in range(self.num_devices)]
        self.costs = pricing.unit_costs()
        self.known: dict[tuple[bool, bool, int, int], float] = {}
        self.bound_s = max(float(pricing.step(stage).total_s) for stage in pricing.stages(self.costs))

    def divided(self) -> Division | None:
        """The best division of all layers; None where none is faster than the layout's own within the memory."""
        num_layers = self.pricing.architecture.num_layers
        best = {(0, 0): Division(0.0, 0, ())}
        for device in range(self.num_devices):
            left = sum(self.fewest[device + 1 :])
            following: dict[tuple[int, int], Division] = {}
            for (held, dense), before in best.items():
                for count, own_dense, seconds in self._choices(device, num_layers - held - left, dense):
                    key = held + count, dense + own_dense
                    found = Division(
                        max(before.slowest_s, seconds), before.squares + count * count, (*before.layers, count)
                    )
                    if key not in following or found < following[key]:
                        following[key] = found
            best = self._reaching(following, self.num_devices - device - 1)
        return min((one for (held, _), one in best.items() if held == num_layers), default=None)

    def _choices(self, device: int, most: int, dense: int) -> Iterator[tuple[int, int, float]]:
        """How many layers a device can have, of which how many are leading dense ones, and how long it takes: `most` at most, and
        none that makes it slower than the layout is, or that it has no room for."""
        for count in range(self.fewest[device], most + 1):
            own_dense = min(self.pricing.architecture.num_dense_layers - dense, self._of_first(device, count))
            seconds = self._seconds(device, count, own_dense)
            if seconds > self.bound_s or not self._fits(device, count, own_dense):
                return
            yield count, own_dense, seconds

    def _reaching(self, found: dict[tuple[int, int], Division], num_left: int) -> dict[tuple[int, int], Division]:
        """Those from which so many devices can take all that is left: none takes more than `_most`."""
        least = self.pricing.architecture.num_layers - num_left * self._most
        return {key: one for key, one in found.items() if key[0] >= least}

    @cached_property
    def _most(self) -> int:
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

    def _of_first(self, device: int, count: int) -> int:
        """How many of a device's layers are on the first of its virtual stages."""
        virtual = self.pricing.layout.num_virtual_stages * (2 if self.both_ends else 1)
        return count // virtual if device == 0 and not self.both_ends else -(-count // virtual)

    def _stage(self, device: int, count: int, dense: int) -> Stage:
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

    def of_stages(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Layers of each stage, from those of each device."""
        if not self.both_ends:
            return layers
        return (*(-(-count // 2) for count in layers), *(count // 2 for count in reversed(layers)))
