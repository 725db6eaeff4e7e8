"""SVG primitives: a document of groups, rectangles, lines and texts; the same input gives the same bytes.

`Drawing` is a canvas to put primitives on, `strip` lays out frames of devices and what each holds. Nothing here knows what
is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape

INK, FAINT, PAPER = "#1c2733", "#9aa5b1", "#ffffff"
FONT = "Inter, 'DejaVu Sans', Helvetica, Arial, sans-serif"
# Okabe and Ito's colours, which stay apart for colour-blind readers, then lighter relatives; black text is legible on all.
COLOURS = (
    "#e69f00", "#56b4e9", "#3cb48c", "#f0e442", "#7aa6dc", "#e8804f", "#d79ac0", "#b8bec6",
    "#f7cf87", "#a9d9f4", "#9bdcc4", "#f8f3ab", "#bcd2ee", "#f3bfa5", "#ecd0e1", "#dfe3e7",
)  # fmt: skip


def colour(index: int) -> str:
    """One of sixteen fill colours; they repeat."""
    return COLOURS[index % len(COLOURS)]


def number(value: float) -> str:
    """A coordinate with at most two decimals, so that drawings do not depend on rounding noise."""
    return f"{round(value, 2) + 0.0:.2f}".rstrip("0").rstrip(".")


class Drawing:
    """A canvas of `width` by `height` pixels on white; (0, 0) is the upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._lines: list[str] = []
        self._depth = 1

    def rect(
        self, x: float, y: float, width: float, height: float, *,
        fill: str = "none", stroke: str = "none", stroke_width: float = 1.0, radius: float = 0.0,
    ) -> None:  # fmt: skip
        """A rectangle with its upper left corner at (x, y)."""
        self._put(
            "rect", x=x, y=y, width=width, height=height, rx=radius, fill=fill, stroke=stroke, stroke_width=stroke_width
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = INK, stroke_width: float = 1.0) -> None:
        """A straight line."""
        self._put("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke, stroke_width=stroke_width)

    def text(
        self, x: float, y: float, content: str, *,
        size: float = 13.0, fill: str = INK, anchor: str = "start", weight: str = "normal",
    ) -> None:  # fmt: skip
        """Text whose baseline is at y; `anchor` says what x is: start, middle or end."""
        self._put("text", content, x=x, y=y, font_size=size, fill=fill, text_anchor=anchor, font_weight=weight)

    @contextmanager
    def group(self, *, x: float = 0.0, y: float = 0.0) -> Iterator[None]:
        """Everything put inside is moved by (x, y)."""
        self._lines.append(f'{"  " * self._depth}<g transform="translate({number(x)} {number(y)})">')
        self._depth += 1
        yield
        self._depth -= 1
        self._lines.append(f"{'  ' * self._depth}</g>")

    def _put(self, tag: str, content: str | None = None, **attributes: str | float) -> None:
        shown = " ".join(
            f'{name.replace("_", "-")}="{escape(value) if isinstance(value, str) else number(value)}"'
            for name, value in attributes.items()
        )
        body = "/>" if content is None else f">{escape(content)}</{tag}>"
        self._lines.append(f"{'  ' * self._depth}<{tag} {shown}{body}")

    def include(self, other: Drawing, *, x: float = 0.0, y: float = 0.0) -> None:
        """Put all of another drawing with its upper left corner at (x, y)."""
        with self.group(x=x, y=y):
            self._lines += [f"  {line}" for line in other._lines]

    def render(self) -> str:
        """The SVG document."""
        size = f'width="{number(self.width)}" height="{number(self.height)}"'
        box = f'viewBox="0 0 {number(self.width)} {number(self.height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} font-family="{FONT}" role="img">'
        body = [f"  <title>{escape(self.title)}</title>", f'  <rect width="100%" height="100%" fill="{PAPER}"/>']
        return "\n".join([head, *body, *self._lines, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A piece that a device holds: its colour, what is written in it, how much of it is there, whether it just came.

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


MARGIN, CELL_HEIGHT, GAP, HEAD, FOOT = 24.0, 22.0, 36.0, 26.0, 24.0
PAGE_WIDTH = 1100.0


def strip(title: str, subtitle: str, device_names: Sequence[str], frames: Sequence[Frame], legend: str) -> str:
    """An SVG of frames in reading order: a column for each device, a cell for each piece that it holds.

    A cell is filled as far as its piece is there; a thick edge marks what came in this frame.
    """
    cell_width = max(30.0, 9.0 * max(map(len, device_names)) + 4.0)
    num_rows = 1 + max((cell.row for frame in frames for column in frame.columns for cell in column), default=0)
    width = cell_width * len(device_names)
    height = HEAD + CELL_HEIGHT * num_rows + FOOT
    per_line = max(1, min(len(frames), int((PAGE_WIDTH - 2 * MARGIN + GAP) // (width + GAP))))
    num_lines = -(-len(frames) // per_line)
    words = 7.2 * max(len(title) * 1.5, len(subtitle), len(legend))  # wide enough for any sans serif
    total_width = 2 * MARGIN + max(per_line * (width + GAP) - GAP, words)
    top = MARGIN + 62.0
    drawing = Drawing(total_width, top + num_lines * (height + GAP) - GAP + 34.0 + MARGIN, title)
    drawing.text(MARGIN, MARGIN + 16.0, title, size=18.0, weight="bold")
    drawing.text(MARGIN, MARGIN + 38.0, subtitle, size=13.0)
    for index, frame in enumerate(frames):
        line, place = divmod(index, per_line)
        with drawing.group(x=MARGIN + place * (width + GAP), y=top + line * (height + GAP)):
            _frame(drawing, frame, device_names, num_rows, cell_width)
    drawing.text(MARGIN, drawing.height - MARGIN, legend, size=13.0)
    return drawing.render()


def _frame(drawing: Drawing, frame: Frame, device_names: Sequence[str], num_rows: int, cell_width: float) -> None:
    drawing.text(0, 14, frame.title, size=14, weight="bold")
    bottom = HEAD + CELL_HEIGHT * num_rows
    for place, (name, column) in enumerate(zip(device_names, frame.columns, strict=True)):
        left = place * cell_width
        drawing.rect(left, HEAD, cell_width, CELL_HEIGHT * num_rows, stroke=FAINT)
        for cell in column:
            _cell(drawing, cell, left, cell_width)
        drawing.text(left + cell_width / 2, bottom + 16, name, anchor="middle")


def _cell(drawing: Drawing, cell: Cell, left: float, cell_width: float) -> None:
    inset = 2.0
    x, y = left + inset, HEAD + CELL_HEIGHT * cell.row + inset
    width, height = cell_width - 2 * inset, CELL_HEIGHT - 2 * inset
    drawing.rect(x, y, width * cell.share, height, fill=colour(cell.colour), radius=2)
    if cell.new:
        drawing.rect(x, y, width, height, stroke=INK, stroke_width=2, radius=2)
    elif cell.share < 1:
        drawing.rect(x, y, width, height, stroke=FAINT, radius=2)
    if cell.label:
        drawing.text(left + cell_width / 2, y + height - 4, cell.label, size=12, anchor="middle")
