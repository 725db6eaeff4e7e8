"""Blocks of an array that each device holds, the sends of a permute, and the number of legal shardings of an array.

In a permute each device sends one part of its shard to one device. A permute leads to any sharding that splits every dim at
least as finely as before (its degree a multiple): each device then needs a part of one old shard, and as many devices need
parts of a shard as hold it, so that sources and destinations can be paired one to one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.sharding.collectives import Collective
from shardwise.sharding.spec import Axes, Mesh, Spec
from shardwise.values import ShardingError


def list_legal_shardings(dims: Sequence[str], axes: Sequence[str], *, ordered: bool = True) -> Iterator[Spec]:
    """Yield all distinct legal shardings of an array: each axis on one dim or on none.

    ordered: I_XY and I_YX are two shardings, as they are on a mesh with more than one device on both axes; otherwise the axes
    of a dim stand in the order of `axes`.
    """
    for owners in itertools.product((None, *dims), repeat=len(axes)):
        groups = [tuple(axis for axis, owner in zip(axes, owners, strict=True) if owner == dim) for dim in dims]
        orders = ([tuple(order) for order in itertools.permutations(group)] if ordered else [group] for group in groups)
        for ordered_groups in itertools.product(*orders):
            yield Spec(tuple(dims), ordered_groups)


def count_shardings(num_dims: int, num_axes: int, *, ordered: bool = True) -> int:
    """Return the number of `list_legal_shardings`.

    Formula: (d + 1)^a without order. With it, the sum over k of C(a, k) k! C(k + d - 1, k): k axes in a row, cut into d
    parts.
    """
    if not ordered:
        return int((num_dims + 1) ** num_axes)
    counts = (math.perm(num_axes, k) * (math.comb(k + num_dims - 1, k) if k else 1) for k in range(num_axes + 1))
    return sum(counts) if num_dims else 1


def shard_fraction(spec: Spec, mesh: Mesh) -> float:
    """Return the fraction of the array that each device holds."""
    return 1.0 / mesh.size(spec.sharded_axes)


def device_index_ranges(spec: Spec, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[dict[str, range], ...]:
    """Return for each device, in device order, the indices of each dim that it holds.

    Raises `ShardingError` where an axis does not divide its dim.
    """
    shard_sizes = dict(zip(spec.dims, spec.local_shape(mesh, sizes), strict=True))
    return tuple(
        {
            dim: range(index * shard_sizes[dim], (index + 1) * shard_sizes[dim])
            for dim, index in zip(spec.dims, spec.shard_index(mesh, coordinate), strict=True)
        }
        for coordinate in mesh.coordinates()
    )


def have_same_placement(left: Spec, right: Spec, mesh: Mesh) -> bool:
    """Return True if two shardings put the same part on every device: I_XY and I_YX do not, unless an axis has size 1."""
    if left.dims != right.dims or {*_split_axes(left.partial, mesh)} != {*_split_axes(right.partial, mesh)}:
        return False
    cuts = [[mesh.size(axes) for axes in spec.axes] for spec in (left, right)]
    return cuts[0] == cuts[1] and all(
        left.shard_index(mesh, c) == right.shard_index(mesh, c) for c in mesh.coordinates()
    )


def _split_axes(axes: Axes, mesh: Mesh) -> Axes:
    return tuple(axis for axis in axes if mesh.size(axis) > 1)


BlockIndex = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PermuteSend:
    """Send of a device in a permute: the destination, and which part of its shard along each dim."""

    destination: int
    part: BlockIndex


def permute_split_factors(collective: Collective, mesh: Mesh) -> BlockIndex:
    """Return the number of parts into which a permute cuts a shard along each dim (1: whole shards)."""
    pairs = zip(collective.before.axes, collective.after.axes, strict=True)
    ratios = [divmod(mesh.size(new), mesh.size(old)) for old, new in pairs]
    if any(remainder for _, remainder in ratios):
        raise ShardingError(f"{collective}: not a permute, which splits every dim at least as finely as before")
    return tuple(ratio for ratio, _ in ratios)


def permute_sends(collective: Collective, mesh: Mesh) -> tuple[PermuteSend, ...]:
    """Return the send of each device, by device number. A device that has what it needs sends to itself."""
    ratios = permute_split_factors(collective, mesh)
    coordinates = list(mesh.coordinates())
    sends: dict[int, PermuteSend] = {}
    holders: dict[tuple[BlockIndex, BlockIndex], list[int]] = {}
    for device, coordinate in enumerate(coordinates):
        block = collective.before.shard_index(mesh, coordinate)
        holders.setdefault((_uncrossed_position(collective, mesh, coordinate), block), []).append(device)
    waiting = []
    for device, coordinate in enumerate(coordinates):
        target_block = collective.after.shard_index(mesh, coordinate)
        block = tuple(n // r for n, r in zip(target_block, ratios, strict=True))
        part = tuple(n % r for n, r in zip(target_block, ratios, strict=True))
        key = _uncrossed_position(collective, mesh, coordinate), block
        if device in holders.get(key, ()):
            holders[key].remove(device)
            sends[device] = PermuteSend(device, part)
        else:
            waiting.append((key, device, part))
    for key, device, part in waiting:
        if not holders.get(key):
            raise ShardingError(f"{collective}: not a permute; no device is left that can serve device {device}")
        sends[holders[key].pop(0)] = PermuteSend(device, part)
    return tuple(sends[device] for device in range(len(coordinates)))


def _uncrossed_position(collective: Collective, mesh: Mesh, coordinate: Mapping[str, int]) -> BlockIndex:
    """Return the position of a device along the axes that the permute does not cross."""
    return tuple(coordinate[axis] for axis in mesh.names if axis not in collective.axes)


ShardHolders = Mapping[tuple[int, int], Sequence[Sequence[int]]]


def shard_holders(spec: Spec, mesh: Mesh) -> tuple[tuple[int, int], ShardHolders]:
    """Return the rows and columns of the grid of shards, and for each cell the devices per summand of a partial sum."""
    down, across = _axes_down_and_across(spec)
    grid: dict[tuple[int, int], list[list[int]]] = {}
    for device, coordinate in enumerate(mesh.coordinates()):
        cell = mesh.position(coordinate, down), mesh.position(coordinate, across)
        summands = grid.setdefault(cell, [[] for _ in range(mesh.size(spec.partial))])
        summands[mesh.position(coordinate, spec.partial)].append(device)
    return (mesh.size(down), mesh.size(across)), grid


def _axes_down_and_across(spec: Spec) -> tuple[Axes, Axes]:
    """Return the axes of the dims drawn downwards and across."""
    axes = list(spec.axes) if len(spec.axes) <= 2 else [group for group in spec.axes if group]
    axes += [(), ()]
    return axes[0], axes[1]
