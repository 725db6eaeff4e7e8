"""Shardings as numbers, and every collective that leads from one to another.

An `AxisGroups` numbers the ordered groups of a mesh's axes: what a dim may be split over, or a partial sum be over. A tensor
lies as its dims' group numbers say, and behind them that of its partial axes; these are the digits of the number of its
sharding. Which collectives lead where depends on the mesh and the number of dims only, so tensors with as many dims share
what is computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes, Spec

RADIX = 64  # of a rank: more than the places of an axis in a product, whose dims have a letter each


class AxisGroups:
    """Every ordered group of axes; 0 is the group without axes. A mask has a bit for each axis.

    `by_mask` gives the group of some axes in the mesh's order, `partial` that in the order in which partial axes are written.
    """

    def __init__(self, degree: Mapping[str, int]) -> None:
        self.degree, self.names = dict(degree), tuple(degree)
        count = len(self.names)
        self.axes: list[Axes] = [g for n in range(count + 1) for g in itertools.permutations(self.names, n)]
        self.number = {group: number for number, group in enumerate(self.axes)}
        self.size = [math.prod(degree[axis] for axis in group) for group in self.axes]
        self.single = [self.number[axis,] for axis in self.names]
        self.mask = [sum(1 << self.names.index(axis) for axis in group) for group in self.axes]
        masks = [tuple(a for i, a in enumerate(self.names) if mask >> i & 1) for mask in range(1 << count)]
        self.by_mask = [self.number[axes] for axes in masks]
        self.partial = [self.number[tuple(sorted(axes))] for axes in masks]
        self.loses_bit = 1 << count  # a bit of `axis_changes`
        self.orders = list(map(self._rank_order, self.axes))
        self.weights = list(map(self._rank_weight, self.axes))
        self.suffixes_cache: dict[int, list[tuple[int, int]]] = {}
        self.subsets_cache: dict[int, list[tuple[int, int, list[int]]]] = {}
        self.axis_changes_cache: dict[int, list[int]] = {}

    def size_of(self, axes: Axes) -> int:
        return self.size[self.number[axes]]

    def concatenate(self, group: int, tail: int) -> int:
        """The axes of a group with those of another one behind them."""
        return self.number[self.axes[group] + self.axes[tail]]

    def suffixes(self, group: int) -> list[tuple[int, int]]:
        """What may be gathered of a dim that is split over a group: its last axes, and the axes that are left."""
        if group not in self.suffixes_cache:
            axes, number = self.axes[group], self.number
            self.suffixes_cache[group] = [(number[axes[n:]], number[axes[:n]]) for n in range(len(axes))]
        return self.suffixes_cache[group]

    def subsets(self, partial: int) -> list[tuple[int, int, list[int]]]:
        """What may be reduced of partial sums: some of the axes, those that are left, and the orders of the reduced ones."""
        if partial not in self.subsets_cache:
            axes, number = self.axes[partial], self.number
            some = [s for count in range(1, len(axes) + 1) for s in itertools.combinations(axes, count)]
            self.subsets_cache[partial] = [
                (
                    number[s],
                    number[tuple(a for a in axes if a not in s)],
                    [number[o] for o in itertools.permutations(s)],
                )
                for s in some
            ]
        return self.subsets_cache[partial]

    def axis_changes(self, before: int) -> list[int]:
        """For each group that a dim may have behind `before`: a mask of the axes whose place differs, and the bit `loses_bit`
        where the dim does not only gain axes behind those that it has.

        A dim keeps the axes that lead both before and after. Where it only gains axes, each device keeps a part of its shard.
        """
        if before not in self.axis_changes_cache:
            self.axis_changes_cache[before] = [self._axis_change(self.axes[before], after) for after in self.axes]
        return self.axis_changes_cache[before]

    def _axis_change(self, old: Axes, new: Axes) -> int:
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))))
        moved = self.mask[self.number[old[shared:]]] | self.mask[self.number[new[shared:]]]
        return moved | (self.loses_bit if shared < len(old) else 0)

    def enumerate_splits(self, num_dims: int, without: int = 0) -> Iterator[tuple[int, ...]]:
        """Every way to split so many dims over distinct axes that are not in the group `without`."""
        axes = [axis for axis in self.names if axis not in self.axes[without]]
        for where in itertools.product(range(num_dims + 1), repeat=len(axes)):
            split = [[axis for axis, dim in zip(axes, where, strict=True) if dim == own] for own in range(num_dims)]
            for orders in itertools.product(*map(itertools.permutations, split)):
                yield tuple(self.number[order] for order in orders)

    def rank_digits(self, place: int) -> list[int]:
        """The part that each group on one place has in the rank of how a mesh is laid over a product (see `local_products`).

        `place` counts from the last place, where an axis does nothing and has no part. The sums of the parts compare as the
        places of all axes do, the first axis first, and then the orders of the groups, that with the first axis first.
        """
        return [order - place * weight for order, weight in zip(self.orders, self.weights, strict=True)]

    def _rank_weight(self, group: Axes) -> int:
        """A digit 1 for each axis, the first axis's the highest, above all digits of orders."""
        count = len(self.names)
        digits: int = sum(RADIX ** (count - 1 - self.names.index(axis)) for axis in group)
        return digits * int(len(self.axes) ** count)

    def _rank_order(self, group: Axes) -> int:
        """The place of a group among the orders of its axes, as a digit that stands where its first axis does."""
        if not group:
            return 0
        positions = [self.names.index(axis) for axis in group]
        same = list(itertools.permutations(sorted(positions)))
        return int(same.index(tuple(positions)) * len(self.axes) ** (len(self.names) - 1 - min(positions)))


GroupNumbers = tuple[int, ...]
NumberedMove = tuple[int, int]  # the number of an operation, and that of the place behind it


class CollectiveTemplate(NamedTuple):
    """A collective's kind and axes. Its payload is `factor` times the elements before or, where that is 0, those behind it."""

    kind: CollectiveKind
    axes: Axes
    factor: int


GATHER, EXCHANGE, REDUCE, SCATTER, SLICE, PERMUTE = range(6)  # in the order of KINDS
COLLECTIVE_KINDS = (
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL,
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.SLICE,
    CollectiveKind.PERMUTE,
)


class NumberedShardings:
    """The places of tensors with so many dims on a mesh, and the collectives that lead from each."""

    def __init__(self, num_dims: int, groups: AxisGroups) -> None:
        self.num_dims, self.groups = num_dims, groups
        self.base = len(groups.axes)
        self.powers = [self.base**dim for dim in range(num_dims + 1)]
        self.edges_cache: dict[int, list[NumberedMove]] = {}
        self.splits_cache: dict[int, Mapping[tuple[int, ...], list[tuple[GroupNumbers, int]]]] = {}
        self.targets_cache: dict[tuple[tuple[int, ...], int, tuple[int, ...]], list[tuple[GroupNumbers, int]]] = {}

    @cached_property
    def operations(self) -> list[CollectiveTemplate]:
        """Every kind over every group of axes: the number of an operation is its kind's times `base`, and its group's."""
        return [
            CollectiveTemplate(kind, axes, {CollectiveKind.ALL_GATHER: size, CollectiveKind.PERMUTE: 0}.get(kind, 1))
            for kind in COLLECTIVE_KINDS
            for axes, size in zip(self.groups.axes, self.groups.size, strict=True)
        ]

    def encode(self, place: Sequence[int]) -> int:
        return sum(group * power for group, power in zip(place, self.powers, strict=True))

    def encode_spec(self, spec: Spec) -> int:
        numbered = self.groups.number
        return self.encode([*(numbered[axes] for axes in spec.axes), numbered[spec.partial]])

    def decode(self, number: int) -> GroupNumbers:
        return tuple(number // power % self.base for power in self.powers)

    def spec(self, number: int, dims: Sequence[str]) -> Spec:
        *split, partial = (self.groups.axes[group] for group in self.decode(number))
        return Spec(tuple(dims), tuple(split), partial)

    def edges_from(self, number: int) -> list[NumberedMove]:
        """Every collective that applies to a tensor lying so, in an order that decides between ways that cost the same."""
        if number not in self.edges_cache:
            *split, partial = self.decode(number)
            used = self.groups.mask[partial] | sum(self.groups.mask[group] for group in split)
            unused = [group for group in self.groups.single if not used & self.groups.mask[group]]
            self.edges_cache[number] = [
                *self._gathers(number, split),
                *self._reductions(number, split, partial),
                *self._slices(number, split, unused),
                *self._permutes(split, partial, unused),
            ]
        return self.edges_cache[number]

    def _gathers(self, number: int, split: Sequence[int]) -> Iterator[NumberedMove]:
        concatenate = self.groups.concatenate
        for dim, group in enumerate(split):
            for tail, kept in self.groups.suffixes(group):
                rest = number + (kept - group) * self.powers[dim]
                yield GATHER * self.base + tail, rest
                for target, other in enumerate(split):
                    if target != dim:
                        yield (
                            EXCHANGE * self.base + tail,
                            rest + (concatenate(other, tail) - other) * self.powers[target],
                        )

    def _reductions(self, number: int, split: Sequence[int], partial: int) -> Iterator[NumberedMove]:
        for some, kept, orders in self.groups.subsets(partial):
            rest = number + (kept - partial) * self.powers[-1]
            yield REDUCE * self.base + some, rest
            for order in orders:
                for dim, group in enumerate(split):
                    grown = self.groups.concatenate(group, order)
                    yield SCATTER * self.base + order, rest + (grown - group) * self.powers[dim]

    def _slices(self, number: int, split: Sequence[int], unused: Sequence[int]) -> Iterator[NumberedMove]:
        for dim, group in enumerate(split):
            for axis in unused:
                grown = self.groups.concatenate(group, axis)
                yield SLICE * self.base + axis, number + (grown - group) * self.powers[dim]

    def _permutes(self, split: Sequence[int], partial: int, unused: Sequence[int]) -> Iterator[NumberedMove]:
        """Every other place with the same partial sums that splits each dim at least as finely (see `device_shards`).

        A finer one is left out where slices by unused axes, which are free, lead to the same degrees first, and one whose
        dims all only gain axes, where each device keeps a part.
        """
        steps = [self.groups.axis_changes(group) for group in split]
        loses, by_mask, first = self.groups.loses_bit, self.groups.by_mask, PERMUTE * self.base
        for after, number in self._permute_targets(split, partial, unused):
            changed = 0
            for step, group in zip(steps, after, strict=True):
                changed |= step[group]
            if changed & loses:
                yield first + by_mask[changed - loses], number

    def _permute_targets(
        self, split: Sequence[int], partial: int, unused: Sequence[int]
    ) -> list[tuple[GroupNumbers, int]]:
        """The places that a permute may lead to, by the degrees of the dims alone, with their numbers."""
        now = tuple(self.groups.size[group] for group in split)
        free = tuple(sorted(self.groups.size[group] for group in unused))
        key = free, partial, now
        if key not in self.targets_cache:
            products = {math.prod(s) for n in range(1, len(free) + 1) for s in itertools.combinations(free, n)}
            found: list[tuple[GroupNumbers, int]] = []
            for degrees, places in self._splits(partial).items():
                ratios = [divmod(new, old) for new, old in zip(degrees, now, strict=True)]
                finer = not any(rest for _, rest in ratios)
                sliced_first = degrees != now and all(ratio == 1 or ratio in products for ratio, _ in ratios)
                found += places if finer and not sliced_first else []
            self.targets_cache[key] = found
        return self.targets_cache[key]

    def _splits(self, partial: int) -> Mapping[tuple[int, ...], list[tuple[GroupNumbers, int]]]:
        """Every way to split the dims over the axes that are not partial, by the degrees of the dims."""
        if partial not in self.splits_cache:
            found: dict[tuple[int, ...], list[tuple[GroupNumbers, int]]] = {}
            for split in self.groups.enumerate_splits(self.num_dims, without=partial):
                degrees = tuple(self.groups.size[group] for group in split)
                found.setdefault(degrees, []).append((split, self.encode((*split, partial))))
            self.splits_cache[partial] = found
        return self.splits_cache[partial]
