"""Stacked bars, one under the other: bytes or seconds by name, the limit they are compared with, the legend below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.present.charts.axis_scale import SHOWN, even_ticks
from shardwise.present.charts.drawing import (
    HEADING,
    MARGIN,
    ROW,
    SMALL,
    Canvas,
    Drawing,
    below,
    flowed,
    text_width,
    wrapped,
)
from shardwise.present.charts.palette import GRID, INK, PAPER, by_name, part_colours, text_on

BAR_WIDTH, BAR_HEIGHT, LINE = 860.0, 30.0, 18.0  # LINE: of text over a bar
BEHIND = 90.0  # room behind the longest bar, for its total
LIMIT = (6, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedBar:
    """Values by name, one after the other."""

    label: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Stacked bars, and the limit that they are compared with, if there is one; `unit` is a key of `axis_scale.SHOWN`."""

    title: str
    subtitle: str
    bars: tuple[StackedBar, ...]
    limit: float = 0.0
    limit_label: str = ""
    unit: str = "B"

    def show(self, value: float) -> str:
        return SHOWN[self.unit](value)


def draw_bars(chart: BarChart) -> Drawing:
    """The chart as a drawing: under each label its bar with the total behind it, the limit as a line, the legend below."""
    return _BarPlot(chart).drawn()


def draw_bar_charts(charts: Sequence[BarChart]) -> Drawing:
    """Charts of bars as one drawing, one under the other."""
    return below([draw_bars(chart) for chart in charts])


class _BarPlot:
    def __init__(self, chart: BarChart) -> None:
        self.chart = chart
        every = dict.fromkeys(name for bar in chart.bars for name in bar.parts)
        self.names = [name for name in every if any(bar.parts.get(name, 0.0) > 0 for bar in chart.bars)]
        self.colours = {name: by_name(colour) for name, colour in part_colours(every).items()}
        self.labels = [wrapped(bar.label, BAR_WIDTH) for bar in chart.bars]
        heights = [LINE * len(lines) + BAR_HEIGHT + 14.0 for lines in self.labels]
        self.starts = list(accumulate(heights, initial=HEADING + ROW))
        self.top, self.bottom = self.starts[0], self.starts[-1]
        self.longest = max(chart.limit, *(bar.total for bar in chart.bars))
        self.entries = list(flowed(self.names, 38.0, MARGIN + BAR_WIDTH)) if len(every) > 1 else []
        num_rows = 1 + max((row for _, _, row in self.entries), default=-1)
        edges = [MARGIN + BAR_WIDTH + BEHIND, self.x(chart.limit) + 6 + text_width(chart.limit_label)]
        height = self.bottom + 34.0 + ROW * num_rows + MARGIN
        self.canvas = Canvas(max(edges) + MARGIN, height, chart.title, chart.subtitle)

    def x(self, value: float) -> float:
        return MARGIN + BAR_WIDTH * value / self.longest

    def drawn(self) -> Drawing:
        self.grid()
        tops = [start + LINE * len(lines) for start, lines in zip(self.starts, self.labels, strict=False)]
        for bar, top in zip(self.chart.bars, tops, strict=True):
            self.bar(bar, top)
        if self.chart.limit:
            self.limit()
        for bar, lines, top in zip(self.chart.bars, self.labels, tops, strict=True):
            for number, line in enumerate(reversed(lines)):
                self.canvas.text_on_paper(MARGIN, top - 5.0 - LINE * number, line)
            total = self.chart.show(bar.total)
            self.canvas.text_on_paper(self.x(bar.total) + 6, top + BAR_HEIGHT / 2 + 4.5, total, bold=True)
        self.legend()
        return self.canvas

    def grid(self) -> None:
        for tick in even_ticks(self.longest):
            x = self.x(tick)
            self.canvas.line(x, self.top, x, self.bottom, stroke=GRID)
            self.canvas.text(x, self.bottom + 16, self.chart.show(tick), anchor="middle" if tick else "start")

    def bar(self, bar: StackedBar, top: float) -> None:
        """The parts from the left, each with its value where there is room."""
        end = 0.0
        for name in self.names:
            value, fill = bar.parts.get(name, 0.0), self.colours[name]
            left, width = self.x(end), self.x(value) - MARGIN
            end += value
            if value <= 0:
                continue
            self.canvas.rect(left, top, width, BAR_HEIGHT, fill=fill, stroke=PAPER, stroke_width=1.0)
            shown = self.chart.show(value)
            if text_width(shown, SMALL) + 6 <= width and len(self.names) > 1:
                middle, base = left + width / 2, top + BAR_HEIGHT / 2 + 4.0
                self.canvas.text(middle, base, shown, size=SMALL, anchor="middle", fill=text_on(fill))

    def limit(self) -> None:
        x = self.x(self.chart.limit)
        self.canvas.path([(x, self.top - 18), (x, self.bottom)], stroke=INK, width=1.5, dash=LIMIT)
        self.canvas.text(x + 6, self.top - 8, self.chart.limit_label)

    def legend(self) -> None:
        for name, left, row in self.entries:
            y = self.bottom + 34.0 + ROW * row
            self.canvas.rect(left, y, 14, 14, fill=self.colours[name], radius=2)
            self.canvas.text(left + 20, y + 11.5, name)
