"""Floating-point formats side by side, and their JSON; imports no NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardwise.values.dtypes import NUMBER_FORMATS, NumberFormat, get_number_format
from shardwise.values.errors import run_all
from shardwise.values.payload import Payload


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
