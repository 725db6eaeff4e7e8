"""Dynamic tree quantisation in blocks, in NumPy: the formats of `dtypes.BLOCKS`, in which optimizers keep moments in 8 bits.

A code of 8 bits stands for a number of a table, at most 1 in size. A block's largest size is its scale, and an element stands for
the number of its code times the scale. Numbers lie close near 0: seven decades, each with twice as many as the one below.
Source: Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning (arXiv 1511.04561); Dettmers et al. 2022 (arXiv
2110.02861), section 2, of which the unsigned table, for moments of squares, has a bit more for each number in place of a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.dtypes import BLOCKS, Blocks
from shardwise.errors import chosen

DECADES = 7
Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class Numbers:
    """The numbers of a format by their codes, in rising order; `signed`: also below 0, though not -1."""

    name: str
    signed: bool

    @property
    def blocks(self) -> Blocks:
        """How many elements share a scale."""
        return BLOCKS[self.name]

    @cached_property
    def values(self) -> Floats:
        """[256]: 0, 1, and of each decade the middles of even parts of what lies between a tenth of its largest size and that."""
        found = [0.0, 1.0]
        for decade in range(DECADES):
            num_parts = 2 ** (decade + (not self.signed))
            middles = (0.1 + 0.9 * (part + 0.5) / num_parts for part in range(num_parts))
            sizes = [10.0 ** (decade + 1 - DECADES) * middle for middle in middles]
            found += [*sizes, *(-size for size in sizes)] if self.signed else sizes
        return np.sort(np.array(found)).astype(np.float32)

    @cached_property
    def limits(self) -> Floats:
        """[255]: the least float32 that is not below the middle between each number and the next, from which on the next one is
        nearest."""
        numbers = self.values.astype(np.float64)
        middles = (numbers[:-1] + numbers[1:]) / 2
        found = middles.astype(np.float32)
        return np.where(found < middles, np.nextafter(found, np.float32(np.inf)), found)


NUMBERS = {name: Numbers(name, signed) for name, signed in (("dynamic8", True), ("unsigned_dynamic8", False))}


def numbers_named(name: str) -> Numbers:
    """The numbers of a format by its name. Raises `InputError` that lists the names."""
    return chosen(NUMBERS, name, "format")


class Coded(NamedTuple):
    """Elements as codes [n], and the scale of each block [blocks]."""

    codes: Codes
    scales: Floats


def coded(values: Floats, to: Numbers) -> Coded:
    """Elements [n] in blocks of a format, counted from the first; the last block may be smaller. The nearest number is taken,
    halfway between two the larger, and all arithmetic is float32's.

    Differs: torchao.optim and bitsandbytes have scales of at least 1e-12, below which small squares would lose their bits.

    >>> found = coded(np.array([0.5, -4.0, 0.0], np.float32), NUMBERS["dynamic8"])
    >>> found.scales.tolist(), [f"{one:.3f}" for one in decoded(found, NUMBERS["dynamic8"])]
    ([4.0], ['0.484', '-3.972', '0.000'])
    """
    starts = np.arange(0, len(values), to.blocks.size)
    scales = np.maximum.reduceat(np.abs(values), starts) if len(values) else np.zeros(0, np.float32)
    divisors = _spread(np.where(scales > 0, scales, np.float32(1)), len(values), to)
    return Coded(np.searchsorted(to.limits, values / divisors, side="right").astype(np.uint8), scales)


def decoded(found: Coded, of: Numbers) -> Floats:
    """What codes and scales stand for [n]."""
    return of.values[found.codes] * _spread(found.scales, len(found.codes), of)


def _spread(scales: Floats, size: int, of: Numbers) -> Floats:
    return np.repeat(scales, of.blocks.size)[:size]
