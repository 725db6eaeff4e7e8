"""Heat maps: a table of percentages, each cell shaded by its number, with notes in the cells and the scale of colours below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.present.draw.canvas import HEADING, MARGIN, ROW, SMALL, Canvas
from shardwise.present.draw.drawing import SIZE, Drawing
from shardwise.present.draw.palette import EMPTY, FAINT, shade, text_on
from shardwise.present.draw.text import text_width

CELL_WIDTH, CELL_HEIGHT = 84.0, 34.0
NOTE_LINE = 15.0  # of text under a cell's number
SCALE_WIDTH, SCALE_STEPS = 160.0, 16  # of the strip of colours


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A table of parts of 1, written as percentages; None is where there is none, and `absent` says why.

    `notes` are lines of text for each cell, under its number; `scale` says what the colours mean, beside a strip of them.
    """

    title: str
    subtitle: str
    row_title: str
    column_title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    absent: str
    notes: tuple[tuple[tuple[str, ...], ...], ...] = ()
    scale: str = ""


def draw_heat_map(chart: HeatMap) -> Drawing:
    """The table as a drawing: the larger a number the deeper its cell."""
    return _HeatPlot(chart).drawn()


class _HeatPlot:
    def __init__(self, chart: HeatMap) -> None:
        self.chart = chart
        lines = [cell for row in chart.notes for cell in row]
        self.width = max([CELL_WIDTH, *(text_width(line, SMALL) + 20 for cell in lines for line in cell)])
        self.height = CELL_HEIGHT + NOTE_LINE * max(map(len, lines), default=0)
        self.left = MARGIN + max(map(text_width, (*chart.rows, chart.row_title))) + 12
        self.top = HEADING + 2 * ROW
        self.right = self.left + self.width * len(chart.columns)
        self.bottom = self.top + self.height * len(chart.rows)
        self.most = max((value for row in chart.values for value in row if value is not None), default=1.0)
        absent = any(value is None for row in chart.values for value in row)
        self.footer = chart.absent if absent else ""
        edges = [self.right, MARGIN + text_width(self.footer) + 18]
        edges += [MARGIN + SCALE_WIDTH + 8 + text_width(self.scale())] if chart.scale else []
        foot = ROW * (bool(self.footer) + 1.5 * bool(chart.scale))
        height = self.bottom + MARGIN + foot
        self.canvas = Canvas(max(edges) + MARGIN, height, chart.title, chart.subtitle)

    def scale(self) -> str:
        return f"{self.chart.scale}: 0% to {self.most:.1%}"

    def drawn(self) -> Drawing:
        canvas, chart = self.canvas, self.chart
        canvas.text((self.left + self.right) / 2, self.top - ROW - 6, chart.column_title, anchor="middle")
        canvas.text(self.left - 12, self.top - 8, chart.row_title, anchor="end")
        for column, name in enumerate(chart.columns):
            canvas.text(self.left + self.width * (column + 0.5), self.top - 8, name, anchor="middle", bold=True)
        for number, (name, row) in enumerate(zip(chart.rows, chart.values, strict=True)):
            y = self.top + self.height * number
            canvas.text(self.left - 12, y + self.height / 2 + 4.5, name, anchor="end")
            for column, value in enumerate(row):
                notes = chart.notes[number][column] if chart.notes else ()
                self.cell(self.left + self.width * column, y, value, notes)
        self.foot()
        return canvas

    def cell(self, x: float, y: float, value: float | None, notes: Sequence[str]) -> None:
        """One number, in a colour as deep as its part of the largest, and its notes, all in the middle."""
        fill = EMPTY if value is None else shade(value / self.most)
        self.canvas.rect(x, y, self.width, self.height, fill=fill, stroke=FAINT, stroke_width=0.75)
        middle, base = x + self.width / 2, y + (self.height - NOTE_LINE * len(notes)) / 2 + 4.5
        lines = ["–" if value is None else f"{value:.1%}", *notes]
        for number, line in enumerate(lines):
            size, bold = (SMALL, False) if number else (SIZE, bool(notes))
            height = base + NOTE_LINE * number
            self.canvas.text(middle, height, line, size=size, anchor="middle", bold=bold, fill=text_on(fill))

    def foot(self) -> None:
        """Why numbers are absent, and under that the scale of colours."""
        y = self.bottom + ROW
        if self.footer:
            self.canvas.text(MARGIN, y, f"–  {self.footer}")
            y += 1.5 * ROW
        if self.chart.scale:
            width = SCALE_WIDTH / SCALE_STEPS
            for step in range(SCALE_STEPS):
                self.canvas.rect(MARGIN + width * step, y - 11, width, 14, fill=shade((step + 0.5) / SCALE_STEPS))
            self.canvas.rect(MARGIN, y - 11, SCALE_WIDTH, 14, stroke=FAINT)
            self.canvas.text(MARGIN + SCALE_WIDTH + 8, y, self.scale())
