"""NumPy references of low-precision numbers, which the engine's kernels and PyTorch's casts must match bit for bit.

Rounding to a floating-point format and its bit codes; blocks of a matrix with a scale each; scales from the largest
magnitudes (amax) of earlier steps; and dynamic tree quantization in blocks, in which optimizers keep moments in 8 bits.

A matmul sums a matrix [rows, columns] over its columns. The largest magnitude of a block is mapped to the largest number of a
narrow format, or nearly so, and all elements are rounded to that format. Letters of amax histories: N tensors with a scale
each, S steps, the newest first.

Dynamic trees: a code of 8 bits stands for a number of a table, at most 1 in magnitude. A block's largest magnitude is its
scale, and an element is the number of its code times the scale. Numbers are dense near 0: seven decades, each with twice as
many as the one below. Source: Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning (arXiv 1511.04561);
Dettmers et al. 2022 (arXiv 2110.02861), section 2, whose unsigned table, for moments of squares, has a bit more for each
number in place of a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.values.dtypes import BLOCK_SCALED_DTYPES, NUMBER_FORMATS, BlockScaledDtype, NumberFormat
from shardwise.values.errors import lookup, raise_problems
from shardwise.values.precision import DelayedScaling
from shardwise.values.scalings import MIN_AMAX, ScaleBlock, ScaleKind

Float64Array = NDArray[np.float64]


def round_to_format(values: ArrayLike, fmt: NumberFormat, *, saturating: bool = False) -> Float64Array:
    """Round `values` (any shape) to the nearest numbers of a format, in float64, which holds every number of every format
    here.

    Ties go to the even mantissa (IEEE 754-2019, 4.3.1, roundTiesToEven). A result above the format's largest number becomes
    infinite, or NaN in a format without infinity; with `saturating` it becomes the largest number, with its sign, as do
    infinities. A format with neither always saturates, and maps NaN to its largest number (PTX ISA, cvt.satfinite). A format
    without a sign takes magnitudes, at least its smallest number.

    Differs: PyTorch 2.13 saturates casts to float8_e4m3fn, and not those to float8_e5m2; ml_dtypes saturates neither.

    >>> from shardwise.values.dtypes import NUMBER_FORMATS
    >>> round_to_format([1.0625, 1.1875, 3e-3, 500.0], NUMBER_FORMATS["e4m3"], saturating=True).tolist()
    [1.0, 1.25, 0.00390625, 448.0]
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN warns
        x = np.asarray(values, dtype=np.float64)
    x = x if fmt.sign_bits else np.maximum(np.abs(x), fmt.min_normal)
    _, exponents = np.frexp(x)  # x = m · 2^exponent, 0.5 <= m < 1
    # The distance between neighbours at x; subnormals share that of the smallest normal number.
    quanta = np.maximum(exponents - 1, fmt.min_exponent) - fmt.mantissa_bits
    rounded = np.ldexp(np.rint(np.ldexp(x, -quanta)), quanta)
    overflows = np.abs(rounded) > fmt.max
    if saturating or not fmt.has_nan:
        rounded = np.where(overflows, np.copysign(fmt.max, x), rounded)
    else:
        rounded = np.where(overflows, np.copysign(np.inf, x) if fmt.has_infinity else np.nan, rounded)
    return rounded if fmt.has_nan else np.where(np.isnan(rounded), fmt.max, rounded)


def encode_bits(values: ArrayLike, fmt: NumberFormat, *, saturating: bool = False) -> NDArray[np.uint32]:
    """Return the codes of `values` rounded to a format: sign, exponent and mantissa from the highest bit down.

    >>> from shardwise.values.dtypes import NUMBER_FORMATS
    >>> [f"{code:08b}" for code in encode_bits([1.0, -448.0], NUMBER_FORMATS["e4m3"])]
    ['00111000', '11111110']
    """
    x = round_to_format(values, fmt, saturating=saturating)
    magnitudes = np.where(np.isfinite(x), np.abs(x), fmt.max)
    _, exponents = np.frexp(magnitudes)
    exponents = np.maximum(exponents - 1, fmt.min_exponent)
    mantissas = np.ldexp(magnitudes, fmt.mantissa_bits - exponents).astype(
        np.int64
    )  # with the leading 1 of normal numbers
    implicit_bit = 2**fmt.mantissa_bits
    exponent_fields = np.where(mantissas < implicit_bit, 0, exponents + fmt.bias)
    codes = exponent_fields * implicit_bit + np.where(mantissas < implicit_bit, mantissas, mantissas - implicit_bit)
    codes = np.where(np.isinf(x), fmt.largest_code + 1, codes)
    codes = np.where(np.isnan(x), _nan_code(fmt), codes)
    signs = np.signbit(x).astype(np.int64) * fmt.sign_bits
    bits: NDArray[np.uint32] = (codes + (signs << (fmt.bits - fmt.sign_bits))).astype(np.uint32)
    return bits


def decode_bits(codes: ArrayLike, fmt: NumberFormat) -> Float64Array:
    """Return the numbers of `codes`. Raises `InputError` for codes with more bits than the format.

    >>> from shardwise.values.dtypes import NUMBER_FORMATS
    >>> decode_bits(range(8), NUMBER_FORMATS["e2m1"]).tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    int_codes = np.asarray(codes, dtype=np.int64)
    invalid = int_codes[(int_codes < 0) | (int_codes >= 2**fmt.bits)]
    raise_problems(
        [f"code: found {code}; 0 to {2**fmt.bits - 1} are those of {fmt.name}" for code in invalid.ravel()[:1]]
    )
    signs, magnitude_codes = np.divmod(int_codes, 2 ** (fmt.bits - fmt.sign_bits))
    exponent_fields, mantissas = np.divmod(magnitude_codes, 2**fmt.mantissa_bits)
    is_normal = (exponent_fields > 0) | (not fmt.has_zero)
    significands = np.where(is_normal, 1.0, 0.0) + mantissas * fmt.epsilon
    magnitudes = np.ldexp(
        significands, np.where(is_normal, exponent_fields - fmt.bias, fmt.min_exponent).astype(np.int32)
    )
    if fmt.has_infinity:
        magnitudes = np.where(magnitude_codes == fmt.largest_code + 1, np.inf, magnitudes)
    last_number_code = fmt.largest_code + (1 if fmt.has_infinity else 0)
    magnitudes = np.where(magnitude_codes > last_number_code, np.nan, magnitudes)
    return np.copysign(magnitudes, np.where(signs > 0, -1.0, 1.0))


def _nan_code(fmt: NumberFormat) -> int:
    """Return a quiet NaN: with the highest mantissa bit set in IEEE's formats, else the only one."""
    return fmt.largest_code + 1 + (2 ** (fmt.mantissa_bits - 1) if fmt.has_infinity else 0)


Float32Matrix = NDArray[np.float32]


class QuantizedMatrix(NamedTuple):
    """Matrix in a narrow format: elements [rows, columns], the scale of each block [row blocks, column blocks], and one of
    the whole matrix; an element times both scales is its value."""

    elements: Float32Matrix
    scales: Float32Matrix
    matrix_scale: np.float32

    def dequantize(self, block: ScaleBlock) -> NDArray[np.float64]:
        """Return the values [rows, columns] in float64, without a rounding."""
        scales = expand_scales(self.scales, self.elements.shape, block).astype(np.float64)
        return self.elements * scales * np.float64(self.matrix_scale)


def quantize_blocks(
    matrix: Float32Matrix, fmt: NumberFormat, block: ScaleBlock, kind: ScaleKind, factor: float | None = None
) -> QuantizedMatrix:
    """Quantize a float32 matrix [rows, columns] in blocks, with all arithmetic in float32 as on a device.

    `factor`: multiplier of the whole matrix, of scales in fp32 (`update_amax_history`); None: the one that maps each block's
    amax to the format's largest number. Larger values saturate. The last blocks may be smaller.

    >>> quantized = quantize_blocks(np.array([[1.0, -3.0], [0.5, 0.0]], np.float32), NUMBER_FORMATS["e4m3"], (1, None), "e8m0")
    >>> quantized.elements.tolist(), quantized.scales.tolist()
    ([[128.0, -384.0], [256.0, 0.0]], [[0.0078125], [0.001953125]])
    """
    multipliers, scales, matrix_scale = (
        _scales(block_amax(matrix, block), fmt, kind) if factor is None else _scales_from_factor(factor)
    )
    scaled = matrix * expand_scales(multipliers, matrix.shape, block)
    return QuantizedMatrix(round_to_format(scaled, fmt, saturating=True).astype(np.float32), scales, matrix_scale)


def _scales_from_factor(factor: float) -> tuple[Float32Matrix, Float32Matrix, np.float32]:
    multiplier = np.full((1, 1), factor, np.float32)
    return multiplier, np.float32(1) / multiplier, np.float32(1)


def _scales(amax: Float32Matrix, fmt: NumberFormat, kind: ScaleKind) -> tuple[Float32Matrix, Float32Matrix, np.float32]:
    """Return the multiplier per block, the scale that undoes it, and the scale of the whole matrix."""
    unity = np.float32(
        1
    )  # all in float32, in the order of the device's operations: another order gives other last bits
    if kind == "e8m0":
        exponents = np.clip(floor_log2(amax) - int(np.log2(fmt.max)), -127, 127)
        return powers_of_two(-exponents), powers_of_two(exponents), unity
    if kind == "e4m3":
        return _scales_in_e4m3(amax, fmt)
    multipliers = (np.float32(fmt.max) / np.maximum(amax, np.float32(MIN_AMAX))).astype(np.float32)
    if kind == "power_of_two":
        multipliers = powers_of_two(floor_log2(multipliers))
    return multipliers, unity / multipliers, unity


def _scales_in_e4m3(amax: Float32Matrix, fmt: NumberFormat) -> tuple[Float32Matrix, Float32Matrix, np.float32]:
    unity, scale_format = np.float32(1), NUMBER_FORMATS["e4m3"]
    matrix_multiplier = np.float32(scale_format.max * fmt.max) / np.maximum(amax.max(), np.float32(MIN_AMAX))
    matrix_scale = unity / matrix_multiplier
    scales = round_to_format(amax / np.float32(fmt.max) * matrix_multiplier, scale_format, saturating=True).astype(
        np.float32
    )
    combined_scales = scales * matrix_scale
    return np.divide(unity, combined_scales, out=np.zeros_like(combined_scales), where=scales > 0), scales, matrix_scale


def block_amax(matrix: Float32Matrix, block: ScaleBlock) -> Float32Matrix:
    """Return the largest magnitude in each block [row blocks, column blocks]."""
    magnitudes = np.abs(matrix)
    for axis, width in enumerate(block):
        starts = np.arange(0, magnitudes.shape[axis], width or max(magnitudes.shape[axis], 1))
        magnitudes = np.maximum.reduceat(magnitudes, starts, axis=axis)
    return magnitudes


def expand_scales(scales: Float32Matrix, shape: tuple[int, ...], block: ScaleBlock) -> Float32Matrix:
    """Return the scale of each element, from one per block."""
    for axis, width in enumerate(block):
        scales = np.repeat(scales, width or shape[axis], axis=axis).take(range(shape[axis]), axis=axis)
    return scales


def powers_of_two(exponents: NDArray[np.int32]) -> Float32Matrix:
    """Return 2 to the power of each exponent, -149 to 127."""
    return np.ldexp(np.float32(1), exponents).astype(np.float32)


def floor_log2(values: Float32Matrix) -> NDArray[np.int32]:
    """Return the exponent of the power of two at or below each positive value; for 0 that of the smallest float32."""
    _, exponents = np.frexp(np.maximum(values, np.finfo(np.float32).smallest_subnormal))
    return exponents - 1


DECADES = 7
Float32Array = NDArray[np.float32]
Codes = NDArray[np.uint8]


@dataclass(frozen=True)
class DynamicTreeFormat:
    """Table of the numbers of a dynamic tree format by code, ascending; `signed`: with negative numbers, except -1."""

    name: str
    signed: bool

    @property
    def blocks(self) -> BlockScaledDtype:
        """Storage of the format: elements per scale, and bytes."""
        return BLOCK_SCALED_DTYPES[self.name]

    @cached_property
    def values(self) -> Float32Array:
        """Numbers by code [256]: 0, 1, and for each decade the midpoints of equal parts of the interval from 0.1 to 1 times
        its top."""
        numbers = [0.0, 1.0]
        for decade in range(DECADES):
            num_parts = 2 ** (decade + (not self.signed))
            middles = (0.1 + 0.9 * (part + 0.5) / num_parts for part in range(num_parts))
            magnitudes = [10.0 ** (decade + 1 - DECADES) * middle for middle in middles]
            numbers += [*magnitudes, *(-magnitude for magnitude in magnitudes)] if self.signed else magnitudes
        return np.sort(np.array(numbers)).astype(np.float32)

    @cached_property
    def rounding_boundaries(self) -> Float32Array:
        """Smallest float32 [255] from which on the next number of the table is the nearest one: midpoints, rounded up."""
        numbers = self.values.astype(np.float64)
        middles = (numbers[:-1] + numbers[1:]) / 2
        rounded = middles.astype(np.float32)
        return np.where(rounded < middles, np.nextafter(rounded, np.float32(np.inf)), rounded)


DYNAMIC_TREE_FORMATS = {
    name: DynamicTreeFormat(name, signed) for name, signed in (("dynamic8", True), ("unsigned_dynamic8", False))
}


def get_dynamic_tree_format(name: str) -> DynamicTreeFormat:
    """Return a dynamic tree format by name. Raises `InputError` that lists the names."""
    return lookup(DYNAMIC_TREE_FORMATS, name, "format")


class BlockCodes(NamedTuple):
    """Elements as codes [n], and the scale of each block [blocks]."""

    codes: Codes
    scales: Float32Array


def quantize_dynamic_tree(values: Float32Array, tree_format: DynamicTreeFormat) -> BlockCodes:
    """Quantize elements [n] in consecutive blocks, the last of which may be smaller: the nearest number, the larger at a tie,
    with all arithmetic in float32.

    Differs: torchao.optim and bitsandbytes have scales of at least 1e-12, below which small squares would lose their bits.

    >>> quantized = quantize_dynamic_tree(np.array([0.5, -4.0, 0.0], np.float32), DYNAMIC_TREE_FORMATS["dynamic8"])
    >>> restored = dequantize_dynamic_tree(quantized, DYNAMIC_TREE_FORMATS["dynamic8"])
    >>> quantized.scales.tolist(), [f"{number:.3f}" for number in restored]
    ([4.0], ['0.484', '-3.972', '0.000'])
    """
    starts = np.arange(0, len(values), tree_format.blocks.size)
    scales = np.maximum.reduceat(np.abs(values), starts) if len(values) else np.zeros(0, np.float32)
    divisors = _expand_block_scales(np.where(scales > 0, scales, np.float32(1)), len(values), tree_format)
    return BlockCodes(
        np.searchsorted(tree_format.rounding_boundaries, values / divisors, side="right").astype(np.uint8), scales
    )


def dequantize_dynamic_tree(quantized: BlockCodes, tree_format: DynamicTreeFormat) -> Float32Array:
    """Dequantize codes [n] with the scales of their blocks."""
    return tree_format.values[quantized.codes] * _expand_block_scales(
        quantized.scales, len(quantized.codes), tree_format
    )


def _expand_block_scales(scales: Float32Array, num_elements: int, tree_format: DynamicTreeFormat) -> Float32Array:
    return np.repeat(scales, tree_format.blocks.size)[:num_elements]


AmaxArray = NDArray[np.float32]


def update_amax_history(
    step_amax: AmaxArray, history: AmaxArray, factors: AmaxArray, max_numbers: AmaxArray, delayed: DelayedScaling
) -> tuple[AmaxArray, AmaxArray]:
    """Return the amax history [N, S] and the factors [N] of the next step, from those of a step and its `step_amax` [N].

    `max_numbers` [N]: the largest number of each tensor's format. A factor stays as it is while only zeros have been seen,
    and is at most the largest float32. An amax that is not finite enters the history as 0. Source: Transformer Engine,
    common/recipe/delayed_scaling.cu. Differs: there it enters, and keeps the factor as it is until it leaves the history.

    >>> amax, history, factors, largest = (np.array(x, np.float32) for x in ([7.0], [[14.0, 28.0]], [1.0], [448.0]))
    >>> history, factors = update_amax_history(amax, history, factors, largest, DelayedScaling(history=2))
    >>> history.tolist(), factors.tolist()
    ([[7.0, 14.0]], [32.0])
    """
    finite_amax = np.where(np.isfinite(step_amax), step_amax, np.float32(0))
    history = np.concatenate([finite_amax[:, None], history[:, :-1]], axis=1)
    amax = history.max(axis=1) if delayed.algorithm == "max" else finite_amax
    with np.errstate(divide="ignore", over="ignore"):
        new_factors = np.minimum(max_numbers * np.float32(2.0**-delayed.margin) / amax, np.finfo(np.float32).max)
    return history, np.where(amax > 0, new_factors, factors).astype(np.float32)
