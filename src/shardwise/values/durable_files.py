"""Write files atomically, with errors that name the path, or through to the disk with checksums of their bytes, so that damage is
detected; a JSON payload carries its own checksum.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.values.errors import InputError
from shardwise.values.input_files import open_input


def write_json_atomic(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a payload as JSON, so that readers see either the old file or the new one."""
    write_text_atomic(path, json.dumps(payload, indent=2) + "\n")


@contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Add the path to an `OSError` that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None


def write_text_atomic(path: Path, text: str) -> None:
    """Replace a file by a new text, so that readers see either the old file or the new one; a failure leaves the old one."""
    new_file = path.with_name(f"{path.name}.new")
    try:
        with name_path_in_errors(path):
            new_file.write_text(text, encoding="utf-8")
            os.replace(new_file, path)
    except OSError:
        new_file.unlink(missing_ok=True)
        raise


def require_writable(path: str | Path) -> None:
    """Raise `InputError` if a file cannot be written. Creates nothing."""
    target = Path(path)
    folder = target.parent
    problem = (
        "no such folder" if not folder.is_dir()
        else "it is a folder" if target.is_dir()
        else "" if os.access(target if target.exists() else folder, os.W_OK)
        else "permission denied"
    )  # fmt: skip
    if problem:
        raise InputError(f"cannot write {target}: {problem}; choose a writable path")


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
    with open_input(path) as file:
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
