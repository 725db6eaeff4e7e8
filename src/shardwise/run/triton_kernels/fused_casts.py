"""Norms and gated activations that write their results as operands of FP8 products, in the pass that makes them.

A result [M, K] becomes rows [M, K] and columns [K, M] in FP8, with a scale for each block of 128 or 32 elements, or for a whole
row (`block_casts`, `casts`); and it is written as it is where something else reads it. It is rounded to its own dtype before it
is cast, so that all numbers are those of a kernel and casts behind it.

- A norm has a row in registers, casts it by its blocks, and writes it once. Blocks of columns have elements of 128 or 32 rows,
  more than a program holds. So the first kernel only adds the residual and takes the statistics, and a second one, by tiles of
  128 x 128, normalises and writes both orders.
- A gated activation is elementwise: a program has a tile of gate and up (and of dy, for both gradients), and writes both orders.

Bytes of N elements of b bytes, scales apart: a norm of rows 3 N b + N (two reads, the sum, the rows), with columns 4 N b + 2 N; a
gated activation 2 N b + 2 N; both gradients 3 N b + 4 N. A kernel with casts behind it moves 2 N b more for each result, and N b
for each cast. References: `run.kernels.norms`, `run.kernels.elementwise` and `run.kernels.quantization`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.run.triton_kernels.block_casts import (
    KINDS,
    TILE,
    cast_tile,
    inside_of_tile,
    scale_factors,
    tile_pointers,
)
from shardwise.run.triton_kernels.gated_activation import CLAMPED_SWIGLU, gate_gradient, gated_value, up_gradient
from shardwise.run.triton_kernels.gated_activation import KINDS as GATED_KINDS
from shardwise.run.triton_kernels.norms import normalise_row, num_warps_of
from shardwise.values.scalings import ScaleBlock, ScaleKind

NUM_WARPS = 16  # 32 elements a thread


class CastOptions(NamedTuple):
    """Forms in which a result is written, and the format of those that are cast: FP8 dtype, block and kind of scales."""

    dtype: torch.dtype
    block: ScaleBlock
    kind: ScaleKind
    plain: bool
    rows: bool
    columns: bool


class ResultForms(NamedTuple):
    """A result as it is, and its rows and columns as elements and scales; of what is not written, memory that is not read."""

    plain: Tensor
    rows: tuple[Tensor, Tensor]
    columns: tuple[Tensor, Tensor]


@triton.jit
def norm_rows_kernel(
    x, residual, weight, total, out, mean, inverse, elements, scales, width, epsilon, largest, largest_exponent,
    IS_LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_PLAIN: tl.constexpr, HAS_ROWS: tl.constexpr,
    KIND: tl.constexpr, WIDTH: tl.constexpr, BY_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise a row, after adding the residual to it, and write the sum, the statistics, and the forms of the result."""
    row = tl.program_id(0).to(tl.int64)
    result = normalise_row(
        x, residual, weight, total, mean, inverse, row, width, epsilon, IS_LAYER, HAS_RESIDUAL, BLOCK
    ).to(x.dtype.element_ty)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    if HAS_PLAIN:
        tl.store(out + row * width + columns, result, mask=inside)
    if HAS_ROWS:
        parts = tl.reshape(result.to(tl.float32), (BLOCK // WIDTH, WIDTH))
        encode, scale = scale_factors(tl.max(tl.abs(parts), axis=1), largest, largest_exponent, KIND)
        values = tl.reshape(parts * encode[:, None], (BLOCK,))
        values = tl.minimum(tl.maximum(values, -largest), largest)
        tl.store(elements + row * width + columns, values.to(elements.dtype.element_ty), mask=inside)
        num_blocks = tl.cdiv(width, WIDTH)
        blocks = tl.arange(0, BLOCK // WIDTH)
        row_stride, block_stride = (1, tl.num_programs(0)) if BY_COLUMNS else (num_blocks, 1)
        offsets = row * row_stride + blocks * block_stride
        tl.store(scales + offsets, scale.to(scales.dtype.element_ty), mask=blocks < num_blocks)


@triton.jit
def load_tile(matrix, first_row, first_column, num_rows, num_columns, TILE: tl.constexpr):
    """Return a tile of a contiguous matrix in float32."""
    inside = inside_of_tile(first_row, first_column, num_rows, num_columns, TILE)
    pointers = tile_pointers(matrix, first_row, first_column, num_columns, TILE)
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_forms(
    values, plain, elements, scales, turned, turned_scales, first_row, first_column, num_rows, num_columns, largest,
    largest_exponent, HAS_PLAIN: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr, KIND: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the forms of a tile of a result that has its dtype."""
    if HAS_PLAIN:
        inside = inside_of_tile(first_row, first_column, num_rows, num_columns, TILE)
        tl.store(tile_pointers(plain, first_row, first_column, num_columns, TILE), values, mask=inside)
    tile = values.to(tl.float32)
    if HAS_ROWS:
        cast_tile(
            tile, elements, scales, first_row, first_column, num_rows, num_columns, largest, largest_exponent, KIND, WIDTH,
            TILE,
        )  # fmt: skip
    if HAS_COLUMNS:
        cast_tile(
            tl.trans(tile), turned, turned_scales, first_column, first_row, num_columns, num_rows, largest,
            largest_exponent, KIND, WIDTH, TILE,
        )  # fmt: skip


@triton.jit
def norm_tiles_kernel(
    x, weight, mean, inverse, plain, elements, scales, turned, turned_scales, num_rows, num_columns, largest,
    largest_exponent, IS_LAYER: tl.constexpr, HAS_PLAIN: tl.constexpr, HAS_ROWS: tl.constexpr, KIND: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Normalise a tile of rows with known statistics, and write the forms of the result, columns among them."""
    first_row, first_column = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    rows, columns = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    has_row, has_column = rows < num_rows, columns < num_columns
    inside = has_row[:, None] & has_column[None, :]
    pointers = tile_pointers(x, first_row, first_column, num_columns, TILE)
    values = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    if IS_LAYER:
        average = tl.load(mean + rows, mask=has_row, other=0.0)
        values = tl.where(inside, values - average[:, None], 0.0)
    factor = tl.load(inverse + rows, mask=has_row, other=0.0)
    scale = tl.load(weight + columns, mask=has_column, other=0.0).to(tl.float32)
    result = (values * factor[:, None] * scale[None, :]).to(x.dtype.element_ty)
    _store_forms(
        result, plain, elements, scales, turned, turned_scales, first_row, first_column, num_rows, num_columns, largest,
        largest_exponent, HAS_PLAIN, HAS_ROWS, True, KIND, WIDTH, TILE,
    )  # fmt: skip


@triton.jit
def gated_forward_tiles_kernel(
    gate, up, plain, elements, scales, turned, turned_scales, num_rows, num_columns, largest, largest_exponent,
    ACTIVATION: tl.constexpr, HAS_PLAIN: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    KIND: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the forms of act(gate) · up of a tile."""
    first_row, first_column = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    gate_values = load_tile(gate, first_row, first_column, num_rows, num_columns, TILE)
    result = gated_value(gate_values, load_tile(up, first_row, first_column, num_rows, num_columns, TILE), ACTIVATION)
    _store_forms(
        result.to(gate.dtype.element_ty), plain, elements, scales, turned, turned_scales, first_row, first_column, num_rows,
        num_columns, largest, largest_exponent, HAS_PLAIN, HAS_ROWS, HAS_COLUMNS, KIND, WIDTH, TILE,
    )  # fmt: skip


@triton.jit
def gated_backward_tiles_kernel(
    dy, gate, up, gate_plain, gate_elements, gate_scales, gate_turned, gate_turned_scales, up_plain, up_elements, up_scales,
    up_turned, up_turned_scales, num_rows, num_columns, largest, largest_exponent,
    ACTIVATION: tl.constexpr, HAS_PLAIN: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    KIND: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the forms of the gradient of gate, or of up, of a tile: registers have no room for both in two orders. Programs of
    one tile are neighbours, so that the second finds dy and gate in the L2 cache."""
    first_row, first_column = tl.program_id(1) * TILE, tl.program_id(2) * TILE
    gradient = load_tile(dy, first_row, first_column, num_rows, num_columns, TILE)
    gate_values = load_tile(gate, first_row, first_column, num_rows, num_columns, TILE)
    if tl.program_id(0) == 0:
        linear = load_tile(up, first_row, first_column, num_rows, num_columns, TILE)
        result = gate_gradient(gradient, gate_values, linear, ACTIVATION).to(gate.dtype.element_ty)
        _store_forms(
            result, gate_plain, gate_elements, gate_scales, gate_turned, gate_turned_scales, first_row, first_column, num_rows,
            num_columns, largest, largest_exponent, HAS_PLAIN, HAS_ROWS, HAS_COLUMNS, KIND, WIDTH, TILE,
        )  # fmt: skip
    else:
        linear = gradient
        if ACTIVATION == CLAMPED_SWIGLU:
            linear = load_tile(up, first_row, first_column, num_rows, num_columns, TILE)
        result = up_gradient(gradient, gate_values, linear, ACTIVATION).to(up.dtype.element_ty)
        _store_forms(
            result, up_plain, up_elements, up_scales, up_turned, up_turned_scales, first_row, first_column, num_rows,
            num_columns, largest, largest_exponent, HAS_PLAIN, HAS_ROWS, HAS_COLUMNS, KIND, WIDTH, TILE,
        )  # fmt: skip


def norm_forms(
    x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, options: CastOptions, *, is_layer: bool,
    into: Tensor | None = None,
) -> tuple[Tensor, ResultForms, Tensor, Tensor]:  # fmt: skip
    """Return x + residual (x itself without one), the forms of its norm, and the mean and inverse deviation of each row, as
    `norms.norm_forward` does."""
    width = weight.numel()
    num_rows = x.numel() // width
    total = x if residual is None else torch.empty_like(x) if into is None else into
    inverse = x.new_empty((num_rows, 1), dtype=torch.float32)
    mean = torch.empty_like(inverse) if is_layer else inverse.new_empty(0)
    forms = _empty_forms(x, (num_rows, width), options)
    if not num_rows:
        return total, forms, mean, inverse
    block = options.block[1]
    size = max(int(triton.next_power_of_2(width)), block or 1)
    norm_rows_kernel[(num_rows,)](
        x, x if residual is None else residual, weight, total, forms.plain, mean, inverse, *_pointers(forms.rows), width,
        epsilon, *_limits(options), IS_LAYER=is_layer, HAS_RESIDUAL=residual is not None,
        HAS_PLAIN=options.plain and not options.columns, HAS_ROWS=options.rows and not options.columns,
        KIND=KINDS[options.kind], WIDTH=block or size, BY_COLUMNS=_is_by_columns(options), BLOCK=size,
        num_warps=num_warps_of(width),
    )  # fmt: skip
    if options.columns:
        norm_tiles_kernel[_grid(num_rows, width)](
            total, weight, mean, inverse, forms.plain, *_pointers(forms.rows, forms.columns), num_rows, width,
            *_limits(options), IS_LAYER=is_layer, HAS_PLAIN=options.plain, HAS_ROWS=options.rows,
            KIND=KINDS[options.kind], WIDTH=block, TILE=TILE, num_warps=NUM_WARPS,
        )  # fmt: skip
    return total, forms, mean, inverse


def gated_forms(kind: str, gate: Tensor, up: Tensor, shape: tuple[int, int], options: CastOptions) -> ResultForms:
    """Return the forms of act(gate) · up of contiguous tensors, which are matrices of a shape; scales are of blocks."""
    forms = _empty_forms(gate, shape, options)
    if gate.numel():
        gated_forward_tiles_kernel[_grid(*shape)](
            gate, up, forms.plain, *_pointers(forms.rows, forms.columns), *shape, *_limits(options),
            ACTIVATION=GATED_KINDS[kind], **_written(options), num_warps=NUM_WARPS,
        )  # fmt: skip
    return forms


def gated_gradient_forms(
    kind: str, operands: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int], options: CastOptions
) -> tuple[ResultForms, ResultForms]:
    """Return the forms of the gradients of gate and up, from dy, gate and up, as `gated_forms` does."""
    dy, gate, up = operands
    of_gate, of_up = _empty_forms(gate, shape, options), _empty_forms(up, shape, options)
    if gate.numel():
        gated_backward_tiles_kernel[(2, *_grid(*shape))](
            dy, gate, up, of_gate.plain, *_pointers(of_gate.rows, of_gate.columns), of_up.plain,
            *_pointers(of_up.rows, of_up.columns), *shape, *_limits(options), ACTIVATION=GATED_KINDS[kind],
            **_written(options), num_warps=NUM_WARPS,
        )  # fmt: skip
    return of_gate, of_up


def _grid(num_rows: int, num_columns: int) -> tuple[int, int]:
    return triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE)


def _written(options: CastOptions) -> dict[str, int | None]:
    return {
        "HAS_PLAIN": options.plain, "HAS_ROWS": options.rows, "HAS_COLUMNS": options.columns, "KIND": KINDS[options.kind],
        "WIDTH": options.block[1], "TILE": TILE,
    }  # fmt: skip


def _limits(options: CastOptions) -> tuple[float, int]:
    """Return the largest number of a format, and its exponent."""
    largest = torch.finfo(options.dtype).max
    return largest, int(largest).bit_length() - 1


def _is_by_columns(options: CastOptions) -> bool:
    """Return whether the scales of a block's rows lie side by side, as tensor cores take those of 1x128."""
    return options.block[1] == TILE


def _empty_forms(x: Tensor, shape: tuple[int, int], options: CastOptions) -> ResultForms:
    """Return memory for the forms of a result with the shape of x, a matrix of `shape`; none for those that are not written."""
    num_rows, num_columns = shape
    plain = torch.empty_like(x) if options.plain else x.new_empty(0)
    rows = _empty_cast(x, num_rows, num_columns, options, is_written=options.rows)
    return ResultForms(plain, rows, _empty_cast(x, num_columns, num_rows, options, is_written=options.columns))


def _empty_cast(
    x: Tensor, num_rows: int, num_columns: int, options: CastOptions, *, is_written: bool
) -> tuple[Tensor, Tensor]:
    scale_dtype = torch.float8_e8m0fnu if options.kind == "e8m0" else torch.float32
    if not is_written:
        return x.new_empty(0, dtype=options.dtype), x.new_empty(0, dtype=scale_dtype)
    shape = num_rows, triton.cdiv(num_columns, options.block[1] or max(num_columns, 1))
    is_by_columns = _is_by_columns(options)
    scales = x.new_empty(shape[::-1] if is_by_columns else shape, dtype=scale_dtype)
    return x.new_empty((num_rows, num_columns), dtype=options.dtype), scales.t() if is_by_columns else scales


def _pointers(*casts: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return elements and scales as kernels take them: E8M0 by its bits."""
    return tuple(
        tensor.view(torch.uint8) if tensor.dtype == torch.float8_e8m0fnu else tensor
        for cast in casts
        for tensor in cast
    )
