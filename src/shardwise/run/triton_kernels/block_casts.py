"""Casts to FP8 with a scale for each block of 1x128, 128x128 or 1x32 elements, with the transposed copy in the same pass.

The largest magnitude a of a block becomes m / a, or the power of two below it, times itself, where m is the format's
largest number (`values.quantization`); in MX formats the scale is the power of two 2^(floor(log2 a) - floor(log2 m)),
stored as its exponent in E8M0. A product sums over the last dim of both operands, so a gradient needs the matrix
transposed, with blocks along its rows: that copy has scales of its own, except with blocks of 128x128, where it has the
same ones transposed.

A program has a tile of 128 x 128 in registers and reads it once. Bytes of N elements of 2 bytes: 2 N read, N written,
another N for the transposed copy, and 4 (in E8M0 one) for each block; the reference makes some ten passes. Reference:
`run.kernels.quantization.quantize_matrix`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.values.scalings import MIN_AMAX, ScaleBlock, ScaleKind

TILE, NUM_WARPS = 128, 16  # 32 elements a thread
KINDS: dict[ScaleKind, int] = {"fp32": 0, "power_of_two": 1, "e8m0": 2}
POWER_OF_TWO, E8M0 = tl.constexpr(1), tl.constexpr(2)
BLOCKS: tuple[ScaleBlock, ...] = ((1, 128), (128, 128), (1, 32))
LEAST = tl.constexpr(MIN_AMAX)
EXPONENT_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _exponent_to_float(exponents):
    """Return powers of two from -127 (a subnormal number) to 127, from their bits."""
    bits = tl.where(exponents < -126, 1 << 22, (exponents + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def scale_factors(amax, largest, largest_exponent, KIND: tl.constexpr):
    """Return the factor of elements, and the scale as it is stored: a number, or its exponent in E8M0."""
    if KIND == E8M0:
        fields = (amax.to(tl.int32, bitcast=True) & EXPONENT_BITS) >> 23
        exponents = tl.minimum(tl.maximum(fields - 127 - largest_exponent, -127), 127)
        encode = _exponent_to_float(-exponents)
        scale = exponents + 127
    else:
        encode = tl.div_rn(tl.zeros_like(amax) + largest, tl.maximum(amax, LEAST))
        if KIND == POWER_OF_TWO:  # the sign and the mantissa of a normal number are cleared
            encode = (encode.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)
        scale = tl.div_rn(tl.zeros_like(amax) + 1.0, encode)
    return encode, scale


@triton.jit
def tile_pointers(matrix, first_row, first_column, num_columns, TILE: tl.constexpr):
    """Return pointers to a tile of a contiguous matrix: one of 64 bits, and offsets of 32 bits, which take fewer registers."""
    offsets = tl.arange(0, TILE)[:, None] * num_columns + tl.arange(0, TILE)[None, :]
    return matrix + (first_row.to(tl.int64) * num_columns + first_column) + offsets


@triton.jit
def inside_of_tile(first_row, first_column, num_rows, num_columns, TILE: tl.constexpr):
    """Return which elements of a tile a matrix has."""
    rows, columns = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    return (rows < num_rows)[:, None] & (columns < num_columns)[None, :]


@triton.jit
def cast_tile(
    tile, elements, scales, first_row, first_column, num_rows, num_columns, largest, largest_exponent, KIND: tl.constexpr,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast a tile with a scale for each `WIDTH` elements of a row, and store it in a contiguous matrix."""
    parts = tl.reshape(tile, (TILE, TILE // WIDTH, WIDTH))
    encode, scale = scale_factors(tl.max(tl.abs(parts), axis=2), largest, largest_exponent, KIND)
    values = tl.reshape(parts * encode[:, :, None], (TILE, TILE))
    values = tl.minimum(tl.maximum(values, -largest), largest)
    inside = inside_of_tile(first_row, first_column, num_rows, num_columns, TILE)
    pointers = tile_pointers(elements, first_row, first_column, num_columns, TILE)
    tl.store(pointers, values.to(elements.dtype.element_ty), mask=inside)
    num_blocks, rows = tl.cdiv(num_columns, WIDTH), first_row + tl.arange(0, TILE)
    blocks = first_column // WIDTH + tl.arange(0, TILE // WIDTH)
    block_inside = (rows < num_rows)[:, None] & (blocks < num_blocks)[None, :]
    # Tensor cores take scales of 1x128 with the rows of a block side by side, and copy those of 1x32 into an order of their own.
    row_stride, block_stride = (num_blocks, 1) if WIDTH < TILE else (1, num_rows)
    block_offsets = rows.to(tl.int64)[:, None] * row_stride + blocks[None, :] * block_stride
    tl.store(scales + block_offsets, scale.to(scales.dtype.element_ty), mask=block_inside)


@triton.jit
def cast_rows_in_blocks_kernel(
    matrix, elements, scales, transposed, transposed_scales, num_rows, num_columns, row_stride, column_stride, largest,
    largest_exponent, KIND: tl.constexpr, WIDTH: tl.constexpr, HAS_TRANSPOSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast a tile by blocks of its rows, and its transposed copy by blocks of its columns."""
    first_row, first_column = tl.program_id(0) * TILE, tl.program_id(1) * TILE
    rows, columns = first_row + tl.arange(0, TILE), first_column + tl.arange(0, TILE)
    inside = inside_of_tile(first_row, first_column, num_rows, num_columns, TILE)
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    tile = tl.load(matrix + offsets, mask=inside, other=0.0).to(tl.float32)
    cast_tile(
        tile, elements, scales, first_row, first_column, num_rows, num_columns, largest, largest_exponent, KIND, WIDTH, TILE
    )  # fmt: skip
    if HAS_TRANSPOSED:
        cast_tile(
            tl.trans(tile), transposed, transposed_scales, first_column, first_row, num_columns, num_rows, largest,
            largest_exponent, KIND, WIDTH, TILE,
        )  # fmt: skip


@triton.jit
def cast_tiles_kernel(
    matrix, elements, scales, transposed, num_rows, num_columns, row_stride, column_stride, largest, largest_exponent,
    KIND: tl.constexpr, HAS_TRANSPOSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Cast a tile with one scale, and store it as it is and transposed."""
    rows, columns = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows.to(tl.int64)[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
    tile = tl.load(matrix + offsets, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.max(tl.abs(tile), axis=1), axis=0)
    encode, scale = scale_factors(tl.zeros([1], tl.float32) + amax, largest, largest_exponent, KIND)
    values = tl.minimum(tl.maximum(tile * encode[:, None], -largest), largest)
    stored = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(elements + stored, values.to(elements.dtype.element_ty), mask=inside)
    block = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(scales + block + tl.arange(0, 1), scale.to(scales.dtype.element_ty))
    if HAS_TRANSPOSED:
        turned = columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
        turned_inside = (columns < num_columns)[:, None] & (rows < num_rows)[None, :]
        tl.store(transposed + turned, tl.trans(values).to(transposed.dtype.element_ty), mask=turned_inside)


def cast_blocks(
    matrix: Tensor, dtype: torch.dtype, block: ScaleBlock, kind: ScaleKind, *, with_transposed: bool = False
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Return a matrix [M, K], a view with any strides, in FP8 and the scales of its blocks [R, C]; and both of the
    transposed matrix [K, M], if required, with blocks of the same shape.

    Elements are contiguous, scales in float32 or, for `e8m0`, in that format; those of 1x128 are contiguous along R. `block` is
    one of `BLOCKS`.
    """
    (num_rows, num_columns), largest = matrix.shape, torch.finfo(dtype).max
    height, width = block
    assert height is not None
    assert width is not None
    grid = triton.cdiv(num_rows, TILE), triton.cdiv(num_columns, TILE)
    by_columns = height == 1 and width == TILE
    scale_dtype = torch.uint8 if kind == "e8m0" else torch.float32

    def outputs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        elements = torch.empty((rows, columns), dtype=dtype, device=matrix.device)
        shape = triton.cdiv(rows, height), triton.cdiv(columns, width)
        if by_columns:
            return elements, torch.empty(shape[::-1], dtype=scale_dtype, device=matrix.device).t()
        return elements, torch.empty(shape, dtype=scale_dtype, device=matrix.device)

    elements, scales = outputs(num_rows, num_columns)
    transposed, transposed_scales = outputs(num_columns, num_rows) if with_transposed else (elements, scales)
    sizes = num_rows, num_columns, *matrix.stride(), largest, int(torch.finfo(dtype).max).bit_length() - 1
    options = {"KIND": KINDS[kind], "HAS_TRANSPOSED": with_transposed, "TILE": TILE, "num_warps": NUM_WARPS}
    if height == 1:
        cast_rows_in_blocks_kernel[grid](
            matrix, elements, scales, transposed, transposed_scales, *sizes, WIDTH=width, **options
        )
    else:
        cast_tiles_kernel[grid](matrix, elements, scales, transposed, *sizes, **options)
        transposed_scales = scales.t()
    stored = torch.float8_e8m0fnu if kind == "e8m0" else torch.float32
    copy = (transposed, transposed_scales.view(stored)) if with_transposed else None
    return (elements, scales.view(stored)), copy
