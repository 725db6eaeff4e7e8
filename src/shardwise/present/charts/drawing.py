"""A drawing as a value: rectangles, lines, areas, circles and texts in pixels, with their page and text widths.

`svg` writes SVG, `matplotlib_export` makes a figure of matplotlib; neither knows what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from unicodedata import east_asian_width

from shardwise.present.charts.palette import INK, PAPER, Colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Place = tuple[float, float]
SIZE = 13.0  # of text, in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """A datum that marks show: its text beside the pointer, the path of its number in a payload, and the query of a click."""

    hover: str = ""
    path: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rect:
    """A rectangle with its upper left corner at (x, y)."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour | None
    stroke: Colour | None
    stroke_width: float
    radius: float
    about: About | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Straight lines through points; `dash` has the lengths of strokes and of what is left out between them."""

    points: tuple[Place, ...]
    stroke: Colour
    stroke_width: float
    dash: tuple[float, ...]
    about: About | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """The area inside a closed line through points."""

    points: tuple[Place, ...]
    fill: Colour
    about: About | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """A circle around (x, y)."""

    x: float
    y: float
    radius: float
    fill: Colour
    stroke: Colour
    stroke_width: float
    about: About | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Text whose baseline is at y; `anchor` says what x is: start, middle or end. `upward`: turned to read upwards."""

    x: float
    y: float
    content: str
    size: float
    fill: Colour
    anchor: str
    bold: bool
    upward: bool
    about: About | None = None


Mark = Rect | Path | Area | Circle | Text


class Drawing:
    """Marks on a page of `width` by `height` pixels, the later over the earlier; (0, 0) is the upper left corner.

    `title` and `description` are the text alternative for readers who do not see the drawing.
    """

    def __init__(self, width: float, height: float, title: str, description: str = "") -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self.marks: list[Mark] = []
        self._x, self._y = 0.0, 0.0
        self._about: About | None = None

    def rect(
        self, x: float, y: float, width: float, height: float, *,
        fill: Colour | None = None, stroke: Colour | None = None, stroke_width: float = 1.0, radius: float = 0.0,
    ) -> None:  # fmt: skip
        """Put a rectangle with its upper left corner at (x, y)."""
        self._put(
            Rect(
                x=x, y=y, width=width, height=height,
                fill=fill, stroke=stroke, stroke_width=stroke_width if stroke else 0.0, radius=radius,
            )
        )  # fmt: skip

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: Colour = INK, width: float = 1.0) -> None:
        """Put a straight line."""
        self.path([(x1, y1), (x2, y2)], stroke=stroke, width=width)

    def path(self, points: Sequence[Place], *, stroke: Colour, width: float, dash: Sequence[float] = ()) -> None:
        """Put straight lines through points, with round joints."""
        self._put(Path(points=tuple(points), stroke=stroke, stroke_width=width, dash=tuple(dash)))

    def area(self, points: Sequence[Place], *, fill: Colour) -> None:
        """Put the area that the points enclose."""
        self._put(Area(points=tuple(points), fill=fill))

    def circle(
        self, x: float, y: float, radius: float, *, fill: Colour, stroke: Colour, stroke_width: float = 1.5
    ) -> None:
        """Put a circle around (x, y)."""
        self._put(Circle(x=x, y=y, radius=radius, fill=fill, stroke=stroke, stroke_width=stroke_width))

    def text(
        self, x: float, y: float, content: str, *,
        size: float = SIZE, fill: Colour = INK, anchor: str = "start", bold: bool = False, upward: bool = False,
    ) -> None:  # fmt: skip
        """Put text whose baseline is at y."""
        self._put(Text(x=x, y=y, content=content, size=size, fill=fill, anchor=anchor, bold=bold, upward=upward))

    @contextmanager
    def group(self, *, x: float = 0.0, y: float = 0.0) -> Iterator[None]:
        """Move everything put inside by (x, y)."""
        before = self._x, self._y
        self._x, self._y = self._x + x, self._y + y
        yield
        self._x, self._y = before

    @contextmanager
    def about(self, hover: str = "", path: str = "", query: str = "") -> Iterator[None]:
        """Attach a datum to everything put inside: SVG has its text as a title, and its path and query as attributes."""
        before, about = self._about, About(hover=hover, path=path, query=query)
        self._about = about if about != About() else before
        yield
        self._about = before

    def include(self, drawing: Drawing, *, x: float = 0.0, y: float = 0.0) -> None:
        """Put all of another drawing with its upper left corner at (x, y)."""
        with self.group(x=x, y=y):
            for mark in drawing.marks:
                self._put(mark)

    def _put(self, mark: Mark) -> None:
        if isinstance(mark, (Path, Area)):
            points = tuple((x + self._x, y + self._y) for x, y in mark.points)
            self.marks.append(replace(mark, points=points, about=mark.about or self._about))
        else:
            self.marks.append(replace(mark, x=mark.x + self._x, y=mark.y + self._y, about=mark.about or self._about))

    def svg(self) -> str:
        """Return the drawing as an SVG document: the same drawing gives the same bytes."""
        from shardwise.present.charts.svg import render

        return render(self)

    def figure(self) -> Figure:
        """Return the drawing as a figure of matplotlib, of `shardwise[plot]`. Raises `InputError` where it is not installed."""
        from shardwise.present.charts.matplotlib_export import figure

        return figure(self)

    def _repr_html_(self) -> str:
        return self.svg()


def below(drawings: Sequence[Drawing]) -> Drawing:
    """Return drawings one under the other, under the title of the first."""
    first = drawings[0]
    page = Drawing(
        max(drawing.width for drawing in drawings),
        sum(drawing.height for drawing in drawings),
        first.title,
        first.description,
    )
    top = 0.0
    for drawing in drawings:
        page.include(drawing, y=top)
        top += drawing.height
    return page


MARGIN, ROW = 24.0, 22.0
LEFT, SAMPLE = 84.0, 30.0
SMALL = 11.0  # of text in a plot: none is smaller
TITLE = 18.0
HEADING = MARGIN + 56.0  # height of title and subtitle


def heading_lines(title: str, subtitle: str, width: float | None = None) -> tuple[list[str], list[str]]:
    """Return title and subtitle in lines of a page of `width` pixels, without it in a line each."""
    if width is None:
        return [title], [subtitle]
    return wrapped(title, (width - 2 * MARGIN) / BOLD, TITLE), wrapped(subtitle, width - 2 * MARGIN)


class Canvas(Drawing):
    """A drawing with a title and a subtitle in its upper left corner, at least as wide as they are.

    They are wrapped to `page_width` pixels, if it is given.
    """

    def __init__(
        self, width: float, height: float, title: str, subtitle: str, page_width: float | None = None
    ) -> None:  # fmt: skip
        titles, subtitles = heading_lines(title, subtitle, page_width)
        least = max(*(text_width(line, TITLE, bold=True) for line in titles), *map(text_width, subtitles))
        super().__init__(max(width, 2 * MARGIN + least), height, title, subtitle)
        y = MARGIN + 16.0
        for line in titles:
            self.text(MARGIN, y, line, size=TITLE, bold=True)
            y += ROW
        for line in subtitles:
            self.text(MARGIN, y, line)
            y += ROW

    def text_on_paper(
        self, x: float, y: float, content: str, *, size: float = SIZE, anchor: str = "start", bold: bool = False
    ) -> None:
        """Put text on the page's colour, where lines run through."""
        width = text_width(content, size, bold=bold)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor] * width
        self.rect(left - 2, y - 0.85 * size, width + 4, 1.1 * size, fill=PAPER)
        self.text(x, y, content, size=size, anchor=anchor, bold=bold)


def flowed(labels: Sequence[str], sample_width: float, right: float) -> Iterator[tuple[str, float, int]]:
    """Yield label, left edge and row of legend entries, wrapped at `right`; a sample of `sample_width` pixels precedes each."""
    x, row = MARGIN, 0
    for label in labels:
        width = sample_width + text_width(label)
        if x + width > right and x > MARGIN:
            x, row = MARGIN, row + 1
        yield label, x, row
        x += width


# Advance widths in units of the size, rounded up. Source: hmtx of DejaVu Sans 2.35, the widest of the fonts that pictures name.
WIDTHS = {
    0.28: "'ijl", 0.32: " ,.IJ·", 0.40: "()-/:;[\\]ft|", 0.45: "!r", 0.53: "\"*_`sz–", 0.56: "?Lc", 0.60: "Fkvxy",
    0.64: "$0123456789EPSTYabdeghnopqu{}µ", 0.70: "ABCKRVXZ", 0.80: "&DGHNOQU", 0.85: "#+<=>^w~×→≤", 1.00: "%@MWm…",
}  # fmt: skip
DEFAULT_WIDTH, SQUARE_WIDTH = 0.84, 1.05  # of any other character; of one that fills a square, as in Chinese
BOLD = 1.14  # of a bold text over a regular one; source: the medians of DejaVu Sans Bold and Regular
_WIDTH = {character: width for width, characters in WIDTHS.items() for character in characters}


def text_width(text: str, size: float = SIZE, *, bold: bool = False) -> float:
    """Return the pixels that a text takes at most in a usual sans serif.

    >>> round(text_width("bubble", 10.0), 3)
    34.8
    """
    return size * sum(map(_character_width, text)) * (BOLD if bold else 1.0)


def wrapped(text: str, width: float, size: float = SIZE) -> list[str]:
    """Return the text in lines of at most so many pixels, broken between words; a longer word is a line of its own.

    >>> wrapped("one two three", 60.0)
    ['one two', 'three']
    """
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _character_width(character: str) -> float:
    width = _WIDTH.get(character)
    if width is None:
        return SQUARE_WIDTH if east_asian_width(character) in "WF" else DEFAULT_WIDTH
    return width
