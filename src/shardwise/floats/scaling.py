"""Quantisation with scales, in NumPy: the reference for what the engine does on its tensors.

A matrix [rows, columns] that a product takes is summed over its columns. Blocks of it have a scale each: the largest size in a
block becomes the largest number of a narrow format, or nearly so, and what is left is rounded to that format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import chosen
from shardwise.floats.number_format import FORMATS, NumberFormat
from shardwise.floats.rounding import rounded

Matrix = NDArray[np.float32]
Block = tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them
ScaleKind = Literal["fp32", "power_of_two", "e8m0", "e4m3"]
WHOLE: Block = (None, None)
LEAST_AMAX = 1e-12  # so that scales stay finite; source: torchao, float8_utils.EPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Which elements share a scale, of an operand and of a weight, and what kind of number a scale is.

    `fp32`: the format's largest number over the block's; `power_of_two`: the next power of two below; `e8m0`: a power of two from
    the exponents alone; `e4m3`: a number in E4M3, under one in fp32 for the whole matrix. `is_delayed`: the largest sizes are
    those of earlier steps.
    """

    name: str
    block: Block
    weight_block: Block
    kind: ScaleKind
    source: str
    is_delayed: bool = False

    @property
    def is_local(self) -> bool:
        """Whether scales are exact within products: a number of few bits each, which fp32 sums take beside the elements."""
        return self.kind in ("e8m0", "e4m3")


_TE = "NVIDIA, Transformer Engine user guide, FP8 recipes"
SCALINGS = {
    one.name: one
    for one in (
        Scaling(name="tensor", block=WHOLE, weight_block=WHOLE, kind="fp32", source=f"{_TE}: Float8CurrentScaling"),
        Scaling(
            name="delayed", block=WHOLE, weight_block=WHOLE, kind="fp32", is_delayed=True,
            source=f"{_TE}: DelayedScaling",
        ),
        Scaling(
            name="row", block=(1, None), weight_block=(1, None), kind="power_of_two",
            source="torchao, Float8LinearConfig.from_recipe_name('rowwise'): a scale of each row, a power of two",
        ),
        Scaling(
            name="tile", block=(1, 128), weight_block=(128, 128), kind="fp32",
            source="DeepSeek-AI 2024, DeepSeek-V3 (arXiv 2412.19437), section 3.3.2",
        ),
        Scaling(
            name="tile_power_of_two", block=(1, 128), weight_block=(128, 128), kind="power_of_two",
            source=f"{_TE}: Float8BlockScaling, whose scales are powers of two by default",
        ),
        Scaling(
            name="mx", block=(1, 32), weight_block=(1, 32), kind="e8m0",
            source="OCP Microscaling Formats (MX) Specification 1.0, section 6.3",
        ),
        Scaling(
            name="nvfp4", block=(1, 16), weight_block=(16, 16), kind="e4m3",
            source="NVIDIA 2025, Pretraining Large Language Models with NVFP4 (arXiv 2509.25149), appendix C",
        ),
    )
}  # fmt: skip


def scaling_named(name: str) -> Scaling:
    """A scaling by name. Raises `InputError` that lists the names."""
    return chosen(SCALINGS, name, "scaling")


class Quantised(NamedTuple):
    """A matrix as elements in a narrow format [rows, columns], the scale of each block [blocks of rows, blocks of columns], and
    one for the whole: an element times both is what it stands for."""

    elements: Matrix
    scales: Matrix
    whole: np.float32

    def dequantised(self, block: Block) -> NDArray[np.float64]:
        """What it stands for [rows, columns], in float64 without a rounding."""
        scales = spread(self.scales, self.elements.shape, block).astype(np.float64)
        return self.elements * scales * np.float64(self.whole)


def quantised(
    matrix: Matrix, to: NumberFormat, block: Block, kind: ScaleKind, factor: float | None = None
) -> Quantised:
    """A matrix [rows, columns] of float32 in blocks of a format, all arithmetic in float32 as a device has it.

    `factor`: by what the whole matrix is multiplied, of scales in fp32 (`floats.delayed`); None: what brings the largest size of
    each block to the format's largest number. What is larger saturates. The last blocks may be smaller than the others.

    >>> found = quantised(np.array([[1.0, -3.0], [0.5, 0.0]], np.float32), FORMATS["e4m3"], (1, None), "e8m0")
    >>> found.elements.tolist(), found.scales.tolist()
    ([[128.0, -384.0], [256.0, 0.0]], [[0.0078125], [0.001953125]])
    """
    encode, scales, whole = _scales(block_amax(matrix, block), to, kind) if factor is None else _given(factor)
    scaled = matrix * spread(encode, matrix.shape, block)
    return Quantised(rounded(scaled, to, saturating=True).astype(np.float32), scales, whole)


def _given(factor: float) -> tuple[Matrix, Matrix, np.float32]:
    encode = np.full((1, 1), factor, np.float32)
    return encode, np.float32(1) / encode, np.float32(1)


def _scales(sizes: Matrix, to: NumberFormat, kind: ScaleKind) -> tuple[Matrix, Matrix, np.float32]:
    """By what elements are multiplied, what takes that back, and what takes it back of the whole matrix."""
    one = np.float32(1)
    if kind == "e8m0":
        exponents = np.clip(floor_log2(sizes) - int(np.log2(to.max)), -127, 127)
        return powers_of_two(-exponents), powers_of_two(exponents), one
    if kind == "e4m3":
        return _scales_in_e4m3(sizes, to)
    encode = (np.float32(to.max) / np.maximum(sizes, np.float32(LEAST_AMAX))).astype(np.float32)
    if kind == "power_of_two":
        encode = powers_of_two(floor_log2(encode))
    return encode, one / encode, one


def _scales_in_e4m3(sizes: Matrix, to: NumberFormat) -> tuple[Matrix, Matrix, np.float32]:
    one, scale_format = np.float32(1), FORMATS["e4m3"]
    encode = np.float32(scale_format.max * to.max) / np.maximum(sizes.max(), np.float32(LEAST_AMAX))
    decode = one / encode
    scales = rounded(sizes / np.float32(to.max) * encode, scale_format, saturating=True).astype(np.float32)
    products = scales * decode
    return np.divide(one, products, out=np.zeros_like(products), where=scales > 0), scales, decode


def block_amax(matrix: Matrix, block: Block) -> Matrix:
    """The largest size in each block [blocks of rows, blocks of columns]."""
    found = np.abs(matrix)
    for axis, width in enumerate(block):
        starts = np.arange(0, found.shape[axis], width or max(found.shape[axis], 1))
        found = np.maximum.reduceat(found, starts, axis=axis)
    return found


def spread(scales: Matrix, shape: tuple[int, ...], block: Block) -> Matrix:
    """The scale of each element, from one for each block."""
    for axis, width in enumerate(block):
        scales = np.repeat(scales, width or shape[axis], axis=axis).take(range(shape[axis]), axis=axis)
    return scales


def powers_of_two(exponents: NDArray[np.int32]) -> Matrix:
    """2 to each of them, -149 to 127."""
    return np.ldexp(np.float32(1), exponents).astype(np.float32)


def floor_log2(values: Matrix) -> NDArray[np.int32]:
    """The exponent of the power of two at or below each value above 0; that of the smallest float32 for 0."""
    _, exponents = np.frexp(np.maximum(values, np.finfo(np.float32).smallest_subnormal))
    return exponents - 1
