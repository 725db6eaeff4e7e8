"""A weight as matrices, [stack, rows, columns], and what has one number for each row, column or matrix of it.

What has no rows and columns is one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.lowering.groups import Member
from shardwise.optimizer.optimizer import Per
from shardwise.train.box import Box, Shape

DIM: Mapping[Per, tuple[int, ...]] = {  # that a tensor lacks of [stack, rows, columns]
    Per.ELEMENT: (), Per.ROW: (2,), Per.COLUMN: (1,), Per.TENSOR: (1, 2)
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extents:
    """A weight as [stack, rows, columns]: `shape` as it is used, with what pads it, its `window` without, and the `whole` one."""

    shape: Shape
    window: Shape
    whole: Shape

    @classmethod
    def of(cls, member: Member, window: Box) -> Extents:
        """Those of a parameter, of which a process uses a window."""
        matrix = member.parameter.matrix

        def folded(sizes: Sequence[int]) -> Shape:
            if matrix is None:
                return 1, 1, math.prod(sizes)
            ends = len(matrix.stack), len(matrix.stack) + len(matrix.rows)
            return math.prod(sizes[: ends[0]]), math.prod(sizes[ends[0] : ends[1]]), math.prod(sizes[ends[1] :])

        return cls(folded(member.shape), folded(window.lengths), folded(member.whole))

    def zeros(self, per: Per, like: Tensor, dtype: torch.dtype) -> Tensor:
        """One number for each row, column or matrix, with those that pad it."""
        sizes = [1 if dim in DIM[per] else size for dim, size in enumerate(self.shape)]
        return torch.zeros(sizes, dtype=dtype, device=like.device)

    def own(self, per: Per, small: Tensor) -> Tensor:
        """A view without what pads it."""
        return small[tuple(slice(None) if dim in DIM[per] else slice(size) for dim, size in enumerate(self.window))]

    def count(self, per: Per, of: Iterable[Per]) -> int:
        """How many of the numbers of some tensors a number of another is the mean of."""
        kept = {dim for one in of for dim in range(3) if dim not in DIM[one]}
        return math.prod(self.whole[dim] for dim in DIM[per] if dim in kept)


def within(box: Box, small: Tensor) -> tuple[slice, ...]:
    """What of a tensor of rows or columns a box of elements takes."""
    return tuple(slice(None) if size == 1 else part for size, part in zip(small.shape, box.slices, strict=True))


def cut(box: Box, most: int) -> Iterator[Box]:
    """A contiguous box in contiguous boxes of at most so many elements."""
    if box.volume <= most:
        yield box
        return
    dim = next(dim for dim, length in enumerate(box.lengths) if length > 1)
    size, each = box.lengths[dim], max(1, most // math.prod(box.lengths[dim + 1 :]))
    for part in box.cut(dim, [min(each, size - start) for start in range(0, size, each)]):
        yield from cut(part, most)
