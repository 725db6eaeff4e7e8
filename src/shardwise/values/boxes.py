"""Boxes of N-D tensors: what a process holds of one, and what of it lies in a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a tensor: where it begins and how long it is, in each dim.

    >>> rows = Box((2, 0), (4, 8))
    >>> rows.volume, rows.slices
    (32, (slice(2, 6, None), slice(0, 8, None)))
    >>> rows.intersection(Box((4, 6), (9, 9)))
    Box(offsets=(4, 6), lengths=(2, 2))
    """

    offsets: Shape
    lengths: Shape

    @property
    def volume(self) -> int:
        """Its elements."""
        return math.prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What indexes the tensor with it."""
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.lengths, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether it lies inside a tensor of this shape."""
        return len(self.offsets) == len(self.lengths) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= size
            for start, length, size in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """What both have; None without an element."""
        starts, lengths = [], []
        for a, m, b, n in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            start, stop = max(a, b), min(a + m, b + n)
            if start >= stop:
                return None
            starts.append(start)
            lengths.append(stop - start)
        return Box(tuple(starts), tuple(lengths))

    def seen_from(self, outer: Box) -> Box:
        """The same box, counted from where `outer` begins."""
        starts = (start - origin for start, origin in zip(self.offsets, outer.offsets, strict=True))
        return Box(tuple(starts), self.lengths)

    def cut(self, dim: int, lengths: Iterable[int]) -> Iterator[Box]:
        """The boxes of these lengths in a dim that it is made of, one after the other."""
        start = self.offsets[dim]
        for length in lengths:
            offsets, own = list(self.offsets), list(self.lengths)
            offsets[dim], own[dim] = start, length
            yield Box(tuple(offsets), tuple(own))
            start += length

    def moved(self, by: Sequence[int]) -> Box:
        """The same box, so far on in each dim."""
        return Box(tuple(start + step for start, step in zip(self.offsets, by, strict=True)), self.lengths)

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """From its first element to behind its last one, in the flattened tensor of this shape (row-major)."""
        first = last = 0
        for start, length, size in zip(self.offsets, self.lengths, shape, strict=True):
            first, last = first * size + start, last * size + start + length - 1
        return first, last + 1


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements `start` to `stop` of a flattened tensor (row-major) are, in order, each one contiguous.

    >>> [box.slices for box in interval_boxes((3, 4), 2, 9)]
    [(slice(0, 1, None), slice(2, 4, None)), (slice(1, 2, None), slice(0, 4, None)), (slice(2, 3, None), slice(0, 1, None))]
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    inner = math.prod(shape[1:])
    row, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if row == last or head:
        end = tail if row == last else inner
        yield from (_in_row(row, box) for box in interval_boxes(shape[1:], head, end))
        row += 1
    if row < last:
        yield Box((row, *(0 for _ in shape[1:])), (last - row, *shape[1:]))
    if row <= last and tail:
        yield from (_in_row(last, box) for box in interval_boxes(shape[1:], 0, tail))


def _in_row(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.lengths))


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """ "" where the boxes are together all of a tensor of this shape, each element once; else what is wrong with them."""
    if not all(box.fits(shape) for box in boxes):
        return f"a box outside the shape {tuple(shape)}"
    held, size = sum(box.volume for box in boxes), math.prod(shape)
    if _overlap([box for box in boxes if box.volume], len(shape)):
        return "boxes that overlap"
    return "" if held == size else f"{held:,} of {size:,} elements"


def _overlap(boxes: Sequence[Box], ndim: int) -> bool:
    """Whether two of the boxes share an element: a sweep along the dim that separates most of them."""
    if ndim == 0:
        return len(boxes) > 1
    dim = max(range(ndim), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    alive: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        alive = [other for other in alive if other.offsets[dim] + other.lengths[dim] > box.offsets[dim]]
        if any(other.intersection(box) for other in alive):
            return True
        alive.append(box)
    return False
