"""Twisted tori: going around a short axis also shifts the long ones by half of their length.

Legal are k x k x 2k and k x 2k x 2k, in any order of the axes, with k a multiple of 4: the wraparound links are optical
and lie between cubes of 4x4x4. The bisection and the average distance get better, rings of the short axes are gone.
Source: Jouppi et al., TPU v4 (ISCA 2023), section on twisted tori; Camara et al., Twisted Torus Topologies for Enhanced
Interconnection Networks (2010); Google Cloud documentation, TPU v4 and v5p, which print 4x4x8_twisted for the slice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

CUBE = 4
LEGAL = "KxKx2K or Kx2Kx2K in any order, with K a multiple of 4, such as 4x4x8 or 4x8x8,"


def is_twistable(shape: tuple[int, ...]) -> bool:
    """Whether a slice of this shape may be twisted."""
    return len(shape) == 3 and min(shape) % CUBE == 0 and set(shape) == {min(shape), 2 * min(shape)}


def shifted_by(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The axes that going around `axis` shifts: all long ones around a short axis, none around a long one."""
    short = min(shape)
    return tuple(i for i, size in enumerate(shape) if size == 2 * short) if shape[axis] == short else ()


def closed_groups(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The sets of whole axes that hold a short one and every axis that it shifts: twisted tori of their own."""
    axes = range(len(shape))
    for count in range(2, len(shape) + 1):
        for group in itertools.combinations(axes, count):
            shifts = [set(shifted_by(shape, axis)) for axis in group]
            if any(shifts) and all(shift <= set(group) for shift in shifts):
                yield group


@dataclass(frozen=True, slots=True)
class Distances:
    """Of one device to all N, itself included: hops on the average along each axis, and to the farthest."""

    mean_hops: tuple[float, ...]
    diameter: int

    @property
    def mean(self) -> float:
        return sum(self.mean_hops)


@lru_cache(maxsize=64)
def distances(shape: tuple[int, ...]) -> Distances:
    """Distances on the twisted torus of a shape (k x 2k, k x k x 2k, k x 2k x 2k in any order), by its shortest ways.

    Every device sees the same. A way goes around each short axis some number of times and then the shorter way along each
    long axis; each of the shortest vectors carries an equal part, which loads all axes alike.
    """
    short = min(shape)
    shorts = [axis for axis, size in enumerate(shape) if size == short]
    total, farthest = [0.0] * len(shape), 0
    for place in itertools.product(*map(range, shape)):
        ways = [
            _way(shape, place, dict(zip(shorts, turns, strict=True)))
            for turns in itertools.product((-2, -1, 0, 1), repeat=len(shorts))
        ]
        nearest = min(sum(hops) for hops, _ in ways)
        shortest = [(hops, count) for hops, count in ways if sum(hops) == nearest]
        farthest = max(farthest, nearest)
        num_ways = sum(count for _, count in shortest)
        for axis in range(len(shape)):
            total[axis] += sum(hops[axis] * count for hops, count in shortest) / num_ways
    return Distances(tuple(hops / math.prod(shape) for hops in total), farthest)


def _way(shape: tuple[int, ...], place: tuple[int, ...], turns: dict[int, int]) -> tuple[tuple[int, ...], int]:
    """Hops along each axis to a place, going so many times around each short axis, and how many vectors have them: two for
    each long axis whose both ways are as far."""
    shift = min(shape) * sum(turns.values())
    hops, count = [], 1
    for axis, size in enumerate(shape):
        if axis in turns:
            hops.append(abs(place[axis] + turns[axis] * size))
        else:
            ahead = (place[axis] - shift) % size
            hops.append(min(ahead, size - ahead))
            count *= 2 if 2 * ahead == size else 1
    return tuple(hops), count
