"""Charts of common forms: curves on two axes, lying bars, frames of pieces, timelines, and columns of values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from shardwise.present.charts.axis_ticks import FORMATS, even_ticks, log_ticks
from shardwise.present.charts.chart import (
    Axis,
    Category,
    Cell,
    Cells,
    Chart,
    Curve,
    LegendEntry,
    Mark,
    Pairs,
    Panel,
    Points,
    RuleLine,
    Span,
    Spans,
    StackedBars,
)
from shardwise.present.charts.drawing import SMALL, text_width
from shardwise.values import format_seconds


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


ROW_HEIGHT, ROW_GAP, LEAST_WIDTH = 26.0, 6.0, 280.0  # pixels


def row_chart(
    title: str, x: Axis, rows: Sequence[Category], marks: Iterable[Mark], *,
    size: tuple[float, float] = (LEAST_WIDTH, ROW_HEIGHT), gap: float = ROW_GAP, legend: Iterable[LegendEntry] = (),
) -> Chart:  # fmt: skip
    """Return a chart of lying bars or spans, a row for each category behind its label."""
    panel = Panel(x=x, y=Axis(categories=tuple(rows)), marks=tuple(marks), size=size, gap=gap)
    return Chart(title=title, subtitle="", panels=(panel,), legend=tuple(legend))


def length_axis(end: float, *, unit: str = "", ticks: bool = False) -> Axis:
    """Return an axis from 0 to `end`."""
    return Axis(unit=unit, ends=(0.0, end), ticks=None if ticks else ())


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
CURVES_WIDTH = 260.0  # of the curves beside a timeline
TICK_SPACE = 24.0  # between texts along the axis


def timeline(
    title: str, subtitle: str, end: float, rows: Sequence[Category], spans: Sequence[Span], in_flight: Mapping[int, Pairs], *,
    curves_title: str, legend: Iterable[LegendEntry],
) -> Chart:  # fmt: skip
    """Return spans of rows from 0 to `end` seconds, and beside each row what is `in_flight`: (when, value from then on)."""
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
        for row, values in in_flight.items()
    )
    unlabelled = tuple(Category(label="", thin=row.thin) for row in rows)
    panels = (
        Panel(
            x=Axis(unit="s", ends=ends, ticks=ticks), y=Axis(categories=tuple(rows)), marks=(Spans(spans=tuple(spans)),),
            size=(width, 30.0), gap=6.0,
        ),
        Panel(
            x=Axis(ends=ends, ticks=()), y=Axis(categories=unlabelled), marks=tuple(curves), title=curves_title,
            size=(CURVES_WIDTH, 30.0), gap=6.0, beside=True,
        ),
    )  # fmt: skip
    return Chart(title=title, subtitle=subtitle, panels=panels, legend=tuple(legend))


def _steps(values: Pairs, end: float) -> Pairs:
    """Return the corners of values that hold from a time on: from 0 before the first to the last at the end."""
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
    highest, lowest = max(bounds, default=1.0), min(bounds, default=1.0)
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
        x=x, y=_column_axis(unit, lowest, highest, log=len(parts) == 1 and highest >= DECADE * lowest), title=title,
        marks=tuple(marks), size=COLUMN_SIZE,
    )  # fmt: skip


def _column_axis(unit: str, lowest: float, highest: float, *, log: bool) -> Axis:
    """Return an axis with room for texts over its highest value."""
    height = COLUMN_SIZE[1]
    if not log:
        places, ends = even_ticks(highest, COLUMN_TICKS), (0.0, highest * height / (height - ABOVE))
    else:
        places, factor = log_ticks(lowest, highest), highest / lowest
        places = (
            places if len(places) <= COLUMN_TICKS else tuple(tick for tick in places if math.log10(tick).is_integer())
        )
        inner = height - ABOVE - BELOW
        ends = lowest / factor ** (BELOW / inner), highest * factor ** (ABOVE / inner)
    return Axis(
        unit=unit, log=log, ends=ends, ticks=tuple((place, FORMATS[unit](place)) for place in places), small=True
    )
