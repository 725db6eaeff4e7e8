"""Contents of a pipeline's virtual stages, as the prices of a layout count them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.cost.counts import KEPT, add_up
from shardwise.cost.pricing import Pricing
from shardwise.lowering.stages import SPLIT, stage_units
from shardwise.model.decoder import LAYERS, PREDICTS
from shardwise.schedule.action import Placement
from shardwise.simulate.units import UnitWorks


class Stage(NamedTuple):
    """A virtual stage: its units in the model's order.

    `owned`: those, and others, whose weights rest on the rank because of the stage: it reduces and updates them. `used`:
    units that run on weights which another unit owns. `host_s`: a micro-batch's activations to the host. `exchange_s`:
    gradients exchanged with the rank that has a copy of the weights. `saved_bytes`: what a micro-batch's forward pass keeps,
    of which `waiting_bytes` until weights' gradients are made where these wait.
    """

    units: tuple[str, ...]
    owned: tuple[str, ...]
    used: frozenset[str] = frozenset()
    host_s: float = 0.0
    exchange_s: float = 0.0
    saved_bytes: float = 0.0
    waiting_bytes: float = 0.0


def stages_of(works: UnitWorks, placement: Placement) -> tuple[tuple[Stage, ...], tuple[tuple[int, ...], ...]]:
    """All virtual stages, and those that each rank holds."""
    pricing = works.pricing
    placed = [tuple(unit.kind for unit in units) for units in stage_units(pricing.architecture, pricing.layout)]
    held = tuple(placement.held(rank) for rank in range(pricing.layout.pp))
    found: dict[int, Stage] = {}
    for rank, numbers in enumerate(held):
        for number, units in zip(numbers, _recomputing(pricing, rank, [placed[n] for n in numbers]), strict=True):
            found[number] = _stage(works, rank, units)
    return tuple(found[number] for number in sorted(found)), held


def _recomputing(pricing: Pricing, rank: int, stages: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The units of a rank's stages, with the layers that recompute nothing by their own names: the last of each kind."""
    counts = pricing.counts(rank)
    left = {kind: int(number) - int(counts.kept.get(kind, 0)) for kind, number in counts.layers.items()}
    found = []
    for units in stages:
        names = []
        for unit in units:
            if unit in left:
                left[unit] -= 1
            names.append(KEPT + unit if unit in left and left[unit] < 0 else unit)
        found.append(tuple(names))
    return found


def _stage(works: UnitWorks, rank: int, units: tuple[str, ...]) -> Stage:
    """A stage of a rank. What the rank holds of embeddings follows from the counts of its price."""
    counts, (activation, state) = works.pricing.counts(rank), works.costs
    plain = [unit.removeprefix(KEPT) for unit in units]
    used = {"embedding"} if "embedding" in units and not counts.copies else set()
    owned = [unit for unit in plain if unit not in used]
    if "head" in units and "embedding" not in units and counts.copies and not counts.embedding:
        owned.append("embedding")  # a copy, which multi-token prediction borrows
    if "head" in units and counts.untied:
        owned.append("untied")
    times: Mapping[str, int] = Counter(unit for unit in units if unit.removeprefix(KEPT) in LAYERS + PREDICTS)
    split = {unit: number for unit, number in times.items() if unit.removeprefix(KEPT) in SPLIT}
    saved = add_up(activation, {**times, "head": units.count("head")}, "saved_bytes")
    host = works.pricing.host
    exchange_s = 0.0
    if counts.exchanges and {"embedding", "head"} & set(units):
        exchange_s += float(state["embedding"].exchange_s)
    if works.pricing.pipeline.form.both_ends:
        exchange_s += sum(float(state[unit].exchange_s) for unit in owned)
    return Stage(
        units, tuple(owned), frozenset(used), exchange_s=exchange_s,
        host_s=float(add_up(activation, times, "saved_bytes")) / host.bytes_per_s if host.activations else 0.0,
        saved_bytes=0.0 if host.activations else float(saved), waiting_bytes=float(add_up(activation, split, "waiting_bytes")),
    )  # fmt: skip
