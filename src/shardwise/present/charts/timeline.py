"""Timelines: what rows of workers do over time, what is idle, and beside it a curve of each row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.present.charts.axis_scale import even_ticks
from shardwise.present.charts.drawing import (
    HEADING,
    MARGIN,
    ROW,
    SAMPLE,
    SIZE,
    SMALL,
    Canvas,
    Drawing,
    flowed,
    text_width,
)
from shardwise.present.charts.palette import EMPTY, FAINT, INK, PAPER, Colour, text_on
from shardwise.values import format_seconds

ROW_HEIGHT, ROW_GAP = 30.0, 6.0
THIN_HEIGHT, THIN_GAP = 12.0, 2.0
STRIPE = 3.0  # height of the line that tells the stages of a rank apart
WIDTHS = (480.0, 1400.0)  # of the plot: wide enough for the labels, between these
CURVE_WIDTH, CURVE_GAP, NOTE_WIDTH = 260.0, 28.0, 84.0
TICK_GAP = 24.0  # between the numbers along the axis, at least
IDLE, STRIPED = "idle", "a stripe: every other stage of a rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is done in a span: its colour, its label, whether a stripe runs through it."""

    fill: Colour
    label: str = ""
    striped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something done from start to end; several parts share its height, one over the other."""

    start: float
    end: float
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A worker's spans, a note behind them, and how much it holds: (when, how much from then on); empty: no curve.

    A row that is `thin` belongs to the one above it.
    """

    label: str
    note: str
    spans: tuple[Span, ...]
    curve: tuple[tuple[float, float], ...] = ()
    thin: bool = False

    @property
    def height(self) -> float:
        """Pixels."""
        return THIN_HEIGHT if self.thin else ROW_HEIGHT

    @property
    def gap(self) -> float:
        """Pixels above it."""
        return THIN_GAP if self.thin else ROW_GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart:
    """Rows from 0 to `end`; `legend` has colours and what they mean, `curve_title` what the curves count."""

    title: str
    subtitle: str
    end: float
    rows: tuple[Row, ...]
    legend: tuple[tuple[Colour, str], ...]
    curve_title: str


def draw_timeline(chart: TimelineChart) -> Drawing:
    """The chart: a row for each worker on the colour of nothing, which shows where it is idle; curves to the right."""
    return _Plot(chart).drawn()


class _Plot:
    def __init__(self, chart: TimelineChart) -> None:
        self.chart = chart
        self.left = MARGIN + max(text_width(row.label) for row in chart.rows) + 10.0
        self.width = _plot_width(chart)
        self.top = HEADING + 6.0
        self.bottom = self.top + sum(row.gap + row.height for row in chart.rows) - ROW_GAP
        self.curve_left = self.left + self.width + NOTE_WIDTH + CURVE_GAP
        self.most = max((held for row in chart.rows for _, held in row.curve), default=0.0) or 1.0
        right = self.curve_left + max(CURVE_WIDTH + 44.0, text_width(chart.curve_title))
        labels = [label for _, label in chart.legend] + [IDLE]
        labels += [STRIPED] if any(part.striped for span in _spans(chart.rows) for part in span.parts) else []
        self.entries = list(flowed(labels, SAMPLE + 24.0, right))
        height = self.bottom + 56.0 + ROW * (1 + self.entries[-1][2]) + MARGIN
        self.canvas = Canvas(right + MARGIN, height, chart.title, chart.subtitle)

    def x(self, seconds: float) -> float:
        return self.left + self.width * seconds / self.chart.end if self.chart.end else self.left

    def drawn(self) -> Drawing:
        self.canvas.text(self.curve_left, self.top - 8.0, self.chart.curve_title)
        top = self.top - ROW_GAP
        for row in self.chart.rows:
            self.row(row, top + row.gap)
            top += row.gap + row.height
        self.axis()
        self.legend()
        return self.canvas

    def row(self, row: Row, top: float) -> None:
        size, lower = (SMALL, 4.0) if row.thin else (SIZE, 4.5)
        middle = top + row.height / 2 + lower
        self.canvas.text(self.left - 10.0, middle, row.label, size=size, anchor="end")
        self.canvas.rect(self.left, top, self.width, row.height, fill=EMPTY)
        for span in row.spans:
            self.span(span, top, row.height, stroke=None if row.thin else PAPER)
        self.canvas.rect(self.left, top, self.width, row.height, stroke=FAINT, stroke_width=0.6)
        self.canvas.text(self.left + self.width + 8.0, middle, row.note, size=size)
        if row.curve:
            self.curve(row.curve, top)

    def span(self, span: Span, top: float, room: float, stroke: Colour | None) -> None:
        left, height = self.x(span.start), room / len(span.parts)
        width = self.x(span.end) - left
        for number, part in enumerate(span.parts):
            y, ink = top + number * height, text_on(part.fill)
            self.canvas.rect(left, y, width, height, fill=part.fill, stroke=stroke, stroke_width=0.6)
            if part.striped:
                self.stripe(left, y + height, width, ink)
            if part.label and text_width(part.label, SMALL) <= width:
                base = y + height / 2 + (2.0 if part.striped else 4.0)
                self.canvas.text(left + width / 2, base, part.label, size=SMALL, anchor="middle", fill=ink)

    def stripe(self, left: float, bottom: float, width: float, ink: Colour) -> None:
        """A line near the lower edge of a part."""
        inset = min(2.0, width / 4)
        self.canvas.rect(left + inset, bottom - STRIPE - 1.0, width - 2 * inset, STRIPE, fill=ink)

    def curve(self, curve: Sequence[tuple[float, float]], top: float) -> None:
        """What a row holds, in steps, on the scale of all rows; its most behind it."""
        base, scale = top + ROW_HEIGHT, ROW_HEIGHT / self.most
        points, held = [(self.curve_left, base)], 0.0
        for when, after in (*curve, (self.chart.end, curve[-1][1] if curve else 0.0)):
            x = self.curve_left + (CURVE_WIDTH * when / self.chart.end if self.chart.end else 0.0)
            points += [(x, base - held * scale), (x, base - after * scale)]
            held = after
        self.canvas.line(self.curve_left, base, self.curve_left + CURVE_WIDTH, base, stroke=FAINT)
        self.canvas.path(points, stroke=INK, width=1.4)
        most = max((value for _, value in curve), default=0.0)
        self.canvas.text(self.curve_left + CURVE_WIDTH + 8.0, base - ROW_HEIGHT / 2 + 4.5, f"{most:.4g}")

    def axis(self) -> None:
        most = int(self.width / (text_width(format_seconds(0.999 * self.chart.end)) + TICK_GAP))
        for tick in even_ticks(self.chart.end, most) if self.chart.end else ():
            self.canvas.line(self.x(tick), self.bottom, self.x(tick), self.bottom + 5.0, stroke=FAINT)
            self.canvas.text(self.x(tick), self.bottom + 20.0, format_seconds(tick), anchor="middle")

    def legend(self) -> None:
        fills = {label: fill for fill, label in self.chart.legend} | {IDLE: EMPTY, STRIPED: PAPER}
        for label, x, row in self.entries:
            y = self.bottom + 56.0 + ROW * row
            edge = FAINT if label in (IDLE, STRIPED) else None
            self.canvas.rect(x, y - 12.0, SAMPLE, 15.0, fill=fills[label], stroke=edge)
            if label == STRIPED:
                self.stripe(x, y + 3.0, SAMPLE, INK)
            self.canvas.text(x + SAMPLE + 8.0, y, label)


def _plot_width(chart: TimelineChart) -> float:
    """As wide as the narrowest span needs for its label, within limits."""
    needed = (
        max(text_width(part.label, SMALL) for part in span.parts) / (span.end - span.start)
        for span in _spans(chart.rows)
        if span.end > span.start
    )
    narrow, wide = WIDTHS
    wanted = 1.4 * chart.end * max(needed, default=0.0)
    return min(max(wanted, narrow), wide) if math.isfinite(wanted) else wide


def _spans(rows: Iterable[Row]) -> Iterable[Span]:
    return (span for row in rows for span in row.spans)
