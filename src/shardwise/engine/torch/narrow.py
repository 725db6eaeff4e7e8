"""Products whose operands are cast to a narrow format with scales, as a precision recipe says.

On a GPU those with a scale for each tensor or row run in FP8 (`torch._scaled_mm`); all others, and all on a CPU, are emulated.

Elements are held in float32 and multiplied there, so that every product of two is exact, and sums are float32's: what hardware
gives, up to the order of its sums. Source: `floats.scaling` has those of the recipes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from shardwise.engine.torch.devices import on_gpu
from shardwise.engine.torch.quantise import (
    Quantised,
    can_run_on_tensor_cores,
    quantised,
    scaled_product,
    tensor_core_product,
)
from shardwise.engine.torch.tiled import Tiled
from shardwise.floats.number_format import NumberFormat, format_named
from shardwise.floats.scaling import WHOLE, Block, Scaling, scaling_named
from shardwise.model.program import Role
from shardwise.model.program import Tensor as Named
from shardwise.precision import Precision

Dims = tuple[str, ...]
Operable = Tensor | Tiled
SCALES = "@scales"  # what a call reads of the scales from earlier steps


@dataclass(frozen=True, slots=True)
class Operand:
    """What an operand of a product is cast to: a format, in blocks [rows, summed] that have a scale each. `name` is that of the
    tensor in its unit."""

    to: NumberFormat
    block: Block
    name: str = ""


class Scales(Protocol):
    """Scales of one unit's operands from earlier steps."""

    def factor(self, name: str, values: Tensor) -> Tensor:
        """By what the tensor of a name is multiplied, a scalar; its values are seen for the steps that follow."""


@dataclass(frozen=True, slots=True)
class Narrow:
    """The formats of products with a block's weights: of activations and weights, and of gradients."""

    operand: NumberFormat
    gradient: NumberFormat
    scaling: Scaling

    def of(self, tensor: Named) -> Operand:
        """What a tensor of a unit is cast to."""
        block = self.scaling.weight_block if tensor.role is Role.WEIGHT else self.scaling.block
        return Operand(self.gradient if tensor.gradient_of else self.operand, block, tensor.name)

    def product(self, left: Dims, right: Dims, result: Dims, tensors: Sequence[Named]) -> NarrowProduct:
        """That of two tensors of a unit, whose dims stand so."""
        first, second = (self.of(one) for one in tensors)
        return NarrowProduct(left, right, result, (first, second), self.scaling)


def narrow_of(precision: Precision) -> Narrow | None:
    """Those of a recipe; None: products run in the format of activations."""
    if precision.operand is None or precision.gradient_operand is None or precision.scaling is None:
        return None
    operand, gradient = format_named(precision.operand), format_named(precision.gradient_operand)
    return Narrow(operand, gradient, scaling_named(precision.scaling))


@dataclass(frozen=True, slots=True)
class NarrowProduct:
    """`result = left · right` with dims as in an einsum, of operands that are cast; with the calls of `products.Product`.

    What an operand has alone are the rows of its matrix, what both have is summed, in the left one's order. Where the scaling is
    delayed, a call reads the unit's `scales` behind the operands.
    """

    left: Dims
    right: Dims
    result: Dims
    operands: tuple[Operand, Operand]
    scaling: Scaling
    scales: Scales | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """What a call reads beside the operands."""
        return (SCALES,) if self.scaling.is_delayed else ()

    def at(self, *scales: Scales) -> NarrowProduct:
        """The same with what `reads` has."""
        return replace(self, scales=scales[0]) if scales else self

    def of(self, left: Dims, right: Dims, result: Dims, *, turned: bool) -> NarrowProduct:
        """The same of operands whose dims stand otherwise; `turned`: the second operand is the left one of these."""
        operands = self.operands[::-1] if turned else self.operands
        return NarrowProduct(left, right, result, operands, self.scaling)

    def __call__(self, left: Operable, right: Operable, *scales: Scales) -> Tensor:
        return self.at(*scales).in_fp32(left, right).to(right.dtype if isinstance(left, Tiled) else left.dtype)

    def into(self, target: Tensor, left: Operable, right: Operable, *scales: Scales, add: bool) -> None:
        """Write the product to `target`, a tensor of the result's shape, or add it to what is there, in the target's format."""
        made = self.at(*scales).in_fp32(left, right)
        target.add_(made) if add else target.copy_(made)

    def in_fp32(self, left: Operable, right: Operable) -> Tensor:
        """The product as it is summed."""
        casts = (self._cast(*one) for one in zip((left, right), (self.left, self.right), self.operands, strict=True))
        first, second = casts
        blocks = self.operands[0].block, self.operands[1].block
        made = self._on_tensor_cores(first, second) if on_gpu(first.elements) else None
        if made is None:
            made = scaled_product(first, blocks[0], second, blocks[1], is_local=self.scaling.is_local)
        sizes = dict(zip((*self.left, *self.right), (*left.shape, *right.shape), strict=True))
        own = (*self._rows(self.left), *self._rows(self.right))
        return made.view([sizes[dim] for dim in own]).permute([own.index(dim) for dim in self.result])

    def _on_tensor_cores(self, first: Quantised, second: Quantised) -> Tensor | None:
        """The product of matrices that one scale of each tensor or row belongs to; None of others."""
        blocks, formats = [one.block for one in self.operands], (self.operands[0].to.name, self.operands[1].to.name)
        by_row = blocks == [(1, None)] * 2
        if not (by_row or blocks == [WHOLE] * 2) or not can_run_on_tensor_cores(first, second, formats, by_row=by_row):
            return None
        return tensor_core_product(first, second, formats, by_row=by_row)

    def _cast(self, tensor: Operable, dims: Dims, operand: Operand) -> Quantised:
        """An operand as a matrix [rows, summed], cast."""
        rows = self._rows(dims)
        if isinstance(tensor, Tiled):
            return tensor.operand(by_columns=(dims[: len(rows)] != rows) is not tensor.turned)
        turned = tensor.permute([dims.index(dim) for dim in (*rows, *self._summed())])
        matrix = turned.reshape(math.prod(turned.shape[: len(rows)]), -1)
        factor = None if self.scales is None else self.scales.factor(operand.name, matrix)
        return quantised(matrix, operand.to, operand.block, self.scaling.kind, factor)

    def _summed(self) -> Dims:
        return tuple(dim for dim in self.left if dim in self.right)

    def _rows(self, dims: Dims) -> Dims:
        return tuple(dim for dim in dims if dim not in self._summed())
