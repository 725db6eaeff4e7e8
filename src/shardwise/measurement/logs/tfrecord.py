"""Records as TensorFlow frames them in a file, with a checksum for the length of each and one for its bytes.

Source: TensorFlow, tsl/lib/io/record_writer.h: uint64 length, masked CRC-32C of it, the bytes, masked CRC-32C of them, in
little-endian order; tsl/lib/hash/crc32c.h for the mask.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shardwise.measurement.logs.wire import damaged

CASTAGNOLI = 0x82F63B78  # the polynomial, lowest bit first. Source: RFC 3720, appendix B.4
MASK = 0xA282EAD8
HEAD, TAIL = struct.Struct("<QI"), struct.Struct("<I")
LONGEST = 1 << 16  # bytes of a record that is read: one of scalars has about a hundred, graphs and images have more


def _table() -> Iterator[int]:
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (CASTAGNOLI if byte & 1 else 0)
        yield byte


_OF_BYTE = tuple(_table())


def crc32c(data: bytes) -> int:
    """The cyclic redundancy check of Castagnoli.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = _OF_BYTE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFF_FFFF


def masked(data: bytes) -> int:
    """The checksum as it stands in a file, so that checksums of data that hold checksums stay apart."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK) & 0xFFFF_FFFF


def starts_record(head: bytes) -> bool:
    """Whether some bytes are the start of a file of records: a length and its checksum."""
    return len(head) >= HEAD.size and masked(head[:8]) == HEAD.unpack_from(head)[1]


def records(path: Path) -> Iterator[bytes | None]:
    """The records of a file; None at last where it ends within one, as that of a run which is writing, or was killed.

    Those above `LONGEST` are passed over. Raises `InputError` for a checksum that is not that of the bytes.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while head := file.read(HEAD.size):
            at = file.tell() - len(head)
            if len(head) == HEAD.size and not starts_record(head):
                raise damaged(path, at)
            if len(head) < HEAD.size or HEAD.unpack(head)[0] + TAIL.size > size - file.tell():
                yield None
                return
            length = HEAD.unpack(head)[0]
            if length > LONGEST:
                file.seek(length + TAIL.size, os.SEEK_CUR)
            else:
                yield _checked(file, length, path, at)


def _checked(file: BinaryIO, length: int, path: Path, at: int) -> bytes:
    data = file.read(length)
    if TAIL.unpack(file.read(TAIL.size))[0] != masked(data):
        raise damaged(path, at)
    return data
