"""Matrices in narrow formats with a scale for each block, as `floats.scaling` defines them, on tensors; their products,
summed in float32; and weights that rest so, a scale for each tile, and are taken by products as they rest.

Letters: M and N rows of the two operands, K what is summed over, R and C blocks of rows and of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.values.dtypes import NUMBER_FORMATS, NumberFormat
from shardwise.values.quantization import MIN_AMAX, ScaleBlock, ScaleKind, Scaling

CASTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class QuantizedTensor(NamedTuple):
    """A matrix as elements in a narrow format [M, K], in float32, the scale of each block [R, C], and one for the whole."""

    elements: Tensor
    scales: Tensor
    whole: Tensor


def round_to_format(values: Tensor, to: NumberFormat) -> Tensor:
    """The nearest numbers of a format, saturated, in float32: by PyTorch's cast where it has one."""
    if to.name in CASTS:
        return values.clamp(-to.max, to.max).to(CASTS[to.name]).float()
    _, exponents = torch.frexp(values)
    quanta = (exponents - 1).clamp(min=to.min_exponent) - to.mantissa_bits
    nearest = torch.round(values * power_of_two(-quanta)) * power_of_two(quanta)
    return nearest.clamp(-to.max, to.max)


def quantize_matrix(
    matrix: Tensor, to: NumberFormat, block: ScaleBlock, kind: ScaleKind, factor: Tensor | None = None
) -> QuantizedTensor:
    """A matrix [M, K] in blocks of a format. `factor`: by what the whole matrix is multiplied, from earlier steps."""
    values = matrix.float()
    encode, scales, whole = (
        _scales(block_amax(values, block), to, kind) if factor is None else _scales_of_factor(factor)
    )
    return QuantizedTensor(round_to_format(values * expand_scales(encode, values.shape, block), to), scales, whole)


def _scales_of_factor(factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    encode = factor.view(1, 1)
    return encode, 1.0 / encode, torch.ones((), device=factor.device)


def _scales(sizes: Tensor, to: NumberFormat, kind: ScaleKind) -> tuple[Tensor, Tensor, Tensor]:
    one = torch.ones((), device=sizes.device)
    if kind == "e8m0":
        exponents = (_floor_log2(sizes) - _exponent(to.max)).clamp(-127, 127)
        return power_of_two(-exponents), power_of_two(exponents), one
    if kind == "e4m3":
        return _scales_in_e4m3(sizes, to)
    encode = _ratio(to.max, sizes.clamp(min=MIN_AMAX))
    if kind == "power_of_two":
        encode = power_of_two(_floor_log2(encode))
    return encode, 1.0 / encode, one


def _scales_in_e4m3(sizes: Tensor, to: NumberFormat) -> tuple[Tensor, Tensor, Tensor]:
    scale_format = NUMBER_FORMATS["e4m3"]
    encode = _ratio(scale_format.max * to.max, sizes.max().clamp(min=MIN_AMAX))
    decode = 1.0 / encode
    scales = round_to_format(sizes / torch.full_like(sizes, to.max) * encode, scale_format)
    return torch.where(scales > 0, 1.0 / (scales * decode), 0.0), scales, decode


def block_amax(values: Tensor, block: ScaleBlock) -> Tensor:
    """The largest size in each block [R, C]."""
    found = values.abs()
    for dim, width in enumerate(block):
        if width == 1:
            continue
        size = found.shape[dim]
        over = -size % (width or size)
        found = F.pad(found, (0, over) if dim else (0, 0, 0, over)) if over else found
        found = torch.unflatten(found, dim, (-1, width or size)).amax(dim + 1)
    return found


def expand_scales(scales: Tensor, shape: torch.Size, block: ScaleBlock) -> Tensor:
    """One for each block as one for each element, or broadcast to that."""
    for dim, width in enumerate(block):
        if width is not None and width > 1:
            scales = scales.repeat_interleave(width, dim).narrow(dim, 0, shape[dim])
    return scales


def scaled_product(
    left: QuantizedTensor, left_block: ScaleBlock, right: QuantizedTensor, right_block: ScaleBlock, *, is_local: bool
) -> Tensor:
    """left [M, K] times right [N, K], summed over K: [M, N] in float32.

    Elements are multiplied, which is exact in float32, and summed; scales follow the sum of each of their blocks of K, so that of
    blocks of 128 every 128 products make a sum (DeepSeek-V3, section 3.3.2). `is_local`: scales of few bits go with the elements.
    """
    if is_local:
        first, second = (_apply_scales(*one) for one in ((left, left_block), (right, right_block)))
        return first @ second.t() * (left.whole * right.whole)
    shapes = left.elements.shape[0], right.elements.shape[0]
    rows = _scales_by_row(left.scales, left_block, shapes[0])
    columns = _scales_by_row(right.scales, right_block, shapes[1])
    width = left_block[1] or left.elements.shape[1]
    total: Tensor | None = None
    pairs = zip(*(torch.split(one.elements, width, 1) for one in (left, right)), strict=True)
    for at, (one, other) in enumerate(pairs):
        part = one @ other.t()
        part = part.mul_(rows[:, min(at, rows.shape[1] - 1), None]).mul_(
            columns[None, :, min(at, columns.shape[1] - 1)]
        )
        total = part if total is None else total.add_(part)
    assert total is not None, "a product sums over something"
    return total


def can_run_on_tensor_cores(
    left: QuantizedTensor, right: QuantizedTensor, formats: tuple[str, str], *, by_row: bool
) -> bool:
    """Whether `torch._scaled_mm` takes two matrices: FP8, one at most in E5M2, both in E4M3 where rows have scales, and sizes
    that 16 divides. Source: PyTorch, aten/src/ATen/native/cuda/ScaledBlas.cpp."""
    allowed = {"e4m3"} if by_row else set(CASTS)
    sizes = (*left.elements.shape[1:], *right.elements.shape[:1])
    return set(formats) <= allowed and "e4m3" in formats and all(size % 16 == 0 for size in sizes)


def tensor_core_product(
    left: QuantizedTensor, right: QuantizedTensor, formats: tuple[str, str], *, by_row: bool
) -> Tensor:
    """The same product by `torch._scaled_mm`, with a scale of each tensor or row, in float32; rows are rounded to bf16."""
    first, second = (one.elements.to(CASTS[name]) for one, name in zip((left, right), formats, strict=True))
    scales = (left.scales, right.scales.t()) if by_row else (left.scales.view(()), right.scales.view(()))
    out = torch.bfloat16 if by_row else torch.float32
    made: Tensor = torch._scaled_mm(first, second.t(), scale_a=scales[0], scale_b=scales[1].contiguous(), out_dtype=out)
    return made.float()


def _apply_scales(one: QuantizedTensor, block: ScaleBlock) -> Tensor:
    return one.elements * expand_scales(one.scales, one.elements.shape, block)


def _scales_by_row(scales: Tensor, block: ScaleBlock, num_rows: int) -> Tensor:
    """The scales of each row [num_rows, C]."""
    height = block[0] or num_rows
    return scales.repeat_interleave(height, 0).narrow(0, 0, num_rows) if height > 1 else scales


def _ratio(value: float, by: Tensor) -> Tensor:
    """A number over tensors in one rounding: PyTorch multiplies by reciprocals where one side is no tensor."""
    return torch.full_like(by, value) / by


def power_of_two(exponents: Tensor) -> Tensor:
    """2 to each of them, -149 to 127, as float32 has it: PyTorch's own powers may be off by a bit."""
    whole = exponents.to(torch.int32)
    found: Tensor = torch.where(whole < -126, 1 << (whole + 149).clamp(min=0), (whole + 127) << 23).to(torch.int32)
    return found.view(torch.float32)


def _floor_log2(values: Tensor) -> Tensor:
    _, exponents = torch.frexp(values.clamp(min=torch.finfo(torch.float32).smallest_normal * 2.0**-23))
    return exponents - 1


def _exponent(value: float) -> int:
    return int(torch.frexp(torch.tensor(value, dtype=torch.float64)).exponent) - 1


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """A weight of a `shape`: `elements` [.., M, K] in a narrow format, and the `scales` [.., R, C] of its tiles; of a stack of
    matrices it has all. `turned`: where it is used rows and columns are exchanged."""

    shape: torch.Size
    elements: Tensor
    scales: Tensor
    to_format: NumberFormat
    scaling: Scaling
    turned: bool = False

    @classmethod
    def zeros(
        cls, shape: torch.Size, num_stacked: int, num_rows: int, to: NumberFormat, scaling: Scaling, device: torch.device
    ) -> TiledWeight:  # fmt: skip
        """One of zeros: of a shape the first dims are those of a stack, the next those of its rows."""
        stack, rows = shape[:num_stacked], shape[num_stacked : num_stacked + num_rows].numel()
        columns = shape[num_stacked + num_rows :].numel()
        blocks = (-(-size // (tile or size)) for size, tile in zip((rows, columns), scaling.weight_block, strict=True))
        elements = torch.zeros(*stack, rows, columns, dtype=CASTS[to.name], device=device)
        return cls(shape, elements, torch.ones(*stack, *blocks, device=device), to, scaling)

    @property
    def dtype(self) -> torch.dtype:
        return self.elements.dtype

    @property
    def device(self) -> torch.device:
        return self.elements.device

    def to(self, dtype: torch.dtype) -> TiledWeight:
        """Itself: products take it as it is, in whatever format the others are used."""
        return self

    def transpose(self, first: int, second: int) -> TiledWeight:
        """With rows and columns of each matrix of a stack exchanged."""
        shape = torch.Size((*self.shape[:first], self.shape[second], self.shape[first]))
        return replace(self, shape=shape, turned=not self.turned)

    def __iter__(self) -> Iterator[TiledWeight]:
        """The matrices of a stack."""
        for elements, scales in zip(self.elements, self.scales, strict=True):
            yield replace(self, shape=self.shape[1:], elements=elements, scales=scales)

    def store(self, values: Tensor) -> None:
        """Cast values of its shape."""
        elements, scales = (one.view(-1, *one.shape[-2:]) for one in (self.elements, self.scales))
        for matrix, into, its_scales in zip(values.reshape(elements.shape), elements, scales, strict=True):
            cast = quantize_matrix(matrix, self.to_format, self.scaling.weight_block, self.scaling.kind)
            into.copy_(cast.elements)
            its_scales.copy_(cast.scales)

    def operand(self, *, by_columns: bool) -> QuantizedTensor:
        """As a product takes one matrix: by its rows, or by its columns as rows."""
        one = QuantizedTensor(self.elements.float(), self.scales, torch.ones((), device=self.device))
        return QuantizedTensor(one.elements.t(), one.scales.t(), one.whole) if by_columns else one
