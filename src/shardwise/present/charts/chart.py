"""Charts as values: panels, their axes with ticks as texts, and marks in the coordinates of the axes.

A chart is plain data: `draw_chart` renders it, and `shardwise figures --json` prints it. Colours are names of `palette.by_name`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from shardwise.present.charts.axis_ticks import FORMATS, even_ticks, log_ticks, round_ends, tick_sets
from shardwise.present.charts.palette import by_name, part_colours

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_TICKS = 8  # of a linear axis
LINEAR_HEADROOM, LOG_HEADROOM = 1.05, 1.15  # between the largest value and the end of the axis, as factors

Pairs = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Category:
    """A named place of an axis: the k-th reaches from k to k + 1. `lines` stand under a column, or to the right of a row.

    A `thin` row belongs to the one above it.
    """

    label: str
    lines: tuple[str, ...] = ()
    thin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A linear, logarithmic or categorical axis; `unit` is a key of `FORMATS`, "" for decimal prefixes.

    Without `ends` and `ticks` the panel chooses them so that its marks fit; () is no ticks. Categories are written outside of the
    plot: in `side` "top" above it, in "over" each above its row; `small` in the small size.
    """

    title: str = ""
    unit: str = ""
    log: bool = False
    categories: tuple[Category, ...] = ()
    ends: tuple[float, float] | None = None
    ticks: tuple[tuple[float, str], ...] | None = None
    side: Literal["outside", "top", "over"] = "outside"
    small: bool = False

    @property
    def domain(self) -> tuple[float, float]:
        """The values at both ends."""
        return (0.0, float(len(self.categories))) if self.categories else self.ends or (0.0, 1.0)

    def format(self, value: float) -> str:
        """Return a value as text, in the unit of the axis."""
        return FORMATS[self.unit](value)

    def position(self, value: float) -> float:
        """Return where a value lies, from 0 to 1."""
        low, high = self.domain
        return math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)

    def fitted(self, values: Sequence[float], headroom: float = 1.0) -> Axis:
        """Return the axis with ends that hold all values, and ticks; a logarithmic one leaves `headroom`, as a factor."""
        if self.categories or (self.ends and self.ticks is not None):
            return self
        ends = self.ends
        if ends is None:
            highest = max(values, default=1.0)
            linear = (0.0, highest * LINEAR_HEADROOM or 1.0)
            ends = round_ends(min(values) / headroom, highest * headroom) if self.log and values else linear
        places = log_ticks(*ends) if self.log else even_ticks(ends[1], MAX_TICKS, ends[0])
        ticks = tuple((place, self.format(place)) for place in places) if self.ticks is None else self.ticks
        return replace(self, ends=ends, ticks=ticks)

    def tick_sets(self) -> tuple[tuple[tuple[float, str], ...], ...]:
        """Return the ticks, and below them fewer for narrower plots: the finest that have room are drawn."""
        if not self.ticks:
            return ()
        fewer = tick_sets(*self.domain, MAX_TICKS, log=self.log)
        is_alone = len(self.ticks) == 1
        texts = (tuple((place, self.format(place)) for place in places) for places in fewer)
        return self.ticks, *(ticks for ticks in texts if is_alone or len(ticks) < len(self.ticks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """Part of a picture with a text beside the pointer.

    `hover` is the text beside the pointer, `path` the place of its number in the payload, `query` the state that a click takes.
    """

    hover: str = ""
    path: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Element):
    """Points joined by straight lines; a `reference` is thin, dark and dashed, as what other marks are compared with.

    In a `row` of a categorical y axis values reach from 0 to the largest of all such curves.
    """

    points: Pairs
    label: str = ""
    colour: str = ""  # "": the next one
    reference: bool = False
    row: int | None = None
    kind: Literal["Curve"] = "Curve"


Shape = Literal["circle", "dot", "disc", "ring", "triangle", "cross"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points(Element):
    """Points with one label, each with its text, if there are `texts`; a `letter` stands for the label in the plot.

    The area of a point is its `share` of a sum. A "dot" is one of a crowd, a "disc" stands out, a "ring" is around other points.
    """

    points: Pairs
    label: str = ""
    colour: str = ""
    texts: tuple[str, ...] = ()
    letter: str = ""
    share: float = 0.0
    shape: Shape = "circle"
    kind: Literal["Points"] = "Points"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band(Element):
    """Area between two lines over the same x: (x, low, high)."""

    edges: tuple[tuple[float, float, float], ...]
    label: str = ""
    colour: str = "empty"
    kind: Literal["Band"] = "Band"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleLine(Element):
    """A line across the plot at one value of an axis; a `limit` is dashed and stands in the legend or over the plot."""

    at: float
    axis: Literal["x", "y"] = "x"
    label: str = ""
    limit: bool = False
    kind: Literal["RuleLine"] = "RuleLine"


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart(Element):
    """A named part of a bar."""

    name: str
    value: float
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBars:
    """A bar for each category, its parts one after the other; where categories are rows, bars lie."""

    bars: tuple[tuple[BarPart, ...], ...]
    totals: bool = True  # are written at the ends of bars
    kind: Literal["StackedBars"] = "StackedBars"

    @classmethod
    def of(cls, bars: Sequence[Mapping[str, float]], *, totals: bool = True) -> StackedBars:
        """Return bars of values by name; names have the colours of their terms."""
        colours = part_colours(dict.fromkeys(name for bar in bars for name in bar))
        parts = (
            tuple(BarPart(name=name, value=value, colour=colours[name]) for name, value in bar.items()) for bar in bars
        )
        return cls(bars=tuple(parts), totals=totals)

    @property
    def sums(self) -> tuple[float, ...]:
        """The length of each bar."""
        return tuple(sum(part.value for part in bar) for bar in self.bars)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Element):
    """A cell of a table: its lines of text, and how much of it is filled. `new` has a thick edge, `ringed` a line inside."""

    row: int
    column: int
    colour: str
    lines: tuple[str, ...] = ()
    share: float = 1.0
    new: bool = False
    ringed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells of rows and columns; pieces that columns hold are `inset` from their edges."""

    cells: tuple[Cell, ...]
    inset: bool = False
    kind: Literal["Cells"] = "Cells"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span(Element):
    """Interval of a row from `start` to `end`, in the k-th of n lanes (`lane`); a stripe tells spans of one colour apart."""

    row: int
    start: float
    end: float
    colour: str
    text: str = ""
    lane: tuple[int, int] = (0, 1)
    striped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Spans of all rows; the rest of a row is idle."""

    spans: tuple[Span, ...]
    kind: Literal["Spans"] = "Spans"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanEdges:
    """Starts of spans as lines over other marks, with the texts of the spans on the grounds that `colour` names."""

    spans: tuple[Span, ...]
    kind: Literal["SpanEdges"] = "SpanEdges"


@dataclass(frozen=True, slots=True, kw_only=True)
class PayloadMark(Element):
    """Values at `source` in the answer of the page, which draws them from there; a drawing leaves them out.

    The `spans` of a row are (start, end, term, busy share); its `curve` is (seconds, value from then on), filled, on the scale of
    all rows; `cells` are parts of an array with their ranks, and `dims` the indices of those that are split down and across.
    """

    source: str
    form: Literal["spans", "curve", "cells"]
    row: int = 0
    dims: tuple[int | None, int | None] = (None, None)
    kind: Literal["PayloadMark"] = "PayloadMark"


Mark = StackedBars | Curve | Points | Band | Cells | Spans | SpanEdges | PayloadMark | RuleLine


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    """A sample of a mark and its meaning."""

    label: str
    colour: str
    sample: (
        Literal["box", "line", "reference", "limit", "band", "letter", "idle", "stripe", "scale", "point"] | Shape
    ) = "box"
    letter: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Marks on two axes; panels one under the other with the same x axis share its labels.

    `size` is that of the plot in pixels, along a categorical axis that of a category without its text; `gap` lies between rows.
    A panel `beside` stands to the right of the one before it.
    """

    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    title: str = ""
    caption: str = ""
    size: tuple[float, float] = (640.0, 420.0)
    gap: float = 0.0
    beside: bool = False

    def __post_init__(self) -> None:
        """Choose colours, and ends and ticks of axes."""
        object.__setattr__(self, "marks", tuple(_coloured(self.marks)))
        object.__setattr__(self, "x", self.x.fitted(list(self.spanned("x"))))
        object.__setattr__(self, "y", self.y.fitted(list(self.spanned("y")), LOG_HEADROOM))

    def spanned(self, axis: Literal["x", "y"]) -> Iterator[float]:
        """Yield the values of all marks along an axis."""
        index = "xy".index(axis)
        for mark in self.marks:
            match mark:
                case Curve() | Points():
                    if not (isinstance(mark, Curve) and mark.row is not None and axis == "y"):
                        yield from (point[index] for point in mark.points)
                case Band():
                    yield from (value for x, *ends in mark.edges for value in ((x,), ends)[index])
                case RuleLine():
                    yield from (mark.at,) if mark.axis == axis else ()
                case StackedBars():
                    yield from () if (self.x, self.y)[index].categories else mark.sums
                case Spans():
                    yield from (value for span in mark.spans for value in ((span.start, span.end), (span.row,))[index])
                case Cells():
                    yield from (float((cell.column, cell.row)[index]) for cell in mark.cells)

    def legend(self) -> Iterator[LegendEntry]:
        """Yield an entry for each labelled mark, and for the parts of bars where they have several."""
        order = (StackedBars, Curve, Band, Points, RuleLine)
        for mark in sorted(
            (mark for mark in self.marks if isinstance(mark, order)), key=lambda mark: order.index(type(mark))
        ):
            if isinstance(mark, StackedBars):
                parts = {part.name: part.colour for bar in mark.bars for part in bar}
                there = {part.name for bar in mark.bars for part in bar if part.value > 0}
                has_several = len(parts) > 1
                yield from (
                    LegendEntry(label=name, colour=parts[name]) for name in parts if has_several and name in there
                )
            elif mark.label and isinstance(mark, RuleLine) and mark.axis == "y":
                yield LegendEntry(label=mark.label, colour="ink", sample="limit")
            elif mark.label and not isinstance(mark, RuleLine) and getattr(mark, "row", None) is None:
                yield LegendEntry(
                    label=mark.label, colour=mark.colour, sample=_sample(mark), letter=getattr(mark, "letter", "")
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Panels one under the other, or with `wrap` side by side and wrapped as text is; `note` says what texts in them mean.

    The legend of a panel's marks stands beside it; `legend` has what the marks do not say.
    """

    title: str
    subtitle: str
    panels: tuple[Panel, ...]
    legend: tuple[LegendEntry, ...] = ()
    note: str = ""
    wrap: bool = False


def _sample(mark: Curve | Band | Points) -> Literal["reference", "line", "band", "letter", "point"] | Shape:
    if isinstance(mark, Curve):
        return "reference" if mark.reference else "line"
    if isinstance(mark, Band):
        return "band"
    return "letter" if mark.letter else "point" if mark.shape == "circle" else mark.shape


def _coloured(marks: Sequence[Mark]) -> Iterator[Mark]:
    """Yield the marks; curves without a colour get those that no other has, points without one count for themselves."""
    used_colours = {by_name(mark.colour) for mark in marks if isinstance(mark, Curve) and mark.colour}
    free = (name for name in map("series:{}".format, count()) if by_name(name) not in used_colours)
    num_curves = sum(isinstance(mark, Curve) for mark in marks)
    next_points = 0
    for mark in marks:
        if isinstance(mark, Curve) and not mark.colour:
            yield replace(mark, colour="ink" if mark.reference else next(free))
        elif isinstance(mark, Points) and not mark.colour:
            yield replace(mark, colour=f"series:{num_curves if mark.letter else next_points}")
            next_points += not mark.letter
        else:
            yield mark
