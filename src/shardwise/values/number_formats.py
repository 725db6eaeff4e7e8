"""Floating-point formats side by side, and their JSON; imports no NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.values.dtypes import NUMBER_FORMATS, NumberFormat, get_number_format
from shardwise.values.errors import run_all

SCHEMA = "shardwise.precision/1"


class FormatPayload(TypedDict):
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


class PrecisionPayload(TypedDict):
    """Floating-point formats, in the order in which they were asked for."""

    schema: Literal["shardwise.precision/1"]
    formats: list[FormatPayload]


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


def formats_payload(comparison: FormatComparison) -> dict[str, Any]:
    """Return what `shardwise precision --json` prints.

    >>> formats_payload(compare_formats(["e5m2"]))["formats"][0]["max"]
    57344.0
    """
    return {"schema": SCHEMA, "formats": [_format_payload(number_format) for number_format in comparison.formats]}


def _format_payload(number_format: NumberFormat) -> dict[str, Any]:
    f = number_format
    return {
        "name": f.name, "bits": f.bits, "sign_bits": f.sign_bits, "exponent_bits": f.exponent_bits,
        "mantissa_bits": f.mantissa_bits, "bias": f.bias, "width_bytes": f.width, "has_infinity": f.has_infinity,
        "has_nan": f.has_nan, "max": f.max, "min_normal": f.min_normal, "min_subnormal": f.min_subnormal,
        "epsilon": f.epsilon, "num_finite": f.num_finite, "num_between_1_and_2": f.num_between_1_and_2, "source": f.source,
    }  # fmt: skip
