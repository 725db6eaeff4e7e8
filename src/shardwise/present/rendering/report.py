"""Reports of verbs as values: sections of lines, tables and bars.

Their short form is decided here, their look in `plain_text` (files, pipes) and `terminal`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Tone = Literal["good", "bad", "note"]
BAR_STEPS = 28  # of a bar that is the whole


@dataclass(frozen=True, slots=True)
class Status:
    """Text with a tone: good, bad, or worth a note."""

    text: str
    tone: Tone


@dataclass(frozen=True, slots=True)
class ShareBar:
    """A bar of a term, a character for each step."""

    text: str
    term: str = ""


NumberKind = Literal["exact", "prediction", "bound", "measured", "assumed"]


@dataclass(frozen=True, slots=True)
class Number:
    """A number as it is printed, with its value and its place in the payload of `--json`.

    `path` is dotted ("layouts.0.memory_bytes"), or "" for a number that only the report has. A test resolves every path and
    compares the values. `value` None is unknown and printed as "-". `interval` has the ends of the 90% interval.
    """

    text: str
    value: float | None
    unit: str = ""
    path: str = ""
    interval: tuple[float, float] | None = None
    kind: NumberKind = "exact"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text in which numbers and marked words keep their meaning; it is printed as its parts one after the other."""

    parts: tuple[Cell, ...]

    @property
    def text(self) -> str:
        """The characters of the line."""
        return "".join(map(cell_text, self.parts))


Cell = str | Status | ShareBar | Number | Line
Row = tuple[Cell, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows in columns; those in `right` end at the same place. The first row is a `head` that names the columns, or is none.

    The short form has the first `brief` rows under the head, where it is given. `line` is the format of a row in a file, where
    its columns are not as wide as their widest cells.
    """

    rows: tuple[Row, ...]
    right: Collection[int] = ()
    head: bool = True
    indent: int = 0
    brief: int | None = None
    line: str = ""


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Lines that are made for a width in columns (None: there is no terminal), and never folded."""

    lines: Callable[[int | None], Sequence[str]]


Block = str | Status | Line | Table | Preformatted


@dataclass(frozen=True, slots=True)
class Section:
    """Lines and tables under a title. A `detail` is not in the short form; its `name` there is the title if it has no other."""

    blocks: Sequence[Block]
    title: str = ""
    detail: bool = False
    name: str = ""


Report = Sequence[Section]


def cell_text(cell: Cell) -> str:
    """Return the characters of a cell or of a line."""
    return cell if isinstance(cell, str) else cell.text


def short_form(report: Report) -> Report:
    """Return the report without its details, and a last line that names them: `--verbose` shows them too.

    >>> short_form([Section(["fits"]), Section(["3 layouts"], title="the search", detail=True)])[-1].blocks
    ['with -v: the search']
    """
    short_sections = [
        replace(section, blocks=[_brief(block) for block in section.blocks]) for section in report if not section.detail
    ]
    hidden_names = list(dict.fromkeys(_hidden_sections(report)))
    return [*short_sections, Section([f"with -v: {', '.join(hidden_names)}"])] if hidden_names else short_sections


def _brief(block: Block) -> Block:
    if not isinstance(block, Table) or block.brief is None:
        return block
    return replace(block, rows=block.rows[: block.head + block.brief])


def _hidden_sections(report: Report) -> Iterator[str]:
    """Yield the names of sections that the short form leaves out or shortens."""
    for section in report:
        if section.detail or any(_brief(block) != block for block in section.blocks):
            yield section.name or section.title


def sections_of_text(text: str) -> Report:
    """Return a section for each part of a text; empty lines stand between parts."""
    return [Section(part.split("\n")) for part in text.split("\n\n")]


def facts_table(rows: Iterable[tuple[str, Cell | Line]]) -> Table:
    """Return a table of names and their cells; a row without a name goes on with the row above it."""
    return Table(rows=tuple(rows), head=False, indent=2)


def share_bar(share: float, term: str = "") -> ShareBar:
    """Return a share of a whole as a bar; a share above 0 has at least one step."""
    return ShareBar("#" * max(round(BAR_STEPS * share), share > 0), term)
