"""Sums of a shard's tokens, block by block: taken as they are written, looked at as they are read, each block once."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.values.errors import InputError

BLOCK_BYTES = (
    2**16
)  # bytes with one CRC-32: some sequences, so that a sequence costs few times its own bytes, and sums 0.006% of them
SUMS_DTYPE = np.dtype("<u4")

Array = np.ndarray[Any, np.dtype[Any]]


class BlockChecksums:
    """Takes the CRC-32 of each block of what is written."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._crc = self._filled = 0

    def add(self, data: bytes) -> None:
        """What is written next."""
        remaining = memoryview(data)
        while remaining:
            part, remaining = remaining[: BLOCK_BYTES - self._filled], remaining[BLOCK_BYTES - self._filled :]
            self._crc, self._filled = zlib.crc32(part, self._crc), self._filled + len(part)
            if self._filled == BLOCK_BYTES:
                self._end()

    def _end(self) -> None:
        self._sums.append(self._crc)
        self._crc = self._filled = 0

    def finish(self) -> bytes:
        """The sums of all blocks, the last of which may be short."""
        if self._filled:
            self._end()
        return np.array(self._sums, SUMS_DTYPE).tobytes()


def num_blocks(num_bytes: int) -> int:
    """Blocks of so many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


class VerifiedBlocks:
    """The bytes of a file, and the sums of its blocks; nothing is read before it is asked for."""

    def __init__(self, path: Path, data: Array, sums: Array) -> None:
        self.path, self.data, self.sums = path, data.view(np.uint8), sums
        self._good = bytearray(len(sums))

    def require(self, start: int, stop: int, fix: str) -> None:
        """Raise `InputError` where a block of bytes `start` to `stop` is not what was written."""
        for block in range(start // BLOCK_BYTES, num_blocks(stop)):
            if self._good[block]:
                continue
            first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(self.data))
            if zlib.crc32(self.data[first:last].data) != self.sums[block]:
                raise InputError(
                    f"{self.path} is damaged (CRC-32 mismatch, bytes {first:,} to {last:,}); what was written is required: {fix}"
                )
            self._good[block] = 1
