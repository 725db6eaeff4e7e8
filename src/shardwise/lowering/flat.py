"""Weights as flat arrays: which of them fill one together, and how long it is. Numbers or arrays.

Over the axes that split it each device has one even part of a flat array, padded. Differs from the derivation, which splits every
weight along a dim: bytes are the same but for the padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shardwise.optimizer.table import optimizer_named
from shardwise.sharding.spec import Axes
from shardwise.symbolic import Monomial, Polynomial, Value, Values, ceil_div, constant, maximum, total, where

# Parameters and parts begin at a multiple of so many elements, 16 bytes in the narrowest format that weights rest in (bf16).
# Source: CUTLASS, functionality.md: operands of tensor core kernels are aligned to 128 bits.
ALIGNED = 8


def alignment_of(optimizer: str) -> int:
    """Of how many elements parameters and parts begin at a multiple, with an optimizer by name: blocks of its moments that share
    a scale are those of one parameter on one device.

    >>> alignment_of("adamw"), alignment_of("adamw_8bit")
    (8, 256)
    """
    return math.lcm(ALIGNED, optimizer_named(optimizer).block)


def aligned(elements: Value, alignment: int = ALIGNED) -> Value:
    """The next place where a parameter or a part may begin.

    >>> aligned(17)
    24
    """
    return ceil_div(elements, alignment) * alignment


def shard_elements(elements: Value, num_shards: Value, alignment: int = ALIGNED) -> Value:
    """Elements of each device's part of a flat array, padding included.

    >>> shard_elements(560, 3)
    192
    """
    return aligned(ceil_div(elements, num_shards), alignment)


def openings(sizes: Iterable[Value], most_elements: float | None) -> Iterator[Value]:
    """Whether each weight begins a flat array: the first does, and what does not fit into the one before; one without elements
    does not. `most_elements` of None: all fit into one.

    Source: Li et al. 2020, PyTorch Distributed, section 3.2.3.

    >>> list(openings([6, 0, 3, 2, 9], most_elements=8))
    [True, False, True, False, True]
    """
    filled: Value = 0
    for size in sizes:
        begins = (filled == 0) if most_elements is None else (filled == 0) | (filled + size > most_elements)
        begins = begins & (size > 0)
        yield begins
        filled = where(begins, size, filled + size)


def fullest_part(
    sizes: Sequence[Value], amounts: Sequence[Value], num_shards: Value, alignment: int = ALIGNED
) -> Value:
    """The most that any device has of amounts that weights of these sizes have whole: each counts where there is a part of it.

    Of the devices with a part of a weight none has more weights behind it than that with its end.

    >>> fullest_part([64, 64, 128], [1.0, 2.0, 4.0], num_shards=2)
    4.0
    >>> fullest_part([64, 64, 128], [1.0, 2.0, 4.0], num_shards=3)
    6.0
    """
    starts: list[Value] = []
    stops: list[Value] = []
    for size in sizes:
        starts.append(aligned(stops[-1], alignment) if stops else 0)
        stops.append(where(size > 0, starts[-1] + size, stops[-1] if stops else 0))
    part = maximum(shard_elements(stops[-1], num_shards, alignment), 1)
    most: Value = 0.0
    for end in stops:
        device = (end - 1) // part
        begin, has = device * part, 0.0
        for start, stop, size, amount in zip(starts, stops, sizes, amounts, strict=True):
            has = has + where((start < begin + part) & (stop > begin) & (size > 0), amount, 0.0)
        most = maximum(most, has)
    return most


class Extent(NamedTuple):
    """How many flat arrays there are, and their elements together, padding included."""

    count: Value
    elements: Value


class Weight(NamedTuple):
    """Elements of a weight where it is used. It is among those of its arrays only where the group of devices along `single` is
    one device, and that along `several` is more."""

    elements: Polynomial
    single: Axes = ()
    several: Axes = ()

    def evaluate(self, values: Values) -> Value:
        size = self.elements.evaluate(values)
        if self.single:
            size = where(values.degree(self.single) == 1, size, 0)
        return where(values.degree(self.several) > 1, size, 0) if self.several else size


@dataclass(frozen=True, slots=True)
class FlatArrays:
    """Weights that move as flat arrays, in the order in which they fill them. `split`: the axes of the parts.

    `in_parts`: what moves is each device's part. `alignment`: see `alignment_of`.
    """

    weights: tuple[Weight, ...]
    split: Axes
    bucketed: bool
    in_parts: bool = False
    alignment: int = ALIGNED

    @property
    def elements(self) -> Polynomial:
        """Elements without padding of what moves, where no group of devices is one device."""
        whole = total(weight.elements for weight in self.weights if not weight.single)
        return whole * (share_of(self.split) if self.in_parts else constant(1.0))

    def evaluate(self, values: Values, most_elements: float) -> Extent:
        """The arrays at these sizes and degrees; buckets hold at most so many elements."""
        return values.once((self,), partial(self._extent, values, most_elements), at=most_elements)

    def _extent(self, values: Values, most_elements: float) -> Extent:
        sizes = [weight.evaluate(values) for weight in self.weights]
        shards = values.degree(self.split)
        count, elements = extent(sizes, shards, most_elements if self.bucketed else None, self.alignment)
        return Extent(count, elements / shards if self.in_parts else elements)

    def shared(self, amounts: Sequence[Polynomial], values: Values) -> tuple[Value, Value]:
        """Of amounts that weights of one array have whole what the device with the most has (`fullest_part`), and all."""
        sizes = [weight.evaluate(values) for weight in self.weights]
        found = [where(size > 0, one.evaluate(values), 0.0) for size, one in zip(sizes, amounts, strict=True)]
        return fullest_part(sizes, found, values.degree(self.split), self.alignment), sum(found, start=0.0)

    def arrays(self, values: Values, most_elements: float) -> list[int]:
        """The elements of each array, padding included; of numbers only."""
        sizes = [int(weight.evaluate(values)) for weight in self.weights]
        shards = int(values.degree(self.split))
        filled: list[list[int]] = []
        for size, begins in zip(sizes, openings(sizes, most_elements if self.bucketed else None), strict=True):
            if begins:
                filled.append([])
            if size:
                filled[-1].append(size)
        whole = [int(extent(each, shards, None, self.alignment).elements) for each in filled]
        return [elements // shards for elements in whole] if self.in_parts else whole


def share_of(axes: Axes) -> Polynomial:
    """One device's share of what is split evenly over some axes."""
    return Polynomial((Monomial(1.0, tuple((axis, -1) for axis in sorted(axes))),))


def extent(sizes: Sequence[Value], num_shards: Value, most_elements: float | None, alignment: int = ALIGNED) -> Extent:
    """Flat arrays of weights of these sizes, each padded to even parts.

    >>> extent([12, 96], num_shards=2, most_elements=None)
    Extent(count=1, elements=112)
    """
    count: Value = 0
    elements: Value = 0
    stop: Value = 0
    for size, begins in zip(sizes, openings(sizes, most_elements), strict=True):
        elements = elements + where(begins, shard_elements(stop, num_shards, alignment) * num_shards, 0)
        count = count + where(begins, 1, 0)
        stop = where(begins, size, aligned(stop, alignment) + size)
    return Extent(count, elements + shard_elements(stop, num_shards, alignment) * num_shards)
