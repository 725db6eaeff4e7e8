"""Number formats by name and their width in bytes."""

from __future__ import annotations

from shardwise.errors import InputError
from shardwise.names import unknown

BYTES_PER_ELEMENT = {
    "fp64": 8.0,
    "fp32": 4.0,
    "int32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "fp4": 0.5,
    "int4": 0.5,
}


def bytes_per_element(dtype: str) -> float:
    """Width of one element in bytes. Raises `InputError` for an unknown format."""
    try:
        return BYTES_PER_ELEMENT[dtype]
    except KeyError:
        raise InputError(f"dtype: {unknown(dtype, BYTES_PER_ELEMENT)}") from None
