"""Charts of cells: shards held by devices, heat maps, and frames of a collective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.present.charts.drawing import HEADING, MARGIN, ROW, SIZE, SMALL, Canvas, Drawing, text_width
from shardwise.present.charts.palette import EMPTY, FAINT, INK, PAPER, series, shade, text_on

GRID_CELL_WIDTH, GRID_CELL_HEIGHT, SPACE, GRID_HEAD_HEIGHT = 64.0, 30.0, 40.0, 50.0
GRID_PAGE_WIDTH = 1100.0


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
        return max(GRID_CELL_WIDTH, *(text_width(label) + 18.0 for label in self.labels.values()))

    @property
    def width(self) -> float:
        """Pixels of the cells, or of a text over them that is longer."""
        texts = text_width(self.heading), text_width(self.caption, bold=True)
        return max(self.columns * self.cell_width, *texts)

    @property
    def height(self) -> float:
        """Pixels, texts included."""
        return GRID_HEAD_HEIGHT + self.rows * GRID_CELL_HEIGHT


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
        if x > MARGIN and x + grid.width > GRID_PAGE_WIDTH:
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
        x, y, fill = column * width, GRID_HEAD_HEIGHT + row * GRID_CELL_HEIGHT, series(row * grid.columns + column)
        canvas.rect(x, y, width, GRID_CELL_HEIGHT, fill=fill, stroke=PAPER, stroke_width=2)
        if grid.ringed:
            canvas.rect(x + 4, y + 4, width - 8, GRID_CELL_HEIGHT - 8, stroke=text_on(fill), radius=3)
        canvas.text(x + width / 2, y + GRID_CELL_HEIGHT / 2 + 4.5, label, anchor="middle", fill=text_on(fill))


HEAT_CELL_WIDTH, HEAT_CELL_HEIGHT = 84.0, 34.0
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
        self.width = max([HEAT_CELL_WIDTH, *(text_width(line, SMALL) + 20 for cell in lines for line in cell)])
        self.height = HEAT_CELL_HEIGHT + NOTE_LINE * max(map(len, lines), default=0)
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


FRAME_CELL_HEIGHT, GAP, FRAME_HEAD_HEIGHT, FOOT = 24.0, 36.0, 26.0, 24.0
LEAST_WIDTH, INSET = 30.0, 2.0  # of a cell; of what is in it
RING, LABEL_HEIGHT = (
    2.5,
    13.0,
)  # width of the ring in a cell that is new; height of the label over a piece that is there in part
STRIP_PAGE_WIDTH = 1100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A piece that a device holds: the number of its colour, its label, how much of it is there, whether it just came.

    `row` is its place in the device's column, from the top.
    """

    row: int
    colour: int
    label: str = ""
    share: float = 1.0
    new: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One moment: for each device the cells that it holds."""

    title: str
    columns: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Frames of the same devices; `rows` are names beside the rows, if these have any."""

    title: str
    subtitle: str
    devices: tuple[str, ...]
    frames: tuple[Frame, ...]
    legend: str
    rows: tuple[str, ...] = ()


def draw_strip(strip: Strip) -> Drawing:
    """Frames in reading order: a column for each device, a cell for each piece that it holds.

    A cell is filled as far as its piece is there; a thick edge marks what came in this frame.
    """
    return _StripPlot(strip).drawn()


class _StripPlot:
    def __init__(self, strip: Strip) -> None:
        self.strip = strip
        cells = [cell for frame in strip.frames for column in frame.columns for cell in column]
        labels = [text_width(cell.label, SMALL) + 4 * INSET for cell in cells]
        self.cell_width = max([LEAST_WIDTH, *labels, *(text_width(name, SMALL) + 4.0 for name in strip.devices)])
        self.num_rows = max([len(strip.rows), *(cell.row + 1 for cell in cells)])
        self.beside = max((text_width(name, SMALL) + 6.0 for name in strip.rows), default=0.0)
        width = self.beside + self.cell_width * len(strip.devices)
        height = FRAME_HEAD_HEIGHT + FRAME_CELL_HEIGHT * self.num_rows + FOOT
        fit = int((STRIP_PAGE_WIDTH - 2 * MARGIN + GAP) // (width + GAP))
        self.per_line = max(1, min(len(strip.frames), fit))
        num_lines = -(-len(strip.frames) // self.per_line)
        self.pitch = width + GAP, height + GAP
        right = MARGIN + max(self.per_line * self.pitch[0] - GAP, text_width(strip.legend))
        bottom = HEADING + 6.0 + num_lines * self.pitch[1] - GAP
        self.canvas = Canvas(right + MARGIN, bottom + 34.0 + MARGIN, strip.title, strip.subtitle)

    def drawn(self) -> Drawing:
        for index, frame in enumerate(self.strip.frames):
            line, place = divmod(index, self.per_line)
            with self.canvas.group(x=MARGIN + place * self.pitch[0], y=HEADING + 6.0 + line * self.pitch[1]):
                self.frame(frame)
        self.canvas.text(MARGIN, self.canvas.height - MARGIN, self.strip.legend)
        return self.canvas

    def frame(self, frame: Frame) -> None:
        self.canvas.text(0, 14, frame.title, bold=True)
        bottom = FRAME_HEAD_HEIGHT + FRAME_CELL_HEIGHT * self.num_rows
        for row, name in enumerate(self.strip.rows):
            middle = FRAME_HEAD_HEIGHT + FRAME_CELL_HEIGHT * (row + 0.5) + 4.0
            self.canvas.text(self.beside - 6.0, middle, name, size=SMALL, anchor="end")
        for place, (name, column) in enumerate(zip(self.strip.devices, frame.columns, strict=True)):
            left = self.beside + place * self.cell_width
            self.canvas.rect(left, FRAME_HEAD_HEIGHT, self.cell_width, FRAME_CELL_HEIGHT * self.num_rows, stroke=FAINT)
            for cell in column:
                self.cell(cell, left)
            self.canvas.text(left + self.cell_width / 2, bottom + 16, name, size=SMALL, anchor="middle")

    def cell(self, cell: Cell, left: float) -> None:
        """A piece; the label of one that is there in part stands over it, not half on it."""
        x, y = left + INSET, FRAME_HEAD_HEIGHT + FRAME_CELL_HEIGHT * cell.row + INSET
        width, height = self.cell_width - 2 * INSET, FRAME_CELL_HEIGHT - 2 * INSET
        fill, whole = series(cell.colour), cell.share >= 1
        over = LABEL_HEIGHT if cell.label and not whole else 0.0
        ring = RING if cell.new and whole else 0.0  # the page's colour, between the edge and what it marks
        self.canvas.rect(
            x + ring, y + over + ring, width * cell.share - 2 * ring, height - over - 2 * ring,
            fill=fill, radius=0 if over else 2,
        )  # fmt: skip
        if cell.new or not whole:
            edge, thick = (INK, 2.0) if cell.new else (FAINT, 1.0)
            self.canvas.rect(x, y, width, height, stroke=edge, stroke_width=thick, radius=2)
        if cell.label:
            base = y + (over - 2.5 if over else height / 2 + 4.0)
            ink = INK if over else text_on(fill)
            self.canvas.text(x + width / 2, base, cell.label, size=SMALL, anchor="middle", fill=ink)
