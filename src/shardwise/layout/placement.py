"""Network links that each axis of a layout runs over.

A placement is an order of the axes, innermost first, and an order of the topology's levels (axes of the torus and then its
pods, or tiers of the switch). Each axis in turn takes from each level in turn as much as both still have: its *cuts*. The same
order numbers the ranks of a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.hardware import Cut, Pods, Switched, Topology
from shardwise.values import InputError, Value
from shardwise.values.symbolic import gcd

PLACED_AXES = ("tp", "cp", "fsdp", "dp", "pp")
ATOMIC_AXES: Mapping[str, tuple[str, ...]] = {"tp": ("tp_kv", "tp_rep"), "fsdp": ("ep", "fsdp")}  # innermost first

# Axis orders worth pricing: tensor parallelism wants the closest links, pipelines the farthest; context and data
# parallelism contend for what is between. The last two give the closest links to the data-parallel axes instead.
AXIS_ORDERS = (
    ("tp", "cp", "fsdp", "dp", "pp"),
    ("tp", "fsdp", "cp", "dp", "pp"),
    ("tp", "cp", "pp", "fsdp", "dp"),
    ("tp", "fsdp", "cp", "pp", "dp"),
    ("cp", "tp", "fsdp", "dp", "pp"),
    ("fsdp", "tp", "cp", "dp", "pp"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """`axes`: innermost first; `levels`: which level of the topology is filled first, second, ..."""

    axes: tuple[str, ...]
    levels: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.axes) != sorted(PLACED_AXES):
            raise InputError(f"placement: axes are {self.axes}; an order of {', '.join(PLACED_AXES)} is required")
        if sorted(self.levels) != list(range(len(self.levels))):
            raise InputError(f"placement: levels are {self.levels}; an order of 0..n-1 is required")

    def __str__(self) -> str:
        return ",".join(self.axes) + "@" + ",".join(map(str, self.levels))


def searched_placements(topology: Topology) -> tuple[Placement, ...]:
    """Return the placements that a search prices: each axis order on each order of a torus's axes, or on the tiers.

    Pods are always filled last, by the outermost axes: nothing else is worth their far slower network.
    """
    inside, outside = _inner_and_outer_levels(topology)
    orders: Iterable[tuple[int, ...]] = [inside] if isinstance(topology, Switched) else itertools.permutations(inside)
    return tuple(Placement(axes=axes, levels=levels + outside) for levels in orders for axes in AXIS_ORDERS)


def _inner_and_outer_levels(topology: Topology) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the levels within a pod (tiers, or axes of the torus) and the level of the pods, if there are any."""
    levels = tuple(range(len(topology.levels)))
    return (levels[:-1], levels[-1:]) if isinstance(topology, Pods) else (levels, ())


def default_placement(topology: Topology) -> Placement:
    """Return the placement with tensor parallelism innermost, on the smallest axis of a torus or the innermost tier, and pods
    outermost."""
    inside, outside = _inner_and_outer_levels(topology)
    order = inside if isinstance(topology, Switched) else sorted(inside, key=lambda i: topology.levels[i])
    return Placement(axes=AXIS_ORDERS[0], levels=(*order, *outside))


def cuts_by_axis(topology: Topology, placement: Placement, degrees: Mapping[str, Value]) -> dict[str, tuple[Cut, ...]]:
    """Return the cuts of each atomic axis on every level, for degrees that multiply to the number of devices. Raises
    `InputError` for a placement of another number of levels."""
    if len(placement.levels) != len(topology.levels):
        raise InputError(
            f"placement: levels are {placement.levels}; an order of the network's {len(topology.levels)} levels is required"
        )
    sizes: list[Value] = list(topology.levels)
    strides: list[Value] = [1] * len(sizes)
    cuts: dict[str, tuple[Cut, ...]] = {}
    for axis in (atom for group in placement.axes for atom in ATOMIC_AXES.get(group, (group,))):
        degree = degrees[axis]
        axis_cuts: list[Cut] = [Cut(1, s) for s in strides]
        for level in placement.levels:
            size = gcd(degree, sizes[level])
            axis_cuts[level] = Cut(size, strides[level])
            degree, sizes[level], strides[level] = (degree // size, sizes[level] // size, strides[level] * size)
        cuts[axis] = tuple(axis_cuts)
    return cuts


def degrees_across_pods(topology: Topology, placement: Placement, degrees: Mapping[str, Value]) -> dict[str, Value]:
    """Return the axes that cross pods, and over how many pods each does; empty on one pod and with switches."""
    if not isinstance(topology, Pods):
        return {}
    cuts = cuts_by_axis(topology, placement, degrees)
    sizes = {axis: math.prod(cuts[atom][-1].size for atom in ATOMIC_AXES.get(axis, (axis,))) for axis in placement.axes}
    return {axis: size for axis, size in sizes.items() if size > 1}
