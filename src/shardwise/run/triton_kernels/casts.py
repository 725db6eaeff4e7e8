"""Casts to FP8 with a scale for each row or for the whole matrix, as operands of `scaled_mm` (`run.kernels.tensor_cores`).

A row x with largest magnitude a becomes round(x m / a) in a format with largest number m, saturated, and the scale a /
m by which a product multiplies it again; the same with one a for a whole matrix. Magnitudes below `MIN_AMAX` count as
that. The matrix may be a view with any strides, such as a transposed one; the result is contiguous along its rows. With
powers of two, m / a is rounded down to one.

Bytes of N elements of 2 bytes: 2 N read twice (the second time from the L2 cache where the rows in flight fit), N
written. Reference: `run.kernels.quantization.quantize_matrix`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.values.scalings import MIN_AMAX

ROWS, COLUMNS, NUM_WARPS = 16, 128, 4  # a tile of a program: whole 32-byte sectors whichever dim is contiguous
LEAST = tl.constexpr(MIN_AMAX)


@triton.jit
def _load_tile(matrix, rows, columns, num_rows, num_columns, row_stride, column_stride):
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    return tl.load(matrix + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def cast_rows_kernel(
    matrix, elements, scales, num_rows, num_columns, row_stride, column_stride, largest,
    POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast some rows, each with a scale of its own."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    amax = tl.zeros([ROWS], tl.float32)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        tile = _load_tile(matrix, rows, columns, num_rows, num_columns, row_stride, column_stride)
        amax = tl.maximum(amax, tl.max(tl.abs(tile), axis=1))
    encode = tl.div_rn(tl.zeros([ROWS], tl.float32) + largest, tl.maximum(amax, LEAST))
    if POWER_OF_TWO:  # the sign and the mantissa of a normal number are cleared
        encode = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(scales + rows, tl.div_rn(tl.full([ROWS], 1.0, tl.float32), encode), mask=rows < num_rows)
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        tile = _load_tile(matrix, rows, columns, num_rows, num_columns, row_stride, column_stride)
        _store_tile(elements, tile * encode[:, None], rows, columns, num_rows, num_columns, largest)


@triton.jit
def amax_kernel(
    matrix, amax, num_rows, num_columns, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write the largest magnitude of some rows."""
    program = tl.program_id(0)
    rows = program * ROWS + tl.arange(0, ROWS)
    largest = 0.0
    for start in range(0, num_columns, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        tile = _load_tile(matrix, rows, columns, num_rows, num_columns, row_stride, column_stride)
        largest = tl.maximum(largest, tl.max(tl.abs(tile)))
    tl.store(amax + program, largest)


@triton.jit
def cast_matrix_kernel(
    matrix, elements, encode, num_rows, num_columns, row_stride, column_stride, largest,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast one tile by a factor that is the same for the whole matrix."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    tile = _load_tile(matrix, rows, columns, num_rows, num_columns, row_stride, column_stride)
    _store_tile(elements, tile * tl.load(encode), rows, columns, num_rows, num_columns, largest)


@triton.jit
def _store_tile(elements, values, rows, columns, num_rows, num_columns, largest):
    """Saturate and store a tile of a contiguous matrix."""
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    clamped = tl.minimum(tl.maximum(values, -largest), largest)
    tl.store(elements + offsets, clamped.to(elements.dtype.element_ty), mask=inside)


def cast_rows(matrix: Tensor, dtype: torch.dtype, *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return a matrix [M, K] in FP8, contiguous, and the scale of each row [M, 1] in float32."""
    (num_rows, num_columns), largest = matrix.shape, torch.finfo(dtype).max
    elements = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=matrix.device)
    cast_rows_kernel[(triton.cdiv(num_rows, ROWS),)](
        matrix, elements, scales, num_rows, num_columns, *matrix.stride(), largest, POWER_OF_TWO=power_of_two,
        ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return elements, scales


def cast_matrix(matrix: Tensor, dtype: torch.dtype, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return a matrix [M, K] in FP8, contiguous, and its scale, a scalar in float32.

    `factor` by which elements are multiplied comes from earlier steps (delayed scaling); None: from the largest magnitude.
    """
    (num_rows, num_columns), largest = matrix.shape, torch.finfo(dtype).max
    row_blocks, column_blocks = triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS)
    sizes = num_rows, num_columns, *matrix.stride()
    if factor is None:
        amax = torch.empty(row_blocks, dtype=torch.float32, device=matrix.device)
        amax_kernel[(row_blocks,)](matrix, amax, *sizes, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS)
        factor = torch.full_like(amax[0], largest) / amax.amax().clamp(min=MIN_AMAX)
    elements = torch.empty(matrix.shape, dtype=dtype, device=matrix.device)
    cast_matrix_kernel[(row_blocks, column_blocks)](
        matrix, elements, factor, *sizes, largest, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=NUM_WARPS
    )
    return elements, 1.0 / factor
