"""Number formats by name: bytes of an element, the bits and limits of each floating-point format, and several side by side.

Prices need `bytes_per_element` only: e4m3 and e5m2 are both "fp8" there. A `NumberFormat` has bits, bias and special codes,
from which everything else about its numbers follows; `quantization.py` rounds to it. Loads no NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from shardwise.values.errors import lookup, run_all
from shardwise.values.payload import Payload

BYTES_PER_ELEMENT = {
    "fp64": 8.0, "fp32": 4.0, "int32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0,
    "fp8": 1.0, "int8": 1.0, "fp4": 0.5, "int4": 0.5,
}  # fmt: skip


class BlockScaledDtype(NamedTuple):
    """Storage format whose elements share scales: bytes of an element, elements per scale, bytes of a scale."""

    element_bytes: float
    size: int
    scale_bytes: float

    @property
    def bytes_per_element(self) -> float:
        """Bytes of one element, with its share of the block's scale."""
        return self.element_bytes + self.scale_bytes / self.size


# Dynamic tree quantization (`quantization`): a byte per element, in blocks of 256 with a scale in fp32. Source: Dettmers et al.
# 2022, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), section 2; the block size is that of torchao.optim and of
# bitsandbytes since 0.44 (the paper has 2,048).
# NormalFloat: 4 bits in blocks of 64 with a scale in fp32, or (double quantization) one in 8 bits, of which 256 share another in
# fp32: 0.5 and 0.127 bits of scales a parameter. Source: Dettmers et al. 2023, QLoRA (arXiv 2305.14314), section 3.
BLOCK_SCALED_DTYPES = {
    **{name: BlockScaledDtype(1.0, 256, 4.0) for name in ("dynamic8", "unsigned_dynamic8")},
    "nf4": BlockScaledDtype(0.5, 64, 4.0), "nf4_double": BlockScaledDtype(0.5, 64, 1.0 + 4.0 / 256),
}  # fmt: skip


def bytes_per_element(dtype: str) -> float:
    """Return the bytes of one element, its share of a scale included. Raises `InputError` for an unknown format.

    >>> bytes_per_element("bf16"), bytes_per_element("dynamic8")
    (2.0, 1.015625)
    """
    if dtype in BLOCK_SCALED_DTYPES:
        return BLOCK_SCALED_DTYPES[dtype].bytes_per_element
    return lookup(BYTES_PER_ELEMENT, dtype, "dtype")


# Codes that are not finite: "ieee" those of the largest exponent (infinities and NaNs), "nan" the last code of each sign (NaN),
# "none" no code at all.
Specials = Literal["ieee", "nan", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """Binary floating-point format; every property is exact in a Python float.

    A number is (-1)^sign · 2^(exponent - bias) · 1.mantissa; with `has_zero` the smallest exponent is that of subnormals,
    2^(1 - bias) · 0.mantissa, and of zero. `stored_bits` is the width in memory where an element takes more than its bits.

    >>> NUMBER_FORMATS["e4m3"].max, NUMBER_FORMATS["e4m3"].min_subnormal, NUMBER_FORMATS["e4m3"].num_finite
    (448.0, 0.001953125, 254)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    source: str
    sign_bits: int = 1
    has_zero: bool = True
    stored_bits: int | None = None

    @property
    def bits(self) -> int:
        """Number of bits of sign, exponent and mantissa."""
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def width(self) -> float:
        """Bytes of an element in memory."""
        return (self.stored_bits or self.bits) / 8

    @property
    def largest_code(self) -> int:
        """Code, without the sign, of the largest finite number."""
        codes = 1 << (self.exponent_bits + self.mantissa_bits)
        return codes - 1 - {"ieee": (1 << self.mantissa_bits), "nan": 1, "none": 0}[self.specials]

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return (1 if self.has_zero else 0) - self.bias

    @property
    def max(self) -> float:
        """Largest finite number."""
        exponent, mantissa = divmod(self.largest_code, (1 << self.mantissa_bits))
        return math.ldexp(1.0, exponent - self.bias) * (1 + mantissa * self.epsilon)

    @property
    def min_normal(self) -> float:
        """Smallest normal number above 0."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """Smallest number above 0."""
        return self.min_normal * self.epsilon if self.has_zero else self.min_normal

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def num_finite(self) -> int:
        """Number of codes of finite numbers; -0 and 0 are two."""
        return (self.largest_code + 1) << self.sign_bits

    @property
    def num_between_1_and_2(self) -> int:
        """Count of numbers from 1 to below 2."""
        return 1 << self.mantissa_bits

    @property
    def has_infinity(self) -> bool:
        """True if a number beyond the largest becomes infinite."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """True if the format has a NaN code."""
        return self.specials != "none"


_IEEE = "IEEE 754-2019, table 3.5"
_OFP8 = "OCP 8-bit Floating Point Specification (OFP8) 1.0, table 1; Micikevicius et al. 2022 (arXiv 2209.05433)"
_MX = "OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1"

NUMBER_FORMATS = {
    number_format.name: number_format
    for number_format in (
        NumberFormat(name="fp32", exponent_bits=8, mantissa_bits=23, bias=127, specials="ieee", source=_IEEE),
        NumberFormat(
            name="tf32", exponent_bits=8, mantissa_bits=10, bias=127, specials="ieee", stored_bits=32,
            source="NVIDIA, A100 Tensor Core GPU Architecture (2020), TensorFloat-32: operands are fp32 in memory",
        ),
        NumberFormat(
            name="bf16", exponent_bits=8, mantissa_bits=7, bias=127, specials="ieee",
            source="Google Cloud, BFloat16: the secret to high performance on Cloud TPUs (2019)",
        ),
        NumberFormat(name="fp16", exponent_bits=5, mantissa_bits=10, bias=15, specials="ieee", source=_IEEE),
        NumberFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7, specials="nan", source=_OFP8),
        NumberFormat(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, specials="ieee", source=_OFP8),
        NumberFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, specials="none", source=_MX),
        NumberFormat(
            name="e8m0", exponent_bits=8, mantissa_bits=0, bias=127, specials="nan", sign_bits=0, has_zero=False, source=_MX
        ),
    )
}  # fmt: skip


def get_number_format(name: str) -> NumberFormat:
    """Return a floating-point format by name. Raises `InputError` that lists the names.

    >>> get_number_format("bf16").epsilon
    0.0078125
    """
    return lookup(NUMBER_FORMATS, name, "format")


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRecord(Payload):
    """A floating-point format; sizes are those of positive numbers, `width_bytes` is of an element in memory."""

    name: str
    bits: int
    sign_bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    width_bytes: float
    has_infinity: bool
    has_nan: bool
    max: float
    min_normal: float
    min_subnormal: float
    epsilon: float
    num_finite: int
    num_between_1_and_2: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatComparison:
    """Floating-point formats, in the order in which they were asked for.

    >>> import shardwise as sw
    >>> sw.precision(["bf16"]).formats[0].epsilon
    0.0078125
    """

    formats: tuple[NumberFormat, ...]


def compare_formats(names: Sequence[str] = ()) -> FormatComparison:
    """Return formats by name, each once; without names all of them. Raises `InputError` with every unknown name.

    >>> [number_format.name for number_format in compare_formats(["e5m2", "bf16", "e5m2"]).formats]
    ['e5m2', 'bf16']
    """
    distinct = list(dict.fromkeys(names)) or list(NUMBER_FORMATS)
    return FormatComparison(formats=tuple(run_all(*(partial(get_number_format, name) for name in distinct))))


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatsRecord(Payload):
    """Floating-point formats, in the order in which they were asked for.

    >>> FormatsRecord.of(compare_formats(["e5m2"])).formats[0].max
    57344.0
    """

    SCHEMA = "shardwise.precision/1"
    formats: Sequence[FormatRecord]

    @classmethod
    def of(cls, comparison: FormatComparison) -> FormatsRecord:
        """Return the record of compared formats."""
        formats = comparison.formats
        return cls(formats=[FormatRecord.from_attributes(f, width_bytes=f.width) for f in formats])
