"""References for low-precision numbers in NumPy: what the engine's kernels and PyTorch's casts have to give, bit for bit.

Rounding to a floating-point format and its bit codes; blocks of a matrix with a scale each; scales from the largest
magnitudes (amax) of earlier steps; and dynamic tree quantization in blocks, in which optimizers keep moments in 8 bits.

A matrix [rows, columns] that a product takes is summed over its columns. The largest magnitude of a block becomes the largest
number of a narrow format, or nearly so, and what is left is rounded to that format. Letters of amax histories: N tensors with
a scale each, S steps, the newest first.

Dynamic trees: a code of 8 bits stands for a number of a table, at most 1 in magnitude. A block's largest magnitude is its
scale, and an element stands for the number of its code times the scale. Numbers lie close near 0: seven decades, each with
twice as many as the one below. Source: Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning (arXiv
1511.04561); Dettmers et al. 2022 (arXiv 2110.02861), section 2, of which the unsigned table, for moments of squares, has a
bit more for each number in place of a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.values.dtypes import BLOCK_SCALED_DTYPES, NUMBER_FORMATS, BlockScaledDtype, NumberFormat
from shardwise.values.errors import lookup, raise_problems
from shardwise.values.precision import DelayedScaling

Float64Array = NDArray[np.float64]


def round_to_format(values: ArrayLike, to: NumberFormat, *, saturating: bool = False) -> Float64Array:
    """The nearest numbers of a format to `values` (any shape), in float64, which holds every number of every format here.

    Halfway between two the one with the even mantissa is taken (IEEE 754-2019, 4.3.1, roundTiesToEven). What rounds to more
    than the format's largest number becomes infinite, or NaN in a format without infinity; `saturating`: the largest number,
    with its sign, as infinities do. A format with neither always saturates, and takes NaN to its largest number (PTX ISA,
    cvt.satfinite). One without a sign takes sizes, and no less than its smallest number.

    Differs: PyTorch 2.13 saturates casts to float8_e4m3fn, and not those to float8_e5m2; ml_dtypes saturates neither.

    >>> from shardwise.values.dtypes import NUMBER_FORMATS
    >>> round_to_format([1.0625, 1.1875, 3e-3, 500.0], NUMBER_FORMATS["e4m3"], saturating=True).tolist()
    [1.0, 1.25, 0.00390625, 448.0]
    """
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        x = np.asarray(values, dtype=np.float64)
    x = x if to.sign_bits else np.maximum(np.abs(x), to.min_normal)
    _, exponents = np.frexp(x)  # x = m · 2^exponent, 0.5 <= m < 1
    quanta = np.maximum(exponents - 1, to.min_exponent) - to.mantissa_bits
    nearest = np.ldexp(np.rint(np.ldexp(x, -quanta)), quanta)
    over = np.abs(nearest) > to.max
    if saturating or not to.has_nan:
        nearest = np.where(over, np.copysign(to.max, x), nearest)
    else:
        nearest = np.where(over, np.copysign(np.inf, x) if to.has_infinity else np.nan, nearest)
    return nearest if to.has_nan else np.where(np.isnan(nearest), to.max, nearest)


def encode_bits(values: ArrayLike, to: NumberFormat, *, saturating: bool = False) -> NDArray[np.uint32]:
    """The codes of `values` rounded to a format: sign, exponent and mantissa from the highest bit down.

    >>> from shardwise.values.dtypes import NUMBER_FORMATS
    >>> [f"{code:08b}" for code in encode_bits([1.0, -448.0], NUMBER_FORMATS["e4m3"])]
    ['00111000', '11111110']
    """
    x = round_to_format(values, to, saturating=saturating)
    size = np.where(np.isfinite(x), np.abs(x), to.max)
    _, exponents = np.frexp(size)
    exponents = np.maximum(exponents - 1, to.min_exponent)
    mantissas = np.ldexp(size, to.mantissa_bits - exponents).astype(np.int64)  # with the leading 1 of normal numbers
    one = 2**to.mantissa_bits
    fields = np.where(mantissas < one, 0, exponents + to.bias)
    codes = fields * one + np.where(mantissas < one, mantissas, mantissas - one)
    codes = np.where(np.isinf(x), to.largest_code + 1, codes)
    codes = np.where(np.isnan(x), _nan_code(to), codes)
    signs = np.signbit(x).astype(np.int64) * to.sign_bits
    found: NDArray[np.uint32] = (codes + (signs << (to.bits - to.sign_bits))).astype(np.uint32)
    return found


def decode_bits(codes: ArrayLike, of: NumberFormat) -> Float64Array:
    """The numbers of `codes`. Raises `InputError` for codes that have more bits than the format.

    >>> from shardwise.values.dtypes import NUMBER_FORMATS
    >>> decode_bits(range(8), NUMBER_FORMATS["e2m1"]).tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    whole = np.asarray(codes, dtype=np.int64)
    outside = whole[(whole < 0) | (whole >= 2**of.bits)]
    raise_problems(
        [f"code: found {code}; 0 to {2**of.bits - 1} are those of {of.name}" for code in outside.ravel()[:1]]
    )
    signs, magnitudes = np.divmod(whole, 2 ** (of.bits - of.sign_bits))
    fields, mantissas = np.divmod(magnitudes, 2**of.mantissa_bits)
    is_normal = (fields > 0) | (not of.has_zero)
    significands = np.where(is_normal, 1.0, 0.0) + mantissas * of.epsilon
    sizes = np.ldexp(significands, np.where(is_normal, fields - of.bias, of.min_exponent).astype(np.int32))
    if of.has_infinity:
        sizes = np.where(magnitudes == of.largest_code + 1, np.inf, sizes)
    beyond = of.largest_code + (1 if of.has_infinity else 0)
    sizes = np.where(magnitudes > beyond, np.nan, sizes)
    return np.copysign(sizes, np.where(signs > 0, -1.0, 1.0))


def _nan_code(to: NumberFormat) -> int:
    """A quiet NaN: in IEEE's formats the one with the highest bit of the mantissa set, else the only one."""
    return to.largest_code + 1 + (2 ** (to.mantissa_bits - 1) if to.has_infinity else 0)


Float32Matrix = NDArray[np.float32]
ScaleBlock = tuple[int | None, int | None]  # rows and columns that share a scale; None: all of them
ScaleKind = Literal["fp32", "power_of_two", "e8m0", "e4m3"]
WHOLE_MATRIX: ScaleBlock = (None, None)
MIN_AMAX = 1e-12  # so that scales stay finite; source: torchao, float8_utils.EPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Which elements share a scale, of an operand and of a weight, and what kind of number a scale is.

    `fp32`: the format's largest number over the block's; `power_of_two`: the next power of two below; `e8m0`: a power of two from
    the exponents alone; `e4m3`: a number in E4M3, under one in fp32 for the whole matrix. `is_delayed`: the largest sizes are
    those of earlier steps.
    """

    name: str
    block: ScaleBlock
    weight_block: ScaleBlock
    kind: ScaleKind
    source: str
    is_delayed: bool = False

    @property
    def scales_inside_matmul(self) -> bool:
        """Whether scales are exact within products: a number of few bits each, which fp32 sums take beside the elements."""
        return self.kind in ("e8m0", "e4m3")


_TE = "NVIDIA, Transformer Engine user guide, FP8 recipes"
SCALINGS = {
    one.name: one
    for one in (
        Scaling(name="tensor", block=WHOLE_MATRIX, weight_block=WHOLE_MATRIX, kind="fp32", source=f"{_TE}: Float8CurrentScaling"),
        Scaling(
            name="delayed", block=WHOLE_MATRIX, weight_block=WHOLE_MATRIX, kind="fp32", is_delayed=True,
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


def get_scaling(name: str) -> Scaling:
    """A scaling by name. Raises `InputError` that lists the names."""
    return lookup(SCALINGS, name, "scaling")


class QuantizedMatrix(NamedTuple):
    """A matrix as elements in a narrow format [rows, columns], the scale of each block [blocks of rows, blocks of columns], and
    one for the whole: an element times both is what it stands for."""

    elements: Float32Matrix
    scales: Float32Matrix
    whole: np.float32

    def dequantize(self, block: ScaleBlock) -> NDArray[np.float64]:
        """What it stands for [rows, columns], in float64 without a rounding."""
        scales = expand_scales(self.scales, self.elements.shape, block).astype(np.float64)
        return self.elements * scales * np.float64(self.whole)


def quantize_blocks(
    matrix: Float32Matrix, to: NumberFormat, block: ScaleBlock, kind: ScaleKind, factor: float | None = None
) -> QuantizedMatrix:
    """A matrix [rows, columns] of float32 in blocks of a format, all arithmetic in float32 as a device has it.

    `factor`: by what the whole matrix is multiplied, of scales in fp32 (`update_amax_history`); None: what brings the largest
    size of each block to the format's largest number. What is larger saturates. The last blocks may be smaller than the others.

    >>> found = quantize_blocks(np.array([[1.0, -3.0], [0.5, 0.0]], np.float32), NUMBER_FORMATS["e4m3"], (1, None), "e8m0")
    >>> found.elements.tolist(), found.scales.tolist()
    ([[128.0, -384.0], [256.0, 0.0]], [[0.0078125], [0.001953125]])
    """
    encode, scales, whole = (
        _scales(block_amax(matrix, block), to, kind) if factor is None else _scales_from_factor(factor)
    )
    scaled = matrix * expand_scales(encode, matrix.shape, block)
    return QuantizedMatrix(round_to_format(scaled, to, saturating=True).astype(np.float32), scales, whole)


def _scales_from_factor(factor: float) -> tuple[Float32Matrix, Float32Matrix, np.float32]:
    encode = np.full((1, 1), factor, np.float32)
    return encode, np.float32(1) / encode, np.float32(1)


def _scales(sizes: Float32Matrix, to: NumberFormat, kind: ScaleKind) -> tuple[Float32Matrix, Float32Matrix, np.float32]:
    """By what elements are multiplied, what takes that back, and what takes it back of the whole matrix."""
    one = np.float32(1)
    if kind == "e8m0":
        exponents = np.clip(floor_log2(sizes) - int(np.log2(to.max)), -127, 127)
        return powers_of_two(-exponents), powers_of_two(exponents), one
    if kind == "e4m3":
        return _scales_in_e4m3(sizes, to)
    encode = (np.float32(to.max) / np.maximum(sizes, np.float32(MIN_AMAX))).astype(np.float32)
    if kind == "power_of_two":
        encode = powers_of_two(floor_log2(encode))
    return encode, one / encode, one


def _scales_in_e4m3(sizes: Float32Matrix, to: NumberFormat) -> tuple[Float32Matrix, Float32Matrix, np.float32]:
    one, scale_format = np.float32(1), NUMBER_FORMATS["e4m3"]
    encode = np.float32(scale_format.max * to.max) / np.maximum(sizes.max(), np.float32(MIN_AMAX))
    decode = one / encode
    scales = round_to_format(sizes / np.float32(to.max) * encode, scale_format, saturating=True).astype(np.float32)
    products = scales * decode
    return np.divide(one, products, out=np.zeros_like(products), where=scales > 0), scales, decode


def block_amax(matrix: Float32Matrix, block: ScaleBlock) -> Float32Matrix:
    """The largest size in each block [blocks of rows, blocks of columns]."""
    found = np.abs(matrix)
    for axis, width in enumerate(block):
        starts = np.arange(0, found.shape[axis], width or max(found.shape[axis], 1))
        found = np.maximum.reduceat(found, starts, axis=axis)
    return found


def expand_scales(scales: Float32Matrix, shape: tuple[int, ...], block: ScaleBlock) -> Float32Matrix:
    """The scale of each element, from one for each block."""
    for axis, width in enumerate(block):
        scales = np.repeat(scales, width or shape[axis], axis=axis).take(range(shape[axis]), axis=axis)
    return scales


def powers_of_two(exponents: NDArray[np.int32]) -> Float32Matrix:
    """2 to each of them, -149 to 127."""
    return np.ldexp(np.float32(1), exponents).astype(np.float32)


def floor_log2(values: Float32Matrix) -> NDArray[np.int32]:
    """The exponent of the power of two at or below each value above 0; that of the smallest float32 for 0."""
    _, exponents = np.frexp(np.maximum(values, np.finfo(np.float32).smallest_subnormal))
    return exponents - 1


DECADES = 7
Float32Array = NDArray[np.float32]
Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class DynamicTreeFormat:
    """The numbers of a format by their codes, in rising order; `signed`: also below 0, though not -1."""

    name: str
    signed: bool

    @property
    def blocks(self) -> BlockScaledDtype:
        """How many elements share a scale."""
        return BLOCK_SCALED_DTYPES[self.name]

    @cached_property
    def values(self) -> Float32Array:
        """[256]: 0, 1, and of each decade the middles of even parts of what lies between a tenth of its largest size and that."""
        found = [0.0, 1.0]
        for decade in range(DECADES):
            num_parts = 2 ** (decade + (not self.signed))
            middles = (0.1 + 0.9 * (part + 0.5) / num_parts for part in range(num_parts))
            sizes = [10.0 ** (decade + 1 - DECADES) * middle for middle in middles]
            found += [*sizes, *(-size for size in sizes)] if self.signed else sizes
        return np.sort(np.array(found)).astype(np.float32)

    @cached_property
    def rounding_boundaries(self) -> Float32Array:
        """[255]: the least float32 that is not below the middle between each number and the next, from which on the next one is
        nearest."""
        numbers = self.values.astype(np.float64)
        middles = (numbers[:-1] + numbers[1:]) / 2
        found = middles.astype(np.float32)
        return np.where(found < middles, np.nextafter(found, np.float32(np.inf)), found)


DYNAMIC_TREE_FORMATS = {
    name: DynamicTreeFormat(name, signed) for name, signed in (("dynamic8", True), ("unsigned_dynamic8", False))
}


def get_dynamic_tree_format(name: str) -> DynamicTreeFormat:
    """The numbers of a format by its name. Raises `InputError` that lists the names."""
    return lookup(DYNAMIC_TREE_FORMATS, name, "format")


class BlockCodes(NamedTuple):
    """Elements as codes [n], and the scale of each block [blocks]."""

    codes: Codes
    scales: Float32Array


def quantize_dynamic_tree(values: Float32Array, to: DynamicTreeFormat) -> BlockCodes:
    """Elements [n] in blocks of a format, counted from the first; the last block may be smaller. The nearest number is taken,
    halfway between two the larger, and all arithmetic is float32's.

    Differs: torchao.optim and bitsandbytes have scales of at least 1e-12, below which small squares would lose their bits.

    >>> found = quantize_dynamic_tree(np.array([0.5, -4.0, 0.0], np.float32), DYNAMIC_TREE_FORMATS["dynamic8"])
    >>> found.scales.tolist(), [f"{one:.3f}" for one in dequantize_dynamic_tree(found, DYNAMIC_TREE_FORMATS["dynamic8"])]
    ([4.0], ['0.484', '-3.972', '0.000'])
    """
    starts = np.arange(0, len(values), to.blocks.size)
    scales = np.maximum.reduceat(np.abs(values), starts) if len(values) else np.zeros(0, np.float32)
    divisors = _expand_block_scales(np.where(scales > 0, scales, np.float32(1)), len(values), to)
    return BlockCodes(np.searchsorted(to.rounding_boundaries, values / divisors, side="right").astype(np.uint8), scales)


def dequantize_dynamic_tree(found: BlockCodes, of: DynamicTreeFormat) -> Float32Array:
    """What codes and scales stand for [n]."""
    return of.values[found.codes] * _expand_block_scales(found.scales, len(found.codes), of)


def _expand_block_scales(scales: Float32Array, size: int, of: DynamicTreeFormat) -> Float32Array:
    return np.repeat(scales, of.blocks.size)[:size]


AmaxArray = NDArray[np.float32]


def update_amax_history(
    sizes: AmaxArray, history: AmaxArray, factors: AmaxArray, largest: AmaxArray, delayed: DelayedScaling
) -> tuple[AmaxArray, AmaxArray]:
    """The history [N, S] and the factors [N] of the next step, from those of a step and the `sizes` [N] that were seen in it;
    `largest` [N] are the largest numbers of the formats.

    A factor stays where nothing but zeros has been seen, and is at most the largest float32. A size that is not finite enters as
    0. Source: Transformer Engine, common/recipe/delayed_scaling.cu. Differs: there it enters, and keeps the factor as it is until
    it has left the history.

    >>> given = (np.array(one, np.float32) for one in ([7.0], [[14.0, 28.0]], [1.0], [448.0]))
    >>> history, factors = update_amax_history(*given, DelayedScaling(history=2))
    >>> history.tolist(), factors.tolist()
    ([[7.0, 14.0]], [32.0])
    """
    seen = np.where(np.isfinite(sizes), sizes, np.float32(0))
    history = np.concatenate([seen[:, None], history[:, :-1]], axis=1)
    amax = history.max(axis=1) if delayed.algorithm == "max" else seen
    with np.errstate(divide="ignore", over="ignore"):
        fresh = np.minimum(largest * np.float32(2.0**-delayed.margin) / amax, np.finfo(np.float32).max)
    return history, np.where(amax > 0, fresh, factors).astype(np.float32)
