"""A mesh of named axes on a chip's links, and the placement of a group on its network.

Both say which part of the network is spanned: of each level of a torus, of pods or of switches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations

from shardwise.hardware.chips import Chip, load_chip
from shardwise.hardware.cluster import build_bare_chip_topology
from shardwise.hardware.cluster_loading import is_cluster, load_cluster
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.topology import GroupLinks, Topology
from shardwise.hardware.network.torus import Torus
from shardwise.sharding import Mesh
from shardwise.values import InputError, argument_label

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


@dataclass(frozen=True, slots=True)
class MeshOnChips:
    """Mesh placed on chips: the chip, the network, and the links of every group of axes."""

    name: str
    chip: Chip
    topology: Topology
    mesh: Mesh
    links: GroupLinks

    def cut(self, mesh: Mesh) -> MeshOnChips:
        """Return the same chips for a mesh whose axes are parts of this one's, in order, the major part first."""
        cuts: dict[str, tuple[Cut, ...]] = {}
        parts = list(mesh.axes)
        for axis, size in self.mesh.axes:
            axis_parts: list[tuple[str, int]] = []
            while (parts and math.prod(n for _, n in axis_parts) < size) or not axis_parts:
                axis_parts.append(parts.pop(0))
            cuts |= _split_cuts(self.links.cuts[axis], axis_parts)
        return MeshOnChips(self.name, self.chip, self.topology, mesh, GroupLinks(self.topology, cuts))


def place_mesh(mesh: Mesh, on: str) -> MeshOnChips:
    """Place a mesh on a bare chip (`tpu-v5p`) or on a cluster (`tpu-v5e:4x4`, `h100:64`, `my-cluster.toml`).

    On a bare torus chip each mesh axis has a physical axis of its own, wrapped by the chip's rule. On a slice an axis takes a
    free physical axis of its size if there is one, else factors of the free sizes; on several pods the first axes take the
    pods. Behind switches the last axis is innermost.
    Raises `InputError` if the mesh does not fill the cluster.
    """
    if not is_cluster(on):
        chip = load_chip(on)
        topology = build_bare_chip_topology(on, tuple(size for _, size in mesh.axes))
        if isinstance(topology, Torus):
            cuts = {name: _axis_cuts(i, size, len(mesh.axes)) for i, (name, size) in enumerate(mesh.axes)}
            return MeshOnChips(on, chip, topology, mesh, GroupLinks(topology, cuts))
    else:
        cluster = load_cluster(on)
        chip, topology = cluster.chip, cluster.sustained_topology
        if cluster.num_devices != mesh.num_devices:
            raise InputError(
                f"mesh: {mesh.num_devices} devices ({_format_mesh(mesh)}) on {on}, which has {cluster.num_devices}; "
                "the mesh must fill the cluster"
            )
    return MeshOnChips(on, chip, topology, mesh, GroupLinks(topology, _cut_axes(mesh, topology)))


def _format_mesh(mesh: Mesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.axes)


def _axis_cuts(level: int, size: int, num_levels: int) -> tuple[Cut, ...]:
    return tuple(Cut(size if i == level else 1, 1) for i in range(num_levels))


def _split_cuts(cuts: tuple[Cut, ...], parts: list[tuple[str, int]]) -> dict[str, tuple[Cut, ...]]:
    """Split an axis's cuts among its parts, from the minor one on."""
    free_sizes, strides = [cut.size for cut in cuts], [cut.stride for cut in cuts]
    cuts_by_part: dict[str, tuple[Cut, ...]] = {}
    for name, size in reversed(parts):
        part_cuts = []
        for level in range(len(free_sizes)):
            share = math.gcd(size, free_sizes[level])
            part_cuts.append(Cut(share, strides[level]))
            size, free_sizes[level], strides[level] = size // share, free_sizes[level] // share, strides[level] * share
        cuts_by_part[name] = tuple(part_cuts)
    return cuts_by_part


def _cut_axes(mesh: Mesh, topology: Topology) -> dict[str, tuple[Cut, ...]]:
    """Return the cuts of each axis: whole physical axes of the same size first, then factors, from the last axis on."""
    if isinstance(topology, Pods):
        return _cut_axes_on_pods(mesh, topology)
    free_sizes, strides = list(topology.levels), [1] * len(topology.levels)
    cuts: dict[str, tuple[Cut, ...]] = {}
    order = [*reversed(mesh.axes)]
    if isinstance(topology, Torus):
        order.sort(key=lambda axis: axis[1] not in topology.levels)
    for name, size in order:
        exact = [i for i, free in enumerate(free_sizes) if isinstance(topology, Torus) and free == size and size > 1]
        axis_cuts = []
        for level in range(len(free_sizes)):
            share = math.gcd(size, free_sizes[level]) if not exact or level == exact[0] else 1
            axis_cuts.append(Cut(share, strides[level]))
            size, free_sizes[level], strides[level] = size // share, free_sizes[level] // share, strides[level] * share
        cuts[name] = tuple(axis_cuts)
    return cuts


def _cut_axes_on_pods(mesh: Mesh, topology: Pods) -> dict[str, tuple[Cut, ...]]:
    """Give the pods to the first axes; the rest of each axis lies on the torus of a pod."""
    free_pods, stride = topology.num_pods, topology.num_pods
    inside, across = [], {}
    for name, size in mesh.axes:
        share = math.gcd(size, free_pods)
        free_pods, stride = free_pods // share, stride // share
        across[name] = Cut(share, stride)
        inside.append((name, size // share))
    cuts = _cut_axes(Mesh(tuple(inside)), topology.torus)
    return {name: (*cuts[name], across[name]) for name in across}
