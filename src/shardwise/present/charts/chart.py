"""Charts as values: panels, their axes with ticks as texts, and marks in the coordinates of the axes.

A chart is plain data: `draw_chart` renders it, and `shardwise figures --json` prints it. Colours are names of `palette.by_name`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from shardwise.present.charts.drawing import SMALL, text_width
from shardwise.present.charts.palette import by_name, part_colours
from shardwise.values import format_bytes, format_quantity, format_seconds, format_usd

FORMATS: Mapping[str, Callable[[float], str]] = {
    "": format_quantity,
    "s": format_seconds,
    "B": format_bytes,
    "$": format_usd,
    "%": lambda value: f"{100 * value:.3g}%",
    "x": lambda value: f"{value:.3g}",
}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_TICKS = 8  # of a linear axis
LINEAR_HEADROOM, LOG_HEADROOM = 1.05, 1.15  # between the largest value and the end of the axis, as factors
MAX_DECADES = 10  # that are ticks of one axis

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
        places = log_ticks(*ends) if self.log else even_ticks(ends[1], MAX_TICKS)
        ticks = tuple((place, self.format(place)) for place in places) if self.ticks is None else self.ticks
        return replace(self, ends=ends, ticks=ticks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A part of a picture that a reader may point at.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Points(Element):
    """Points with one label, each with its text, if there are `texts`; a `letter` stands for the label in the plot.

    The area of a point is its `share` of a sum.
    """

    points: Pairs
    label: str = ""
    colour: str = ""
    texts: tuple[str, ...] = ()
    letter: str = ""
    share: float = 0.0
    kind: Literal["Points"] = "Points"


@dataclass(frozen=True, slots=True, kw_only=True)
class Band(Element):
    """The area between two lines over the same x: (x, low, high)."""

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
    """From `start` to `end` of a row; `lane` (k, n) is the k-th of n sharing its height; a stripe tells equal colours apart."""

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


Mark = StackedBars | Curve | Points | Band | Cells | Spans | RuleLine


@dataclass(frozen=True, slots=True, kw_only=True)
class LegendEntry:
    """A sample of a mark and its meaning."""

    label: str
    colour: str
    sample: Literal["box", "line", "reference", "limit", "band", "point", "letter", "idle", "stripe", "scale"] = "box"
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
                    yield from (value for one in mark.spans for value in ((one.start, one.end), (one.row,))[index])
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
                several = len(parts) > 1
                yield from (LegendEntry(label=name, colour=parts[name]) for name in parts if several and name in there)
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


def _sample(mark: Curve | Band | Points) -> Literal["reference", "line", "band", "letter", "point"]:
    if isinstance(mark, Curve):
        return "reference" if mark.reference else "line"
    return "band" if isinstance(mark, Band) else "letter" if mark.letter else "point"


def _coloured(marks: Sequence[Mark]) -> Iterator[Mark]:
    """Yield the marks; curves without a colour get those that no other has, points without one count for themselves."""
    taken = {by_name(mark.colour) for mark in marks if isinstance(mark, Curve) and mark.colour}
    free = (name for name in map("series:{}".format, count()) if by_name(name) not in taken)
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


def curve_chart(
    title: str, subtitle: str, x: Axis, y: Axis, marks: Iterable[Mark], height: float = 420.0
) -> Chart:  # fmt: skip
    """Return a chart of one panel with numbers on both axes."""
    return Chart(title=title, subtitle=subtitle, panels=(Panel(x=x, y=y, marks=tuple(marks), size=(640.0, height)),))


def bar_chart(
    title: str, subtitle: str, bars: Mapping[str, Mapping[str, float]], *, unit: str = "B",
    limit: float = 0.0, limit_label: str = "",
) -> Chart:  # fmt: skip
    """Return a chart of lying bars by label, in a unit of `FORMATS`, with the limit that they are compared with, if any."""
    marks = StackedBars.of(tuple(bars.values()))
    longest = max(limit, *marks.sums)
    ticks = tuple((tick, FORMATS[unit](tick)) for tick in even_ticks(longest))
    panel = Panel(
        x=Axis(unit=unit, ends=(0.0, longest), ticks=ticks),
        y=Axis(categories=tuple(Category(label=label) for label in bars), side="over"),
        marks=(marks, *([RuleLine(at=limit, label=limit_label, limit=True)] if limit else [])),
        size=(860.0, 30.0), gap=14.0,
    )  # fmt: skip
    return Chart(title=title, subtitle=subtitle, panels=(panel,))


def categories(labels: Iterable[str]) -> tuple[Category, ...]:
    """Return categories without further lines."""
    return tuple(Category(label=label) for label in labels)


def frames_chart(
    title: str, subtitle: str, frames: Mapping[str, Sequence[Cell]], *, columns: Sequence[str], rows: Sequence[str], note: str
) -> Chart:  # fmt: skip
    """Return frames by title, side by side: the pieces that columns hold. Without names of `rows` there are as many as pieces."""
    num_rows = max(1 + cell.row for cells in frames.values() for cell in cells)
    x, y = (Axis(categories=categories(names), small=True) for names in (columns, rows or [""] * num_rows))
    panels = (
        Panel(x=x, y=y, marks=(Cells(cells=tuple(cells), inset=True),), title=frame, size=(30.0, 24.0))
        for frame, cells in frames.items()
    )
    return Chart(title=title, subtitle=subtitle, panels=tuple(panels), note=note, wrap=True)


TIMELINE_WIDTHS = (480.0, 1400.0)  # wide enough for texts in spans, between these
HELD_WIDTH = 260.0  # of the curves beside a timeline
TICK_SPACE = 24.0  # between texts along the axis


def timeline(
    title: str, subtitle: str, end: float, rows: Sequence[Category], spans: Sequence[Span], held: Mapping[int, Pairs], *,
    held_title: str, legend: Iterable[LegendEntry],
) -> Chart:  # fmt: skip
    """Return spans of rows from 0 to `end` seconds, and beside each row what it `held`: (when, value from then on)."""
    widths = (
        1.4 * end * text_width(span.text, SMALL) / (span.end - span.start) for span in spans if span.end > span.start
    )
    narrow, wide = TIMELINE_WIDTHS
    width = min(max(narrow, max(widths, default=narrow)), wide)
    most_ticks = int(width / (text_width(format_seconds(0.999 * end)) + TICK_SPACE))
    ticks = tuple((place, format_seconds(place)) for place in even_ticks(end, most_ticks)) if end else ()
    ends = (0.0, end or 1.0)
    curves = (
        Curve(points=_steps(values, ends[1]), label=f"{max(value for _, value in values):.4g}", colour="ink", row=row)
        for row, values in held.items()
    )
    unlabelled = tuple(Category(label="", thin=row.thin) for row in rows)
    panels = (
        Panel(
            x=Axis(unit="s", ends=ends, ticks=ticks), y=Axis(categories=tuple(rows)), marks=(Spans(spans=tuple(spans)),),
            size=(width, 30.0), gap=6.0,
        ),
        Panel(
            x=Axis(ends=ends, ticks=()), y=Axis(categories=unlabelled), marks=tuple(curves), title=held_title,
            size=(HELD_WIDTH, 30.0), gap=6.0, beside=True,
        ),
    )  # fmt: skip
    return Chart(title=title, subtitle=subtitle, panels=panels, legend=tuple(legend))


def _steps(values: Pairs, end: float) -> Pairs:
    """The corners of values that hold from a time on: from 0 before the first to the last at the end."""
    corners, last = [(0.0, 0.0)], 0.0
    for when, value in values:
        corners += [(when, last), (when, value)]
        last = value
    return *corners, (end, last)


COLUMN_SIZE = (84.0, 130.0)
ABOVE, BELOW = 22.0, 8.0  # pixels over the highest value, for its text, and on a logarithmic axis under the lowest
COLUMN_TICKS = 5
DECADE = 10.0  # values that span as much are drawn on a logarithmic axis
Values = Sequence[float | None]


def column_panel(
    x: Axis, title: str, unit: str, parts: Mapping[str, Values], *, joined: bool = True, limit: float | None = None,
    reference: Values = (), dashed: str = "",
) -> Panel:  # fmt: skip
    """Return a panel of values for each column of a categorical axis, in a unit of `FORMATS`; None is where there is none.

    Several parts are stacked; one is drawn as points, `joined` where columns have an order, on a logarithmic axis where they span
    a decade. `dashed` names what they are compared with: a `limit` for all columns, or `reference` values, one for each.
    """
    columns = [[values[number] for values in parts.values()] for number in range(len(x.categories))]
    sums = [sum(value or 0.0 for value in column) if any(v is not None for v in column) else None for column in columns]
    bounds = [value for value in (*sums, *reference, limit) if value]
    most, least = max(bounds, default=1.0), min(bounds, default=1.0)
    marks: list[Mark] = [RuleLine(at=limit, axis="y", label=dashed, limit=True)] if limit else []
    if len(parts) > 1:
        bars = [{name: values[number] or 0.0 for name, values in parts.items()} for number in range(len(columns))]
        marks.insert(0, StackedBars.of(bars, totals=unit != "%"))
    else:
        points, compared = (
            tuple((k + 0.5, value) for k, value in enumerate(values) if value is not None)
            for values in (sums, reference)
        )
        marks += [Curve(points=points, colour="series:0")] if joined and len(points) > 1 else []
        marks += [Curve(points=compared, label=dashed, reference=True)] if compared else []
        marks.append(Points(points=points, colour="series:0", texts=tuple(FORMATS[unit](value) for _, value in points)))
    return Panel(
        x=x, y=_column_axis(unit, least, most, log=len(parts) == 1 and most >= DECADE * least), title=title, marks=tuple(marks),
        size=COLUMN_SIZE,
    )  # fmt: skip


def _column_axis(unit: str, least: float, most: float, *, log: bool) -> Axis:
    """An axis with room for texts over its highest value."""
    height = COLUMN_SIZE[1]
    if not log:
        places, ends = even_ticks(most, COLUMN_TICKS), (0.0, most * height / (height - ABOVE))
    else:
        places, factor = log_ticks(least, most), most / least
        places = (
            places if len(places) <= COLUMN_TICKS else tuple(tick for tick in places if math.log10(tick).is_integer())
        )
        inner = height - ABOVE - BELOW
        ends = least / factor ** (BELOW / inner), most * factor ** (ABOVE / inner)
    return Axis(
        unit=unit, log=log, ends=ends, ticks=tuple((place, FORMATS[unit](place)) for place in places), small=True
    )


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Return powers of ten from `low` to `high`; 1, 2 and 5 times those where there are at most three decades.

    Where there are more than `MAX_DECADES`, every n-th of them, 1 among them.
    """
    span = math.log10(high) - math.log10(low)
    steps = (1, 2, 5) if span <= 3.0 + 1e-9 else (1,)
    every = math.ceil(span / MAX_DECADES)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    decades = [decade for decade in range(first, last) if decade % every == 0]
    ticks = (float(f"{step}e{decade}") for decade in decades for step in steps)
    return tuple(tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))


def even_ticks(high: float, most: int = 10) -> tuple[float, ...]:
    """Return multiples of 1, 2 or 5 times a power of ten from 0 to `high`, at most `most` and one."""
    decade = math.floor(math.log10(high / most))
    step = next(s for s in (float(f"{m}e{decade}") for m in (1, 2, 5, 10)) if high / s <= most + 1e-9)
    return tuple(i * step for i in range(int(high / step + 1e-9) + 1))


def round_ends(low: float, high: float) -> tuple[float, float]:
    """Return the nearest 1, 2 or 5 times a power of ten that hold two values between them."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [float(f"{step}e{decade}") for decade in decades for step in (1, 2, 5)]
    start = max(step for step in steps if step <= low * (1 + 1e-9))
    return start, min(step for step in steps if step >= high * (1 - 1e-9) and step > start)
