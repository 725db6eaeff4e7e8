"""Products of two tensors with named dims as matrix products on views of them, with operands as they are or cast.

Letters: n rows of tokens. Operands are cast to a narrow format with scales, as a precision recipe says. On a GPU those
with a scale for each tensor or row run in FP8 (`torch._scaled_mm`); all others, and all on a CPU, are emulated:
elements are held in float32 and multiplied there, so that every product of two is exact, and sums are float32's: what
hardware gives, up to the order of its sums. Source: `floats.scaling` has those of the recipes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shardwise.model.program import Role
from shardwise.model.program import Tensor as Named
from shardwise.run.kernels.device_dispatch import on_gpu
from shardwise.run.kernels.quantization import (
    QuantizedTensor,
    TiledWeight,
    can_run_on_tensor_cores,
    quantize_matrix,
    scaled_product,
    tensor_core_product,
)
from shardwise.sharding.notation import assign_letters, einsum_subscripts
from shardwise.step.kernel_fusion import BATCH_DIMS
from shardwise.values.dtypes import NumberFormat, get_number_format
from shardwise.values.precision import Precision
from shardwise.values.quantization import WHOLE_MATRIX, ScaleBlock, Scaling, get_scaling

Dims = tuple[str, ...]
View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Matmul:
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
        return multiply(rows, columns).view(self.shape(left, right))

    def matrices(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The two matrices whose product is the result's."""
        return (self.first(right), self.second(left)) if self.swapped else (self.first(left), self.second(right))

    def into(self, target: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
        """Write the product to `target`, a contiguous tensor of the result's shape, or add it to what is there."""
        rows, columns = self.matrices(left, right)
        matrix = target.view(rows.shape[0], columns.shape[1])
        if accumulates_in_fp32(rows):
            made = multiply(rows, columns)
            matrix.add_(made) if add else matrix.copy_(made)
        elif add:
            matrix.addmm_(rows, columns)
        else:
            torch.mm(rows, columns, out=matrix)

    def shape(self, left: Tensor, right: Tensor) -> tuple[int, ...]:
        place, count = self.tokens
        return (*(right if place else left).shape[:count], *self.widths)


def accumulates_in_fp32(rows: Tensor) -> bool:
    """Whether a product is made in float32 and rounded: of fp16 on a CPU, where PyTorch's own takes twenty times as long. So sums
    are float32's there too, as tensor cores have them."""
    return rows.dtype == torch.float16 and rows.device.type == "cpu"


def multiply(rows: Tensor, columns: Tensor) -> Tensor:
    """The product of two matrices in their format, summed in float32."""
    return (
        torch.mm(rows.float(), columns.float()).to(rows.dtype) if accumulates_in_fp32(rows) else torch.mm(rows, columns)
    )


def as_matmul(left: Dims, right: Dims, result: Dims, sizes: Mapping[str, int]) -> Matmul | None:
    """The product of operands with these dims as a matrix product; None where dims stand so that no views are matrices.

    `sizes` are those of the dims that are not tokens.
    """
    summed = tuple(dim for dim in left if dim in right and dim not in result)
    if set(left) & set(right) & set(result) or not summed:
        return None
    for swapped, (one, other) in enumerate(((left, right), (right, left))):
        rows, columns = _unshared_dims(one, other), _unshared_dims(other, one)
        if (*rows, *columns) != result:
            continue
        first, second = _as_matrix(one, rows, summed, sizes), _as_matrix(other, summed, columns, sizes)
        if first is None or second is None:
            return None
        leading = [dim for dim in result if dim in BATCH_DIMS]
        if tuple(leading) != result[: len(leading)] or (leading and tuple(leading) != one[: len(leading)]):
            return None
        widths = tuple(sizes[dim] for dim in result[len(leading) :])
        return Matmul(first, second, bool(swapped), (swapped, len(leading)), widths)
    return None


def _unshared_dims(dims: Dims, other: Dims) -> Dims:
    return tuple(dim for dim in dims if dim not in other)


def _as_matrix(dims: Dims, rows: Dims, columns: Dims, sizes: Mapping[str, int]) -> View | None:
    """An operand as a matrix [rows, columns]."""
    if dims == (*rows, *columns):
        shape = _matrix_shape(rows, columns, sizes)
        return lambda x: x.reshape(shape)
    if dims == (*columns, *rows):
        turned = _matrix_shape(columns, rows, sizes)
        return lambda x: x.reshape(turned).t()
    return None


def _matrix_shape(rows: Dims, columns: Dims, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Tokens are as many as there are."""
    count, width = (
        -1 if set(dims) & set(BATCH_DIMS) else math.prod(sizes[dim] for dim in dims) for dims in (rows, columns)
    )
    return count, width


class Einsum:
    """A product whose dims stand in no matrix's order, with the calls of `Matmul`."""

    def __init__(self, operands: Sequence[Dims], result: Dims) -> None:
        self.operands, self.result = operands, result
        self.subscripts = einsum_subscripts(operands, result, assign_letters(dim for dims in operands for dim in dims))

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


def matmul_or_einsum(left: Dims, right: Dims, result: Dims, sizes: Mapping[str, int]) -> Matmul | Einsum:
    """The product of two operands, as a matrix product where that can be."""
    return as_matmul(left, right, result, sizes) or Einsum((left, right), result)


MatmulOperand = Tensor | TiledWeight
SCALES_INPUT = "@scales"  # what a call reads of the scales from earlier steps


@dataclass(frozen=True, slots=True)
class OperandCast:
    """What an operand of a product is cast to: a format, in blocks [rows, summed] that have a scale each. `name` is that of the
    tensor in its unit."""

    to: NumberFormat
    block: ScaleBlock
    name: str = ""


class OperandScales(Protocol):
    """Scales of one unit's operands from earlier steps."""

    def factor(self, name: str, values: Tensor) -> Tensor:
        """By what the tensor of a name is multiplied, a scalar; its values are seen for the steps that follow."""


@dataclass(frozen=True, slots=True)
class ProductFormats:
    """The formats of products with a block's weights: of activations and weights, and of gradients."""

    operand: NumberFormat
    gradient: NumberFormat
    scaling: Scaling

    def of(self, tensor: Named) -> OperandCast:
        """What a tensor of a unit is cast to."""
        block = self.scaling.weight_block if tensor.role is Role.WEIGHT else self.scaling.block
        return OperandCast(self.gradient if tensor.gradient_of else self.operand, block, tensor.name)

    def product(self, left: Dims, right: Dims, result: Dims, tensors: Sequence[Named]) -> QuantizedMatmul:
        """That of two tensors of a unit, whose dims stand so."""
        first, second = (self.of(one) for one in tensors)
        return QuantizedMatmul(left, right, result, (first, second), self.scaling)


def product_formats(precision: Precision) -> ProductFormats | None:
    """Those of a recipe; None: products run in the format of activations."""
    if precision.operand is None or precision.gradient_operand is None or precision.scaling is None:
        return None
    operand, gradient = get_number_format(precision.operand), get_number_format(precision.gradient_operand)
    return ProductFormats(operand, gradient, get_scaling(precision.scaling))


@dataclass(frozen=True, slots=True)
class QuantizedMatmul:
    """`result = left · right` with dims as in an einsum, of operands that are cast; with the calls of `matmul.Matmul`.

    What an operand has alone are the rows of its matrix, what both have is summed, in the left one's order. Where the scaling is
    delayed, a call reads the unit's `scales` behind the operands.
    """

    left: Dims
    right: Dims
    result: Dims
    operands: tuple[OperandCast, OperandCast]
    scaling: Scaling
    scales: OperandScales | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """What a call reads beside the operands."""
        return (SCALES_INPUT,) if self.scaling.is_delayed else ()

    def at(self, *scales: OperandScales) -> QuantizedMatmul:
        """The same with what `reads` has."""
        return replace(self, scales=scales[0]) if scales else self

    def of(self, left: Dims, right: Dims, result: Dims, *, turned: bool) -> QuantizedMatmul:
        """The same of operands whose dims stand otherwise; `turned`: the second operand is the left one of these."""
        operands = self.operands[::-1] if turned else self.operands
        return QuantizedMatmul(left, right, result, operands, self.scaling)

    def __call__(self, left: MatmulOperand, right: MatmulOperand, *scales: OperandScales) -> Tensor:
        return (
            self.at(*scales)
            .multiply_in_fp32(left, right)
            .to(right.dtype if isinstance(left, TiledWeight) else left.dtype)
        )

    def into(
        self, target: Tensor, left: MatmulOperand, right: MatmulOperand, *scales: OperandScales, add: bool
    ) -> None:
        """Write the product to `target`, a tensor of the result's shape, or add it to what is there, in the target's format."""
        made = self.at(*scales).multiply_in_fp32(left, right)
        target.add_(made) if add else target.copy_(made)

    def multiply_in_fp32(self, left: MatmulOperand, right: MatmulOperand) -> Tensor:
        """The product as it is summed."""
        casts = (self._cast(*one) for one in zip((left, right), (self.left, self.right), self.operands, strict=True))
        first, second = casts
        blocks = self.operands[0].block, self.operands[1].block
        made = self._on_tensor_cores(first, second) if on_gpu(first.elements) else None
        if made is None:
            made = scaled_product(first, blocks[0], second, blocks[1], is_local=self.scaling.scales_inside_matmul)
        sizes = dict(zip((*self.left, *self.right), (*left.shape, *right.shape), strict=True))
        own = (*self._rows(self.left), *self._rows(self.right))
        return made.view([sizes[dim] for dim in own]).permute([own.index(dim) for dim in self.result])

    def _on_tensor_cores(self, first: QuantizedTensor, second: QuantizedTensor) -> Tensor | None:
        """The product of matrices that one scale of each tensor or row belongs to; None of others."""
        blocks, formats = [one.block for one in self.operands], (self.operands[0].to.name, self.operands[1].to.name)
        by_row = blocks == [(1, None)] * 2
        if not (by_row or blocks == [WHOLE_MATRIX] * 2) or not can_run_on_tensor_cores(
            first, second, formats, by_row=by_row
        ):
            return None
        return tensor_core_product(first, second, formats, by_row=by_row)

    def _cast(self, tensor: MatmulOperand, dims: Dims, operand: OperandCast) -> QuantizedTensor:
        """An operand as a matrix [rows, summed], cast."""
        rows = self._rows(dims)
        if isinstance(tensor, TiledWeight):
            return tensor.operand(by_columns=(dims[: len(rows)] != rows) is not tensor.turned)
        turned = tensor.permute([dims.index(dim) for dim in (*rows, *self._summed())])
        matrix = turned.reshape(math.prod(turned.shape[: len(rows)]), -1)
        factor = None if self.scales is None else self.scales.factor(operand.name, matrix)
        return quantize_matrix(matrix, operand.to, operand.block, self.scaling.kind, factor)

    def _summed(self) -> Dims:
        return tuple(dim for dim in self.left if dim in self.right)

    def _rows(self, dims: Dims) -> Dims:
        return tuple(dim for dim in dims if dim not in self._summed())
