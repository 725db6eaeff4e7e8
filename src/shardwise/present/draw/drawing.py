"""A drawing as a value: rectangles, lines, areas, circles and texts in pixels, of which each backend makes its own picture.

`svg` writes SVG, `figure` makes a figure of matplotlib; nothing here or there knows what is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwise.present.draw.palette import INK, Colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Place = tuple[float, float]
SIZE = 13.0  # of text, in pixels


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

    def moved(self, x: float, y: float) -> Rect:
        return replace(self, x=self.x + x, y=self.y + y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """Straight lines through points; `dash` has the lengths of strokes and of what is left out between them."""

    points: tuple[Place, ...]
    stroke: Colour
    stroke_width: float
    dash: tuple[float, ...]

    def moved(self, x: float, y: float) -> Path:
        return replace(self, points=_moved(self.points, x, y))


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """What a closed line through points holds."""

    points: tuple[Place, ...]
    fill: Colour

    def moved(self, x: float, y: float) -> Area:
        return replace(self, points=_moved(self.points, x, y))


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    """A circle around (x, y)."""

    x: float
    y: float
    radius: float
    fill: Colour
    stroke: Colour
    stroke_width: float

    def moved(self, x: float, y: float) -> Circle:
        return replace(self, x=self.x + x, y=self.y + y)


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

    def moved(self, x: float, y: float) -> Text:
        return replace(self, x=self.x + x, y=self.y + y)


Mark = Rect | Path | Area | Circle | Text


class Drawing:
    """Marks on a page of `width` by `height` pixels, the later over the earlier; (0, 0) is the upper left corner.

    `title` and `description` are the text alternative for readers who do not see the drawing.
    """

    def __init__(self, width: float, height: float, title: str, description: str = "") -> None:
        self.width, self.height, self.title, self.description = width, height, title, description
        self.marks: list[Mark] = []
        self._x, self._y = 0.0, 0.0

    def rect(
        self, x: float, y: float, width: float, height: float, *,
        fill: Colour | None = None, stroke: Colour | None = None, stroke_width: float = 1.0, radius: float = 0.0,
    ) -> None:  # fmt: skip
        """A rectangle with its upper left corner at (x, y)."""
        self._put(
            Rect(
                x=x, y=y, width=width, height=height,
                fill=fill, stroke=stroke, stroke_width=stroke_width if stroke else 0.0, radius=radius,
            )
        )  # fmt: skip

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: Colour = INK, width: float = 1.0) -> None:
        """A straight line."""
        self.path([(x1, y1), (x2, y2)], stroke=stroke, width=width)

    def path(self, points: Sequence[Place], *, stroke: Colour, width: float, dash: Sequence[float] = ()) -> None:
        """Straight lines through points, with round joints."""
        self._put(Path(points=tuple(points), stroke=stroke, stroke_width=width, dash=tuple(dash)))

    def area(self, points: Sequence[Place], *, fill: Colour) -> None:
        """What the points enclose."""
        self._put(Area(points=tuple(points), fill=fill))

    def circle(
        self, x: float, y: float, radius: float, *, fill: Colour, stroke: Colour, stroke_width: float = 1.5
    ) -> None:
        """A circle around (x, y)."""
        self._put(Circle(x=x, y=y, radius=radius, fill=fill, stroke=stroke, stroke_width=stroke_width))

    def text(
        self, x: float, y: float, content: str, *,
        size: float = SIZE, fill: Colour = INK, anchor: str = "start", bold: bool = False, upward: bool = False,
    ) -> None:  # fmt: skip
        """Text whose baseline is at y."""
        self._put(Text(x=x, y=y, content=content, size=size, fill=fill, anchor=anchor, bold=bold, upward=upward))

    @contextmanager
    def group(self, *, x: float = 0.0, y: float = 0.0) -> Iterator[None]:
        """Everything put inside is moved by (x, y)."""
        before = self._x, self._y
        self._x, self._y = self._x + x, self._y + y
        yield
        self._x, self._y = before

    def include(self, other: Drawing, *, x: float = 0.0, y: float = 0.0) -> None:
        """Put all of another drawing with its upper left corner at (x, y)."""
        with self.group(x=x, y=y):
            for mark in other.marks:
                self._put(mark)

    def _put(self, mark: Mark) -> None:
        self.marks.append(mark.moved(self._x, self._y) if self._x or self._y else mark)

    def svg(self) -> str:
        """The drawing as an SVG document: the same drawing gives the same bytes."""
        from shardwise.present.draw.svg import render

        return render(self)

    def figure(self) -> Figure:
        """The drawing as a figure of matplotlib, of `shardwise[plot]`. Raises `InputError` where it is not installed."""
        from shardwise.present.draw.figure import figure

        return figure(self)

    def _repr_html_(self) -> str:
        return self.svg()


def below(drawings: Sequence[Drawing]) -> Drawing:
    """Drawings one under the other, under the title of the first."""
    first = drawings[0]
    page = Drawing(
        max(one.width for one in drawings), sum(one.height for one in drawings), first.title, first.description
    )
    top = 0.0
    for one in drawings:
        page.include(one, y=top)
        top += one.height
    return page


def _moved(points: Sequence[Place], x: float, y: float) -> tuple[Place, ...]:
    return tuple((a + x, b + y) for a, b in points)
