"""History of a W&B run: its own files, run-ID.wandb, which may never have been uploaded, and exported tables (CSV).

Sources: LevelDB, doc/log_format.md, for the frames, whose checksum is zlib's here; wandb 0.31,
wandb/proto/wandb_internal.proto, by field numbers.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Collection, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from shardwise.records.logs.logged_steps import CLOCK_COLUMNS, STEP_COLUMNS, TaggedValues, row_to_values
from shardwise.records.logs.tensorboard_events import checksum_error, parse_fields
from shardwise.values import FileMessages, InputError, open_input, parse_csv

WANDB_SUFFIX, IDENTITY, HEADER_BYTES = ".wandb", b":W&B", 7
BLOCK, FRAME = 1 << 15, struct.Struct("<IHB")  # checksum, length, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
LONGEST_RECORD = 1 << 20  # bytes of a record that is read: one of a step has some hundred, of pictures and tables more
HISTORY, ITEM = 2, 1  # of Record, of HistoryRecord
KEY, NESTED_KEY, JSON = 1, 2, 16  # of HistoryItem


def is_wandb_file(path: Path) -> bool:
    """Return True if a file is one of W&B's own."""
    with open_input(path) as file:
        return file.read(len(IDENTITY)) == IDENTITY


def read_wandb_file(path: Path, tags: Collection[str]) -> Iterator[TaggedValues | None]:
    """Yield the values of the given tags per row of a run's history; None at last if the file ends within a record.

    Raises `InputError` for a damaged file.
    """
    for record in _read_records(path):
        try:
            row = None if record is None else _history_row(record)
        except ValueError as error:
            raise InputError(
                f"log: {path} has a record that is not a message: {error}; a file of W&B's is required"
            ) from None
        point = row_to_values(row, tags) if row else None
        if record is None or (point is not None and point.values):
            yield point


def _history_row(record: bytes) -> dict[str, str]:
    """Return the numbers of a row of history by key, as JSON texts; empty for another kind of record."""
    items = [item for number, history in parse_fields(record) if number == HISTORY and isinstance(history, bytes)
             for kind, item in parse_fields(history) if kind == ITEM and isinstance(item, bytes)]  # fmt: skip
    return dict(_history_item(item) for item in items)


def _history_item(item: bytes) -> tuple[str, str]:
    keys: list[str] = []
    value = ""
    for number, content in parse_fields(item):
        if isinstance(content, bytes):
            text = content.decode("utf-8", errors="replace")
            keys += [text] if number in (KEY, NESTED_KEY) else []
            value = text if number == JSON else value
    return ".".join(keys), value


def _read_records(path: Path) -> Iterator[bytes | None]:
    """Yield records assembled from their pieces; None at last if the file ends within one."""
    record, is_complete = bytearray(), True
    for frame in _read_frames(path):
        kind, piece = frame or (FIRST, b"")
        if kind in (FULL, FIRST):
            record.clear()
        record += piece if len(record) <= LONGEST_RECORD else b""
        is_complete = kind in (FULL, LAST)
        if is_complete and len(record) <= LONGEST_RECORD:
            yield bytes(record)
    if not is_complete:
        yield None


def _read_frames(path: Path) -> Iterator[tuple[int, bytes] | None]:
    """Yield kinds and bytes of pieces; None at last if the file ends within one. A block's end too small for a frame is
    skipped."""
    with open_input(path) as file:
        file.seek(HEADER_BYTES)
        while True:
            block_rest = BLOCK - file.tell() % BLOCK
            if block_rest < FRAME.size:
                file.seek(block_rest, os.SEEK_CUR)
            offset, head = file.tell(), file.read(FRAME.size)
            if not head:
                return
            checksum, length, kind = FRAME.unpack(head) if len(head) == FRAME.size else (0, 1, 0)
            piece = file.read(length)
            if len(piece) < length:
                yield None
                return
            if zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
                raise checksum_error(path, offset)
            yield kind, piece


LONGEST_ROW = 1 << 22  # characters of a row: a history with histograms has some 10,000
EXPORT_COMMAND = (
    'pandas.DataFrame(wandb.Api().run("ENTITY/PROJECT/ID").scan_history()).to_csv("history.csv") writes one'
)


def is_csv_export(path: Path) -> bool:
    """Return True if a file is a table with a column of steps. Raises `InputError` for a .csv without one."""
    with open_input(path) as file:
        columns = _parse_header(file.readline(LONGEST_ROW).decode("utf-8-sig", errors="replace"))
    if len(columns) > 1 and not set(STEP_COLUMNS).isdisjoint(map(_tag_of_column, columns)):
        return True
    if path.suffix.lower() == ".csv":
        column_names = ", ".join(columns[:4]) + (", ..." if len(columns) > 4 else "")
        raise InputError(
            f"log: {path} has the columns {column_names or 'of nothing'}; one of steps ({', '.join(STEP_COLUMNS)}) is required, "
            f"as {EXPORT_COMMAND}; a chart is exported with Step on its x-axis"
        )
    return False


def _parse_header(line: str) -> list[str]:
    try:
        return next(parse_csv([line], "header"), (0, []))[1]
    except InputError:  # a field that is longer than any name
        return []


def read_csv_export(path: Path, tags: Collection[str]) -> Iterator[TaggedValues | None]:
    """Yield the values of the given tags per row of a table; None for a row with fewer or more cells than columns.

    Raises `InputError` for a file that is no table, and for one of several runs.
    """
    messages = FileMessages("log: ", f"a table is required: {EXPORT_COMMAND}")
    with open_input(path) as binary, TextIOWrapper(binary, "utf-8-sig", errors="replace", newline="") as file:
        rows = parse_csv(_read_lines(file, path, messages), str(path), messages)
        columns = _column_tags(path, next(rows, (0, []))[1], tags)
        for _, cells in rows:
            point = row_to_values(dict(zip(columns, cells, strict=True)), tags) if len(cells) == len(columns) else None
            if point is None or point.values:
                yield point


def _read_lines(file: TextIO, path: Path, messages: FileMessages) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST_ROW):
        number += 1
        if len(line) == LONGEST_ROW:
            raise messages.fail(f"{path}, line {number}: a line of more than {LONGEST_ROW:,} characters")
        yield line


def _tag_of_column(column: str) -> str:
    """Return the tag of a column; an exported chart's are called RUN - TAG."""
    return column.rpartition(" - ")[2]


def _column_tags(path: Path, columns: list[str], tags: Collection[str]) -> list[str]:
    """Return the tag of each column. Raises `InputError` for columns of several runs."""
    allowed = {*tags, *STEP_COLUMNS, *CLOCK_COLUMNS}
    charted = {
        column: _tag_of_column(column)
        for column in columns
        if column not in allowed and _tag_of_column(column) in allowed
    }
    runs = sorted({column.rpartition(" - ")[0] for column in charted})
    if len(runs) > 1:
        named = ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
        raise InputError(f"log: {path} is of {len(runs)} runs ({named}); an export of one of them is required")
    return [charted.get(column, column) for column in columns]
