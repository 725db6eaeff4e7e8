"""Weights as operands of quantized products: stored in FP8 with a scale for each tile, or cast once for all products of a step.

Both take the place of a weight's tensor in the slots of a unit. Letters: M and K rows and columns of a matrix of the weight, R
and C its blocks of rows and of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.run.kernels.device_dispatch import has_triton
from shardwise.run.kernels.quantization import CASTS, QuantizedTensor, quantize_matrix
from shardwise.run.kernels.tensor_cores import cast_operand
from shardwise.values import NumberFormat
from shardwise.values.scalings import ScaleBlock, ScaleKind, Scaling


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """A weight stored in a narrow format with a scale for each tile: `elements` [.., M, K] and `scales` [.., R, C].

    `shape` is that of the weight; leading dims are a stack of matrices. `turned`: rows and columns are exchanged where
    it is used.
    """

    shape: torch.Size
    elements: Tensor
    scales: Tensor
    to_format: NumberFormat
    scaling: Scaling
    turned: bool = False

    @classmethod
    def zeros(
        cls, shape: torch.Size, num_stacked: int, num_rows: int, to: NumberFormat, scaling: Scaling, device: torch.device
    ) -> TiledWeight:  # fmt: skip
        """Return zeros; the first `num_stacked` dims of `shape` are a stack, the next `num_rows` its rows."""
        stack, rows = shape[:num_stacked], shape[num_stacked : num_stacked + num_rows].numel()
        columns = shape[num_stacked + num_rows :].numel()
        blocks = (-(-size // (tile or size)) for size, tile in zip((rows, columns), scaling.weight_block, strict=True))
        elements = torch.zeros(*stack, rows, columns, dtype=CASTS[to.name], device=device)
        return cls(shape, elements, torch.ones(*stack, *blocks, device=device), to, scaling)

    @property
    def dtype(self) -> torch.dtype:
        return self.elements.dtype

    @property
    def device(self) -> torch.device:
        return self.elements.device

    def to(self, dtype: torch.dtype) -> TiledWeight:
        """Return itself: products take it as it is, whatever the dtype of the activations."""
        return self

    def transpose(self, first: int, second: int) -> TiledWeight:
        """Return it with rows and columns of each matrix exchanged."""
        shape = torch.Size((*self.shape[:first], self.shape[second], self.shape[first]))
        return replace(self, shape=shape, turned=not self.turned)

    def __iter__(self) -> Iterator[TiledWeight]:
        """Yield the matrices of a stack."""
        for elements, scales in zip(self.elements, self.scales, strict=True):
            yield replace(self, shape=self.shape[1:], elements=elements, scales=scales)

    def store(self, values: Tensor) -> None:
        """Quantize a tensor of its shape."""
        elements, scales = (tensor.view(-1, *tensor.shape[-2:]) for tensor in (self.elements, self.scales))
        for matrix, target, target_scales in zip(values.reshape(elements.shape), elements, scales, strict=True):
            cast = quantize_matrix(matrix, self.to_format, self.scaling.weight_block, self.scaling.kind)
            target.copy_(cast.elements)
            target_scales.copy_(cast.scales)

    def operand(self, *, by_columns: bool) -> QuantizedTensor:
        """Return one matrix as an operand of a product, by its rows, or by its columns as rows."""
        quantized = QuantizedTensor(self.elements, self.scales, torch.ones((), device=self.device))
        return quantized.transpose() if by_columns else quantized


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format of a cast weight: that of elements, the block of a scale along each order, and the kind of scale."""

    to: NumberFormat
    block: ScaleBlock
    kind: ScaleKind

    @property
    def stored_block(self) -> ScaleBlock:
        """Block of a scale as it is stored: each row of 16x16 has a copy of it, since tensor cores take scales of 1x16."""
        return (1, 16) if self.block == (16, 16) else self.block

    @property
    def is_symmetric(self) -> bool:
        """True if the cast of the transposed matrix is the transpose of the cast."""
        return self.block[0] == self.block[1]


@dataclass(frozen=True, slots=True, eq=False)
class CastWeight:
    """A weight cast for the products of a step, in both orders of its dims, since each is innermost in some product.

    `by_rows` has the matrices [.., M, K] of a stack, `by_columns` their transposes [.., K, M], each contiguous and with its own
    scales; with blocks as wide as high, both have the same numbers. `shape` is that of the weight. `turned`: rows and columns
    are exchanged where it is used.
    """

    shape: torch.Size
    by_rows: QuantizedTensor
    by_columns: QuantizedTensor
    weight_format: WeightFormat
    turned: bool = False

    @classmethod
    def empty(
        cls, shape: torch.Size, num_stacked: int, num_rows: int, weight_format: WeightFormat, device: torch.device
    ) -> CastWeight:
        """Return memory that is not set; the first `num_stacked` dims of `shape` are a stack, the next `num_rows` its rows."""
        stack, rows = shape[:num_stacked], shape[num_stacked : num_stacked + num_rows].numel()
        columns = shape[num_stacked + num_rows :].numel()

        def order(num_rows: int, num_columns: int) -> QuantizedTensor:
            matrix = torch.empty(num_rows, num_columns, device="meta")
            quantized = quantize_matrix(matrix, weight_format.to, weight_format.stored_block, weight_format.kind)
            stored = quantized.store(weight_format.to, weight_format.kind)
            return QuantizedTensor(
                *(torch.empty((*stack, *part.shape), dtype=part.dtype, device=device) for part in stored)
            )

        return cls(shape, order(rows, columns), order(columns, rows), weight_format)

    @property
    def dtype(self) -> torch.dtype:
        return self.by_rows.elements.dtype

    @property
    def device(self) -> torch.device:
        return self.by_rows.elements.device

    def to(self, dtype: torch.dtype) -> CastWeight:
        """Return itself: products take it as it is, whatever the dtype of the activations."""
        return self

    def transpose(self, first: int, second: int) -> CastWeight:
        """Return it with rows and columns of each matrix exchanged."""
        shape = torch.Size((*self.shape[:first], self.shape[second], self.shape[first]))
        return replace(self, shape=shape, turned=not self.turned)

    def __iter__(self) -> Iterator[CastWeight]:
        """Yield the matrices of a stack."""
        for by_rows, by_columns in zip(_split(self.by_rows), _split(self.by_columns), strict=True):
            yield replace(self, shape=self.shape[1:], by_rows=by_rows, by_columns=by_columns)

    def tensors(self) -> Iterator[Tensor]:
        """Yield what it stores."""
        yield from (*self.by_rows, *self.by_columns)

    def store(self, values: Tensor, factor: Tensor | None = None) -> None:
        """Cast a tensor of its shape, by the scale `factor` of earlier steps where there is one."""
        if self.by_rows.elements.dim() > 2:
            for weight, matrix in zip(self, values, strict=True):
                weight.store(matrix, factor)
            return
        num_rows = self.by_rows.elements.shape[0]
        casts = cast_orders(values.reshape(num_rows, -1), self.weight_format, factor)
        for order, cast in zip((self.by_rows, self.by_columns), casts, strict=True):
            for target, part in zip(order, cast, strict=True):
                target.copy_(part)

    @property
    def block(self) -> ScaleBlock:
        """Block of a scale."""
        return self.weight_format.stored_block

    def operand(self, *, by_columns: bool) -> QuantizedTensor:
        """Return one matrix as an operand of a product, by its rows, or by its columns as rows."""
        return self.by_columns if by_columns else self.by_rows


def _split(stack: QuantizedTensor) -> Iterator[QuantizedTensor]:
    yield from (QuantizedTensor(*parts) for parts in zip(*stack, strict=True))


def cast_orders(
    matrix: Tensor, weight_format: WeightFormat, factor: Tensor | None = None
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Return a matrix [M, K] and its transpose [K, M] as they are stored: from one read of it by one kernel where there is one
    (blocks of 1x128, 128x128 and 1x32 on a GPU with Triton)."""
    to, block, kind = weight_format.to, weight_format.block, weight_format.kind
    if factor is None and to.name in CASTS and has_triton(matrix, any_strides=True):
        from shardwise.run.triton_kernels import block_casts

        if block in block_casts.BLOCKS and kind in block_casts.KINDS:
            first, second = block_casts.cast_blocks(matrix, CASTS[to.name], block, kind, with_transposed=True)
            unscaled = torch.ones((), device=matrix.device)
            assert second is not None
            return QuantizedTensor(*first, unscaled), QuantizedTensor(*second, unscaled)
    if not weight_format.is_symmetric:
        return cast_operand(matrix, to, block, kind, factor), cast_operand(matrix.t(), to, block, kind, factor)
    if to.name in CASTS:
        cast = cast_operand(matrix, to, block, kind, factor)
        return cast, cast.transpose()
    quantized = quantize_matrix(matrix, to, block, kind, factor)
    by_rows, by_columns = (order.store(to, kind) for order in (quantized, quantized.transpose()))
    return _repeat_scales(by_rows, block[0] or 1), _repeat_scales(by_columns, block[0] or 1)


def _repeat_scales(cast: QuantizedTensor, height: int) -> QuantizedTensor:
    """Return a matrix with a copy of each scale for every row of its block."""
    scales = cast.scales.view(torch.uint8).repeat_interleave(height, 0)[: len(cast.elements)]
    return cast._replace(scales=scales.view(cast.scales.dtype))
