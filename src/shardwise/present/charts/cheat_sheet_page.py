"""The cheat sheet as one printed page: topics in two columns, as large as the paper allows; SVG, and HTML that prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from shardwise.book_formulas.cheat_sheet import CheatSheet, SheetItem, SheetSection
from shardwise.present.charts.drawing import Drawing, text_width, wrapped
from shardwise.present.charts.palette import BLUE, FAINT, GRID
from shardwise.values import InputError, format_binary, format_count

PIXELS_PER_MM = 96.0 / 25.4  # of CSS
EDGE, GUTTER = 34.0, 22.0  # pixels around the page (9 mm, which printers reach) and between columns
NUM_COLUMNS = 2
SIZES = (13.0, 12.5, 12.0, 11.5, 11.0)  # of text in pixels, the first that fits; 11 are 8.25 pt
LINE, HEADING = 1.28, 1.9  # heights of a line and of a title in sizes of text
GAP = 10.0  # least pixels between name and number


@dataclass(frozen=True, slots=True)
class Paper:
    """A sheet of paper, upright, in millimetres; `css` is its name in style sheets."""

    css: str
    width_mm: float
    height_mm: float

    @property
    def width(self) -> float:
        """Pixels of CSS."""
        return self.width_mm * PIXELS_PER_MM

    @property
    def height(self) -> float:
        """Pixels of CSS."""
        return self.height_mm * PIXELS_PER_MM


# Source: ISO 216 and ANSI/ASME Y14.1.
PAPERS: Mapping[str, Paper] = {"a4": Paper("A4", 210.0, 297.0), "letter": Paper("letter", 215.9, 279.4)}


@dataclass(frozen=True, slots=True)
class _ItemLines:
    """An item with its formula in lines: beside the name on the first, or under it."""

    item: SheetItem
    beside: str
    under: tuple[str, ...]

    @property
    def num_lines(self) -> int:
        return 1 + len(self.under)


Topic = tuple[SheetSection, tuple[_ItemLines, ...]]


def sheet_drawing(sheet: CheatSheet, paper: Paper) -> Drawing:
    """Return the page. Raises `InputError` for a sheet that does not fit on the paper in the smallest legible size."""
    for size in SIZES:
        layout = _PageLayout(sheet, paper, size)
        if layout.fits:
            return layout.draw()
    raise InputError(
        f"paper: found {sum(len(section.items) for section in sheet.sections)} numbers of long names, which do not fit on one "
        f"page of {paper.css}; a cluster of fewer levels, or --json, is required"
    )


def sheet_html(sheet: CheatSheet, paper: Paper) -> str:
    """Return an HTML page that shows the sheet and prints as one page of the paper; it runs no script and requests nothing."""
    title = escape(_title(sheet))
    style = (
        f"@page {{ size: {paper.css} portrait; margin: 0; }} body {{ margin: 0; background: #fff; }} "
        f"svg {{ display: block; width: {paper.width_mm:g}mm; height: {paper.height_mm - 0.2:g}mm; margin: 0 auto; }}"
    )
    head = f'<meta charset="utf-8"><title>{title}</title><style>{style}</style>'
    svg = sheet_drawing(sheet, paper).svg().replace("max-width:100%;height:auto", "")
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{svg}</body>\n</html>\n'


def _title(sheet: CheatSheet) -> str:
    return f"{sheet.model_name} on {sheet.cluster}"


class _PageLayout:
    """Places of all topics at one size of text."""

    def __init__(self, sheet: CheatSheet, paper: Paper, size: float) -> None:
        self.sheet, self.paper, self.size = sheet, paper, size
        self.column_width = (paper.width - 2 * EDGE - (NUM_COLUMNS - 1) * GUTTER) / NUM_COLUMNS
        self.head_lines = wrapped(self._head(), paper.width - 2 * EDGE, size)
        self.foot_lines = wrapped(FOOT, paper.width - 2 * EDGE, size)
        self.top = EDGE + 2.7 * size + LINE * size * len(self.head_lines)
        self.bottom = paper.height - EDGE - LINE * size * len(self.foot_lines)
        self.topics = [self._topic(section) for section in sheet.sections]
        self.columns = self._columns()

    def _head(self) -> str:
        sheet = self.sheet
        return (
            f"{format_binary(sheet.global_batch_tokens)} tokens in a batch, sequences of {sheet.seq_len:,}, {sheet.precision}, "
            f"{format_count(sheet.tokens)} tokens in all"
        )

    def _topic(self, section: SheetSection) -> Topic:
        return section, tuple(map(self._lines, section.items))

    def _lines(self, item: SheetItem) -> _ItemLines:
        name_and_number = text_width(item.name, self.size) + text_width(item.text, self.size, bold=True) + 2 * GAP
        room = self.column_width - name_and_number
        if text_width(item.formula, self.size) <= room:
            return _ItemLines(item, item.formula, ())
        return _ItemLines(item, "", tuple(wrapped(item.formula, self.column_width - GAP, self.size)))

    def height(self, topic: Topic) -> float:
        """Pixels of a topic with its title."""
        return self.size * (HEADING + LINE * sum(lines.num_lines for lines in topic[1]))

    def _columns(self) -> list[list[Topic]]:
        """Return the topics of each column, in order, so that the longest column is as short as possible."""
        heights = [self.height(topic) for topic in self.topics]
        split = min(range(len(heights) + 1), key=lambda count: max(sum(heights[:count]), sum(heights[count:])))
        return [self.topics[:split], self.topics[split:]]

    @property
    def fits(self) -> bool:
        """True if no column, no name with its number and no title is longer than its room."""
        is_short = all(sum(map(self.height, column)) <= self.bottom - self.top for column in self.columns)
        items = [lines.item for _, items in self.topics for lines in items]
        is_narrow = all(
            text_width(item.name, self.size) + text_width(item.text, self.size, bold=True) + GAP <= self.column_width
            for item in items
        )
        titles = [section.title for section, _ in self.topics]
        widths = [text_width(title, 1.1 * self.size, bold=True) for title in titles]
        page = text_width(_title(self.sheet), 1.6 * self.size, bold=True) <= self.paper.width - 2 * EDGE
        return is_short and is_narrow and page and max(widths, default=0.0) <= self.column_width

    def draw(self) -> Drawing:
        size = self.size
        drawing = Drawing(
            self.paper.width, self.paper.height, _title(self.sheet), "Rules and typical scales on one page"
        )
        drawing.text(EDGE, EDGE + 1.4 * size, _title(self.sheet), size=1.6 * size, bold=True)
        for number, line in enumerate(self.head_lines):
            drawing.text(EDGE, EDGE + 2.2 * size + LINE * size * (number + 0.75), line, size=size, fill=FAINT)
        for number, column in enumerate(self.columns):
            self._draw_column(drawing, EDGE + number * (self.column_width + GUTTER), column)
        for number, line in enumerate(self.foot_lines):
            drawing.text(EDGE, self.bottom + LINE * size * (number + 0.9), line, size=size, fill=FAINT)
        return drawing

    def _draw_column(self, drawing: Drawing, x: float, topics: Sequence[Topic]) -> None:
        """Draw topics one under the other; what room is left is shared out between them."""
        spare = self.bottom - self.top - sum(map(self.height, topics))
        space = min(spare / max(1, len(topics)), 1.2 * self.size)
        y, right = self.top, x + self.column_width
        for section, items in topics:
            drawing.text(x, y + 1.35 * self.size, section.title, size=1.1 * self.size, fill=BLUE, bold=True)
            y += HEADING * self.size
            drawing.line(x, y - 0.25 * self.size, right, y - 0.25 * self.size, stroke=GRID)
            for lines in items:
                baseline = y + 0.9 * self.size
                drawing.text(x, baseline, lines.item.name, size=self.size)
                drawing.text(right, baseline, lines.item.text, size=self.size, anchor="end", bold=True)
                if lines.beside:
                    start = x + text_width(lines.item.name, self.size) + GAP
                    drawing.text(start, baseline, lines.beside, size=self.size, fill=FAINT)
                for number, line in enumerate(lines.under, 1):
                    drawing.text(x + GAP, baseline + number * LINE * self.size, line, size=self.size, fill=FAINT)
                y += LINE * self.size * lines.num_lines
            y += space


FOOT = (
    "Nominal rates and dense peaks. Rules: How to Scale Your Model (Austin et al., 2025), Compute-Bound Training (Stratos, "
    "2026), The Ultra-Scale Playbook (Tazi et al., 2025). `shardwise cheat-sheet --json` has each number with its source."
)
