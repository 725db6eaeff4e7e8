"""How many shardings an array has on a mesh, and which part of it each device holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes, Spec


def legal_shardings(dims: Sequence[str], axes: Sequence[str], *, ordered: bool = True) -> Iterator[Spec]:
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
    """How many `legal_shardings` there are.

    Formula: (d + 1)^a without order. With it, the sum over k of C(a, k) k! C(k + d - 1, k): k axes in a row, cut into d parts.
    """
    if not ordered:
        return int((num_dims + 1) ** num_axes)
    rows = (math.perm(num_axes, k) * (math.comb(k + num_dims - 1, k) if k else 1) for k in range(num_axes + 1))
    return sum(rows) if num_dims else 1


def held_fraction(spec: Spec, mesh: Mesh) -> float:
    """The part of the array that each device holds."""
    return 1.0 / mesh.size(spec.sharded_axes)


def index_sets(spec: Spec, mesh: Mesh, sizes: Mapping[str, int]) -> tuple[dict[str, range], ...]:
    """For each device, in device order, the indices of each dim that it holds.

    Raises `ShardingError` where an axis does not divide its dim.
    """
    local = dict(zip(spec.dims, spec.local_shape(mesh, sizes), strict=True))
    return tuple(
        {
            dim: range(place * local[dim], (place + 1) * local[dim])
            for dim, place in zip(spec.dims, _places(spec, mesh, coordinate), strict=True)
        }
        for coordinate in mesh.coordinates()
    )


def same_placement(one: Spec, other: Spec, mesh: Mesh) -> bool:
    """Whether two shardings put the same part on every device: I_XY and I_YX do not, unless an axis has size 1."""
    if one.dims != other.dims or {*_split(one.partial, mesh)} != {*_split(other.partial, mesh)}:
        return False
    cuts = [[mesh.size(axes) for axes in spec.axes] for spec in (one, other)]
    return cuts[0] == cuts[1] and all(_places(one, mesh, c) == _places(other, mesh, c) for c in mesh.coordinates())


def _places(spec: Spec, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(mesh.position(coordinate, axes) for axes in spec.axes)


def _split(axes: Axes, mesh: Mesh) -> Axes:
    return tuple(axis for axis in axes if mesh.size(axis) > 1)
