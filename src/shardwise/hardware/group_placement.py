"""Placement of a group on a chip's network: the part of each level of a torus, of pods or of switches that it spans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import permutations

from shardwise.hardware.catalog_networks import build_bare_chip_topology
from shardwise.hardware.cluster_loading import is_cluster, load_cluster
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.topology import Topology
from shardwise.hardware.network.torus import Torus
from shardwise.values import InputError
from shardwise.values.argument_labels import argument_label

MAX_TORUS_AXES = 3


def place_group(on: str, axes: Sequence[int]) -> tuple[Topology, list[Cut]]:
    """Return the network of a chip or a cluster, and the part of each of its levels that a group of devices spans.

    `on` is a bare chip ("tpu-v5e"), whose axes are physical axes of their own, or a cluster ("tpu-v5e:4x4", "h100:64", a .toml
    file). `axes` are devices on each axis of a torus (and pods, last), or on each tier of switches from the inside out; one
    number fills the tiers. Raises `InputError` for axes that the network does not have.

    >>> [cut.size for cut in place_group("h100", (16,))[1]]
    [8, 2]
    """
    axes = tuple(axes)
    if is_cluster(on):
        topology = load_cluster(on).sustained_topology
    else:
        topology = build_bare_chip_topology(on.lower(), axes)
        if isinstance(topology, Torus):
            _require_sold(on.lower(), axes)
            return topology, [Cut(size, 1) for size in axes]
    if isinstance(topology, Switched):
        sizes = _sizes_on_tiers(on, axes, topology.levels)
    elif isinstance(topology, Torus):
        sizes = _sizes_on_torus(on, axes, topology.levels)
    else:
        sizes = _sizes_on_pods(on, axes, topology.torus.levels, topology.num_pods)
    return topology, [Cut(size, 1) for size in sizes]


def _require_sold(chip: str, axes: tuple[int, ...]) -> None:
    """Refuse axes that no slice of the chip has: the catalogue takes the shape, filled up with axes of 1, or it does not."""
    for num_axes in range(len(axes), MAX_TORUS_AXES + 1):
        with suppress(InputError):
            load_cluster(f"{chip}:" + "x".join(map(str, axes + (1,) * (num_axes - len(axes)))))
            return
    label = argument_label("axes")
    raise InputError(
        f"{label}: found {_join_sizes(axes)}; no pod of {chip} has such axes; fewer or shorter ones are required, such as "
        f"{label} 4"
    )


def _sizes_on_pods(on: str, axes: tuple[int, ...], shape: tuple[int, ...], num_pods: int) -> list[int]:
    """Return the sizes on the torus, and last the pods: 1 if there are only axes of the torus."""
    inside, pods = (axes[:-1], axes[-1]) if len(axes) == len(shape) + 1 else (axes, 1)
    if pods > num_pods:
        raise InputError(
            f"{argument_label('axes')}: found {pods} pods on {on}, which has {num_pods}; at most so many are required"
        )
    return [*_sizes_on_torus(on, inside, shape), pods]


def _sizes_on_torus(on: str, axes: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """Return the sizes in the order of the physical axes: a full axis each if there is one, else the shortest that it divides."""
    if len(axes) <= len(shape):
        filled = axes + (1,) * (len(shape) - len(axes))
        fitting = [
            order
            for order in permutations(filled)
            if all(length % size == 0 for size, length in zip(order, shape, strict=True))
        ]
        if fitting:
            return list(min(fitting, key=lambda order: _repeats(order, shape)))
    label, lengths = argument_label("axes"), "x".join(map(str, shape))
    raise InputError(
        f"{label}: found {_join_sizes(axes)} on {on}; each needs a physical axis of its own of {lengths}, of its size or a "
        f"multiple of it; a group on several physical axes is written as several sizes, such as {label} {_join_sizes(shape)}"
    )


def _repeats(order: Iterable[int], shape: Iterable[int]) -> float:
    """Return how often the group's axes fit on their physical axes, in all."""
    return sum(length / size for size, length in zip(order, shape, strict=True) if size > 1)


def _sizes_on_tiers(on: str, axes: tuple[int, ...], tiers: tuple[int, ...]) -> list[int]:
    """Return the sizes by tier, from the inside out; one number fills the inner tier first."""
    inner = tiers[0]
    if len(axes) == 1 and axes[0] > inner and axes[0] % inner == 0:
        axes = (inner, axes[0] // inner)
    if len(axes) <= len(tiers) and all(size <= tier for size, tier in zip(axes, tiers, strict=False)):
        return [*axes, *(1,) * (len(tiers) - len(axes))]
    label = argument_label("axes")
    raise InputError(
        f"{label}: found {_join_sizes(axes)} on {on}, whose tiers hold {', '.join(map(str, tiers))} from the inside out; "
        f"one number of devices or a size for each tier is required, such as {label} {inner} or --on h100:64 {label} 1,8"
    )


def _join_sizes(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))
