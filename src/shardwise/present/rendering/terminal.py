"""A report on a terminal: folded to its width and in colour by `rich`, which is loaded for a terminal alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, TextIO

from shardwise.present.rendering.report import (
    Block,
    Cell,
    Preformatted,
    Report,
    Section,
    ShareBar,
    Status,
    Table,
    cell_text,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

PLAIN_TERMINALS = ("dumb", "unknown")  # values of TERM: terminals that get no more than a file
STYLES = {"good": "green", "bad": "bold red", "note": "yellow"}
BLOCKS = str.maketrans("#+-", "█▓░")  # of bars
GAP = 2  # columns between those of a table
SHORT_CELL = 12  # characters of cells that are not folded, so that what is long has the room
LIGHT_BACKGROUNDS = ("7", "15")  # white, as COLORFGBG numbers the colour of the page


def open_console(stream: TextIO | None) -> Console | None:
    """Return the console of a stream that is a terminal; None for a file, a pipe and the plainest terminals."""
    if stream is None or not stream.isatty() or os.environ.get("TERM") in PLAIN_TERMINALS:
        return None
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def render_terminal(report: Report, console: Console) -> str:
    """Return the report as the terminal takes it, with the codes of its colours."""
    with console.capture() as capture:
        visible_sections = (section for section in report if section.title or section.blocks)
        for number, section in enumerate(visible_sections):
            if number:
                console.print()
            for renderable in _section(section, console.width):
                console.print(renderable)
    return capture.get()


def _section(section: Section, width: int) -> Iterator[RenderableType]:
    from rich.text import Text

    if section.title:
        yield Text(section.title, style="bold", overflow="fold")
    for block in section.blocks:
        yield from _block(block, width)


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    if isinstance(block, Table):
        for number, part in enumerate(split_columns(block, width)):
            if number:
                yield ""
            yield Padding(_table(part), (0, 0, 0, part.indent), expand=False)
    elif isinstance(block, Preformatted):
        yield from (Text(line, no_wrap=True, overflow="crop") for line in block.lines(width))
    else:
        line = cell_text(block)
        indent = len(line) - len(line.lstrip())
        yield Padding(_cell(block, from_column=indent), (0, 0, 0, indent), expand=False)


def _table(block: Table) -> RenderableType:
    from rich.table import Table as RichTable

    head, rows = (block.rows[0], block.rows[1:]) if block.head else (("",) * len(block.rows[0]), block.rows)
    table = RichTable(
        box=None, show_header=block.head, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0),
    )  # fmt: skip
    for number, title in enumerate(head):
        is_whole = _is_whole(block, number)
        table.add_column(
            _cell(title), justify="right" if number in block.right else "left", no_wrap=is_whole,
            overflow="crop" if is_whole else "fold",
        )  # fmt: skip
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(cell: Cell, from_column: int = 0) -> Text:
    from rich.text import Text

    text = cell_text(cell)[from_column:]
    if isinstance(cell, ShareBar):
        return Text(text.translate(BLOCKS), style=_colours().get(cell.term, ""))
    return Text(text, style=STYLES[cell.tone] if isinstance(cell, Status) else "", overflow="fold")


@cache
def _colours() -> dict[str, str]:
    """Return the colours of an estimate's terms as in pictures, on a dark page unless the terminal says that it is light."""
    from shardwise.present.charts.palette import TERM_COLOURS

    is_light = os.environ.get("COLORFGBG", "").rpartition(";")[2] in LIGHT_BACKGROUNDS
    return {name: colour.light if is_light else colour.dark for name, colour in TERM_COLOURS.items()}


def split_columns(table: Table, width: int) -> Iterator[Table]:
    """Yield the table, or for a terminal that is too narrow for its numbers tables of some columns each, all with the first.

    >>> wide = Table(rows=(("model", "layers", "heads", "width"), ("gpt-2", "12", "12", "768")), right=(1, 2, 3))
    >>> [part.rows for part in split_columns(wide, 22)]
    [(('model', 'layers', 'heads'), ('gpt-2', '12', '12')), (('model', 'width'), ('gpt-2', '768'))]
    """
    needs = [_needed_width(table, number) for number in range(len(table.rows[0]))]
    first, room = 1, width - table.indent
    if sum(needs) + GAP * (len(needs) - 1) <= room or len(needs) < 3:
        yield table
        return
    while first < len(needs):
        last, used_width = first + 1, needs[0] + GAP + needs[first]
        while last < len(needs) and used_width + GAP + needs[last] <= room:
            used_width += GAP + needs[last]
            last += 1
        yield _columns(table, (0, *range(first, last)))
        first = last


def _needed_width(table: Table, number: int) -> int:
    """Return the width that a column needs: that of its longest cell, or of its longest word if its cells are folded."""
    cells = [cell_text(row[number]) for row in table.rows]
    return max(len(word) for cell in cells for word in ([cell] if _is_whole(table, number) else cell.split() or [""]))


def _is_whole(table: Table, number: int) -> bool:
    """Return whether a column is not folded: numbers, bars, and short text."""
    cells = [row[number] for row in table.rows]
    is_short = all(len(cell_text(cell)) <= SHORT_CELL for cell in cells)
    return is_short or number in table.right or any(isinstance(cell, ShareBar) for cell in cells)


def _columns(table: Table, chosen: tuple[int, ...]) -> Table:
    rows = tuple(tuple(row[number] for number in chosen) for row in table.rows)
    right = [place for place, number in enumerate(chosen) if number in table.right]
    return Table(rows=rows, right=right, head=table.head, indent=table.indent)
