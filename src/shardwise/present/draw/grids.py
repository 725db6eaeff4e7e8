"""Grids of labelled cells in reading order: arrays cut into pieces, and who has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.present.draw.canvas import HEADING, MARGIN, Canvas
from shardwise.present.draw.drawing import Drawing
from shardwise.present.draw.palette import PAPER, series, text_on
from shardwise.present.draw.text import text_width

CELL_WIDTH, CELL_HEIGHT, SPACE, HEAD = 64.0, 30.0, 40.0, 50.0
PAGE_WIDTH = 1100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Rows and columns of cells with labels; `ringed` ones have a line inside. `heading` and `caption` stand over them."""

    heading: str
    caption: str
    rows: int
    columns: int
    labels: Mapping[tuple[int, int], str]
    ringed: bool = False

    @property
    def cell_width(self) -> float:
        """Pixels of a cell: room for the longest label."""
        return max(CELL_WIDTH, *(text_width(label) + 18.0 for label in self.labels.values()))

    @property
    def width(self) -> float:
        """Pixels of the cells, or of a text over them that is longer."""
        texts = text_width(self.heading), text_width(self.caption, bold=True)
        return max(self.columns * self.cell_width, *texts)

    @property
    def height(self) -> float:
        """Pixels, texts included."""
        return HEAD + self.rows * CELL_HEIGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class GridChart:
    """Grids side by side, wrapped as text is; `legend` under them says what labels and lines mean."""

    title: str
    subtitle: str
    grids: tuple[Grid, ...]
    legend: str


def draw_grids(chart: GridChart) -> Drawing:
    """The grids as a drawing: each cell in the colour of its number in its grid."""
    places, x, y, tallest = [], MARGIN, HEADING + 8.0, 0.0
    for grid in chart.grids:
        if x > MARGIN and x + grid.width > PAGE_WIDTH:
            x, y, tallest = MARGIN, y + tallest + SPACE, 0.0
        places.append((x, y))
        x, tallest = x + grid.width + SPACE, max(tallest, grid.height)
    edges = [left + grid.width for (left, _), grid in zip(places, chart.grids, strict=True)]
    right = max(*edges, MARGIN + text_width(chart.legend))
    canvas = Canvas(right + MARGIN, y + tallest + SPACE + MARGIN, chart.title, chart.subtitle)
    for grid, (left, top) in zip(chart.grids, places, strict=True):
        with canvas.group(x=left, y=top):
            _draw(grid, canvas)
    canvas.text(MARGIN, canvas.height - MARGIN, chart.legend)
    return canvas


def _draw(grid: Grid, canvas: Canvas) -> None:
    width = grid.cell_width
    canvas.text(0, 12, grid.heading)
    canvas.text(0, 34, grid.caption, bold=True)
    for (row, column), label in sorted(grid.labels.items()):
        x, y, fill = column * width, HEAD + row * CELL_HEIGHT, series(row * grid.columns + column)
        canvas.rect(x, y, width, CELL_HEIGHT, fill=fill, stroke=PAPER, stroke_width=2)
        if grid.ringed:
            canvas.rect(x + 4, y + 4, width - 8, CELL_HEIGHT - 8, stroke=text_on(fill), radius=3)
        canvas.text(x + width / 2, y + CELL_HEIGHT / 2 + 4.5, label, anchor="middle", fill=text_on(fill))
