"""Messages of Protocol Buffers, taken apart without their schema, and what is said of a file of them that is damaged.

Source: protobuf.dev, Encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwise.values.errors import InputError

LONGEST_VARINT = 10  # bytes of 7 bits each that 64 bits take
VARINT, EIGHT_BYTES, LENGTH_DELIMITED, FOUR_BYTES = (
    0,
    1,
    2,
    5,
)  # wire types; 3 and 4 are groups, which no longer are in use


def parse_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in order, each with its number: a varint as an integer, all else as its bytes.

    Raises `ValueError` for what is no message.

    >>> list(parse_fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69])))
    [(1, 150), (2, b'hi')]
    """
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = read_varint(message, at)
            yield number, value
            continue
        if kind == LENGTH_DELIMITED:
            size, at = read_varint(message, at)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if kind == EIGHT_BYTES else 4
        else:
            raise ValueError(f"wire type {kind}")
        if size > len(message) - at:
            raise ValueError(f"a field of {size:,} bytes where {len(message) - at:,} are left")
        yield number, message[at : at + size]
        at += size


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    """The integer without a sign that starts at a byte, and where the next field does. Raises `ValueError` for none."""
    value = 0
    for index, byte in enumerate(message[at : at + LONGEST_VARINT]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at + index + 1
    raise ValueError("a varint without an end")


def checksum_error(path: Path, at: int) -> InputError:
    """The error for a checksum that is not that of its bytes."""
    return InputError(
        f"log: {path} is damaged at byte {at:,}: a checksum is not that of its bytes; the file as its writer left it is required"
    )
