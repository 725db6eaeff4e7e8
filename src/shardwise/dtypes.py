"""Number formats by name and their width in bytes."""

from __future__ import annotations

from typing import NamedTuple

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


class Blocks(NamedTuple):
    """A format at rest whose elements share scales: bytes of an element, how many have one scale, and bytes of that."""

    element_bytes: float
    size: int
    scale_bytes: float

    @property
    def bytes_per_element(self) -> float:
        """Of an element with its share of a scale."""
        return self.element_bytes + self.scale_bytes / self.size


# Numbers of dynamic tree quantisation (`floats.dynamic`), a byte each, in blocks of 256 with a scale in fp32. Source: Dettmers
# et al. 2022, 8-bit Optimizers via Block-wise Quantization (arXiv 2110.02861), section 2; blocks are as large as those of
# torchao.optim and of bitsandbytes since 0.44 (the paper has 2,048).
BLOCKS = {name: Blocks(1.0, 256, 4.0) for name in ("dynamic8", "unsigned_dynamic8")}


def bytes_per_element(dtype: str) -> float:
    """Width of one element in bytes, its share of a scale included. Raises `InputError` for an unknown format.

    >>> bytes_per_element("bf16"), bytes_per_element("dynamic8")
    (2.0, 1.015625)
    """
    if dtype in BLOCKS:
        return BLOCKS[dtype].bytes_per_element
    try:
        return BYTES_PER_ELEMENT[dtype]
    except KeyError:
        raise InputError(f"dtype: {unknown(dtype, BYTES_PER_ELEMENT)}") from None
