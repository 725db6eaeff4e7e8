"""The notation for dims of a stored tensor, and where the elements of a parameter lie in it.

A pattern gives our dims in the order that the stored tensor has them, with commas between its own dims:

    pattern = group {"," group}        a dim of the tensor, of what stands in it, outer first
    group   = factor {" " factor}
    factor  = part {"+" part}          one behind the other; the part in brackets is the parameter's own
    part    = letters | "1" | "{name}" our dims by their letters, a dim of size 1, or the number of a layer or an expert

A "~" behind a letter: the two halves of that dim lie interleaved in the tensor, as pairs (0, n/2), (1, n/2 + 1), ...

Each dim of a parameter goes along one dim of the stored tensor in equal strides. So one value says how a parameter is written and
how it is read, whichever dims are permuted, joined, stacked or interleaved.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.values.boxes import Box, Shape, interval_boxes

_PART = re.compile(r"(?:[A-Za-z]~?)+|1|\{\w+\}")
_LETTER = re.compile(r"([A-Za-z])(~?)")


class PatternLetter(NamedTuple):
    """One of our dims, and whether its halves are interleaved."""

    dim: str
    interleaved: bool


class PatternFactor(NamedTuple):
    """Parts one behind the other, each a product of dims, of which the parameter has the part `own_part`."""

    parts: tuple[tuple[PatternLetter, ...], ...]
    own_part: int
    number: str  # what it counts ("layer", "expert"), or ""


FactorGroup = tuple[PatternFactor, ...]


@cache
def parse_pattern(layout: str) -> tuple[FactorGroup, ...]:
    """The groups of a layout. Raises `ValueError` for one that is not as above.

    >>> (rows,), columns = parse_pattern("[F]+F, D")
    >>> rows.own_part, len(rows.parts), columns[0].parts
    (0, 2, ((PatternLetter(dim='D', interleaved=False),),))
    """
    return tuple(tuple(_parse_factor(word) for word in group.split()) for group in layout.split(","))


def _parse_factor(word: str) -> PatternFactor:
    parts = word.split("+")
    own = [number for number, part in enumerate(parts) if part.startswith("[") and part.endswith("]")]
    bare = [part.strip("[]") for part in parts]
    if len(own) != (len(parts) > 1) or not all(_PART.fullmatch(part) for part in bare):
        raise ValueError(f"found {word!r} in a layout; parts such as [GH]+H, of which one is in brackets, are required")
    number = bare[0][1:-1] if bare[0].startswith("{") else ""
    return PatternFactor(tuple(() if number else _parse_letters(part) for part in bare), own[0] if own else 0, number)


def _parse_letters(part: str) -> tuple[PatternLetter, ...]:
    return tuple(PatternLetter(dim, bool(mark)) for dim, mark in _LETTER.findall(part))


class StridedRun(NamedTuple):
    """So many places along a dim of the stored tensor, `stride` of its elements apart."""

    dim: int
    length: int
    stride: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The shape of a stored tensor, where in it the first element of the parameter lies, and the steps of each of its dims: one
    run of them, or two for a dim whose halves are interleaved."""

    shape: Shape
    offsets: Shape
    runs: tuple[tuple[StridedRun, ...], ...]

    def write_parameter(self, part: Tensor, stored: Tensor) -> None:
        """Write a parameter where a stored tensor, which is contiguous, has it, in the tensor's format."""
        steps = [one for runs in self.runs for one in runs]
        begin = sum(start * stride for start, stride in zip(self.offsets, stored.stride(), strict=True))
        target = _strided_view(stored, steps, [one.length for one in steps], begin)
        target.copy_(part.view([one.length for one in steps]))

    def read_box(self, read: Callable[[Box], Tensor], box: Box) -> Tensor:
        """A box of the parameter, of what `read` gives of the stored tensor: from the box's first element to its last."""
        for dim, runs in enumerate(self.runs):
            pieces = list(_split_interval(runs, box.offsets[dim], box.lengths[dim]))
            if len(pieces) > 1:
                return torch.cat(
                    [self.read_box(read, part) for part in box.cut(dim, [one.volume for one in pieces])], dim
                )
        found: list[tuple[StridedRun, int, int]] = []
        for runs, offset, length in zip(self.runs, box.offsets, box.lengths, strict=True):
            (piece,) = _split_interval(runs, offset, length)
            found += zip(runs, piece.offsets, piece.lengths, strict=True)
        first, last = list(self.offsets), list(self.offsets)
        for one, offset, length in found:
            first[one.dim] += one.stride * offset
            last[one.dim] += one.stride * (offset + length - 1)
        span = read(Box(tuple(first), tuple(end - start + 1 for start, end in zip(first, last, strict=True))))
        lengths = [length for _, _, length in found]
        return _strided_view(span, [one for one, _, _ in found], lengths, 0).reshape(box.lengths)


def _strided_view(stored: Tensor, steps: Sequence[StridedRun], lengths: Sequence[int], begin: int) -> Tensor:
    """A parameter's dims as a view of a stored tensor."""
    strides = [one.stride * stored.stride(one.dim) for one in steps]
    return stored.as_strided(lengths, strides, stored.storage_offset() + begin)


def _split_interval(runs: Sequence[StridedRun], offset: int, length: int) -> Sequence[Box]:
    """An interval of a dim as boxes of its runs."""
    if len(runs) == 1:
        return [Box((offset,), (length,))]
    return list(interval_boxes([one.length for one in runs], offset, offset + length))


def arrange(layout: str, dims: Sequence[str], sizes: Mapping[str, int]) -> Arrangement:
    """How a parameter of these dims lies in a tensor of this layout ("": its dims one after the other in one).

    Raises `ValueError` for a layout that leaves out a dim longer than 1, and for halves of an odd one.

    >>> arrange("[F]+F, D", ("D", "F"), {"D": 4, "F": 6}).shape
    (12, 4)
    >>> arrange("F+[F], D", ("D", "F"), {"D": 4, "F": 6}).offsets
    (6, 0)
    """
    shape, begin = [], []
    steps: dict[str, tuple[StridedRun, ...]] = dict.fromkeys(dims, (StridedRun(0, 1, 0),))
    left_out = [dim for dim in dims if sizes[dim] != 1]
    for place, group in enumerate(parse_pattern(layout or " ".join(dims))):
        stride, start = 1, 0
        for factor in reversed(group):
            extents = [math.prod(sizes[one.dim] for one in part) for part in factor.parts]
            start += stride * sum(extents[: factor.own_part])
            steps |= _own_runs(factor, place, stride, sizes)
            left_out = [dim for dim in left_out if dim not in {one.dim for one in factor.parts[factor.own_part]}]
            stride *= sum(extents)
        shape.append(stride)
        begin.append(start)
    if left_out:
        raise ValueError(f"the layout {layout!r} leaves out {', '.join(left_out)} of {', '.join(dims)}")
    return Arrangement(tuple(shape), tuple(begin), tuple(steps[dim] for dim in dims))


def _own_runs(
    factor: PatternFactor, place: int, stride: int, sizes: Mapping[str, int]
) -> dict[str, tuple[StridedRun, ...]]:
    """The steps of the parameter's dims in a factor."""
    found = {}
    for letter in reversed(factor.parts[factor.own_part]):
        found[letter.dim] = _letter_runs(letter, place, stride, sizes[letter.dim])
        stride *= sizes[letter.dim]
    return found


def _letter_runs(letter: PatternLetter, place: int, stride: int, size: int) -> tuple[StridedRun, ...]:
    if not letter.interleaved:
        return (StridedRun(place, size, stride),)
    if size % 2:
        raise ValueError(f"{letter.dim} = {size} has no halves; an even width is required")
    return StridedRun(place, 2, stride), StridedRun(place, size // 2, 2 * stride)
