"""Rounding to a format, and its codes, in NumPy: bit for bit what hardware and PyTorch's casts do."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.errors import require
from shardwise.floats.number_format import NumberFormat

Floats = NDArray[np.float64]


def rounded(values: ArrayLike, to: NumberFormat, *, saturating: bool = False) -> Floats:
    """The nearest numbers of a format to `values` (any shape), in float64, which holds every number of every format here.

    Halfway between two the one with the even mantissa is taken (IEEE 754-2019, 4.3.1, roundTiesToEven). What rounds to more
    than the format's largest number becomes infinite, or NaN in a format without infinity; `saturating`: the largest number,
    with its sign, as infinities do. A format with neither always saturates, and takes NaN to its largest number (PTX ISA,
    cvt.satfinite). One without a sign takes sizes, and no less than its smallest number.

    Differs: PyTorch 2.13 saturates casts to float8_e4m3fn, and not those to float8_e5m2; ml_dtypes saturates neither.

    >>> from shardwise.floats.number_format import FORMATS
    >>> rounded([1.0625, 1.1875, 3e-3, 500.0], FORMATS["e4m3"], saturating=True).tolist()
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


def encoded(values: ArrayLike, to: NumberFormat, *, saturating: bool = False) -> NDArray[np.uint32]:
    """The codes of `values` rounded to a format: sign, exponent and mantissa from the highest bit down.

    >>> from shardwise.floats.number_format import FORMATS
    >>> [f"{code:08b}" for code in encoded([1.0, -448.0], FORMATS["e4m3"])]
    ['00111000', '11111110']
    """
    x = rounded(values, to, saturating=saturating)
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


def decoded(codes: ArrayLike, of: NumberFormat) -> Floats:
    """The numbers of `codes`. Raises `InputError` for codes that have more bits than the format.

    >>> from shardwise.floats.number_format import FORMATS
    >>> decoded(range(8), FORMATS["e2m1"]).tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    whole = np.asarray(codes, dtype=np.int64)
    outside = whole[(whole < 0) | (whole >= 2**of.bits)]
    require([f"code: found {code}; 0 to {2**of.bits - 1} are those of {of.name}" for code in outside.ravel()[:1]])
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
