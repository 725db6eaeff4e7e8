"""Boxes of N-D tensors: the part of a tensor that a process holds, or that lies in a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """Box within a tensor: its first index and its length along each dim.

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
        """Number of elements."""
        return math.prod(self.lengths)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that index the tensor with the box."""
        return tuple(slice(start, start + length) for start, length in zip(self.offsets, self.lengths, strict=True))

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True if the box lies inside a tensor of this shape."""
        return len(self.offsets) == len(self.lengths) == len(shape) and all(
            start >= 0 and length >= 0 and start + length <= size
            for start, length, size in zip(self.offsets, self.lengths, shape, strict=True)
        )

    def intersection(self, box: Box) -> Box | None:
        """Return the box that two boxes share, or None if they share no element."""
        starts, lengths = [], []
        for a, m, b, n in zip(self.offsets, self.lengths, box.offsets, box.lengths, strict=True):
            start, stop = max(a, b), min(a + m, b + n)
            if start >= stop:
                return None
            starts.append(start)
            lengths.append(stop - start)
        return Box(tuple(starts), tuple(lengths))

    def seen_from(self, outer: Box) -> Box:
        """Return the same box with offsets relative to the start of `outer`."""
        starts = (start - origin for start, origin in zip(self.offsets, outer.offsets, strict=True))
        return Box(tuple(starts), self.lengths)

    def cut(self, dim: int, lengths: Iterable[int]) -> Iterator[Box]:
        """Yield the consecutive boxes of these lengths that make up this one along a dim."""
        start = self.offsets[dim]
        for length in lengths:
            offsets, box_lengths = list(self.offsets), list(self.lengths)
            offsets[dim], box_lengths[dim] = start, length
            yield Box(tuple(offsets), tuple(box_lengths))
            start += length

    def moved(self, shifts: Sequence[int]) -> Box:
        """Return the box shifted by so many indices in each dim."""
        return Box(tuple(start + shift for start, shift in zip(self.offsets, shifts, strict=True)), self.lengths)

    def span(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the first flat index and one past the last, in a row-major tensor of this shape."""
        first = last = 0
        for start, length, size in zip(self.offsets, self.lengths, shape, strict=True):
            first, last = first * size + start, last * size + start + length - 1
        return first, last + 1


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that cover the elements `start` to `stop` of a flattened (row-major) tensor, in order, each contiguous.

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
    """Return "" if the boxes cover a tensor of this shape with each element once, else what is wrong with them."""
    if not all(box.fits(shape) for box in boxes):
        return f"a box outside the shape {tuple(shape)}"
    num_covered, num_elements = sum(box.volume for box in boxes), math.prod(shape)
    if _overlap([box for box in boxes if box.volume], len(shape)):
        return "boxes that overlap"
    return "" if num_covered == num_elements else f"{num_covered:,} of {num_elements:,} elements"


def _overlap(boxes: Sequence[Box], ndim: int) -> bool:
    """Return True if two boxes share an element: a sweep along the dim that separates most of them."""
    if ndim == 0:
        return len(boxes) > 1
    dim = max(range(ndim), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        active = [earlier for earlier in active if earlier.offsets[dim] + earlier.lengths[dim] > box.offsets[dim]]
        if any(earlier.intersection(box) for earlier in active):
            return True
        active.append(box)
    return False
