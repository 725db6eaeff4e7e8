"""Every collective that applies to a tensor, found on numbers: shardings without the names of the dims.

A place is how a tensor lies: for each dim the number of its group of axes, and behind them that of the partial axes, which are
the digits of its own number. Which collectives lead where depends on the mesh and the number of dims only, so tensors with as
many dims share what is found.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.sharding.collective import Kind
from shardwise.sharding.groups import AxisGroups
from shardwise.sharding.spec import Axes, Spec

Place = tuple[int, ...]
Move = tuple[int, int]  # the number of an operation, and that of the place behind it


class Operation(NamedTuple):
    """A collective's kind and axes. Its payload is `factor` times the elements before or, where that is 0, those behind it."""

    kind: Kind
    axes: Axes
    factor: int


GATHER, EXCHANGE, REDUCE, SCATTER, SLICE, PERMUTE = range(6)  # in the order of KINDS
KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER, Kind.SLICE, Kind.PERMUTE)


class Shardings:
    """The places of tensors with so many dims on a mesh, and the collectives that lead from each."""

    def __init__(self, num_dims: int, groups: AxisGroups) -> None:
        self.num_dims, self.groups = num_dims, groups
        self.base = len(groups.axes)
        self.powers = [self.base**dim for dim in range(num_dims + 1)]
        self.known_moves: dict[int, list[Move]] = {}
        self.known_splits: dict[int, Mapping[tuple[int, ...], list[tuple[Place, int]]]] = {}
        self.known_targets: dict[tuple[tuple[int, ...], int, tuple[int, ...]], list[tuple[Place, int]]] = {}

    @cached_property
    def operations(self) -> list[Operation]:
        """Every kind over every group of axes: the number of an operation is its kind's times `base`, and its group's."""
        return [
            Operation(kind, axes, {Kind.ALL_GATHER: size, Kind.PERMUTE: 0}.get(kind, 1))
            for kind in KINDS
            for axes, size in zip(self.groups.axes, self.groups.size, strict=True)
        ]

    def number(self, place: Sequence[int]) -> int:
        return sum(group * power for group, power in zip(place, self.powers, strict=True))

    def number_of(self, spec: Spec) -> int:
        numbered = self.groups.number
        return self.number([*(numbered[axes] for axes in spec.axes), numbered[spec.partial]])

    def place(self, number: int) -> Place:
        return tuple(number // power % self.base for power in self.powers)

    def spec(self, number: int, dims: Sequence[str]) -> Spec:
        *split, partial = (self.groups.axes[group] for group in self.place(number))
        return Spec(tuple(dims), tuple(split), partial)

    def moves(self, number: int) -> list[Move]:
        """Every collective that applies to a tensor lying so, in an order that decides between ways that cost the same."""
        if number not in self.known_moves:
            *split, partial = self.place(number)
            used = self.groups.mask[partial] | sum(self.groups.mask[group] for group in split)
            unused = [group for group in self.groups.single if not used & self.groups.mask[group]]
            self.known_moves[number] = [
                *self._gathers(number, split),
                *self._reductions(number, split, partial),
                *self._slices(number, split, unused),
                *self._permutes(split, partial, unused),
            ]
        return self.known_moves[number]

    def _gathers(self, number: int, split: Sequence[int]) -> Iterator[Move]:
        joined = self.groups.joined
        for dim, group in enumerate(split):
            for tail, kept in self.groups.tails(group):
                rest = number + (kept - group) * self.powers[dim]
                yield GATHER * self.base + tail, rest
                for target, other in enumerate(split):
                    if target != dim:
                        yield EXCHANGE * self.base + tail, rest + (joined(other, tail) - other) * self.powers[target]

    def _reductions(self, number: int, split: Sequence[int], partial: int) -> Iterator[Move]:
        for some, kept, orders in self.groups.parts(partial):
            rest = number + (kept - partial) * self.powers[-1]
            yield REDUCE * self.base + some, rest
            for order in orders:
                for dim, group in enumerate(split):
                    grown = self.groups.joined(group, order)
                    yield SCATTER * self.base + order, rest + (grown - group) * self.powers[dim]

    def _slices(self, number: int, split: Sequence[int], unused: Sequence[int]) -> Iterator[Move]:
        for dim, group in enumerate(split):
            for axis in unused:
                grown = self.groups.joined(group, axis)
                yield SLICE * self.base + axis, number + (grown - group) * self.powers[dim]

    def _permutes(self, split: Sequence[int], partial: int, unused: Sequence[int]) -> Iterator[Move]:
        """Every other place with the same partial sums that splits each dim at least as finely (see `exchange`).

        A finer one is left out where slices by unused axes, which are free, lead to the same degrees first, and one whose
        dims all only gain axes, where each device keeps a part.
        """
        steps = [self.groups.steps(group) for group in split]
        loses, by_mask, first = self.groups.loses, self.groups.by_mask, PERMUTE * self.base
        for after, number in self._targets(split, partial, unused):
            changed = 0
            for step, group in zip(steps, after, strict=True):
                changed |= step[group]
            if changed & loses:
                yield first + by_mask[changed - loses], number

    def _targets(self, split: Sequence[int], partial: int, unused: Sequence[int]) -> list[tuple[Place, int]]:
        """The places that a permute may lead to, by the degrees of the dims alone, with their numbers."""
        now = tuple(self.groups.size[group] for group in split)
        free = tuple(sorted(self.groups.size[group] for group in unused))
        key = free, partial, now
        if key not in self.known_targets:
            products = {math.prod(s) for n in range(1, len(free) + 1) for s in itertools.combinations(free, n)}
            found: list[tuple[Place, int]] = []
            for degrees, places in self._splits(partial).items():
                ratios = [divmod(new, old) for new, old in zip(degrees, now, strict=True)]
                finer = not any(rest for _, rest in ratios)
                sliced_first = degrees != now and all(ratio == 1 or ratio in products for ratio, _ in ratios)
                found += places if finer and not sliced_first else []
            self.known_targets[key] = found
        return self.known_targets[key]

    def _splits(self, partial: int) -> Mapping[tuple[int, ...], list[tuple[Place, int]]]:
        """Every way to split the dims over the axes that are not partial, by the degrees of the dims."""
        if partial not in self.known_splits:
            found: dict[tuple[int, ...], list[tuple[Place, int]]] = {}
            for split in self.groups.splits(self.num_dims, without=partial):
                degrees = tuple(self.groups.size[group] for group in split)
                found.setdefault(degrees, []).append((split, self.number((*split, partial))))
            self.known_splits[partial] = found
        return self.known_splits[partial]
