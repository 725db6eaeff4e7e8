"""Loads of the ladders' kernels in elements, as closed forms; and the tiles of products. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

LANE_ELEMENTS = 256  # elements of a program that has one for each lane
ROW_COLUMNS = 256  # columns of a program that has one row of a product
SUMMED_BLOCK = 1024  # elements of a program that sums the parts of a product
ATTENTION_BLOCK = 64  # queries, and keys, of a block of attention


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a product: rows, columns and depth; `group` rows of tiles are computed column by column, so that tiles that run
    together share operands in the L2 cache; `num_stages` loads are in flight while they are multiplied. `wide_loads`: a thread
    loads up to 16 bytes at once; `tensor_cores`: these multiply."""

    rows: int
    columns: int
    depth: int
    group: int = 1
    num_warps: int = 4
    num_stages: int = 1
    wide_loads: bool = True
    tensor_cores: bool = True

    def count(self, num_rows: int, num_columns: int) -> int:
        """Return the number of tiles of a result."""
        return -(-num_rows // self.rows) * -(-num_columns // self.columns)


def tile_loads(shape: tuple[int, int, int], tiles: Tiles) -> int:
    """Return the elements that all tiles of an [M, K] by [K, N] product load.

    >>> tile_loads((4096, 4096, 4096), Tiles(128, 128, 64)) == 2 * 4096**3 // 128
    True
    """
    num_rows, depth, num_columns = shape
    return depth * (num_rows * -(-num_columns // tiles.columns) + num_columns * -(-num_rows // tiles.rows))


def element_loads(shape: tuple[int, int, int]) -> int:
    """Return the elements that a product loads whose lanes each compute an element: two for each multiplication."""
    num_rows, depth, num_columns = shape
    return 2 * num_rows * depth * num_columns


def row_loads(shape: tuple[int, int, int]) -> int:
    """Return the elements that a product by rows loads."""
    num_rows, depth, num_columns = shape
    return num_rows * depth * (-(-num_columns // ROW_COLUMNS) + num_columns)


def flash_forward_loads(heads: int, length: int, width: int) -> int:
    """Return the elements that flash attention loads: queries once, keys and values for each block that sees them."""
    seen = sum(min(start + ATTENTION_BLOCK, length) for start in range(0, length, ATTENTION_BLOCK))
    return heads * width * (length + 2 * seen)


def flash_backward_loads(heads: int, length: int, width: int) -> tuple[int, int]:
    """Return the elements that the three kernels of its backward pass load: of matrices, and of statistics of rows."""
    starts = range(0, length, ATTENTION_BLOCK)
    seen_keys = sum(min(start + ATTENTION_BLOCK, length) for start in starts)
    seeing_queries = sum(length - start for start in starts)
    matrices = 2 * length + (2 * length + 2 * seen_keys) + (2 * length + 2 * seeing_queries)
    return heads * width * matrices, heads * 2 * (length + seeing_queries)
