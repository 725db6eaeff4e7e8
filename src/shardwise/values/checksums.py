"""Files whose damage is detected: written through to the disk, with checksums of their bytes; a JSON payload carries its own."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.values.errors import InputError

READ_BYTES = 1 << 22  # bytes read at a time: large enough that zlib.crc32 lets other threads run (from 5 KiB on)
CHECKSUM_KEY = "crc32"


class DamagedFileError(InputError):
    """Files whose bytes are not those that were written."""


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """Size of a file in bytes and its CRC-32."""

    bytes: int
    crc32: int

    def describe_damage(self, path: Path) -> str:
        """Return why a file does not have this checksum, or "" if it does. Raises `OSError`."""
        if not path.is_file():
            return "is missing"
        checksum = checksum_file(path)
        if checksum.bytes != self.bytes:
            return f"has {checksum.bytes:,} bytes of {self.bytes:,}"
        return "" if checksum == self else "is damaged (CRC-32 mismatch)"


def checksum_file(path: Path) -> FileChecksum:
    """Return the size and the CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return FileChecksum(size, crc)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        flush_to_disk(file)


def flush_to_disk(file: BinaryIO) -> None:
    """Flush what was written to a file, and have the system write it to the disk."""
    file.flush()
    os.fsync(file.fileno())


def add_checksum(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON payload with its own CRC-32, which ignores whitespace and the order of keys.

    >>> describe_checksum_problem(add_checksum({"step": 3}))
    ''
    >>> describe_checksum_problem({**add_checksum({"step": 3}), "step": 4})
    'is damaged (CRC-32 mismatch)'
    """
    return {**payload, CHECKSUM_KEY: _crc32(payload)}


def describe_checksum_problem(payload: Mapping[str, Any]) -> str:
    """Return why the checksum of a JSON payload does not hold, or "" if it does."""
    if CHECKSUM_KEY not in payload:
        return "has no CRC-32 of its own"
    content = {key: value for key, value in payload.items() if key != CHECKSUM_KEY}
    return "" if _crc32(content) == payload[CHECKSUM_KEY] else "is damaged (CRC-32 mismatch)"


def _crc32(payload: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode())
