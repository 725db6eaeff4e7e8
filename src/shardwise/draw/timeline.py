"""Timelines: what rows of workers do over time, what is idle, and beside it a curve of each row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.draw.canvas import CHARACTER, MARGIN, SAMPLE, SIZE, Canvas, text_width
from shardwise.draw.scales import even_ticks
from shardwise.draw.svg import FAINT, INK, PAPER, colour, number

ROW_HEIGHT, ROW_GAP = 30.0, 6.0
THIN_HEIGHT, THIN_GAP = 9.0, 1.5
IDLE = "#d5d9de"
LABEL_SIZE, TEXT_SIZE, THIN_SIZE = 11.0, SIZE, 8.5  # of what is written in a span, beside a row and beside a thin one
WIDTHS = (480.0, 2400.0)  # of the plot: wide enough for the labels, between these
CURVE_WIDTH, CURVE_GAP, NOTE_WIDTH = 260.0, 28.0, 84.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something done from start to end; several parts share its height, one over the other. `fills` are numbers of colours."""

    start: float
    end: float
    fills: tuple[int, ...]
    labels: tuple[str, ...]


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
    legend: tuple[tuple[int, str], ...]
    curve_title: str


def draw_timeline(chart: TimelineChart) -> str:
    """The chart as an SVG: a row for each worker on grey, which shows through where it is idle; curves to the right."""
    return _Plot(chart).render()


class _Plot:
    def __init__(self, chart: TimelineChart) -> None:
        self.chart = chart
        self.left = MARGIN + max(text_width(row.label) for row in chart.rows) + 10.0
        self.width = _plot_width(chart)
        self.top = MARGIN + 62.0
        self.bottom = self.top + sum(row.gap + row.height for row in chart.rows) - ROW_GAP
        self.curve_left = self.left + self.width + NOTE_WIDTH + CURVE_GAP
        self.most = max((held for row in chart.rows for _, held in row.curve), default=0.0) or 1.0
        head = max(text_width(chart.title, 19.0), text_width(chart.subtitle), self._legend_width())
        right = max(self.curve_left + CURVE_WIDTH + 44.0, MARGIN + head)
        self.canvas = Canvas(right + MARGIN, self.bottom + 78.0 + MARGIN, chart.title)

    def _legend_width(self) -> float:
        return sum(SAMPLE + 24.0 + text_width(label) for _, label in (*self.chart.legend, (0, "idle")))

    def x(self, seconds: float) -> float:
        return self.left + self.width * seconds / self.chart.end if self.chart.end else self.left

    def render(self) -> str:
        self.canvas.heading(self.chart.title, self.chart.subtitle)
        self.canvas.text(self.curve_left, self.top - 8.0, self.chart.curve_title)
        top = self.top - ROW_GAP
        for row in self.chart.rows:
            self.row(row, top + row.gap)
            top += row.gap + row.height
        self.axis()
        self.legend()
        return self.canvas.render()

    def row(self, row: Row, top: float) -> None:
        size, lower = (THIN_SIZE, 3.0) if row.thin else (TEXT_SIZE, 4.5)
        middle = top + row.height / 2 + lower
        self.canvas.text(self.left - 10.0, middle, row.label, size=size, anchor="end")
        self.canvas.rect(self.left, top, self.width, row.height, fill=IDLE)
        for span in row.spans:
            self.span(span, top, row.height, stroke="none" if row.thin else PAPER)
        self.canvas.text(self.left + self.width + 8.0, middle, row.note, size=size)
        if row.curve:
            self.curve(row.curve, top)

    def span(self, span: Span, top: float, room: float, stroke: str) -> None:
        left, height = self.x(span.start), room / len(span.fills)
        width = self.x(span.end) - left
        for part, (fill, label) in enumerate(zip(span.fills, span.labels, strict=True)):
            y = top + part * height
            self.canvas.rect(left, y, width, height, fill=colour(fill), stroke=stroke, stroke_width=0.6)
            if label and text_width(label, LABEL_SIZE) <= width:
                self.canvas.text(left + width / 2, y + height / 2 + 4.0, label, size=LABEL_SIZE, anchor="middle")

    def curve(self, curve: Sequence[tuple[float, float]], top: float) -> None:
        """What a row holds, in steps, on the scale of all rows; its most behind it."""
        base, scale = top + ROW_HEIGHT, ROW_HEIGHT / self.most
        points, held = [(self.curve_left, base)], 0.0
        for when, after in (*curve, (self.chart.end, curve[-1][1] if curve else 0.0)):
            x = self.curve_left + (CURVE_WIDTH * when / self.chart.end if self.chart.end else 0.0)
            points += [(x, base - held * scale), (x, base - after * scale)]
            held = after
        self.canvas.line(self.curve_left, base, self.curve_left + CURVE_WIDTH, base, stroke=FAINT)
        self.canvas.polyline(points, stroke=INK, stroke_width=1.4)
        most = max((value for _, value in curve), default=0.0)
        self.canvas.text(self.curve_left + CURVE_WIDTH + 8.0, base - ROW_HEIGHT / 2 + 4.5, f"{most:.4g}")

    def axis(self) -> None:
        for tick in even_ticks(self.chart.end, 12) if self.chart.end else ():
            self.canvas.line(self.x(tick), self.bottom, self.x(tick), self.bottom + 5.0, stroke=FAINT)
            self.canvas.text(self.x(tick), self.bottom + 20.0, number(tick), anchor="middle")

    def legend(self) -> None:
        x, y = MARGIN, self.bottom + 56.0
        for fill, label in (*((colour(fill), label) for fill, label in self.chart.legend), (IDLE, "idle")):
            self.canvas.rect(x, y - 12.0, SAMPLE, 15.0, fill=fill)
            self.canvas.text(x + SAMPLE + 8.0, y, label)
            x += SAMPLE + 24.0 + text_width(label)


def _plot_width(chart: TimelineChart) -> float:
    """As wide as the narrowest span needs for its label, within limits."""
    needed = (
        max(CHARACTER * LABEL_SIZE * len(label) for label in span.labels) / (span.end - span.start)
        for span in _spans(chart.rows)
        if span.end > span.start
    )
    narrow, wide = WIDTHS
    wanted = 1.6 * chart.end * max(needed, default=0.0)
    return min(max(wanted, narrow), wide) if math.isfinite(wanted) else wide


def _spans(rows: Iterable[Row]) -> Iterable[Span]:
    return (span for row in rows for span in row.spans)
