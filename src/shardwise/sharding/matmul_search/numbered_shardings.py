"""Shardings as integers, and every collective that leads from one to another.

An `AxisGroups` numbers the ordered groups of a mesh's axes: what a dim may be split over, or a partial sum be over. The
digits of a sharding's number are the group numbers of its dims, then that of its partial axes. Which collectives lead where
depends only on the mesh and the number of dims, so tensors with as many dims share these results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes, Spec, num_shared_axes

# Ranks are mixed-radix numbers: a digit per axis for its place in the product, above digits for the orders of groups, so that
# sums of ranks compare as a plain enumeration would. Ties between equal costs, and so the printed strategies, depend on it. 64 is
# more than the places of an axis in a product, whose dims have a letter each.
RADIX = 64


class AxisGroups:
    """Every ordered group of axes; 0 is the empty group. A mask has a bit for each axis.

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
        """Return the axes of a group followed by those of another one."""
        return self.number[self.axes[group] + self.axes[tail]]

    def suffixes(self, group: int) -> list[tuple[int, int]]:
        """Return each suffix of a group that an AllGather may remove, with the axes that remain."""
        if group not in self.suffixes_cache:
            axes, number = self.axes[group], self.number
            self.suffixes_cache[group] = [(number[axes[n:]], number[axes[:n]]) for n in range(len(axes))]
        return self.suffixes_cache[group]

    def subsets(self, partial: int) -> list[tuple[int, int, list[int]]]:
        """Return each subset of partial axes that may be reduced, with the axes that remain, and the orders of the subset."""
        if partial not in self.subsets_cache:
            axes, number = self.axes[partial], self.number
            subsets = [subset for count in range(1, len(axes) + 1) for subset in itertools.combinations(axes, count)]
            self.subsets_cache[partial] = [
                (
                    number[subset],
                    number[tuple(a for a in axes if a not in subset)],
                    [number[o] for o in itertools.permutations(subset)],
                )
                for subset in subsets
            ]
        return self.subsets_cache[partial]

    def axis_changes(self, before: int) -> list[int]:
        """Return for each group that may follow `before` on a dim: a mask of the axes that change place, plus `loses_bit`
        unless the dim only gains axes after those that it has.

        A dim keeps its leading axes that are the same before and after. If it only gains axes, each device keeps a part of
        its shard.
        """
        if before not in self.axis_changes_cache:
            self.axis_changes_cache[before] = [self._axis_change(self.axes[before], after) for after in self.axes]
        return self.axis_changes_cache[before]

    def _axis_change(self, old: Axes, new: Axes) -> int:
        shared = num_shared_axes(old, new)
        moved = self.mask[self.number[old[shared:]]] | self.mask[self.number[new[shared:]]]
        return moved | (self.loses_bit if shared < len(old) else 0)

    def enumerate_splits(self, num_dims: int, without: int = 0) -> Iterator[tuple[int, ...]]:
        """Yield every way to split `num_dims` dims over distinct axes that are not in the group `without`."""
        axes = [axis for axis in self.names if axis not in self.axes[without]]
        for owners in itertools.product(range(num_dims + 1), repeat=len(axes)):
            split = [
                [axis for axis, owner in zip(axes, owners, strict=True) if owner == dim] for dim in range(num_dims)
            ]
            for orders in itertools.product(*map(itertools.permutations, split)):
                yield tuple(self.number[order] for order in orders)

    def rank_digits(self, place: int) -> list[int]:
        """Return the contribution of each group on one place to the rank of a product (see `local_products`).

        `place` counts from the last one, where an axis is unused and contributes nothing. Sums of contributions compare as
        the places of all axes do, the first axis first, and then as the orders of the groups, that with the first axis first.
        """
        return [order - place * weight for order, weight in zip(self.orders, self.weights, strict=True)]

    def _rank_weight(self, group: Axes) -> int:
        """Return a digit 1 for each axis, the first axis's the highest, above all digits of orders."""
        count = len(self.names)
        digits: int = sum(RADIX ** (count - 1 - self.names.index(axis)) for axis in group)
        return digits * int(len(self.axes) ** count)

    def _rank_order(self, group: Axes) -> int:
        """Return the index of a group among the orders of its axes, as a digit at the position of its first axis."""
        if not group:
            return 0
        positions = [self.names.index(axis) for axis in group]
        orders = list(itertools.permutations(sorted(positions)))
        return int(orders.index(tuple(positions)) * len(self.axes) ** (len(self.names) - 1 - min(positions)))


GroupNumbers = tuple[int, ...]
NumberedMove = tuple[int, int]  # number of an operation, and of the sharding after it


class CollectiveTemplate(NamedTuple):
    """Kind and axes of a collective. Its payload is `factor` times the elements before it or, if that is 0, those after it."""

    kind: CollectiveKind
    axes: Axes
    factor: int


GATHER, EXCHANGE, REDUCE, SCATTER, SLICE, PERMUTE = range(6)  # in the order of COLLECTIVE_KINDS
COLLECTIVE_KINDS = (
    CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.SLICE, CollectiveKind.PERMUTE,
)  # fmt: skip


class NumberedShardings:
    """Shardings of tensors with so many dims on a mesh, and the collectives that lead from each."""

    def __init__(self, num_dims: int, groups: AxisGroups) -> None:
        self.num_dims, self.groups = num_dims, groups
        self.base = len(groups.axes)
        self.powers = [self.base**dim for dim in range(num_dims + 1)]
        self.edges_cache: dict[int, list[NumberedMove]] = {}
        self.splits_cache: dict[int, Mapping[tuple[int, ...], list[tuple[GroupNumbers, int]]]] = {}
        self.targets_cache: dict[tuple[tuple[int, ...], int, tuple[int, ...]], list[tuple[GroupNumbers, int]]] = {}

    @cached_property
    def operations(self) -> list[CollectiveTemplate]:
        """Every kind over every group of axes: an operation's number is its kind's times `base`, plus its group's."""
        return [
            CollectiveTemplate(kind, axes, {CollectiveKind.ALL_GATHER: size, CollectiveKind.PERMUTE: 0}.get(kind, 1))
            for kind in COLLECTIVE_KINDS
            for axes, size in zip(self.groups.axes, self.groups.size, strict=True)
        ]

    def encode(self, group_numbers: Sequence[int]) -> int:
        return sum(group * power for group, power in zip(group_numbers, self.powers, strict=True))

    def encode_spec(self, spec: Spec) -> int:
        numbered = self.groups.number
        return self.encode([*(numbered[axes] for axes in spec.axes), numbered[spec.partial]])

    def decode(self, number: int) -> GroupNumbers:
        return tuple(number // power % self.base for power in self.powers)

    def spec(self, number: int, dims: Sequence[str]) -> Spec:
        *split, partial = (self.groups.axes[group] for group in self.decode(number))
        return Spec(tuple(dims), tuple(split), partial)

    def edges_from(self, number: int) -> list[NumberedMove]:
        """Return every collective that applies to a tensor in this sharding; the order decides between paths of the same
        cost."""
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
            for suffix, remaining in self.groups.suffixes(group):
                gathered = number + (remaining - group) * self.powers[dim]
                yield GATHER * self.base + suffix, gathered
                for target, target_group in enumerate(split):
                    if target != dim:
                        yield (
                            EXCHANGE * self.base + suffix,
                            gathered + (concatenate(target_group, suffix) - target_group) * self.powers[target],
                        )

    def _reductions(self, number: int, split: Sequence[int], partial: int) -> Iterator[NumberedMove]:
        for reduced, remaining, orders in self.groups.subsets(partial):
            without_sum = number + (remaining - partial) * self.powers[-1]
            yield REDUCE * self.base + reduced, without_sum
            for order in orders:
                for dim, group in enumerate(split):
                    grown = self.groups.concatenate(group, order)
                    yield SCATTER * self.base + order, without_sum + (grown - group) * self.powers[dim]

    def _slices(self, number: int, split: Sequence[int], unused: Sequence[int]) -> Iterator[NumberedMove]:
        for dim, group in enumerate(split):
            for axis in unused:
                grown = self.groups.concatenate(group, axis)
                yield SLICE * self.base + axis, number + (grown - group) * self.powers[dim]

    def _permutes(self, split: Sequence[int], partial: int, unused: Sequence[int]) -> Iterator[NumberedMove]:
        """Yield every other sharding with the same partial sums that splits each dim at least as finely (see
        `shard_placement`).

        Left out: a finer one if free slices by unused axes lead to the same degrees first, and one whose dims all only gain
        axes, as each device then keeps a part of its shard.
        """
        changes = [self.groups.axis_changes(group) for group in split]
        loses, by_mask, first_permute = self.groups.loses_bit, self.groups.by_mask, PERMUTE * self.base
        for after, number in self._permute_targets(split, partial, unused):
            changed = 0
            for change, group in zip(changes, after, strict=True):
                changed |= change[group]
            if changed & loses:
                yield first_permute + by_mask[changed - loses], number

    def _permute_targets(
        self, split: Sequence[int], partial: int, unused: Sequence[int]
    ) -> list[tuple[GroupNumbers, int]]:
        """Return the shardings that a permute may lead to, by the degrees of the dims alone, with their numbers."""
        current = tuple(self.groups.size[group] for group in split)
        unused_sizes = tuple(sorted(self.groups.size[group] for group in unused))
        key = unused_sizes, partial, current
        if key not in self.targets_cache:
            slices = {
                math.prod(subset)
                for n in range(1, len(unused_sizes) + 1)
                for subset in itertools.combinations(unused_sizes, n)
            }
            targets: list[tuple[GroupNumbers, int]] = []
            for degrees, splits in self._splits(partial).items():
                ratios = [divmod(new, old) for new, old in zip(degrees, current, strict=True)]
                finer = not any(remainder for _, remainder in ratios)
                sliced_first = degrees != current and all(ratio == 1 or ratio in slices for ratio, _ in ratios)
                targets += splits if finer and not sliced_first else []
            self.targets_cache[key] = targets
        return self.targets_cache[key]

    def _splits(self, partial: int) -> Mapping[tuple[int, ...], list[tuple[GroupNumbers, int]]]:
        """Return every way to split the dims over the axes that are not partial, by the degrees of the dims."""
        if partial not in self.splits_cache:
            splits_by_degree: dict[tuple[int, ...], list[tuple[GroupNumbers, int]]] = {}
            for split in self.groups.enumerate_splits(self.num_dims, without=partial):
                degrees = tuple(self.groups.size[group] for group in split)
                splits_by_degree.setdefault(degrees, []).append((split, self.encode((*split, partial))))
            self.splits_cache[partial] = splits_by_degree
        return self.splits_cache[partial]
