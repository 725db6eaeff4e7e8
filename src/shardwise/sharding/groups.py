"""The ordered groups of a mesh's axes, by number: what a dim may be split over, or a partial sum be over."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from shardwise.sharding.spec import Axes

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
        self.loses = 1 << count  # a bit of `steps`
        self.orders = list(map(self._order, self.axes))
        self.weights = list(map(self._weight, self.axes))
        self.known_tails: dict[int, list[tuple[int, int]]] = {}
        self.known_parts: dict[int, list[tuple[int, int, list[int]]]] = {}
        self.known_steps: dict[int, list[int]] = {}

    def size_of(self, axes: Axes) -> int:
        return self.size[self.number[axes]]

    def joined(self, group: int, tail: int) -> int:
        """The axes of a group with those of another one behind them."""
        return self.number[self.axes[group] + self.axes[tail]]

    def tails(self, group: int) -> list[tuple[int, int]]:
        """What may be gathered of a dim that is split over a group: its last axes, and the axes that are left."""
        if group not in self.known_tails:
            axes, number = self.axes[group], self.number
            self.known_tails[group] = [(number[axes[n:]], number[axes[:n]]) for n in range(len(axes))]
        return self.known_tails[group]

    def parts(self, partial: int) -> list[tuple[int, int, list[int]]]:
        """What may be reduced of partial sums: some of the axes, those that are left, and the orders of the reduced ones."""
        if partial not in self.known_parts:
            axes, number = self.axes[partial], self.number
            some = [s for count in range(1, len(axes) + 1) for s in itertools.combinations(axes, count)]
            self.known_parts[partial] = [
                (
                    number[s],
                    number[tuple(a for a in axes if a not in s)],
                    [number[o] for o in itertools.permutations(s)],
                )
                for s in some
            ]
        return self.known_parts[partial]

    def steps(self, before: int) -> list[int]:
        """For each group that a dim may have behind `before`: a mask of the axes whose place differs, and the bit `loses`
        where the dim does not only gain axes behind those that it has.

        A dim keeps the axes that lead both before and after. Where it only gains axes, each device keeps a part of its shard.
        """
        if before not in self.known_steps:
            self.known_steps[before] = [self._step(self.axes[before], after) for after in self.axes]
        return self.known_steps[before]

    def _step(self, old: Axes, new: Axes) -> int:
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))))
        moved = self.mask[self.number[old[shared:]]] | self.mask[self.number[new[shared:]]]
        return moved | (self.loses if shared < len(old) else 0)

    def splits(self, num_dims: int, without: int = 0) -> Iterator[tuple[int, ...]]:
        """Every way to split so many dims over distinct axes that are not in the group `without`."""
        axes = [axis for axis in self.names if axis not in self.axes[without]]
        for where in itertools.product(range(num_dims + 1), repeat=len(axes)):
            split = [[axis for axis, dim in zip(axes, where, strict=True) if dim == own] for own in range(num_dims)]
            for orders in itertools.product(*map(itertools.permutations, split)):
                yield tuple(self.number[order] for order in orders)

    def ranks(self, place: int) -> list[int]:
        """The part that each group on one place has in the rank of how a mesh is laid over a product (see `joins`).

        `place` counts from the last place, where an axis does nothing and has no part. The sums of the parts compare as the
        places of all axes do, the first axis first, and then the orders of the groups, that with the first axis first.
        """
        return [order - place * weight for order, weight in zip(self.orders, self.weights, strict=True)]

    def _weight(self, group: Axes) -> int:
        """A digit 1 for each axis, the first axis's the highest, above all digits of orders."""
        count = len(self.names)
        digits: int = sum(RADIX ** (count - 1 - self.names.index(axis)) for axis in group)
        return digits * int(len(self.axes) ** count)

    def _order(self, group: Axes) -> int:
        """The place of a group among the orders of its axes, as a digit that stands where its first axis does."""
        if not group:
            return 0
        positions = [self.names.index(axis) for axis in group]
        same = list(itertools.permutations(sorted(positions)))
        return int(same.index(tuple(positions)) * len(self.axes) ** (len(self.names) - 1 - min(positions)))
