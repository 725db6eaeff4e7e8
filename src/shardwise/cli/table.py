"""Rows in columns, in the width of the terminal where there is one; what scripts read is never cut."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Sequence

from shardwise.cli.terminal import terminal_width

Row = tuple[str, ...]
GAP = "  "
NARROWEST = 24  # of a column of text that is folded, where columns can be left to another part


def table(rows: Sequence[Row], *, right: Collection[int] = (), width: int | None = None) -> str:
    """Rows in columns as wide as their widest cell; those in `right` end at the same place.

    A table that is wider than `width` (that of the terminal; None where there is none) has its widest column of text folded,
    or where that is not enough comes in several parts, each with the first column.

    >>> rows = [("chip", "memory", "source"), ("h100", "80 GB", "NVIDIA H100 datasheet, SXM5, page 3")]
    >>> print(table(rows, right=(1,)))
    chip  memory  source
    h100   80 GB  NVIDIA H100 datasheet, SXM5, page 3
    >>> print(table(rows, right=(1,), width=40))
    chip  memory  source
    h100   80 GB  NVIDIA H100 datasheet,
                  SXM5, page 3
    """
    width = terminal_width() if width is None else width
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    over = sum(widths) + len(GAP) * (len(widths) - 1) - width if width is not None else 0
    texts = [i for i in range(len(widths)) if i not in right]
    widest = max(texts, key=lambda i: widths[i], default=None)
    if over > 0 and widest is not None and (widths[widest] - over >= NARROWEST or len(widths) == 2):
        widths[widest] = max(widths[widest] - over, 1)
    elif over > 0 and width is not None and len(widths) > 2:
        return "\n\n".join(_parts(rows, widths, right, width))
    return "\n".join(line.rstrip() for row in rows for line in _lines(row, widths, right))


def _lines(row: Row, widths: Sequence[int], right: Collection[int]) -> Iterator[str]:
    """The lines of one row, several where a cell is folded."""
    folded = [
        textwrap.wrap(cell, size, break_on_hyphens=False) if len(cell) > size else [cell]
        for cell, size in zip(row, widths, strict=True)
    ]
    for number in range(max(map(len, folded))):
        cells = [lines[number] if number < len(lines) else "" for lines in folded]
        yield GAP.join(
            cell.rjust(size) if i in right else cell.ljust(size)
            for i, (cell, size) in enumerate(zip(cells, widths, strict=True))
        )


def _parts(rows: Sequence[Row], widths: Sequence[int], right: Collection[int], width: int) -> Iterator[str]:
    """Tables of the first column with as many of the others as there is room for."""
    first = 1
    while first < len(widths):
        last, taken = first + 1, widths[0] + len(GAP) + widths[first]
        while last < len(widths) and taken + len(GAP) + widths[last] <= width:
            taken += len(GAP) + widths[last]
            last += 1
        chosen = (0, *range(first, last))
        yield table(
            [tuple(row[i] for i in chosen) for row in rows],
            right=[place for place, i in enumerate(chosen) if i in right], width=width,
        )  # fmt: skip
        first = last
