"""Tables of comma-separated values, as W&B exports the history of a run and its charts."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TextIO

from shardwise.errors import InputError
from shardwise.measurement.logs.points import CLOCKS, STEPS, Point, point_of

LONGEST = 1 << 22  # characters of a row: a history with histograms has some 10,000
EXPORT = 'pandas.DataFrame(wandb.Api().run("ENTITY/PROJECT/ID").scan_history()).to_csv("history.csv") writes one'


def is_table(path: Path) -> bool:
    """Whether a file is a table with a column of steps. Raises `InputError` for a .csv without one."""
    with path.open("rb") as file:
        columns = _columns(file.readline(LONGEST).decode("utf-8-sig", errors="replace"))
    if len(columns) > 1 and not set(STEPS).isdisjoint(map(_of_chart, columns)):
        return True
    if path.suffix.lower() == ".csv":
        found = ", ".join(columns[:4]) + (", ..." if len(columns) > 4 else "")
        raise InputError(
            f"log: {path} has the columns {found or 'of nothing'}; one of steps ({', '.join(STEPS)}) is required, as {EXPORT}; a "
            "chart is exported with Step on its x-axis"
        )
    return False


def _columns(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # no text, or a field that is longer than any name
        return []


def table_points(path: Path, tags: Collection[str]) -> Iterator[Point | None]:
    """What some tags have in a table, a row each; None for one with fewer or more cells than columns.

    Raises `InputError` for what is no table, and for one of several runs.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(_lines(file))
        try:
            columns = _names(path, next(rows, []), tags)
            for cells in rows:
                point = point_of(dict(zip(columns, cells, strict=True)), tags) if len(cells) == len(columns) else None
                if point is None or point.values:
                    yield point
        except csv.Error as error:
            raise InputError(f"log: {path}, line {rows.line_num}: {error}; a table is required: {EXPORT}") from None


def _lines(file: TextIO) -> Iterator[str]:
    while line := file.readline(LONGEST):
        if len(line) == LONGEST:
            raise csv.Error(f"a line of more than {LONGEST:,} characters")
        yield line


def _of_chart(column: str) -> str:
    """What a column has: of an exported chart's, which are called RUN - TAG, the tag alone."""
    return column.rpartition(" - ")[2]


def _names(path: Path, columns: list[str], tags: Collection[str]) -> list[str]:
    """What each column has. Raises `InputError` for those of several runs."""
    known = {*tags, *STEPS, *CLOCKS}
    charted = {column: _of_chart(column) for column in columns if column not in known and _of_chart(column) in known}
    runs = sorted({column.rpartition(" - ")[0] for column in charted})
    if len(runs) > 1:
        named = ", ".join(runs[:3]) + (", ..." if len(runs) > 3 else "")
        raise InputError(f"log: {path} is of {len(runs)} runs ({named}); an export of one of them is required")
    return [charted.get(column, column) for column in columns]
