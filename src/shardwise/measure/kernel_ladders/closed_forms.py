"""Loads of the ladders' kernels as closed forms, in elements, bytes and sectors; and the tiles of products. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.run.triton_kernels.traffic import SECTOR_BYTES, STATISTIC_BYTES, WARP_LANES, Traffic

LANE_ELEMENTS = 256  # elements of a program that has one for each lane
ROW_COLUMNS = 256  # columns of a program that has one row of a product
SUMMED_BLOCK = 1024  # elements of a program that sums the parts of a product
ATTENTION_BLOCK = 64  # queries, and keys, of a block of attention
FULL_GPU_PROGRAMS, MOST_PARTS = (
    256,
    8,
)  # two programs for each of the 108 to 148 multiprocessors of an A100, H100 or B200
SCALE_BYTES, INT8_BYTES = 4, 1  # of a weight's scale in float32, and of a quantized weight


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


def element_sectors(shape: tuple[int, int, int]) -> int:
    """Return the sectors that warps load whose lanes are in neighbouring rows: one for each lane of the left operand, and one
    for the element of the right operand that they share. Rows are multiples of a warp, and longer than a sector.

    >>> element_sectors((64, 32, 256)) / (64 * 32 * 256 / WARP_LANES)
    33.0
    """
    num_rows, depth, num_columns = shape
    loads = num_rows * depth * num_columns
    return loads + loads // WARP_LANES


def row_sectors(shape: tuple[int, int, int], itemsize: int) -> int:
    """Return the sectors that programs load that have some columns of a row: one for the element of the left operand, and the
    columns of the right one side by side. Columns are multiples of a program's."""
    num_rows, depth, num_columns = shape
    programs = num_rows * -(-num_columns // ROW_COLUMNS)
    return programs * depth * (1 + ROW_COLUMNS * itemsize // SECTOR_BYTES)


def int8_tiles(num_rows: int, num_weights: int = 1) -> Tiles:
    """Return the tiles of a product of some rows with int8 weights, its columns the features of the weights.

    Few rows: narrow tiles, so that enough programs read the weights. Many rows: wide ones, since rows are loaded once for each
    tile of features, and cost two bytes for the weights' one. Two weights have half of the features each.
    """
    rows = max(16, min(128, 1 << (num_rows - 1).bit_length()))  # 16: the least of a tensor core's operand
    if num_rows <= 16:
        return Tiles(rows, 64 // num_weights, 128, num_stages=4)
    return Tiles(rows, 128 // num_weights, 64, num_warps=8, num_stages=3)


def int8_parts(shape: tuple[int, int, int], num_weights: int = 1) -> int:
    """Return into how many parts a product's sum is split, which run side by side: as many as fill a GPU, for a product that is
    summed after it (one weight)."""
    num_rows, depth, num_columns = shape
    tiles = int8_tiles(num_rows, num_weights)
    parts = FULL_GPU_PROGRAMS // tiles.count(num_rows, num_columns) if num_weights == 1 else 1
    return max(1, min(MOST_PARTS, parts, -(-depth // tiles.depth)))


def int8_product_traffic(shape: tuple[int, int, int], itemsize: int, num_weights: int = 1) -> Traffic:
    """Return the traffic of a product with int8 weights; `num_weights` weights multiply the same rows in one kernel. Parts of a
    sum pass through memory in float32."""
    num_rows, depth, num_columns = shape
    tiles, num_parts = int8_tiles(num_rows, num_weights), int8_parts(shape, num_weights)
    row_tiles, column_tiles = -(-num_rows // tiles.rows), -(-num_columns // tiles.columns)
    weights = num_weights * num_columns * row_tiles * (depth * INT8_BYTES + num_parts * SCALE_BYTES)
    parts = num_parts * num_rows * num_columns * STATISTIC_BYTES if num_parts > 1 else 0
    return Traffic(
        num_rows * depth * column_tiles * itemsize + weights + parts, num_rows * num_columns * itemsize + parts
    )


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
