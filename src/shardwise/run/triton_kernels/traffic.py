"""Loads and stores of kernels as closed forms: what a kernel asks of memory, without what caches answer.

>>> from shardwise.run.triton_kernels.traffic import cross_entropy_traffic
>>> traffic = cross_entropy_traffic(8192, 128_256, 2, num_ignored=0, replace=True)
>>> f"{traffic.loaded_bytes / 1e9:.2f} GB read, {traffic.stored_bytes / 1e9:.2f} GB written"
'4.20 GB read, 2.10 GB written'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Lanes of a warp, and bytes of the pieces in which memory is read (CUDA C++ Best Practices Guide, coalesced access).
WARP_LANES, SECTOR_BYTES = 32, 32
STATISTIC_BYTES, TARGET_BYTES, INDEX_BYTES = 4, 8, 8  # float32; int64


@dataclass(slots=True)
class Traffic:
    """Bytes that kernels load and store."""

    loaded_bytes: int = 0
    stored_bytes: int = 0


def cross_entropy_traffic(num_rows: int, num_words: int, itemsize: int, *, num_ignored: int, replace: bool) -> Traffic:
    """Return the traffic of the loss: logits read once or, with their gradient, read twice and written."""
    counted = num_rows - num_ignored
    passes = 2 if replace else 1
    row_bytes = num_words * itemsize
    loaded = num_rows * TARGET_BYTES + counted * (passes * row_bytes + itemsize + STATISTIC_BYTES * replace)
    return Traffic(loaded, num_rows * STATISTIC_BYTES + num_rows * row_bytes * replace)


def gated_activation_traffic(size: int, itemsize: int, *, backward: bool) -> Traffic:
    """Return the traffic of a gated activation, or of both its gradients."""
    return (
        Traffic(3 * size * itemsize, 2 * size * itemsize) if backward else Traffic(2 * size * itemsize, size * itemsize)
    )


def rotary_traffic(num_tokens: int, size: int, num_angles: int, itemsize: int) -> Traffic:
    """Return the traffic of a rotation of `size` elements; `num_angles` angles of a token are loaded once each."""
    return Traffic((size + 2 * num_tokens * num_angles) * itemsize, size * itemsize)


def norm_forward_traffic(num_rows: int, width: int, itemsize: int, *, is_layer: bool, has_residual: bool) -> Traffic:
    """Return the traffic of a norm, with the residual sum before it."""
    tensors = 2 if has_residual else 1
    statistics = num_rows * STATISTIC_BYTES * (2 if is_layer else 1)
    loaded = (tensors * num_rows + num_rows) * width * itemsize
    return Traffic(loaded, tensors * num_rows * width * itemsize + statistics)


def norm_backward_traffic(
    num_rows: int, width: int, itemsize: int, *, is_layer: bool, has_residual: bool, num_programs: int
) -> Traffic:
    """Return the traffic of a norm's gradients; each program has a part of the weight's in float32."""
    tensors = 3 if has_residual else 2
    statistics = num_rows * STATISTIC_BYTES * (2 if is_layer else 1)
    loaded = (tensors * num_rows + num_programs) * width * itemsize + statistics
    return Traffic(loaded, num_rows * width * itemsize + num_programs * width * STATISTIC_BYTES)


def adamw_traffic(
    size: int,
    weight_bytes: int,
    gradient_bytes: int,
    moment_bytes: tuple[int, int],
    copy_bytes: int,
    *,
    num_blocks: int,
) -> Traffic:
    """Return the traffic of an update: gradient, weight and moments once, and two numbers for each block; the new weight,
    moments and the weight's copy."""
    state = weight_bytes + sum(moment_bytes)
    return Traffic(size * (state + gradient_bytes) + num_blocks * 2 * STATISTIC_BYTES, size * (state + copy_bytes))


def cast_rows_traffic(num_rows: int, num_columns: int, itemsize: int) -> Traffic:
    """Return the traffic of a cast to FP8 with a scale for each row: two reads, and a byte for each element."""
    return Traffic(2 * num_rows * num_columns * itemsize, num_rows * (num_columns + STATISTIC_BYTES))


def block_cast_traffic(
    num_rows: int, num_columns: int, itemsize: int, block: tuple[int, int], scale_bytes: int, *, has_transposed: bool
) -> Traffic:
    """Return the traffic of a cast with a scale for each block: one read; elements and scales, and those of the transposed
    copy, whose scales are the same where blocks are square."""
    size, (height, width) = num_rows * num_columns, block
    blocks = -(-num_rows // height) * -(-num_columns // width)
    turned_blocks = 0 if height > 1 else num_columns * -(-num_rows // width)
    stored = size + scale_bytes * blocks + has_transposed * (size + scale_bytes * turned_blocks)
    return Traffic(size * itemsize, stored)


class FormSizes(NamedTuple):
    """Forms in which a kernel writes a result, elements of a row that share a scale, and bytes of a scale."""

    plain: bool
    rows: bool
    columns: bool
    block: int
    scale_bytes: int

    def stored_bytes(self, num_rows: int, num_columns: int, itemsize: int) -> int:
        """Return the bytes of all forms of a result [num_rows, num_columns]."""
        size = num_rows * num_columns
        scales = {"rows": num_rows * -(-num_columns // self.block), "columns": num_columns * -(-num_rows // self.block)}
        casts = sum(size + self.scale_bytes * scales[form] for form in scales if getattr(self, form))
        return size * itemsize * self.plain + casts


CAST_TILE = 128  # rows and columns of the tiles in which columns are cast


def norm_forms_traffic(
    num_rows: int, width: int, itemsize: int, forms: FormSizes, *, is_layer: bool, has_residual: bool
) -> Traffic:
    """Return the traffic of a norm that casts its result: one pass or, with columns, a second one that reads the sum, and for
    each tile the statistics of its rows and the weight of its columns."""
    traffic = norm_forward_traffic(num_rows, width, itemsize, is_layer=is_layer, has_residual=has_residual)
    traffic.stored_bytes += forms.stored_bytes(num_rows, width, itemsize) - num_rows * width * itemsize
    if forms.columns:
        statistics = num_rows * STATISTIC_BYTES * (2 if is_layer else 1) * -(-width // CAST_TILE)
        traffic.loaded_bytes += (num_rows + -(-num_rows // CAST_TILE)) * width * itemsize + statistics
    return traffic


def gated_forms_traffic(
    num_rows: int, num_columns: int, itemsize: int, forms: FormSizes, *, backward: bool, clamps: bool = False
) -> Traffic:
    """Return the traffic of a gated activation that casts its result, or both its gradients. For the second of these it reads dy
    and gate again, which a cache answers, and up too where the activation `clamps` it."""
    size, stored = num_rows * num_columns * itemsize, forms.stored_bytes(num_rows, num_columns, itemsize)
    return Traffic((5 + clamps) * size, 2 * stored) if backward else Traffic(2 * size, stored)


def gathered_sum_traffic(
    num_tokens: int, num_chosen: int, num_dropped: int, width: int, itemsize: int, *, num_blocks: int, has_gates: bool
) -> Traffic:
    """Return the traffic of the sum of each token's rows; a row index, and a gate, are read once for each block of a row."""
    pairs = num_tokens * num_chosen
    indices = num_blocks * pairs * (INDEX_BYTES + STATISTIC_BYTES * has_gates)
    return Traffic((pairs - num_dropped) * width * itemsize + indices, num_tokens * width * itemsize)


def gate_gradient_traffic(
    num_tokens: int, num_chosen: int, num_dropped: int, width: int, itemsize: int, *, num_blocks: int
) -> Traffic:
    """Return the traffic of the gates' gradient: each token's gradient once, each of its rows once."""
    pairs = num_tokens * num_chosen
    loaded = (num_tokens + pairs - num_dropped) * width * itemsize + num_blocks * pairs * INDEX_BYTES
    return Traffic(loaded, pairs * STATISTIC_BYTES)


def row_gradient_traffic(num_rows: int, width: int, itemsize: int) -> Traffic:
    """Return the traffic of the rows' gradient: a token's gradient for each of its rows, and the rows."""
    loaded = num_rows * (width * itemsize + INDEX_BYTES + STATISTIC_BYTES)
    return Traffic(loaded, num_rows * width * itemsize)
