"""Collectives and local products of sharded tensors, enumerated on specs: the reference for the numbered shardings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

from shardwise.sharding.collectives import Collective, CollectiveKind
from shardwise.sharding.spec import Axes, Spec


def collectives_from(spec: Spec, degree: Mapping[str, int]) -> Iterator[Collective]:
    """Every collective that applies to a tensor sharded as `spec`."""
    yield from _gathers(spec)
    yield from _reductions(spec)
    used = spec.sharded_axes | set(spec.partial)
    for dim in spec.dims:
        for axis in degree:
            if axis not in used:
                yield Collective(CollectiveKind.SLICE, (axis,), spec, spec.with_axes(dim, (*spec.axes_of(dim), axis)))
    yield from _permutes(spec, degree)


def _gathers(spec: Spec) -> Iterator[Collective]:
    for dim in spec.dims:
        axes = spec.axes_of(dim)
        for start in range(len(axes)):
            tail, gathered = axes[start:], spec.with_axes(dim, axes[:start])
            yield Collective(CollectiveKind.ALL_GATHER, tail, spec, gathered)
            for target in spec.dims:
                if target != dim:
                    yield Collective(
                        CollectiveKind.ALL_TO_ALL,
                        tail,
                        spec,
                        gathered.with_axes(target, gathered.axes_of(target) + tail),
                    )


def _reductions(spec: Spec) -> Iterator[Collective]:
    for count in range(1, len(spec.partial) + 1):
        for reduced in itertools.combinations(spec.partial, count):
            remaining = spec.with_partial(axis for axis in spec.partial if axis not in reduced)
            yield Collective(CollectiveKind.ALL_REDUCE, reduced, spec, remaining)
            for order in itertools.permutations(reduced):
                for dim in spec.dims:
                    yield Collective(
                        CollectiveKind.REDUCE_SCATTER,
                        order,
                        spec,
                        remaining.with_axes(dim, remaining.axes_of(dim) + order),
                    )


def _permutes(spec: Spec, degree: Mapping[str, int]) -> Iterator[Collective]:
    """Every other sharding with the same partial sums that splits each dim at least as finely (see `exchange`).

    A finer one is left out where slices by unused axes, which are free, lead to the same degrees first.
    """
    free = tuple((axis, size) for axis, size in degree.items() if axis not in spec.partial)
    now = tuple(math.prod(degree[axis] for axis in axes) for axes in spec.axes)
    unused = {size for count in range(1, len(free) + 1) for size in _products_of(spec, free, count)}
    for degrees, splits in _splits(len(spec.dims), free).items():
        ratios = [divmod(new, old) for new, old in zip(degrees, now, strict=True)]
        finer = not any(remainder for _, remainder in ratios)
        sliced_first = degrees != now and all(ratio == 1 or ratio in unused for ratio, _ in ratios)
        if not finer or sliced_first:
            continue
        for axes in splits:
            moved = _moved_axes(spec.axes, axes, degree)
            if moved and not _is_slice(spec.axes, axes):
                yield Collective(CollectiveKind.PERMUTE, moved, spec, Spec(spec.dims, axes, spec.partial))


def _products_of(spec: Spec, free: tuple[tuple[str, int], ...], count: int) -> Iterator[int]:
    """Degrees that a slice by `count` unused axes adds."""
    sizes = [size for axis, size in free if axis not in spec.sharded_axes]
    return (math.prod(chosen) for chosen in itertools.combinations(sizes, count))


@lru_cache(maxsize=4096)
def _splits(num_dims: int, free: tuple[tuple[str, int], ...]) -> Mapping[tuple[int, ...], list[tuple[Axes, ...]]]:
    """Every way to split `num_dims` dims over distinct axes, by the degrees of the dims."""
    size = dict(free)
    splits_by_degrees: dict[tuple[int, ...], list[tuple[Axes, ...]]] = {}
    for places in itertools.product(range(num_dims + 1), repeat=len(free)):
        groups = [[axis for (axis, _), p in zip(free, places, strict=True) if p == dim] for dim in range(num_dims)]
        for axes in itertools.product(*(itertools.permutations(group) for group in groups)):
            degrees = tuple(math.prod(size[axis] for axis in group) for group in axes)
            splits_by_degrees.setdefault(degrees, []).append(axes)
    return splits_by_degrees


def _moved_axes(before: tuple[Axes, ...], after: tuple[Axes, ...], degree: Mapping[str, int]) -> Axes:
    """Axes that move: a dim keeps its leading axes common to both specs."""
    moved: set[str] = set()
    for old, new in zip(before, after, strict=True):
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))))
        moved |= {*old[shared:], *new[shared:]}
    return tuple(axis for axis in degree if axis in moved)


def _is_slice(before: tuple[Axes, ...], after: tuple[Axes, ...]) -> bool:
    """Each dim only gains trailing axes: every device keeps a part of its shard."""
    return all(new[: len(old)] == old for old, new in zip(before, after, strict=True))


def local_products(left: Axes, right: Axes, result: Axes, axes: Axes) -> Iterator[tuple[Spec, Spec, Spec]]:
    """Every assignment of mesh axes to a local product: an axis splits a dim, is a partial sum of an operand, or is unused."""
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
