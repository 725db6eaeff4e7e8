"""Products of two tensors with named dims as matrix products on views of them. Letters: n rows of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.lowering.kernels import BATCH_DIMS
from shardwise.sharding.meaning import einsum_subscripts, letters_of

Dims = tuple[str, ...]
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """`result = left · right` with dims as in an einsum, as one `mm` of matrices that are views of the operands.

    `swapped`: the right operand has the rows of the result. The result has the shape of its dims: tokens as `tokens` has them
    (an operand's place, 0 or 1, and how many of its leading dims they are), and `widths` for the others.
    """

    first: View
    second: View
    swapped: bool
    tokens: tuple[int, int]
    widths: tuple[int, ...]

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        rows, columns = self.matrices(left, right)
        return multiplied(rows, columns).view(self.shape(left, right))

    def matrices(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The two matrices whose product is the result's."""
        return (self.first(right), self.second(left)) if self.swapped else (self.first(left), self.second(right))

    def into(self, target: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
        """Write the product to `target`, a contiguous tensor of the result's shape, or add it to what is there."""
        rows, columns = self.matrices(left, right)
        matrix = target.view(rows.shape[0], columns.shape[1])
        if in_fp32(rows):
            made = multiplied(rows, columns)
            matrix.add_(made) if add else matrix.copy_(made)
        elif add:
            matrix.addmm_(rows, columns)
        else:
            torch.mm(rows, columns, out=matrix)

    def shape(self, left: Tensor, right: Tensor) -> tuple[int, ...]:
        place, count = self.tokens
        return (*(right if place else left).shape[:count], *self.widths)


def in_fp32(rows: Tensor) -> bool:
    """Whether a product is made in float32 and rounded: of fp16 on a CPU, where PyTorch's own takes twenty times as long. So sums
    are float32's there too, as tensor cores have them."""
    return rows.dtype == torch.float16 and rows.device.type == "cpu"


def multiplied(rows: Tensor, columns: Tensor) -> Tensor:
    """The product of two matrices in their format, summed in float32."""
    return torch.mm(rows.float(), columns.float()).to(rows.dtype) if in_fp32(rows) else torch.mm(rows, columns)


def product_of(left: Dims, right: Dims, result: Dims, sizes: Mapping[str, int]) -> Product | None:
    """The product of operands with these dims as a matrix product; None where dims stand so that no views are matrices.

    `sizes` are those of the dims that are not tokens.
    """
    summed = tuple(dim for dim in left if dim in right and dim not in result)
    if set(left) & set(right) & set(result) or not summed:
        return None
    for swapped, (one, other) in enumerate(((left, right), (right, left))):
        rows, columns = _own(one, other), _own(other, one)
        if (*rows, *columns) != result:
            continue
        first, second = _matrix(one, rows, summed, sizes), _matrix(other, summed, columns, sizes)
        if first is None or second is None:
            return None
        leading = [dim for dim in result if dim in BATCH_DIMS]
        if tuple(leading) != result[: len(leading)] or (leading and tuple(leading) != one[: len(leading)]):
            return None
        widths = tuple(sizes[dim] for dim in result[len(leading) :])
        return Product(first, second, bool(swapped), (swapped, len(leading)), widths)
    return None


def _own(dims: Dims, other: Dims) -> Dims:
    return tuple(dim for dim in dims if dim not in other)


def _matrix(dims: Dims, rows: Dims, columns: Dims, sizes: Mapping[str, int]) -> View | None:
    """An operand as a matrix [rows, columns]."""
    if dims == (*rows, *columns):
        shape = _shape(rows, columns, sizes)
        return lambda x: x.reshape(shape)
    if dims == (*columns, *rows):
        turned = _shape(columns, rows, sizes)
        return lambda x: x.reshape(turned).t()
    return None


def _shape(rows: Dims, columns: Dims, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Tokens are as many as there are."""
    count, width = (
        -1 if set(dims) & set(BATCH_DIMS) else math.prod(sizes[dim] for dim in dims) for dims in (rows, columns)
    )
    return count, width


class Einsum:
    """A product whose dims stand in no matrix's order, with the calls of `Product`."""

    def __init__(self, operands: Sequence[Dims], result: Dims) -> None:
        self.operands, self.result = operands, result
        self.subscripts = einsum_subscripts(operands, result, letters_of(dim for dims in operands for dim in dims))

    def __call__(self, *tensors: Tensor) -> Tensor:
        return torch.einsum(self.subscripts, *tensors)

    def into(self, target: Tensor, *tensors: Tensor, add: bool) -> None:
        """Write the product to `target`, or add it to what is there."""
        made = self(*tensors)
        target.add_(made) if add else target.copy_(made)

    def shape(self, *tensors: Tensor) -> tuple[int, ...]:
        pairs = zip(self.operands, tensors, strict=True)
        sizes = {dim: size for dims, one in pairs for dim, size in zip(dims, one.shape, strict=True)}
        return tuple(sizes[dim] for dim in self.result)


def product_or_einsum(left: Dims, right: Dims, result: Dims, sizes: Mapping[str, int]) -> Product | Einsum:
    """The product of two operands, as a matrix product where that can be."""
    return product_of(left, right, result, sizes) or Einsum((left, right), result)
