"""Every collective that applies to a tensor, and every way to lay a mesh over a local product."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from shardwise.sharding.collective import Collective, Kind
from shardwise.sharding.spec import Axes, Spec


def collectives_from(spec: Spec, degree: Mapping[str, int]) -> Iterator[Collective]:
    """Every collective that applies to a tensor lying as `spec`."""
    yield from _gathers(spec)
    yield from _reductions(spec)
    used = spec.sharded_axes | set(spec.partial)
    for dim in spec.dims:
        for axis in degree:
            if axis not in used:
                yield Collective(Kind.SLICE, (axis,), spec, spec.with_axes(dim, (*spec.axes_of(dim), axis)))
    yield from _permutes(spec, [axis for axis in degree if axis not in used], degree)


def _gathers(spec: Spec) -> Iterator[Collective]:
    for dim in spec.dims:
        own = spec.axes_of(dim)
        for start in range(len(own)):
            tail, kept = own[start:], spec.with_axes(dim, own[:start])
            yield Collective(Kind.ALL_GATHER, tail, spec, kept)
            for target in spec.dims:
                if target != dim:
                    yield Collective(Kind.ALL_TO_ALL, tail, spec, kept.with_axes(target, kept.axes_of(target) + tail))


def _reductions(spec: Spec) -> Iterator[Collective]:
    for count in range(1, len(spec.partial) + 1):
        for some in itertools.combinations(spec.partial, count):
            rest = spec.with_partial(axis for axis in spec.partial if axis not in some)
            yield Collective(Kind.ALL_REDUCE, some, spec, rest)
            for order in itertools.permutations(some):
                for dim in spec.dims:
                    yield Collective(Kind.REDUCE_SCATTER, order, spec, rest.with_axes(dim, rest.axes_of(dim) + order))


def _permutes(spec: Spec, unused: Sequence[str], degree: Mapping[str, int]) -> Iterator[Collective]:
    """Other orders of the axes on one dim; two axes of one size exchanged; an axis replaced by an unused one of its size."""
    for dim in spec.dims:
        for order in itertools.permutations(spec.axes_of(dim)):
            if order != spec.axes_of(dim):
                yield Collective(Kind.PERMUTE, order, spec, spec.with_axes(dim, order))
    placed = sorted(spec.sharded_axes)
    for first, second in itertools.combinations(placed, 2):
        if degree[first] == degree[second] and spec.dim_of(first) != spec.dim_of(second):
            yield Collective(Kind.PERMUTE, (first, second), spec, _renamed(spec, {first: second, second: first}))
    for axis, other in itertools.product(placed, unused):
        if degree[axis] == degree[other]:
            yield Collective(Kind.PERMUTE, (axis, other), spec, _renamed(spec, {axis: other}))


def _renamed(spec: Spec, names: Mapping[str, str]) -> Spec:
    axes = tuple(tuple(names.get(axis, axis) for axis in group) for group in spec.axes)
    return Spec(spec.dims, axes, spec.partial)


def local_products(left: Axes, right: Axes, result: Axes, axes: Axes) -> Iterator[tuple[Spec, Spec, Spec]]:
    """Every way to lay the mesh over a local product: each axis splits one dim, or is a partial sum of one side, or rests."""
    dims = tuple(dict.fromkeys((*left, *right)))
    for places in itertools.product((*dims, "{left}", "{right}", None), repeat=len(axes)):
        by_dim: dict[str, list[str]] = {}
        for axis, place in zip(axes, places, strict=True):
            if place in dims:
                by_dim.setdefault(str(place), []).append(axis)
        partial = [tuple(a for a, p in zip(axes, places, strict=True) if p == side) for side in ("{left}", "{right}")]
        for orders in itertools.product(*(itertools.permutations(group) for group in by_dim.values())):
            split = dict(zip(by_dim, orders, strict=True))
            summed = [a for d, group in split.items() if d not in result for a in group]
            yield (
                Spec.of(left, {d: g for d, g in split.items() if d in left}, partial[0]),
                Spec.of(right, {d: g for d, g in split.items() if d in right}, partial[1]),
                Spec.of(result, {d: g for d, g in split.items() if d in result}, (*summed, *partial[0], *partial[1])),
            )
