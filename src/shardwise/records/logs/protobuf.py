"""Protocol Buffers messages, parsed without their schema, and the error for a damaged file of them.

Source: protobuf.dev, Encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardwise.values import InputError

LONGEST_VARINT = 10  # bytes of 7 bits each that 64 bits take
VARINT, EIGHT_BYTES, LENGTH_DELIMITED, FOUR_BYTES = 0, 1, 2, 5  # wire types; 3 and 4 are groups, no longer in use


def parse_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a message in order, each with its number: a varint as an integer, all else as its bytes.

    Raises `ValueError` for a malformed message.

    >>> list(parse_fields(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69])))
    [(1, 150), (2, b'hi')]
    """
    offset = 0
    while offset < len(message):
        key, offset = read_varint(message, offset)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, offset = read_varint(message, offset)
            yield number, value
            continue
        if kind == LENGTH_DELIMITED:
            size, offset = read_varint(message, offset)
        elif kind in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if kind == EIGHT_BYTES else 4
        else:
            raise ValueError(f"wire type {kind}")
        if size > len(message) - offset:
            raise ValueError(f"a field of {size:,} bytes where {len(message) - offset:,} are left")
        yield number, message[offset : offset + size]
        offset += size


def read_varint(message: bytes, offset: int) -> tuple[int, int]:
    """Return the unsigned integer at an offset, and the offset after it. Raises `ValueError` if it does not end."""
    number = 0
    for index, byte in enumerate(message[offset : offset + LONGEST_VARINT]):
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, offset + index + 1
    raise ValueError("a varint without an end")


def checksum_error(path: Path, offset: int) -> InputError:
    """Return the error for a checksum that does not match its bytes."""
    return InputError(
        f"log: {path} is damaged at byte {offset:,}: a checksum is not that of its bytes; the file as its writer left it "
        "is required"
    )
