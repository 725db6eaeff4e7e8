"""Stacked bars, one under the other: bytes or seconds by name, the limit they are compared with, the legend below."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.draw.canvas import CHARACTER, GRID, MARGIN, ROW, SIZE, Canvas, text_width
from shardwise.draw.scales import even_ticks
from shardwise.draw.svg import INK, PAPER, colour
from shardwise.units import format_bytes, format_seconds

BAR_WIDTH, BAR_HEIGHT = 860.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Values by name, one after the other."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Stacked bars of bytes ("B") or seconds ("s"), and the limit that they are compared with, if there is one."""

    title: str
    subtitle: str
    bars: tuple[Bar, ...]
    limit: float = 0.0
    limit_label: str = ""
    unit: str = "B"

    def show(self, value: float) -> str:
        return format_seconds(value) if self.unit == "s" else format_bytes(value)


def draw_bars(chart: BarChart) -> str:
    """The chart as an SVG: under each label its bar with the total behind it, the limit as a line, the legend below."""
    return _BarPlot(chart).drawn().render()


def draw_bar_charts(charts: Sequence[BarChart]) -> str:
    """Charts of bars as one SVG, one under the other."""
    drawn = [_BarPlot(chart).drawn() for chart in charts]
    canvas = Canvas(max(one.width for one in drawn), sum(one.height for one in drawn), charts[0].title)
    for one, top in zip(drawn, accumulate((one.height for one in drawn), initial=0.0), strict=False):
        canvas.include(one, y=top)
    return canvas.render()


class _BarPlot:
    def __init__(self, chart: BarChart) -> None:
        self.chart = chart
        self.names = [name for name in chart.bars[0].parts if any(bar.parts.get(name, 0.0) > 0 for bar in chart.bars)]
        self.colours = {name: colour(index) for index, name in enumerate(chart.bars[0].parts)}
        self.labels = [textwrap.wrap(bar.label, int(BAR_WIDTH / (CHARACTER * SIZE))) or [""] for bar in chart.bars]
        heights = [18.0 * len(lines) + BAR_HEIGHT + 14.0 for lines in self.labels]
        self.starts = list(accumulate(heights, initial=MARGIN + 56.0 + ROW))
        self.top, self.bottom = self.starts[0], self.starts[-1]
        self.longest = max(chart.limit, *(bar.total for bar in chart.bars))
        self.entries = list(_flow(self.names, MARGIN + BAR_WIDTH))
        num_rows = 1 + max((row for _, _, row in self.entries), default=0)
        edges = [MARGIN + BAR_WIDTH + 90.0, self.x(chart.limit) + 6 + text_width(chart.limit_label)]
        edges += [MARGIN + text_width(chart.title, 19.0), MARGIN + text_width(chart.subtitle)]
        self.canvas = Canvas(max(edges) + MARGIN, self.bottom + 34.0 + ROW * num_rows + MARGIN, chart.title)

    def x(self, value: float) -> float:
        return MARGIN + BAR_WIDTH * value / self.longest

    def drawn(self) -> Canvas:
        self.canvas.heading(self.chart.title, self.chart.subtitle)
        self.grid()
        tops = [start + 18.0 * len(lines) for start, lines in zip(self.starts, self.labels, strict=False)]
        for bar, top in zip(self.chart.bars, tops, strict=True):
            self.bar(bar, top)
        if self.chart.limit:
            self.limit()
        for bar, lines, top in zip(self.chart.bars, self.labels, tops, strict=True):
            for number, line in enumerate(reversed(lines)):
                _on_white(self.canvas, line, MARGIN, top - 9.5 - 18 * number)
            total = self.chart.show(bar.total)
            _on_white(self.canvas, total, self.x(bar.total) + 6, top + BAR_HEIGHT / 2, weight="bold")
        self.legend()
        return self.canvas

    def grid(self) -> None:
        for tick in even_ticks(self.longest):
            x = self.x(tick)
            self.canvas.line(x, self.top, x, self.bottom, stroke=GRID)
            self.canvas.text(x, self.bottom + 16, self.chart.show(tick), anchor="middle" if tick else "start")

    def bar(self, bar: Bar, top: float) -> None:
        """The parts from the left, each with its bytes where they have room."""
        end = 0.0
        for name in self.names:
            value = bar.parts.get(name, 0.0)
            left, width = self.x(end), self.x(value) - MARGIN
            end += value
            if value <= 0:
                continue
            self.canvas.rect(left, top, width, BAR_HEIGHT, fill=self.colours[name], stroke=PAPER, stroke_width=0.75)
            shown = self.chart.show(value)
            if text_width(shown, 12.0) + 4 <= width:
                self.canvas.text(left + width / 2, top + BAR_HEIGHT / 2 + 4.2, shown, size=12, anchor="middle")

    def limit(self) -> None:
        x = self.x(self.chart.limit)
        self.canvas.polyline([(x, self.top - 18), (x, self.bottom)], stroke=INK, stroke_width=1.5, dash="6 4")
        self.canvas.text(x + 6, self.top - 8, self.chart.limit_label)

    def legend(self) -> None:
        for name, left, row in self.entries:
            y = self.bottom + 34.0 + ROW * row
            self.canvas.rect(left, y, 14, 14, fill=self.colours[name], radius=2)
            self.canvas.text(left + 20, y + 11.5, name)


def _on_white(canvas: Canvas, text: str, x: float, middle: float, weight: str = "normal") -> None:
    """Text on white, where the grid or the line of the capacity runs through."""
    canvas.rect(x - 2, middle - 9, text_width(text) + 4, 18, fill=PAPER)
    canvas.text(x, middle + 4.5, text, weight=weight)


def _flow(names: Sequence[str], right: float) -> Iterator[tuple[str, float, int]]:
    """Legend entries from left to right and from row to row: name, left edge, row."""
    x, row = MARGIN, 0
    for name in names:
        width = 20 + text_width(name) + 18
        if x + width > right and x > MARGIN:
            x, row = MARGIN, row + 1
        yield name, x, row
        x += width
