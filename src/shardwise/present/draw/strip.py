"""Strips of frames: moment by moment, what every device holds."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.present.draw.canvas import HEADING, MARGIN, SMALL, Canvas
from shardwise.present.draw.drawing import Drawing
from shardwise.present.draw.palette import FAINT, INK, series, text_on
from shardwise.present.draw.text import text_width

CELL_HEIGHT, GAP, HEAD, FOOT = 24.0, 36.0, 26.0, 24.0
LEAST_WIDTH, INSET = 30.0, 2.0  # of a cell; of what is in it
RING, LABEL_HEIGHT = (
    2.5,
    13.0,
)  # width of the ring in a cell that is new; height of the label over a piece that is there in part
PAGE_WIDTH = 1100.0


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
        height = HEAD + CELL_HEIGHT * self.num_rows + FOOT
        fit = int((PAGE_WIDTH - 2 * MARGIN + GAP) // (width + GAP))
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
        bottom = HEAD + CELL_HEIGHT * self.num_rows
        for row, name in enumerate(self.strip.rows):
            middle = HEAD + CELL_HEIGHT * (row + 0.5) + 4.0
            self.canvas.text(self.beside - 6.0, middle, name, size=SMALL, anchor="end")
        for place, (name, column) in enumerate(zip(self.strip.devices, frame.columns, strict=True)):
            left = self.beside + place * self.cell_width
            self.canvas.rect(left, HEAD, self.cell_width, CELL_HEIGHT * self.num_rows, stroke=FAINT)
            for cell in column:
                self.cell(cell, left)
            self.canvas.text(left + self.cell_width / 2, bottom + 16, name, size=SMALL, anchor="middle")

    def cell(self, cell: Cell, left: float) -> None:
        """A piece; the label of one that is there in part stands over it, not half on it."""
        x, y = left + INSET, HEAD + CELL_HEIGHT * cell.row + INSET
        width, height = self.cell_width - 2 * INSET, CELL_HEIGHT - 2 * INSET
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
