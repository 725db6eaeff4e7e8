"""Activations as operands of quantized products: cast by the kernel that makes them, in the forms that products read
(`derive.producer_casts`).

A kernel with an `OutputCast` writes its result [B, T, ..] as matrices with a scale for each block of a row: of `rows` [M, K], M
tokens, and of `columns` [K, M], and as it is where something else reads it. On a GPU with Triton it does so in its own launch
(`run.triton_kernels.fused_casts`); the reference makes the plain result first, rounded to its dtype, and casts that, so that all
numbers are those of casts in the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.derive.producer_casts import FORMS, Form
from shardwise.run.kernels.device_dispatch import has_triton
from shardwise.run.kernels.quantization import CASTS, QuantizedTensor
from shardwise.run.kernels.tensor_cores import cast_operand
from shardwise.values import NumberFormat, ceil_div
from shardwise.values.scalings import ScaleBlock, ScaleKind

if TYPE_CHECKING:
    from shardwise.run.triton_kernels.fused_casts import CastOptions, ResultForms

NUM_TOKEN_DIMS = 2  # B and T, which are the rows of an activation's matrix
SCALE_DTYPES: dict[ScaleKind, torch.dtype] = {
    "fp32": torch.float32, "power_of_two": torch.float32, "e8m0": torch.float8_e8m0fnu,
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class CastActivation:
    """An activation of `shape` as a quantized matrix: its rows, or its columns as rows. Products give results in `dtype`."""

    shape: torch.Size
    dtype: torch.dtype
    quantized: QuantizedTensor

    @property
    def device(self) -> torch.device:
        return self.quantized.elements.device

    def pad(self, shape: tuple[int, int]) -> QuantizedTensor:
        """Return the matrix with zeros up to a shape, which adds no block of a row."""
        elements, scales, tensor_scale = self.quantized
        if tuple(elements.shape) == shape:
            return self.quantized
        num_rows, num_columns = (after - before for after, before in zip(shape, elements.shape, strict=True))
        padded = F.pad(elements.view(torch.uint8), (0, num_columns, 0, num_rows)).view(elements.dtype)
        padding = scales[:1].expand(num_rows, -1)  # of zeros, so that any scale is right
        return QuantizedTensor(padded, torch.cat([scales, padding]) if num_rows else scales, tensor_scale)


@dataclass(frozen=True, slots=True)
class OutputCast:
    """Forms in which a kernel writes its result, in their order, and the format of those that are cast."""

    forms: tuple[Form, ...]
    to: NumberFormat
    block: ScaleBlock
    kind: ScaleKind

    @property
    def has_blocks(self) -> bool:
        """True if scales are of blocks within a row, which a kernel casts by tiles."""
        return self.block[1] is not None

    @property
    def options(self) -> CastOptions:
        """Options of the kernels with casts."""
        from shardwise.run.triton_kernels.fused_casts import CastOptions

        return CastOptions(CASTS[self.to.name], self.block, self.kind, *(form in self.forms for form in FORMS))

    def of_kernel(self, like: Tensor, forms: ResultForms) -> tuple[Tensor | CastActivation, ...]:
        """Return the forms of a result that a kernel with casts has written; it has the shape and the dtype of `like`."""
        unscaled = _unscaled(like)
        rows, columns = (QuantizedTensor(*cast, unscaled) for cast in (forms.rows, forms.columns))
        return self.forms_of(forms.plain if "plain" in self.forms else like, rows, columns)

    def of(self, result: Tensor) -> tuple[Tensor | CastActivation, ...]:
        """Return the forms of a plain result [B, T, ..]."""
        return self.forms_of(result, *self._cast(result.reshape(matrix_shape(result))))

    def forms_of(
        self, plain: Tensor, rows: QuantizedTensor | None, columns: QuantizedTensor | None
    ) -> tuple[Tensor | CastActivation, ...]:
        """Return the forms of a result from its casts; of `plain` only shape and dtype count where it is not among them."""
        casts = {"rows": rows, "columns": columns}
        forms: list[Tensor | CastActivation] = []
        for form in self.forms:
            quantized = casts.get(form)
            forms.append(plain if quantized is None else CastActivation(plain.shape, plain.dtype, quantized))
        return tuple(forms)

    def _cast(self, matrix: Tensor) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        if matrix.is_meta:
            return self.empty(matrix)
        to, block, kind = self.to, self.block, self.kind
        if set(self.forms) >= {"rows", "columns"} and has_triton(matrix, any_strides=True):
            from shardwise.run.triton_kernels import block_casts

            casts = block_casts.cast_blocks(matrix, CASTS[to.name], block, kind, with_transposed=True)
            rows, columns = (QuantizedTensor(*cast, _unscaled(matrix)) for cast in casts if cast is not None)
            return rows, columns
        orders = ("rows", matrix), ("columns", matrix.t())
        first, second = (cast_operand(x, to, block, kind) if form in self.forms else None for form, x in orders)
        return first, second

    def empty(self, matrix: Tensor) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """Return memory that is not set for the casts of a matrix [M, K]; None for a form that is not written."""
        shapes = ("rows", tuple(matrix.shape)), ("columns", tuple(matrix.shape[::-1]))
        first, second = (self._empty(matrix, shape) if form in self.forms else None for form, shape in shapes)
        return first, second

    def _empty(self, matrix: Tensor, shape: tuple[int, ...]) -> QuantizedTensor:
        num_rows, num_columns = shape
        num_blocks = ceil_div(num_columns, self.block[1] or num_columns)
        return QuantizedTensor(
            matrix.new_empty((num_rows, num_columns), dtype=CASTS[self.to.name]),
            matrix.new_empty((num_rows, num_blocks), dtype=SCALE_DTYPES[self.kind]),
            _unscaled(matrix),
        )


def matrix_shape(result: Tensor) -> tuple[int, int]:
    """Return the shape of an activation [B, T, ..] as a matrix whose rows are tokens."""
    return result.shape[:NUM_TOKEN_DIMS].numel(), result.shape[NUM_TOKEN_DIMS:].numel()


def _unscaled(matrix: Tensor) -> Tensor:
    return torch.ones((), device=matrix.device)
