"""Formats as plain data: what `shardwise precision --json` prints, and nothing of NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.values import NumberFormat

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


def formats_payload(formats: Sequence[NumberFormat]) -> dict[str, Any]:
    """What `shardwise precision --json` prints.

    >>> from shardwise.values.dtypes import NUMBER_FORMATS
    >>> formats_payload([NUMBER_FORMATS["e5m2"]])["formats"][0]["max"]
    57344.0
    """
    return {"schema": SCHEMA, "formats": [_payload(one) for one in formats]}


def _payload(one: NumberFormat) -> dict[str, Any]:
    return {
        "name": one.name, "bits": one.bits, "sign_bits": one.sign_bits, "exponent_bits": one.exponent_bits,
        "mantissa_bits": one.mantissa_bits, "bias": one.bias, "width_bytes": one.width, "has_infinity": one.has_infinity,
        "has_nan": one.has_nan, "max": one.max, "min_normal": one.min_normal, "min_subnormal": one.min_subnormal,
        "epsilon": one.epsilon, "num_finite": one.num_finite, "num_between_1_and_2": one.num_between_1_and_2,
        "source": one.source,
    }  # fmt: skip
