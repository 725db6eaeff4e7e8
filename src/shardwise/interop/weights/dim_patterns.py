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

from shardwise.values import Box, Shape, interval_boxes

_PART = re.compile(r"(?:[A-Za-z]~?)+|1|\{\w+\}")
_LETTER = re.compile(r"([A-Za-z])(~?)")


class PatternLetter(NamedTuple):
    """A dim of the parameter, and whether its halves are interleaved."""

    dim: str
    interleaved: bool


class PatternFactor(NamedTuple):
    """Parts that lie one behind the other, each a product of dims; `part_index` is the index of the parameter's.

    `number` names what the factor counts ("layer", "expert"), or is "".
    """

    parts: tuple[tuple[PatternLetter, ...], ...]
    part_index: int
    number: str


FactorGroup = tuple[PatternFactor, ...]


@cache
def parse_pattern(pattern: str) -> tuple[FactorGroup, ...]:
    """Return the groups of a pattern. Raises `ValueError` if it does not follow the grammar above.

    >>> (rows,), columns = parse_pattern("[F]+F, D")
    >>> rows.part_index, len(rows.parts), columns[0].parts
    (0, 2, ((PatternLetter(dim='D', interleaved=False),),))
    """
    return tuple(tuple(_parse_factor(word) for word in group.split()) for group in pattern.split(","))


def _parse_factor(word: str) -> PatternFactor:
    parts = word.split("+")
    bracketed = [number for number, part in enumerate(parts) if part.startswith("[") and part.endswith("]")]
    bare = [part.strip("[]") for part in parts]
    if len(bracketed) != (len(parts) > 1) or not all(_PART.fullmatch(part) for part in bare):
        raise ValueError(f"found {word!r} in a layout; parts such as [GH]+H, of which one is in brackets, are required")
    number = bare[0][1:-1] if bare[0].startswith("{") else ""
    letters = tuple(() if number else _parse_letters(part) for part in bare)
    return PatternFactor(letters, bracketed[0] if bracketed else 0, number)


def _parse_letters(part: str) -> tuple[PatternLetter, ...]:
    return tuple(PatternLetter(dim, bool(mark)) for dim, mark in _LETTER.findall(part))


class StridedRun(NamedTuple):
    """`length` positions along a dim of the stored tensor, `stride` of its elements apart."""

    dim: int
    length: int
    stride: int


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Arrangement of a parameter in a stored tensor.

    `shape` is the stored tensor's; its first element of the parameter is at `offsets`. `runs` has, for each dim of the
    parameter, one strided run, or two if the halves of the dim are interleaved.
    """

    shape: Shape
    offsets: Shape
    runs: tuple[tuple[StridedRun, ...], ...]

    def write_parameter(self, parameter: Tensor, stored: Tensor) -> None:
        """Copy a parameter to its place in `stored`, a contiguous tensor, in that tensor's dtype."""
        strided_runs = [run for runs in self.runs for run in runs]
        offset = sum(start * stride for start, stride in zip(self.offsets, stored.stride(), strict=True))
        target = _strided_view(stored, strided_runs, [run.length for run in strided_runs], offset)
        target.copy_(parameter.view([run.length for run in strided_runs]))

    def read_box(self, read: Callable[[Box], Tensor], box: Box) -> Tensor:
        """Return a box of the parameter. `read` returns boxes of the stored tensor; it gets the smallest that has all
        elements."""
        # An interval of an interleaved dim can cover parts of both halves, which no single strided view has: read it in parts.
        for dim, runs in enumerate(self.runs):
            intervals = list(_split_interval(runs, box.offsets[dim], box.lengths[dim]))
            if len(intervals) > 1:
                parts = box.cut(dim, [interval.volume for interval in intervals])
                return torch.cat([self.read_box(read, part) for part in parts], dim)
        steps: list[tuple[StridedRun, int, int]] = []
        for runs, offset, length in zip(self.runs, box.offsets, box.lengths, strict=True):
            (interval,) = _split_interval(runs, offset, length)
            steps += zip(runs, interval.offsets, interval.lengths, strict=True)
        first, last = list(self.offsets), list(self.offsets)
        for run, offset, length in steps:
            first[run.dim] += run.stride * offset
            last[run.dim] += run.stride * (offset + length - 1)
        span = read(Box(tuple(first), tuple(end - start + 1 for start, end in zip(first, last, strict=True))))
        lengths = [length for _, _, length in steps]
        return _strided_view(span, [run for run, _, _ in steps], lengths, 0).reshape(box.lengths)


def _strided_view(stored: Tensor, strided_runs: Sequence[StridedRun], lengths: Sequence[int], offset: int) -> Tensor:
    """Return the parameter's dims as a view of a stored tensor."""
    strides = [run.stride * stored.stride(run.dim) for run in strided_runs]
    return stored.as_strided(lengths, strides, stored.storage_offset() + offset)


def _split_interval(runs: Sequence[StridedRun], offset: int, length: int) -> Sequence[Box]:
    """Return an interval of a dim as boxes of its runs."""
    if len(runs) == 1:
        return [Box((offset,), (length,))]
    return list(interval_boxes([run.length for run in runs], offset, offset + length))


def arrange(pattern: str, dims: Sequence[str], sizes: Mapping[str, int]) -> Arrangement:
    """Return how a parameter with these dims lies in a tensor with this pattern ("": a vector of its dims in their order).

    Raises `ValueError` for a pattern that leaves out a dim longer than 1, and for interleaved halves of an odd dim.

    >>> arrange("[F]+F, D", ("D", "F"), {"D": 4, "F": 6}).shape
    (12, 4)
    >>> arrange("F+[F], D", ("D", "F"), {"D": 4, "F": 6}).offsets
    (6, 0)
    """
    shape, offsets = [], []
    runs_by_dim: dict[str, tuple[StridedRun, ...]] = dict.fromkeys(dims, (StridedRun(0, 1, 0),))
    left_out = [dim for dim in dims if sizes[dim] != 1]
    for stored_dim, group in enumerate(parse_pattern(pattern or " ".join(dims))):
        stride, offset = 1, 0
        for factor in reversed(group):
            extents = [math.prod(sizes[letter.dim] for letter in part) for part in factor.parts]
            offset += stride * sum(extents[: factor.part_index])
            runs_by_dim |= _part_runs(factor, stored_dim, stride, sizes)
            left_out = [
                dim for dim in left_out if dim not in {letter.dim for letter in factor.parts[factor.part_index]}
            ]
            stride *= sum(extents)
        shape.append(stride)
        offsets.append(offset)
    if left_out:
        raise ValueError(f"the layout {pattern!r} leaves out {', '.join(left_out)} of {', '.join(dims)}")
    return Arrangement(tuple(shape), tuple(offsets), tuple(runs_by_dim[dim] for dim in dims))


def _part_runs(
    factor: PatternFactor, stored_dim: int, stride: int, sizes: Mapping[str, int]
) -> dict[str, tuple[StridedRun, ...]]:
    """Return the strided runs of the parameter's dims in a factor."""
    runs = {}
    for letter in reversed(factor.parts[factor.part_index]):
        runs[letter.dim] = _letter_runs(letter, stored_dim, stride, sizes[letter.dim])
        stride *= sizes[letter.dim]
    return runs


def _letter_runs(letter: PatternLetter, stored_dim: int, stride: int, size: int) -> tuple[StridedRun, ...]:
    if not letter.interleaved:
        return (StridedRun(stored_dim, size, stride),)
    if size % 2:
        raise ValueError(f"{letter.dim} = {size} has no halves; an even width is required")
    return StridedRun(stored_dim, 2, stride), StridedRun(stored_dim, size // 2, 2 * stride)
