"""Matrices in narrow formats with block scales, as `values.quantization` defines them, as tensors, and their products,
summed in float32.

Letters: M and N rows of the two operands, K the summed dim, R and C blocks of rows and of columns.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.run.kernels.device_dispatch import has_triton
from shardwise.values import NumberFormat
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.scalings import MIN_AMAX, ScaleBlock, ScaleKind

CASTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class QuantizedTensor(NamedTuple):
    """A matrix as elements [M, K], the scale of each block [R, C], and one scale of the whole.

    Elements and scales are in float32, or as they are stored: elements in FP8 or two E2M1 in a byte [M, K/2], scales in
    float32, E8M0 or E4M3.
    """

    elements: Tensor
    scales: Tensor
    tensor_scale: Tensor

    def widen(self) -> QuantizedTensor:
        """Return it in float32, which holds every number of its formats."""
        packed = self.elements.dtype == torch.float4_e2m1fn_x2
        elements = unpack_e2m1(self.elements) if packed else self.elements.float()
        return QuantizedTensor(elements, self.scales.float(), self.tensor_scale)

    def store(self, to: NumberFormat, kind: ScaleKind) -> QuantizedTensor:
        """Return it as it is stored, elements contiguous."""
        # A cast alone keeps the strides of a transposed view.
        elements = (
            pack_e2m1(self.elements)
            if to.name == "e2m1"
            else self.elements.to(CASTS[to.name], memory_format=torch.contiguous_format)
        )
        dtype = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}.get(kind, torch.float32)
        return QuantizedTensor(elements, self.scales.to(dtype), self.tensor_scale)

    def transpose(self) -> QuantizedTensor:
        """Return the transpose of a matrix that is not packed, as a view."""
        return QuantizedTensor(self.elements.t(), self.scales.t(), self.tensor_scale)


def round_to_format(values: Tensor, to: NumberFormat) -> Tensor:
    """Return the nearest numbers of a format, saturated, in float32; by PyTorch's cast where it has one."""
    if to.name in CASTS:
        return values.clamp(-to.max, to.max).to(CASTS[to.name]).float()
    _, exponents = torch.frexp(values)
    quanta = (exponents - 1).clamp(min=to.min_exponent) - to.mantissa_bits
    nearest = torch.round(values * power_of_two(-quanta)) * power_of_two(quanta)
    return nearest.clamp(-to.max, to.max)


def quantize_matrix(
    matrix: Tensor, to: NumberFormat, block: ScaleBlock, kind: ScaleKind, factor: Tensor | None = None
) -> QuantizedTensor:
    """Cast a matrix [M, K] to a format with block scales, or with a `factor` from earlier steps; by one kernel on a GPU
    with Triton, where scales of blocks are of the matrix itself."""
    if factor is None and to.name in CASTS and has_triton(matrix, any_strides=True):
        from shardwise.run.triton_kernels import block_casts

        if block in block_casts.BLOCKS and kind in block_casts.KINDS:
            (elements, scales), _ = block_casts.cast_blocks(matrix, CASTS[to.name], block, kind)
            return QuantizedTensor(elements.float(), scales.float(), torch.ones((), device=matrix.device))
    values = matrix.float()
    if factor is None:
        encode, scales, tensor_scale = _scales(block_amax(values, block), to, kind)
    else:
        encode = factor.view(1, 1)
        scales, tensor_scale = 1.0 / encode, torch.ones((), device=factor.device)
    elements = round_to_format(values * expand_scales(encode, values.shape, block), to)
    return QuantizedTensor(elements, scales, tensor_scale)


def _scales(amax: Tensor, to: NumberFormat, kind: ScaleKind) -> tuple[Tensor, Tensor, Tensor]:
    unscaled = torch.ones((), device=amax.device)
    if kind == "e8m0":
        exponents = (_floor_log2(amax) - _exponent(to.max)).clamp(-127, 127)
        return power_of_two(-exponents), power_of_two(exponents), unscaled
    if kind == "e4m3":
        return _scales_in_e4m3(amax, to)
    encode = _ratio(to.max, amax.clamp(min=MIN_AMAX))
    if kind == "power_of_two":
        encode = power_of_two(_floor_log2(encode))
    return encode, 1.0 / encode, unscaled


def _scales_in_e4m3(amax: Tensor, to: NumberFormat) -> tuple[Tensor, Tensor, Tensor]:
    scale_format = NUMBER_FORMATS["e4m3"]
    encode = _ratio(scale_format.max * to.max, amax.max().clamp(min=MIN_AMAX))
    decode = 1.0 / encode
    scales = round_to_format(amax / torch.full_like(amax, to.max) * encode, scale_format)
    return torch.where(scales > 0, 1.0 / (scales * decode), 0.0), scales, decode


def block_amax(matrix: Tensor, block: ScaleBlock) -> Tensor:
    """Return the largest absolute value of each block [R, C]."""
    amax = matrix.abs()
    for dim, width in enumerate(block):
        if width == 1:
            continue
        size = amax.shape[dim]
        padding = -size % (width or size)
        amax = F.pad(amax, (0, padding) if dim else (0, 0, 0, padding)) if padding else amax
        amax = torch.unflatten(amax, dim, (-1, width or size)).amax(dim + 1)
    return amax


def expand_scales(scales: Tensor, shape: torch.Size, block: ScaleBlock) -> Tensor:
    """Return the scales of blocks as scales of elements, or in a shape that broadcasts to them."""
    for dim, width in enumerate(block):
        if width is not None and width > 1:
            scales = scales.repeat_interleave(width, dim).narrow(dim, 0, shape[dim])
    return scales


def scaled_product(
    left: QuantizedTensor, left_block: ScaleBlock, right: QuantizedTensor, right_block: ScaleBlock, *, is_local: bool
) -> Tensor:
    """Multiply left [M, K] by right [N, K] transposed: [M, N] in float32.

    Products of elements are exact in float32. Scales are applied to the sum over each of their blocks of K, so that
    with blocks of 128 every 128 products make a sum (DeepSeek-V3, section 3.3.2). `is_local`: scales of few bits are
    applied to the elements instead.
    """
    left, right = left.widen(), right.widen()
    if is_local:
        first, second = (
            _apply_scales(*operand_and_block) for operand_and_block in ((left, left_block), (right, right_block))
        )
        return first @ second.t() * (left.tensor_scale * right.tensor_scale)
    shapes = left.elements.shape[0], right.elements.shape[0]
    rows = _scales_by_row(left.scales, left_block, shapes[0])
    columns = _scales_by_row(right.scales, right_block, shapes[1])
    width = left_block[1] or left.elements.shape[1]
    total: Tensor | None = None
    # The scales of a block of K are applied to its sum, as the hardware does; a side with wider blocks has fewer scales.
    pairs = zip(*(torch.split(operand.elements, width, 1) for operand in (left, right)), strict=True)
    for block_index, (left_columns, right_columns) in enumerate(pairs):
        part = left_columns @ right_columns.t()
        part = part.mul_(rows[:, min(block_index, rows.shape[1] - 1), None]).mul_(
            columns[None, :, min(block_index, columns.shape[1] - 1)]
        )
        total = part if total is None else total.add_(part)
    assert total is not None, "a product sums over something"
    return total


E2M1_MAGNITUDES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
)  # by code; source: OCP Microscaling Formats 1.0, section 5.3.3


def pack_e2m1(elements: Tensor) -> Tensor:
    """Return numbers of E2M1 [M, K] as two codes of 4 bits in a byte [M, K/2], the first in the lower bits.

    >>> pack_e2m1(torch.tensor([[1.0, -6.0]])).view(torch.uint8).tolist()
    [[242]]
    """
    bounds = torch.tensor(E2M1_MAGNITUDES[1:], device=elements.device)
    codes = torch.bucketize(elements.abs().contiguous(), bounds, right=True) + 8 * elements.signbit()
    pairs = codes.to(torch.uint8).view(len(codes), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.float4_e2m1fn_x2)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the numbers [M, K] of codes that `pack_e2m1` has packed, in float32."""
    codes = torch.stack((packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4), dim=-1).flatten(-2).int()
    magnitudes = torch.tensor(E2M1_MAGNITUDES, device=packed.device)[codes & 7]
    return torch.where(codes >= 8, -magnitudes, magnitudes)


def _apply_scales(tensor: QuantizedTensor, block: ScaleBlock) -> Tensor:
    return tensor.elements * expand_scales(tensor.scales, tensor.elements.shape, block)


def _scales_by_row(scales: Tensor, block: ScaleBlock, num_rows: int) -> Tensor:
    """Return the scales of each row [num_rows, C]."""
    height = block[0] or num_rows
    return scales.repeat_interleave(height, 0).narrow(0, 0, num_rows) if height > 1 else scales


def _ratio(numerator: float, divisor: Tensor) -> Tensor:
    """Divide a number by a tensor with one rounding: PyTorch multiplies by reciprocals where one side is no tensor."""
    return torch.full_like(divisor, numerator) / divisor


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2**exponents for -149 to 127 in float32, built from its bits: PyTorch's own powers may be off by a bit."""
    integers = exponents.to(torch.int32)
    bits: Tensor = torch.where(integers < -126, 1 << (integers + 149).clamp(min=0), (integers + 127) << 23).to(
        torch.int32
    )
    return bits.view(torch.float32)


def _floor_log2(values: Tensor) -> Tensor:
    _, exponents = torch.frexp(values.clamp(min=torch.finfo(torch.float32).smallest_normal * 2.0**-23))
    return exponents - 1


def _exponent(number: float) -> int:
    return math.frexp(number)[1] - 1
