"""Charts of the page as values in data coordinates; the page draws them at its width.

`Plot` has two axes with curves, points and limits; `Rows` has spans along one axis, such as terms of a bar and passes of a rank;
`ShardCells` has the parts of an array. Colours are terms of the palette, or classes of the page's style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


def padded_range(values: Sequence[float], *, log: bool = False, room: float = 0.06) -> tuple[float, float]:
    """Return the range of an axis that contains all values, with room at both ends.

    >>> padded_range([0.0, 10.0], room=0.1)
    (-1.0, 11.0)
    """
    low, high = min(values), max(values)
    if log:
        return low / (1 + 3 * room), high * (1 + 3 * room)
    margin = (high - low or abs(high) or 1.0) * room
    return low - margin, high + margin


class PlotAxis(NamedTuple):
    """An axis: its title, its range, and the unit of its ticks, as the page's `format.js` writes it."""

    title: str
    span: tuple[float, float]
    unit: str = ""
    log: bool = False


class PlotPoint(NamedTuple):
    """A point with its hover text; a click takes the `edit` of the address, or explains the number at `path`."""

    x: float
    y: float
    title: str
    edit: Mapping[str, str] | None = None
    path: str = ""
    shape: str = "circle"
    term: str = ""


class PlotPoints(NamedTuple):
    """Points of a class of the style sheet; `radius` in pixels."""

    style: str
    points: Sequence[PlotPoint]
    radius: float = 4.5

    def to_json(self) -> dict[str, Any]:
        """Return the marks as JSON: points without their empty fields."""
        points = [{name: value for name, value in point._asdict().items() if value} for point in self.points]
        return {"points": points, "style": self.style, "radius": self.radius}


class PlotCurve(NamedTuple):
    """Points joined by lines, of a class of the style sheet."""

    style: str
    points: Sequence[tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        """Return the curve as JSON."""
        return {"curve": [list(point) for point in self.points], "style": self.style}


class PlotLimit(NamedTuple):
    """A vertical dashed line with a text, or with `y` a text at a place."""

    x: float
    text: str
    y: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the limit as JSON."""
        return {"limit": self.x, "text": self.text, "y": self.y}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Marks on two axes; `label` is its text alternative, `height` is in pixels."""

    label: str
    x: PlotAxis
    y: PlotAxis
    marks: Sequence[PlotCurve | PlotPoints | PlotLimit]
    height: int = 280

    def to_json(self) -> dict[str, Any]:
        """Return the plot as JSON."""
        return {
            "kind": "plot", "label": self.label, "height": self.height, "x": self.x._asdict(), "y": self.y._asdict(),
            "marks": [mark.to_json() for mark in self.marks],
        }  # fmt: skip


class RowSpan(NamedTuple):
    """Interval from `start` to `end` in the colour of a term, with its hover text, a label, and the path of its number.

    `lane` of `lanes` is its place in the height of the row; a `solid` of False draws the outline alone.
    """

    start: float
    end: float
    term: str
    title: str
    label: str = ""
    path: str = ""
    lane: int = 0
    lanes: int = 1
    solid: bool = True


class SpanRow(NamedTuple):
    """Spans behind a label; `source` is the path of spans (start, end, term, busy share) in the answer.

    `edges` are passes (start, end, label, hover text, term of the ground) over the spans; `curve` is the path of (time, value).
    """

    label: str
    spans: Sequence[RowSpan] = ()
    height: int = 26
    source: str = ""
    edges: Sequence[tuple[float, float, str, str, str]] = ()
    curve: str = ""
    note: str = ""
    style: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of spans from 0 to `end`. `limit` is a dashed line with a text; `ticks` has a unit where an axis is drawn.

    `min_width` is in pixels: a wider figure scrolls. `mark` is the class of spans. Curves are on a scale up to `curve_end`.
    """

    label: str
    end: float
    rows: Sequence[SpanRow]
    limit: tuple[float, str] | None = None
    ticks: str = ""
    min_width: int = 280
    mark: str = "segment"
    style: str = ""
    curve_end: float = 0.0
    curve_limit: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the rows as JSON: spans as lists, without defaults at their end."""
        return {
            "kind": "rows", "label": self.label, "end": self.end, "limit": self.limit, "ticks": self.ticks, "mark": self.mark,
            "min_width": self.min_width, "style": self.style, "curve_end": self.curve_end,
            "curve_limit": self.curve_limit,
            "rows": [{name: value for name, value in row._asdict().items() if value or name == "label"}
                     | {"spans": [_trimmed(span) for span in row.spans]} for row in self.rows],
        }  # fmt: skip


def _trimmed(span: RowSpan) -> list[Any]:
    values = list(span)
    defaults = list(RowSpan._field_defaults.values())
    while defaults and values[-1] == defaults[-1]:
        values.pop()
        defaults.pop()
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCells:
    """The parts of an array, each with the ranks that hold it: `source` is the path of the holders in the answer.

    `down` and `across` are the indices of the dims that are split, with their names; None where none is.
    """

    label: str
    source: str
    down: tuple[int, str] | None
    across: tuple[int, str] | None

    def to_json(self) -> dict[str, Any]:
        """Return the cells as JSON."""
        return {"kind": "cells", "label": self.label, "source": self.source, "down": self.down, "across": self.across}


PageChart = Plot | Rows | ShardCells
