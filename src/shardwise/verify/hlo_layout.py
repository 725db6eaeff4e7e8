"""Layout of an array in HLO: order of its dims in memory, tiles, padding and memory space.

`bf16[1000,4096]{1,0:T(8,128)(2,1)S(1)}` is an array of 1,000 by 4,096 numbers, dim 1 the minor one, in tiles of 8 by 128 that
are themselves tiled by 2 by 1 (two rows of 16 bits share a word), in memory space 1. Dims that tiles do not divide are padded.
Source: XLA, "Tiled layout" (openxla.org/xla/tiled_layout) and xla/layout.h, names of fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.values import InputError, describe_unknown
from shardwise.values.input_texts import parse_integer

# Bits of an element by XLA's name of its type (xla/primitive_util.h); `E(n)` in a layout says otherwise, as of packed int4.
ELEMENT_BITS: Mapping[str, int] = {
    "pred": 8, "s4": 8, "u4": 8, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f8e4m3fn": 8, "f8e5m2": 8, "f8e4m3b11fnuz": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
}  # fmt: skip
# Memory spaces by number: 5 is `Layout::kHostMemorySpace` of xla/layout.h; 1 is VMEM on a TPU ("How to Scale Your Model",
# profiling chapter). Others are of a backend.
MEMORY_SPACES: Mapping[int, str] = {0: "device memory", 1: "on-chip memory (VMEM of a TPU)", 5: "host memory"}
SHAPE = re.compile(r"(?P<type>[a-z]\w*)\[(?P<dims>[\d,]*)\](?:\{(?P<order>[\d,]*)(?::(?P<fields>[^{}]*))?\})?")
FIELDS = re.compile(r"([A-Z]+)((?:\([^()]*\))+)")


@dataclass(frozen=True, slots=True)
class HloShape:
    """An array's type and dims, and how it lies in memory.

    `minor_to_major`: its dims from the one whose neighbours lie side by side. `tiles`: the first covers the most minor dims, each
    other one the tile before it.

    >>> shape = read_hlo_shape("bf16[1000,3000]{1,0:T(8,128)(2,1)S(1)}")
    >>> shape.padded_dims, shape.padded_bytes, round(shape.padding_efficiency, 3)
    ((1000, 3072), 6144000, 0.977)
    >>> shape.memory
    'on-chip memory (VMEM of a TPU)'
    """

    element_type: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tiles: tuple[tuple[int, ...], ...] = ()
    element_bits: int = 0
    memory_space: int = 0

    @property
    def memory(self) -> str:
        """The memory space in words."""
        return MEMORY_SPACES.get(self.memory_space, f"memory space {self.memory_space} of its backend")

    @property
    def padded_dims(self) -> tuple[int, ...]:
        """Sizes of the dims as multiples of the first tile; dims beyond it are as they are.

        Where later tiles do not divide the first one there is more padding, which `padded_bytes` counts.
        """
        padded = list(self.dims)
        for dim, size in zip(self.minor_to_major, reversed(self.tiles[0] if self.tiles else ()), strict=False):
            padded[dim] = _round_up(padded[dim], size)
        return tuple(padded)

    @property
    def physical_dims(self) -> tuple[int, ...]:
        """Dims of the memory that the array takes, the major one first: counts of tiles, then places within a tile."""
        physical = [self.dims[dim] for dim in reversed(self.minor_to_major)]
        for tile in self.tiles:
            physical = [1] * (len(tile) - len(physical)) + physical
            outer, inner = physical[: -len(tile)], physical[-len(tile) :]
            physical = [*outer, *(-(-size // step) for size, step in zip(inner, tile, strict=True)), *tile]
        return tuple(physical)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements without padding."""
        return -(-math.prod(self.dims) * self.element_bits // 8)

    @property
    def padded_bytes(self) -> int:
        """Bytes of memory that the array takes."""
        return -(-math.prod(self.physical_dims) * self.element_bits // 8)

    @property
    def padding_efficiency(self) -> float:
        """Bytes of elements over those that the array takes."""
        return self.num_bytes / self.padded_bytes if self.padded_bytes else 1.0

    def offset(self, *index: int) -> int:
        """Return the place of an element in memory, in elements from the first one.

        Raises `InputError` for an index outside of the array.

        >>> read_hlo_shape("f32[3,5]{1,0:T(2,2)}").offset(2, 3)
        17
        """
        if len(index) != len(self.dims) or any(not 0 <= i < size for i, size in zip(index, self.dims, strict=True)):
            raise InputError(f"index: found {index}; one within {self.dims} is required")
        places = [index[dim] for dim in reversed(self.minor_to_major)]
        for tile in self.tiles:
            places = [0] * (len(tile) - len(places)) + places
            outer, inner = places[: -len(tile)], places[-len(tile) :]
            counted = [divmod(place, step) for place, step in zip(inner, tile, strict=True)]
            places = [*outer, *(number for number, _ in counted), *(place for _, place in counted)]
        total = 0
        for place, size in zip(places, self.physical_dims, strict=True):
            total = total * size + place
        return total


def read_hlo_shape(text: str) -> HloShape:
    """Return the array that a shape of HLO describes, the major dim first where it has no layout.

    Raises `InputError` for another text, an unknown type, an order that is not one of all dims, and a field of a layout that pads
    in a way that is not known here.

    >>> read_hlo_shape("f32[3,5]{1,0:T(2,2)}").padded_dims
    (4, 6)
    """
    match = SHAPE.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"shape: found {text!r}; an array such as bf16[1024,4096]{{1,0:T(8,128)(2,1)S(1)}} is required"
        )
    element_type, dims = match["type"], _read_sizes(match["dims"])
    if element_type not in ELEMENT_BITS:
        raise InputError(f"shape: type: {describe_unknown(element_type, ELEMENT_BITS)}")
    order = tuple(reversed(range(len(dims)))) if match["order"] is None else _read_sizes(match["order"])
    if sorted(order) != list(range(len(dims))):
        raise InputError(f"shape: {text!r} has the order {order}; each of its {len(dims)} dims once is required")
    fields = _read_fields(match["fields"] or "", text)
    tiles = tuple(fields.get("T", ()))
    if any(not tile or 0 in tile for tile in tiles):
        raise InputError(f"shape: {text!r} has a tile without a size; sizes of at least 1 are required")
    return HloShape(
        element_type, dims, order, tiles,
        element_bits=fields["E"][0][0] if "E" in fields else ELEMENT_BITS[element_type],
        memory_space=fields["S"][0][0] if "S" in fields else 0,
    )  # fmt: skip


def _read_fields(text: str, shape: str) -> dict[str, list[tuple[int, ...]]]:
    """Return the fields of a layout by letter: tiles (T), bits of an element (E), memory space (S)."""
    fields: dict[str, list[tuple[int, ...]]] = {}
    rest = text
    while match := FIELDS.match(rest):
        name, values = match[1], re.findall(r"\(([^()]*)\)", match[2])
        if name not in ("T", "E", "S"):
            raise InputError(
                f"shape: {shape!r} has the field {name}; tiles (T), bits (E) and a memory space (S) are known"
            )
        if not all(re.fullmatch(r"\d+(,\d+)*", value) for value in values):
            raise InputError(f"shape: {shape!r} has {name}({values[0]}); whole numbers are required")
        fields[name] = [_read_sizes(value) for value in values]
        rest = rest[match.end() :]
    if rest:
        raise InputError(f"shape: {shape!r} ends with {rest!r}; tiles (T), bits (E) and a memory space (S) are known")
    return fields


def _read_sizes(text: str) -> tuple[int, ...]:
    return tuple(parse_integer(size) for size in text.split(",") if size)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
