"""Communication on activations that overlaps with the kernels of its own pass: hidden, where prices have what is exposed of it.

Asynchronous tensor parallelism and rings move operands in pieces beside products, Megatron moves the inputs of products beside
those of the weights' gradients, and where devices wait for their host traffic runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.cost.counts import KEPT, never
from shardwise.cost.pricing import Pricing
from shardwise.cost.stage import Stage
from shardwise.cost.unit_parts import Parts, priced_family
from shardwise.layout.family import Family
from shardwise.network.placed import Links
from shardwise.symbolic import Value


def hidden_in_passes(pricing: Pricing, stage: Stage) -> dict[str, float]:
    """Seconds of a step of a stage by axis."""
    found: dict[str, float] = {}
    plain, links = replace(pricing.family, recompute="none"), pricing.links
    for unit, times in stage.computing.items():
        if never(times):
            continue
        family = plain if unit.startswith(KEPT) else pricing.family
        for axis, seconds in _hidden_s(pricing, unit.removeprefix(KEPT), family, links).items():
            found[axis] = found.get(axis, 0.0) + float(times * seconds * pricing.pipeline.rounds)
    return found


def _hidden_s(pricing: Pricing, unit: str, family: Family, links: Links) -> Mapping[str, Value]:
    """Of a unit and a micro-batch: what its collectives take, less what they expose."""
    pricer, values = pricing.pricer, pricing.values
    own = priced_family(pricer.structure, pricer.of_structure(family), unit)
    parts = pricer.parts(own, unit)
    cost = pricer.activation(unit, family, values, links)
    found: dict[str, Value] = {}
    for axis, seconds in _whole_s(pricing, parts, links).items():
        exposed = cost.forward_traffic_s.get(axis, 0.0) + cost.backward_traffic_s.get(axis, 0.0)
        found[axis] = max(float(seconds - exposed), 0.0)
    return found


def _whole_s(pricing: Pricing, parts: Parts, links: Links) -> Mapping[str, Value]:
    """Seconds of a unit's collectives on activations by axis, as if nothing ran beside them."""
    pricer, values = pricing.pricer, pricing.values
    moved = [one for one in parts.collectives if not one.carries_weights and not one.is_control]
    plain = (one for one in moved if not one.beside)
    found: dict[str, Value] = {}
    for (_, axis), seconds in pricer.traffic(parts, plain, values, links).items():
        found[axis] = found.get(axis, 0.0) + seconds
    for one in moved:
        if one.beside:
            found[one.group] = found.get(one.group, 0.0) + pricer.in_pieces_s(one, parts, values, links)
    return found
