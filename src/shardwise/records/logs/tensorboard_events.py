"""TensorBoard event files: records with checksums, and the scalars of given tags in them. Their messages are Protocol
Buffers, parsed without a schema.

Sources: TensorFlow, tsl/lib/io/record_writer.h: uint64 length, masked CRC-32C of it, the bytes, masked CRC-32C of them, in
little-endian order; tsl/lib/hash/crc32c.h for the mask; core/util/event.proto, core/framework/summary.proto and tensor.proto,
by field numbers. protobuf.dev, Encoding.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO

from shardwise.records.logs.logged_steps import TaggedValues
from shardwise.values import InputError, open_input

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


CASTAGNOLI = 0x82F63B78  # the polynomial, lowest bit first. Source: RFC 3720, appendix B.4
MASK = 0xA282EAD8
HEAD, TAIL = struct.Struct("<QI"), struct.Struct("<I")
LONGEST_RECORD = 1 << 16  # bytes of a record that is read: scalars take about a hundred, graphs and images more


def _table() -> Iterator[int]:
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (CASTAGNOLI if byte & 1 else 0)
        yield byte


_CRC_OF_BYTE = tuple(_table())


def crc32c(content: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFF_FFFF
    for byte in content:
        crc = _CRC_OF_BYTE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFF_FFFF


def masked_crc32c(content: bytes) -> int:
    """Return the checksum as stored in a file: masked, so that checksums of data that contain checksums differ."""
    crc = crc32c(content)
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFF_FFFF


def starts_record(head: bytes) -> bool:
    """Return True if some bytes start a file of records: a length and its checksum."""
    return len(head) >= HEAD.size and masked_crc32c(head[:8]) == HEAD.unpack_from(head)[1]


def read_records(path: Path) -> Iterator[bytes | None]:
    """Yield the records of a file; None at last if it ends within one, as a file that is being written or of a killed run.

    Records above `LONGEST_RECORD` are skipped. Raises `InputError` for a wrong checksum.
    """
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        while head := file.read(HEAD.size):
            offset = file.tell() - len(head)
            if len(head) == HEAD.size and not starts_record(head):
                raise checksum_error(path, offset)
            if len(head) < HEAD.size or HEAD.unpack(head)[0] + TAIL.size > size - file.tell():
                yield None
                return
            length = HEAD.unpack(head)[0]
            if length > LONGEST_RECORD:
                file.seek(length + TAIL.size, os.SEEK_CUR)
            else:
                yield _read_checked(file, length, path, offset)


def _read_checked(file: BinaryIO, length: int, path: Path, offset: int) -> bytes:
    content = file.read(length)
    if TAIL.unpack(file.read(TAIL.size))[0] != masked_crc32c(content):
        raise checksum_error(path, offset)
    return content


NAME_PART = "tfevents"  # in the name of each event file
WALL_TIME, STEP, SUMMARY = 1, 2, 5  # of Event
VALUE = 1  # of Summary
TAG, SIMPLE_VALUE, TENSOR = 1, 2, 8  # of Summary.Value
DTYPE, CONTENT = 1, 4  # of TensorProto
# A tensor of one element, by its type (DT_FLOAT, DT_DOUBLE): how it is packed, and the field that it stands in without CONTENT.
ELEMENT = {1: ("<f", 5), 2: ("<d", 6)}


def is_event_file(path: Path) -> bool:
    """Return True if the file starts with a record or, while it is empty, is named like an event file."""
    with open_input(path) as file:
        head = file.read(HEAD.size)
    return starts_record(head) or NAME_PART in path.name


def read_scalars(path: Path, tags: Collection[str]) -> Iterator[TaggedValues | None]:
    """Yield the scalars of the given tags per event; None at last if the file ends within a record.

    Raises `InputError` for a damaged file.
    """
    tag_pattern = re.compile(b"|".join(re.escape(tag.encode()) for tag in sorted(tags)))
    for record in read_records(path):
        if record is None:
            yield None
        elif tag_pattern.search(record):
            try:
                point = _parse_event(record, tags)
            except ValueError as error:
                raise InputError(
                    f"log: {path} has a record that is not an event: {error}; an event file is required"
                ) from None
            if point.values:
                yield point


def _parse_event(event: bytes, tags: Collection[str]) -> TaggedValues:
    clock: float | None = None
    step = 0
    values: dict[str, float] = {}
    for number, value in parse_fields(event):
        if number == WALL_TIME:
            clock = _unpack("<d", value)
        elif number == STEP and isinstance(value, int):
            step = value
        elif number == SUMMARY and isinstance(value, bytes):
            values |= dict(_scalars(value, tags))
    return TaggedValues(step, values, clock)


def _scalars(summary: bytes, tags: Collection[str]) -> Iterator[tuple[str, float]]:
    """Yield the finite scalars; those that are not count as not logged."""
    for number, message in parse_fields(summary):
        if number != VALUE or not isinstance(message, bytes):
            continue
        fields = dict(parse_fields(message))
        tag = fields.get(TAG)
        name = tag.decode("utf-8", errors="replace") if isinstance(tag, bytes) else ""
        scalar = (
            _unpack("<f", fields.get(SIMPLE_VALUE)) if SIMPLE_VALUE in fields else _tensor_element(fields.get(TENSOR))
        )
        if name in tags and scalar is not None and math.isfinite(scalar):
            yield name, scalar


def _tensor_element(tensor: int | bytes | None) -> float | None:
    """Return the element of a tensor that has one."""
    fields = dict(parse_fields(tensor)) if isinstance(tensor, bytes) else {}
    dtype = fields.get(DTYPE)
    if not isinstance(dtype, int) or dtype not in ELEMENT:
        return None
    struct_format, element_field = ELEMENT[dtype]
    return _unpack(struct_format, fields.get(CONTENT) or fields.get(element_field))


def _unpack(struct_format: str, value: int | bytes | None) -> float | None:
    if not isinstance(value, bytes) or len(value) != struct.calcsize(struct_format):
        return None
    return float(struct.unpack(struct_format, value)[0])
