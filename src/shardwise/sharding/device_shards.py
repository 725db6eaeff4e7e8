"""The block of an array that each device holds, the sends of a permute, and how many legal shardings an array has.

In a permute each device sends one part of its shard to one device. A permute leads to any sharding that splits every dim at
least as finely as before (its degree a multiple): then each device needs a part of one old shard, and as many devices need
parts of a shard as hold it, so that sources and destinations can be paired one to one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.sharding.collectives import Collective
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes, Spec
from shardwise.values.errors import ShardingError


def list_legal_shardings(dims: Sequence[str], axes: Sequence[str], *, ordered: bool = True) -> Iterator[Spec]:
    """All distinct legal shardings of an array: each axis on one dim or on none.

    ordered: I_XY and I_YX are two shardings, as they are on a mesh with more than one device on both axes; otherwise the
    axes of a dim stand in the order of `axes`.
    """
    for places in itertools.product((None, *dims), repeat=len(axes)):
        groups = [tuple(axis for axis, place in zip(axes, places, strict=True) if place == dim) for dim in dims]
        orders = ([tuple(o) for o in itertools.permutations(group)] if ordered else [group] for group in groups)
        for chosen in itertools.product(*orders):
            yield Spec(tuple(dims), chosen)


def count_shardings(num_dims: int, num_axes: int, *, ordered: bool = True) -> int:
    """How many `list_legal_shardings` there are.

    Formula: (d + 1)^a without order. With it, the sum over k of C(a, k) k! C(k + d - 1, k): k axes in a row, cut into d parts.
    """
    if not ordered:
        return int((num_dims + 1) ** num_axes)
    rows = (math.perm(num_axes, k) * (math.comb(k + num_dims - 1, k) if k else 1) for k in range(num_axes + 1))
    return sum(rows) if num_dims else 1


def shard_fraction(spec: Spec, mesh: Mesh) -> float:
    """The part of the array that each device holds."""
    return 1.0 / mesh.size(spec.sharded_axes)


def device_index_ranges(spec: Spec, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[dict[str, range], ...]:
    """For each device, in device order, the indices of each dim that it holds.

    Raises `ShardingError` where an axis does not divide its dim.
    """
    local = dict(zip(spec.dims, spec.local_shape(mesh, sizes), strict=True))
    return tuple(
        {
            dim: range(place * local[dim], (place + 1) * local[dim])
            for dim, place in zip(spec.dims, _shard_index(spec, mesh, coordinate), strict=True)
        }
        for coordinate in mesh.coordinates()
    )


def have_same_placement(one: Spec, other: Spec, mesh: Mesh) -> bool:
    """Whether two shardings put the same part on every device: I_XY and I_YX do not, unless an axis has size 1."""
    if one.dims != other.dims or {*_split_axes(one.partial, mesh)} != {*_split_axes(other.partial, mesh)}:
        return False
    cuts = [[mesh.size(axes) for axes in spec.axes] for spec in (one, other)]
    return cuts[0] == cuts[1] and all(
        _shard_index(one, mesh, c) == _shard_index(other, mesh, c) for c in mesh.coordinates()
    )


def _shard_index(spec: Spec, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(mesh.position(coordinate, axes) for axes in spec.axes)


def _split_axes(axes: Axes, mesh: Mesh) -> Axes:
    return tuple(axis for axis in axes if mesh.size(axis) > 1)


BlockIndex = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PermuteSend:
    """What a device sends: to which device, and which of the `ratios` parts of its shard along each dim."""

    destination: int
    part: BlockIndex


def permute_split_factors(collective: Collective, mesh: Mesh) -> BlockIndex:
    """In how many parts a permute cuts a shard along each dim (1: it hands over whole shards)."""
    pairs = zip(collective.before.axes, collective.after.axes, strict=True)
    ratios = [divmod(mesh.size(new), mesh.size(old)) for old, new in pairs]
    if any(rest for _, rest in ratios):
        raise ShardingError(f"{collective}: not a permute, which splits every dim at least as finely as before")
    return tuple(ratio for ratio, _ in ratios)


def permute_sends(collective: Collective, mesh: Mesh) -> tuple[PermuteSend, ...]:
    """What each device of the mesh sends, by device number. A device that has what it needs sends to itself."""
    ratios = permute_split_factors(collective, mesh)
    places = list(mesh.coordinates())
    found: dict[int, PermuteSend] = {}
    holders: dict[tuple[BlockIndex, BlockIndex], list[int]] = {}
    for device, place in enumerate(places):
        block = _block_index(collective.before, mesh, place)
        holders.setdefault((_uncrossed_position(collective, mesh, place), block), []).append(device)
    waiting = []
    for device, place in enumerate(places):
        need = _block_index(collective.after, mesh, place)
        block = tuple(n // r for n, r in zip(need, ratios, strict=True))
        part = tuple(n % r for n, r in zip(need, ratios, strict=True))
        key = _uncrossed_position(collective, mesh, place), block
        if device in holders.get(key, ()):
            holders[key].remove(device)
            found[device] = PermuteSend(device, part)
        else:
            waiting.append((key, device, part))
    for key, device, part in waiting:
        if not holders.get(key):
            raise ShardingError(f"{collective}: not a permute; no device is left that can serve device {device}")
        found[holders[key].pop(0)] = PermuteSend(device, part)
    return tuple(found[device] for device in range(len(places)))


def _block_index(spec: Spec, mesh: Mesh, place: Mapping[str, int]) -> BlockIndex:
    """Which block of the array a device holds: its position along each dim."""
    return tuple(mesh.position(place, axes) for axes in spec.axes)


def _uncrossed_position(collective: Collective, mesh: Mesh, place: Mapping[str, int]) -> BlockIndex:
    """Where a device is along the axes that the permute does not cross."""
    return tuple(place[axis] for axis in mesh.names if axis not in collective.axes)


ShardHolders = Mapping[tuple[int, int], Sequence[Sequence[int]]]


def shard_holders(spec: Spec, mesh: Mesh) -> tuple[tuple[int, int], ShardHolders]:
    """Rows and columns of the grid of shards, and the devices that hold each: a group for each summand of a partial sum."""
    down, across = _axes_down_and_across(spec)
    grid: dict[tuple[int, int], list[list[int]]] = {}
    for device, coordinate in enumerate(mesh.coordinates()):
        cell = mesh.position(coordinate, down), mesh.position(coordinate, across)
        summands = grid.setdefault(cell, [[] for _ in range(mesh.size(spec.partial))])
        summands[mesh.position(coordinate, spec.partial)].append(device)
    return (mesh.size(down), mesh.size(across)), grid


def _axes_down_and_across(spec: Spec) -> tuple[Axes, Axes]:
    """Axes of the dims that run down and across."""
    axes = list(spec.axes) if len(spec.axes) <= 2 else [group for group in spec.axes if group]
    axes += [(), ()]
    return axes[0], axes[1]
