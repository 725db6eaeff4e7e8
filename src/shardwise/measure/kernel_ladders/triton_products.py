"""Products of matrices in Triton, from one row at a time to pipelined tiles.

C [M, N] = A [M, K] · B [K, N]. A tile of BM x BN of C loads K (BM + BN) elements, so that all tiles load M N K (1/BM + 1/BN).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from shardwise.measure.kernel_ladders.closed_forms import ROW_COLUMNS, Tiles


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
def product_by_tiles_kernel(
    left, right, out, num_rows, num_columns, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write one tile of the result; tiles are numbered by groups of rows."""
    tile = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    group_size = GROUP * column_tiles
    first_row = (tile // group_size) * GROUP
    rows_in_group = tl.minimum(row_tiles - first_row, GROUP)
    row_tile = first_row + (tile % group_size) % rows_in_group
    column_tile = (tile % group_size) // rows_in_group
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        ks = start + tl.arange(0, DEPTH)
        left_mask = (rows < num_rows)[:, None] & (ks < depth)[None, :]
        right_mask = (ks < depth)[:, None] & (columns < num_columns)[None, :]
        left_tile = tl.load(left + rows[:, None] * depth + ks[None, :], mask=left_mask, other=0.0)
        right_tile = tl.load(right + ks[:, None] * num_columns + columns[None, :], mask=right_mask, other=0.0)
        total = tl.dot(left_tile, right_tile, total, input_precision="ieee")
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(out + rows[:, None] * num_columns + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


def multiply_by_rows(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of contiguous matrices, a row at a time, without tensor cores."""
    (num_rows, depth), num_columns = left.shape, right.shape[1]
    out = left.new_empty((num_rows, num_columns))
    grid = (num_rows, triton.cdiv(num_columns, ROW_COLUMNS))
    product_by_rows_kernel[grid](left, right, out, num_columns, depth, COLUMNS=ROW_COLUMNS, num_warps=4)
    return out


def multiply_by_tiles(left: Tensor, right: Tensor, tiles: Tiles) -> Tensor:
    """Return the product of contiguous matrices in tiles."""
    (num_rows, depth), num_columns = left.shape, right.shape[1]
    out = left.new_empty((num_rows, num_columns))
    num_tiles = triton.cdiv(num_rows, tiles.rows) * triton.cdiv(num_columns, tiles.columns)
    product_by_tiles_kernel[(num_tiles,)](
        left, right, out, num_rows, num_columns, depth, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        GROUP=tiles.group, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
