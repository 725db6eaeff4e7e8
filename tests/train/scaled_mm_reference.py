"""A call of `torch.nn.functional.scaled_mm` as PyTorch checks it on CUDA, and the exact product of what its operands and scales
stand for, read from memory as cuBLAS documents it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

PLAIN_SCALED_MM = F.scaled_mm


def on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def elements_of(matrix: Tensor) -> Tensor:
    """The numbers of a row-major operand, in float64."""
    if matrix.dtype != torch.float4_e2m1fn_x2:
        return matrix.double()
    codes = matrix.view(torch.uint8).numpy()
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
    return torch.from_numpy(nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64))


def scales_of(scales: Sequence[Tensor], kind: F.ScalingType, num_rows: int, width: int) -> Tensor:
    """The scale of each element [num_rows, width], from the memory of scales as cuBLAS describes it."""
    first = scales[0]
    memory = first.as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
    memory = memory[first.storage_offset() :].double()
    rows, columns = torch.arange(num_rows)[:, None], torch.arange(width)[None, :]
    scaling = F.ScalingType
    match kind:
        case scaling.TensorWise:
            places = 0 * (rows + columns)
        case scaling.RowWise:
            places = rows + 0 * columns
        case scaling.BlockWise1x128:  # the scales of all rows for a block of K, then those of the next
            places = columns // 128 * num_rows + rows
        case scaling.BlockWise128x128:  # the scales along K of 128 rows, padded to 4, then those of the next 128
            places = rows // 128 * (-(-(width // 128) // 4) * 4) + columns // 128
        case _:  # tiles of 128 rows and 4 blocks, in each 16 bytes for every 32nd row
            size = 32 if kind is scaling.BlockWise1x32 else 16
            blocks = columns // size
            tile = rows // 128 * -(-(width // size) // 4) + blocks // 4
            places = tile * 512 + rows % 32 * 16 + rows % 128 // 32 * 4 + blocks % 4
    whole = scales[1].double() if len(scales) > 1 else 1.0
    return memory[places] * whole


def checked_scaled_mm(
    mat_a: Tensor, mat_b: Tensor, scale_a: list[Tensor], kinds_a: list[Any], scale_b: list[Tensor], kinds_b: list[Any],
    *, swizzle_a: list[Any], swizzle_b: list[Any], output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """PyTorch's checks of a call on CUDA, and the exact product of what its arguments stand for."""
    meta = PLAIN_SCALED_MM(
        on_meta(mat_a), on_meta(mat_b), [*map(on_meta, scale_a)], kinds_a, [*map(on_meta, scale_b)], kinds_b,
        swizzle_a=swizzle_a, swizzle_b=swizzle_b, output_dtype=output_dtype,
    )  # fmt: skip
    first, second = elements_of(mat_a), elements_of(mat_b.t())
    first = first * scales_of(scale_a, kinds_a[0], *first.shape)
    second = second * scales_of(scale_b, kinds_b[0], *second.shape)
    product = (first @ second.t()).to(output_dtype)
    assert (product.shape, product.dtype) == (meta.shape, meta.dtype)
    return product
