"""W&B's own files, run-ID.wandb: the history of a run, which may never have been uploaded.

Source: LevelDB, doc/log_format.md, for the frames, whose checksum is zlib's here; wandb 0.31, wandb/proto/wandb_internal.proto,
by field numbers.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path

from shardwise.errors import InputError
from shardwise.measurement.logs.points import Point, point_of
from shardwise.measurement.logs.wire import damaged, fields

SUFFIX, IDENTITY, HEADER_BYTES = ".wandb", b":W&B", 7
BLOCK, FRAME = 1 << 15, struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
LONGEST = 1 << 20  # bytes of a record that is read: one of a step has some hundred, of pictures and tables more
HISTORY, ITEM = 2, 1  # of Record, of HistoryRecord
KEY, NESTED_KEY, JSON = 1, 2, 16  # of HistoryItem


def is_datastore(path: Path) -> bool:
    """Whether a file is one of W&B's own."""
    with path.open("rb") as file:
        return file.read(len(IDENTITY)) == IDENTITY


def datastore_points(path: Path, tags: Collection[str]) -> Iterator[Point | None]:
    """What some tags have in a run's history, a row each; None at last where the file ends within one.

    Raises `InputError` for a file that is damaged.
    """
    for record in _records(path):
        try:
            row = None if record is None else _row(record)
        except ValueError as error:
            raise InputError(
                f"log: {path} has a record that is not a message: {error}; a file of W&B's is required"
            ) from None
        point = point_of(row, tags) if row else None
        if record is None or (point is not None and point.values):
            yield point


def _row(record: bytes) -> dict[str, str]:
    """The numbers of a row of history by key, as texts of JSON; nothing of another record."""
    items = [item for number, history in fields(record) if number == HISTORY and isinstance(history, bytes)
             for kind, item in fields(history) if kind == ITEM and isinstance(item, bytes)]  # fmt: skip
    return dict(_item(item) for item in items)


def _item(item: bytes) -> tuple[str, str]:
    keys: list[str] = []
    value = ""
    for number, said in fields(item):
        if isinstance(said, bytes):
            text = said.decode("utf-8", errors="replace")
            keys += [text] if number in (KEY, NESTED_KEY) else []
            value = text if number == JSON else value
    return ".".join(keys), value


def _records(path: Path) -> Iterator[bytes | None]:
    """Records from their pieces; None at last where the file ends within one."""
    whole, is_whole = bytearray(), True
    for frame in _frames(path):
        kind, piece = frame or (FIRST, b"")
        if kind in (FULL, FIRST):
            whole.clear()
        whole += piece if len(whole) <= LONGEST else b""
        is_whole = kind in (FULL, LAST)
        if is_whole and len(whole) <= LONGEST:
            yield bytes(whole)
    if not is_whole:
        yield None


def _frames(path: Path) -> Iterator[tuple[int, bytes] | None]:
    """Kinds and bytes of pieces. None is within a block where fewer bytes are left than a frame takes."""
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while True:
            left = BLOCK - file.tell() % BLOCK
            if left < FRAME.size:
                file.seek(left, os.SEEK_CUR)
            at, head = file.tell(), file.read(FRAME.size)
            if not head:
                return
            checksum, length, kind = FRAME.unpack(head) if len(head) == FRAME.size else (0, 1, 0)
            piece = file.read(length)
            if len(piece) < length:
                yield None
                return
            if zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
                raise damaged(path, at)
            yield kind, piece
