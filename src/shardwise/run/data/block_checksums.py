"""Checksums of a shard's tokens, block by block: computed when written, verified once when first read."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.values import InputError

# Bytes with one CRC-32: the size of a few sequences, so that reading one verifies few other bytes; sums add 0.006%.
BLOCK_BYTES = 2**16
SUMS_DTYPE = np.dtype("<u4")

Array = np.ndarray[Any, np.dtype[Any]]


class BlockChecksums:
    """Computes the CRC-32 of each block of a stream of bytes."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._crc = self._filled = 0

    def add(self, data: bytes) -> None:
        """Append bytes."""
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
        """Return the checksums of all blocks, the last of which may be short."""
        if self._filled:
            self._end()
        return np.array(self._sums, SUMS_DTYPE).tobytes()


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks of so many bytes."""
    return -(-num_bytes // BLOCK_BYTES)


class VerifiedBlocks:
    """The bytes of a file with the checksums of its blocks; a block is read when it is first required."""

    def __init__(self, path: Path, data: Array, sums: Array) -> None:
        self.path, self.data, self.sums = path, data.view(np.uint8), sums
        self._good = bytearray(len(sums))

    def require(self, start: int, stop: int, fix: str) -> None:
        """Raise `InputError` if a block of bytes `start` to `stop` is damaged."""
        for block in range(start // BLOCK_BYTES, num_blocks(stop)):
            if self._good[block]:
                continue
            first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, len(self.data))
            if zlib.crc32(self.data[first:last].data) != self.sums[block]:
                raise InputError(
                    f"{self.path} is damaged (CRC-32 mismatch, bytes {first:,} to {last:,}); what was written is required: {fix}"
                )
            self._good[block] = 1
