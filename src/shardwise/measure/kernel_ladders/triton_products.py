"""Products of matrices in Triton, from an element at a time to tensor descriptors.

C [M, N] = A [M, K] · B [K, N]. A tile of BM x BN of C loads K (BM + BN) elements, so that all tiles load M N K (1/BM + 1/BN).
Triton's compiler places operands in shared memory and divides a tile among warps and their registers; a kernel sets the size of a
tile, the number of warps, whether tensor cores multiply, and how many loads are in flight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.measure.kernel_ladders.closed_forms import LANE_ELEMENTS, ROW_COLUMNS, SUMMED_BLOCK, Tiles

INTERPRETER_PROGRAMS = 2  # of a persistent kernel where there are no multiprocessors to fill


@triton.jit
def product_by_elements_kernel(left, right, out, num_rows, num_columns, depth, ELEMENTS: tl.constexpr):
    """Write an element for each lane, neighbouring lanes in neighbouring rows: each load of a warp is from 32 rows."""
    index = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    row, column = index % num_rows, index // num_rows
    inside = column < num_columns
    total = tl.zeros([ELEMENTS], tl.float32)
    for k in range(0, depth):
        factor = tl.load(left + row * depth + k, mask=inside, other=0.0).to(tl.float32)
        total += factor * tl.load(right + k * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_columns + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def product_by_rows_kernel(left, right, out, num_columns, depth, COLUMNS: tl.constexpr):
    """Write some columns of one row: each element of B is loaded for every row of A."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    total = tl.zeros([COLUMNS], tl.float32)
    for k in range(0, depth):
        factor = tl.load(left + row * depth + k).to(tl.float32)
        total += factor * tl.load(right + k * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_columns + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tile_position(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Return row and column of a tile; tiles are numbered by groups of rows."""
    group_size = GROUP * column_tiles
    first_row = (tile // group_size) * GROUP
    rows_in_group = tl.minimum(row_tiles - first_row, GROUP)
    return first_row + (tile % group_size) % rows_in_group, (tile % group_size) // rows_in_group


@triton.jit
def multiply_tile(
    left, right, rows, columns, num_rows, num_columns, depth, first, last,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TENSOR_CORES: tl.constexpr,
):  # fmt: skip
    """Return a tile of the product over a part of the summed dim, in float32."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, DEPTH):
        ks = start + tl.arange(0, DEPTH)
        left_mask = (rows < num_rows)[:, None] & (ks < last)[None, :]
        right_mask = (ks < last)[:, None] & (columns < num_columns)[None, :]
        left_tile = tl.load(left + rows[:, None] * depth + ks[None, :], mask=left_mask, other=0.0)
        right_tile = tl.load(right + ks[:, None] * num_columns + columns[None, :], mask=right_mask, other=0.0)
        if not TENSOR_CORES:  # no tensor core multiplies float32 exactly, so that ordinary ones do
            left_tile, right_tile = left_tile.to(tl.float32), right_tile.to(tl.float32)
        total = tl.dot(left_tile, right_tile, total, input_precision="ieee")
    return total


@triton.jit
def product_by_tiles_kernel(
    left, right, out, num_rows, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, TENSOR_CORES: tl.constexpr,
):  # fmt: skip
    """Write one tile of the result."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    row_tile, column_tile = tile_position(tl.program_id(0), row_tiles, column_tiles, GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    total = multiply_tile(
        left, right, rows, columns, num_rows, num_columns, depth, 0, depth, ROWS, COLUMNS, DEPTH, TENSOR_CORES
    )
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out + rows[:, None] * num_columns + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


# The compiler does not use that 16 divides the sizes, so that each load is one element.
narrow_loads_kernel = triton.jit(product_by_tiles_kernel.fn, do_not_specialize=["num_rows", "num_columns", "depth"])


@triton.jit
def persistent_product_kernel(
    left, right, out, num_rows, num_columns, depth, num_programs, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write every `num_programs`th tile: a program stays on its multiprocessor for the whole product."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    for tile in range(tl.program_id(0), row_tiles * column_tiles, num_programs):
        row_tile, column_tile = tile_position(tile, row_tiles, column_tiles, GROUP)
        rows = row_tile * ROWS + tl.arange(0, ROWS)
        columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        total = multiply_tile(
            left, right, rows, columns, num_rows, num_columns, depth, 0, depth, ROWS, COLUMNS, DEPTH, True
        )
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        tl.store(out + rows[:, None] * num_columns + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def product_by_descriptors_kernel(
    left, right, out, num_rows, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Write one tile; the hardware computes addresses and bounds of whole tiles (TMA from sm_90 on)."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    row_tile, column_tile = tile_position(tl.program_id(0), row_tiles, column_tiles, GROUP)
    left_tiles = tl.make_tensor_descriptor(left, [num_rows, depth], [depth, 1], [ROWS, DEPTH])
    right_tiles = tl.make_tensor_descriptor(right, [depth, num_columns], [num_columns, 1], [DEPTH, COLUMNS])
    out_tiles = tl.make_tensor_descriptor(out, [num_rows, num_columns], [num_columns, 1], [ROWS, COLUMNS])
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        left_tile = left_tiles.load([row_tile * ROWS, start])
        right_tile = right_tiles.load([start, column_tile * COLUMNS])
        total = tl.dot(left_tile, right_tile, total, input_precision="ieee")
    out_tiles.store([row_tile * ROWS, column_tile * COLUMNS], total.to(out.dtype.element_ty))


@triton.jit
def split_product_kernel(
    left, right, parts, num_rows, num_columns, depth, span, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Write a tile's sum over a part of the summed dim."""
    part, column_tiles = tl.program_id(1), tl.cdiv(num_columns, COLUMNS)
    rows = (tl.program_id(0) // column_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    first, last = part * span, tl.minimum((part + 1) * span, depth)
    total = multiply_tile(
        left, right, rows, columns, num_rows, num_columns, depth, first, last, ROWS, COLUMNS, DEPTH, True
    )
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(parts + part * num_rows * num_columns + rows[:, None] * num_columns + columns[None, :], total, mask=mask)


@triton.jit
def sum_parts_kernel(parts, out, size, num_parts, BLOCK: tl.constexpr):
    """Write the sum of a product's parts, always in the same order."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, num_parts):
        total += tl.load(parts + part * size + index, mask=index < size, other=0.0)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=index < size)


@triton.jit
def batched_product_kernel(
    left, right, out, num_rows, num_columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """Write a tile of one of many products."""
    product, column_tiles = tl.program_id(1).to(tl.int64), tl.cdiv(num_columns, COLUMNS)
    rows = (tl.program_id(0) // column_tiles) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % column_tiles) * COLUMNS + tl.arange(0, COLUMNS)
    total = multiply_tile(
        left + product * num_rows * depth, right + product * depth * num_columns, rows, columns, num_rows, num_columns, depth,
        0, depth, ROWS, COLUMNS, DEPTH, True,
    )  # fmt: skip
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    target = out + product * num_rows * num_columns + rows[:, None] * num_columns + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


def multiply_by_elements(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of contiguous matrices, each lane of a warp in another row."""
    (num_rows, depth), num_columns = left.shape, right.shape[1]
    out = left.new_empty((num_rows, num_columns))
    grid = (triton.cdiv(out.numel(), LANE_ELEMENTS),)
    product_by_elements_kernel[grid](
        left, right, out, num_rows, num_columns, depth, ELEMENTS=LANE_ELEMENTS, num_warps=4
    )
    return out


def multiply_by_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of contiguous matrices, a row at a time, without tensor cores."""
    (num_rows, depth), num_columns = left.shape, right.shape[1]
    out = left.new_empty((num_rows, num_columns))
    grid = (num_rows, triton.cdiv(num_columns, ROW_COLUMNS))
    product_by_rows_kernel[grid](left, right, out, num_columns, depth, COLUMNS=ROW_COLUMNS, num_warps=4)
    return out


def _launch_tiles(kernel: Any, left: Tensor, right: Tensor, tiles: Tiles, **constants: Any) -> Tensor:
    """Launch a kernel with a program for each tile, and return the product."""
    (num_rows, depth), num_columns = left.shape, right.shape[1]
    out = left.new_empty((num_rows, num_columns))
    kernel[(tiles.count(num_rows, num_columns),)](
        left, right, out, num_rows, num_columns, depth, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        GROUP=tiles.group, **constants, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def multiply_by_tiles(left: Tensor, right: Tensor, tiles: Tiles) -> Tensor:
    """Return the product of contiguous matrices in tiles."""
    kernel = product_by_tiles_kernel if tiles.wide_loads else narrow_loads_kernel
    return _launch_tiles(kernel, left, right, tiles, TENSOR_CORES=tiles.tensor_cores)


def multiply_persistently(left: Tensor, right: Tensor, tiles: Tiles) -> Tensor:
    """Return the product of contiguous matrices by as many programs as the GPU has multiprocessors."""
    (num_rows, depth), num_columns = left.shape, right.shape[1]
    out = left.new_empty((num_rows, num_columns))
    num_programs = INTERPRETER_PROGRAMS
    if left.is_cuda:
        num_programs = torch.cuda.get_device_properties(left.device).multi_processor_count
    grid = (min(num_programs, tiles.count(num_rows, num_columns)),)
    persistent_product_kernel[grid](
        left, right, out, num_rows, num_columns, depth, grid[0], ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        GROUP=tiles.group, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def multiply_by_descriptors(left: Tensor, right: Tensor, tiles: Tiles) -> Tensor:
    """Return the product of contiguous matrices whose rows are multiples of 16 bytes."""
    if left.is_cuda:  # descriptors are written to memory that the kernel asks for

        def allocate(size: int, _alignment: int, _stream: int | None) -> Tensor:
            return torch.empty(size, dtype=torch.int8, device=left.device)

        triton.set_allocator(allocate)
    return _launch_tiles(product_by_descriptors_kernel, left, right, tiles)


def multiply_in_parts(left: Tensor, right: Tensor, tiles: Tiles, num_parts: int) -> Tensor:
    """Return the product of contiguous matrices, the summed dim in parts that run side by side."""
    (num_rows, depth), num_columns = left.shape, right.shape[1]
    parts = left.new_empty((num_parts, num_rows, num_columns), dtype=torch.float32)
    out = left.new_empty((num_rows, num_columns))
    span = triton.cdiv(triton.cdiv(depth, num_parts), tiles.depth) * tiles.depth
    split_product_kernel[(tiles.count(num_rows, num_columns), num_parts)](
        left, right, parts, num_rows, num_columns, depth, span, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return add_parts(parts, out)


def add_parts(parts: Tensor, out: Tensor) -> Tensor:
    """Write the sum of parts [P, M, N] in float32 into a contiguous product [M, N], and return it."""
    grid = (triton.cdiv(out.numel(), SUMMED_BLOCK),)
    sum_parts_kernel[grid](parts, out, out.numel(), len(parts), BLOCK=SUMMED_BLOCK, num_warps=4)
    return out


def multiply_batch(left: Tensor, right: Tensor, tiles: Tiles) -> Tensor:
    """Return the products of contiguous [B, M, K] and [B, K, N] in one launch."""
    num_products, num_rows, depth = left.shape
    num_columns = right.shape[2]
    out = left.new_empty((num_products, num_rows, num_columns))
    batched_product_kernel[(tiles.count(num_rows, num_columns), num_products)](
        left, right, out, num_rows, num_columns, depth, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
