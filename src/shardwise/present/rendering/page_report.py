"""Reports of the page: sections with figures, facts and choices, as JSON that the page's `sections.js` draws.

A report of a verb becomes panels of the page by `panels`. Charts are in data coordinates: the page
has the width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.present.charts.chart import Chart
from shardwise.present.charts.chart_json import chart_to_json
from shardwise.present.rendering.report import (
    BAR_STEPS,
    Block,
    Cell,
    Line,
    Number,
    Preformatted,
    Report,
    ShareBar,
    Status,
    Table,
    Tone,
    cell_text,
)

INDENT = 2  # columns of a line under a title
PathOf = Callable[[str], str]  # path in a report -> path in the answer; "" where nothing explains the number


@dataclass(frozen=True, slots=True)
class PageAction:
    """A button: it takes an edit of the address, or shows a command to copy. A page without a server leaves it out."""

    text: str
    edit: Mapping[str, str | None] = field(default_factory=dict)
    command: str = ""


PageCell = Cell | PageAction


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A line of text; `style` has classes of the page's style sheet."""

    parts: Sequence[PageCell]
    style: str = ""


@dataclass(frozen=True, slots=True)
class Bullets:
    """Lines of a list."""

    lines: Sequence[PageCell]


@dataclass(frozen=True, slots=True)
class Facts:
    """Large numbers side by side: a name, the number, and a note in cells."""

    rows: Sequence[tuple[str, PageCell, Sequence[PageCell]]]


@dataclass(frozen=True, slots=True)
class TermList:
    """Terms with their colour, their number and a note, under an optional title."""

    rows: Sequence[tuple[str, str, PageCell, str]]  # term, label, number, note
    title: str = ""


@dataclass(frozen=True, slots=True)
class DataTable:
    """Rows under a head; folded away where a figure shows the same."""

    caption: str
    rows: Sequence[Sequence[PageCell]]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Slider:
    """A control of the view itself; `options` are as those of `control_values`."""

    label: str
    value: str
    value_cell: PageCell
    options: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SelectedBlocks:
    """Blocks of which one is shown: by a select for each of `names` (identifier, label), the first `start`."""

    names: Sequence[tuple[str, str]]
    start: Sequence[str]
    options: Sequence[tuple[Sequence[str], Sequence[PageBlock]]]


PageBlock = Block | Paragraph | Bullets | Facts | TermList | DataTable | Slider | SelectedBlocks | Chart


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A panel of the page, or its verdict: with a `mark`, and a title of several claims.

    Neighbours that are `half` stand side by side. `name` is the summary of a panel that is folded.
    """

    title: str = ""
    blocks: Sequence[PageBlock] = ()
    style: str = "panel"
    half: bool = False
    claims: Sequence[Sequence[PageCell]] = ()
    mark: Tone | None = None
    fold: str = ""


PageReport = Sequence[PageSection]


def panels(report: Report, title: str = "") -> list[PageSection]:
    """Return a verb's report as panels: a title begins one, details are folded; `title` is that of the first panel."""
    page_sections: list[PageSection] = []
    for section in report:
        blocks = list(section.blocks)
        if section.detail:
            page_sections.append(PageSection(blocks=blocks, fold=section.title or section.name))
        elif section.title or not page_sections or page_sections[-1].fold:
            page_sections.append(PageSection(title=section.title, blocks=blocks))
        else:
            page_sections[-1] = replace(page_sections[-1], blocks=[*page_sections[-1].blocks, *blocks])
    if title and page_sections:
        head = [Paragraph((page_sections[0].title,), "quiet")] if page_sections[0].title else []
        page_sections[0] = replace(page_sections[0], title=title, blocks=[*head, *page_sections[0].blocks])
    return [panel for panel in page_sections if panel.blocks or panel.title]


def report_to_json(report: PageReport, path_of: PathOf = str) -> list[dict[str, Any]]:
    """Return a page's report as JSON; `path_of` gives the paths of its numbers in the answer."""
    return [_section(section, path_of) for section in report]


def _section(section: PageSection, path_of: PathOf) -> dict[str, Any]:
    values = {
        "title": section.title, "style": section.style, "half": section.half, "mark": section.mark, "fold": section.fold,
        "claims": [_cells(claim, path_of) for claim in section.claims],
        "blocks": [block_to_json(block, path_of) for block in section.blocks],
    }  # fmt: skip
    return {name: value for name, value in values.items() if value}


def block_to_json(block: PageBlock, path_of: PathOf = str) -> Any:
    """Return a block as JSON: an object whose first key is its kind, or a text."""
    match block:
        case str() | Status() | Line():
            text = cell_text(block)
            indent = max(0, len(text) - len(text.lstrip()) - INDENT)
            return {"text": _cell(block, path_of), "style": "line", "indent": indent}
        case Paragraph():
            return {"text": _cells(block.parts, path_of), "style": block.style}
        case Bullets():
            return {"bullets": _cells(block.lines, path_of)}
        case Facts():
            return {"facts": [[name, _cell(value, path_of), _cells(note, path_of)] for name, value, note in block.rows]}
        case TermList():
            terms = [[term, label, _cell(number, path_of), note] for term, label, number, note in block.rows]
            return {"terms": terms, "title": block.title}
        case Table():
            rows = [_cells(row, path_of) for row in block.rows]
            head = rows.pop(0) if block.head else []
            return {"rows": rows, "head": head, "right": sorted(block.right)}
        case DataTable():
            head, *rows = (_cells(row, path_of) for row in block.rows)
            return {"rows": rows, "head": head, "caption": block.caption, "folded": block.folded}
        case Slider():
            value_cell = _cell(block.value_cell, path_of)
            return {"slider": block.label, "value": block.value, "shown": value_cell, "options": list(block.options)}
        case SelectedBlocks():
            options = [[list(keys), [block_to_json(part, path_of) for part in parts]] for keys, parts in block.options]
            names = [list(name) for name in block.names]
            return {"choices": options, "names": names, "start": list(block.start)}
        case Preformatted():
            return {"pre": "\n".join(block.lines(None))}
        case _:
            return {"chart": chart_to_json(block)}


def _cells(cells: Sequence[PageCell], path_of: PathOf) -> list[Any]:
    return [_cell(cell, path_of) for cell in cells]


def _cell(cell: PageCell, path_of: PathOf) -> Any:
    match cell:
        case str():
            return cell
        case Number(value=None):
            return {"unknown": cell.text}
        case Number():
            path = path_of(cell.path) if cell.path else ""
            return {"number": cell.text, "path": path} if path else cell.text
        case Status():
            return {"status": cell.text, "tone": cell.tone}
        case ShareBar():
            return {"bar": list(_bar_parts(cell.text)), "term": cell.term}
        case PageAction():
            return {"action": cell.text, "edit": dict(cell.edit), "command": cell.command}
        case Line():
            return _cells(cell.parts, path_of)


def _bar_parts(text: str) -> Iterator[list[str | float]]:
    """Yield the kinds of a bar's parts with their shares: "#" of both, "+" of one alone, "-" of the other."""
    for kind in dict.fromkeys(text):
        yield [kind, text.count(kind) / BAR_STEPS]
