"""What a verb says to people, as values: sections of lines, tables and bars.

Which of it is short is decided here, how it looks in `plain` (files, pipes) and `terminal`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Tone = Literal["good", "bad", "note"]
BAR_STEPS = 28  # of a bar that is the whole


@dataclass(frozen=True, slots=True)
class Status:
    """Text that says whether something is as it should be, or what to know of it."""

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
    """The characters of a cell or of a line."""
    return cell if isinstance(cell, str) else cell.text


def short_form(report: Report) -> Report:
    """The report without its details, and a last line that names them: what `--verbose` shows beside.

    >>> short_form([Section(["fits"]), Section(["3 layouts"], title="the search", detail=True)])[-1].blocks
    ['with -v: the search']
    """
    shown = [replace(one, blocks=[_brief(block) for block in one.blocks]) for one in report if not one.detail]
    left = list(dict.fromkeys(_hidden_sections(report)))
    return [*shown, Section([f"with -v: {', '.join(left)}"])] if left else shown


def _brief(block: Block) -> Block:
    if not isinstance(block, Table) or block.brief is None:
        return block
    return replace(block, rows=block.rows[: block.head + block.brief])


def _hidden_sections(report: Report) -> Iterator[str]:
    """Names of what the short form leaves out: of sections, and of those of which it has only a part."""
    for one in report:
        if one.detail or any(_brief(block) != block for block in one.blocks):
            yield one.name or one.title


def sections_of_text(text: str) -> Report:
    """A text whose parts stand apart by empty lines."""
    return [Section(part.split("\n")) for part in text.split("\n\n")]


def facts_table(rows: Iterable[tuple[str, Cell | Line]]) -> Table:
    """A table of names and what belongs to them; a row without a name goes on with what is above it."""
    return Table(rows=tuple(rows), head=False, indent=2)


def share_bar(share: float, term: str = "") -> ShareBar:
    """A share of a whole as a bar: at least one step of what there is."""
    return ShareBar("#" * max(round(BAR_STEPS * share), share > 0), term)
