"""Panels over the same columns: values as points or as stacked bars, one panel under the other, and text under each column.

Columns stand at even distances, so that each has room for its text: values that grow by a factor are on a logarithmic axis then,
and names stand as well as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from shardwise.present.charts.axis_scale import SHOWN, even_ticks, log_place, ticks
from shardwise.present.charts.drawing import HEADING, LEFT, MARGIN, ROW, SIZE, SMALL, Canvas, Drawing, text_width
from shardwise.present.charts.palette import BLUE, FAINT, GRID, INK, PAPER, by_name, part_colours

HEIGHT, HEAD = 130.0, 30.0  # of a panel, and of its title
LEAST_WIDTH, LINE = 84.0, 15.0  # of a column; of a line of text under it
ABOVE, BELOW = 22.0, 8.0  # pixels over the highest value, for its label, and on a logarithmic axis under the lowest
DASH, MARKED = (6, 4), (2, 3)
MOST_TICKS = 5
ENTRY = SIZE + 4.0  # height of a legend's entry
DECADE = 10.0  # values that span as much are drawn on a logarithmic axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A place on the shared axis: its name, and lines of text under it."""

    label: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Values for each column in a unit of `axis_scale.SHOWN`; None is where there is none.

    One part is drawn as points, joined where columns have an order; several are stacked. What they are compared with is `dashed`,
    its name: a `limit` for all columns, or `reference` values, one for each.
    """

    title: str
    unit: str
    parts: Mapping[str, tuple[float | None, ...]]
    joined: bool = True
    limit: float | None = None
    reference: tuple[float | None, ...] = ()
    dashed: str = ""

    def total(self, column: int) -> float | None:
        """The sum of a column's parts; None where none of them is there."""
        found = [values[column] for values in self.parts.values()]
        there = [value for value in found if value is not None]
        return sum(there) if there else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelChart:
    """Panels over columns; `mark` is the number of a column that a line goes through, with its label over the panels."""

    title: str
    subtitle: str
    axis_title: str
    columns: tuple[Column, ...]
    panels: tuple[Panel, ...]
    mark: int | None = None
    mark_label: str = ""


def draw_panels(chart: PanelChart) -> Drawing:
    """The chart as a drawing."""
    return _Panels(chart).drawn()


class _Panels:
    def __init__(self, chart: PanelChart) -> None:
        self.chart = chart
        texts = [text_width(line, SMALL) + 10 for one in chart.columns for line in one.lines]
        self.width = max([LEAST_WIDTH, *texts, *(text_width(one.label, bold=True) + 10 for one in chart.columns)])
        self.left = MARGIN + LEFT
        self.right = self.left + self.width * len(chart.columns)
        first = HEADING + (ROW if chart.mark is not None else 0.0)
        self.tops = list(accumulate([first + HEAD] + [HEIGHT + HEAD] * (len(chart.panels) - 1)))
        self.bottom = self.tops[-1] + HEIGHT
        self.legends = list(_legends(chart.panels))
        named = [text_width(name) for _, names in self.legends for name in names]
        edges = [self.right + MARGIN + 30 + max(named, default=0.0)]
        edges += [MARGIN + text_width(chart.axis_title)]
        edges += [] if chart.mark is None else [self.mark_left(chart.mark) + text_width(chart.mark_label)]
        lines = max((len(one.lines) for one in chart.columns), default=0)
        below = self.bottom + 22 + LINE * lines + ROW
        height = max(below, *(y + ENTRY * len(names) for y, names in self.legend_places())) + MARGIN
        self.canvas = Canvas(max(edges) + MARGIN, height, chart.title, chart.subtitle)

    def x(self, column: int) -> float:
        """The middle of a column."""
        return self.left + self.width * (column + 0.5)

    def mark_left(self, mark: int) -> float:
        """Where the label of the line through a column begins: beside it, on the left where there is room."""
        left = self.x(mark) - 6 - text_width(self.chart.mark_label)
        return left if left >= MARGIN else self.x(mark) + 6

    def drawn(self) -> Drawing:
        self.mark()
        for panel, top in zip(self.chart.panels, self.tops, strict=True):
            _Panel(self, panel, top).draw()
        self.columns()
        for (first, names), (y, _) in zip(self.legends, self.legend_places(), strict=True):
            self.legend(self.chart.panels[first], names, y)
        return self.canvas

    def legend_places(self) -> Iterator[tuple[float, list[str]]]:
        """How far down each legend begins: beside its panel, under the one before."""
        end = 0.0
        for first, names in self.legends:
            start = max(end, self.tops[first] + 10.0)
            yield start, names
            end = start + ENTRY * len(names)

    def legend(self, panel: Panel, names: Sequence[str], y: float) -> None:
        left, colours = self.right + MARGIN, {n: by_name(c) for n, c in part_colours(panel.parts).items()}
        for number, name in enumerate(names):
            middle = y + ENTRY * number
            if name == panel.dashed:
                self.canvas.path([(left, middle), (left + 18, middle)], stroke=INK, width=1.5, dash=DASH)
            else:
                self.canvas.rect(left, middle - 7, 14, 14, fill=colours[name], radius=2)
            self.canvas.text(left + 22, middle + 4, name)

    def mark(self) -> None:
        if self.chart.mark is None:
            return
        x, head = self.x(self.chart.mark), self.tops[0] - HEAD - 4
        self.canvas.text(self.mark_left(self.chart.mark), head, self.chart.mark_label)
        self.canvas.path([(x, head - 12), (x, head + 6)], stroke=INK, width=1.0, dash=MARKED)
        for top in self.tops:
            self.canvas.path([(x, top), (x, top + HEIGHT)], stroke=INK, width=1.0, dash=MARKED)

    def columns(self) -> None:
        y = self.bottom + 18
        for number, column in enumerate(self.chart.columns):
            self.canvas.text(self.x(number), y, column.label, anchor="middle", bold=True)
            for line, text in enumerate(column.lines, 1):
                self.canvas.text(self.x(number), y + 3 + LINE * line, text, size=SMALL, anchor="middle")
        middle = max((self.left + self.right) / 2, MARGIN + text_width(self.chart.axis_title) / 2)
        self.canvas.text(middle, self.canvas.height - MARGIN, self.chart.axis_title, anchor="middle")


class _Panel:
    """One panel with its upper edge at `top`."""

    def __init__(self, page: _Panels, panel: Panel, top: float) -> None:
        self.page, self.panel, self.top, self.bottom = page, panel, top, top + HEIGHT
        self.canvas, self.show = page.canvas, SHOWN[panel.unit]
        self.totals = [panel.total(number) for number in range(len(page.chart.columns))]
        values = [value for value in (*self.totals, *panel.reference, panel.limit) if value]
        self.most, self.least = max(values, default=1.0), min(values, default=1.0)
        self.stacked = len(panel.parts) > 1
        self.colours = {name: by_name(colour) for name, colour in part_colours(panel.parts).items()}
        self.logarithmic = not self.stacked and self.most >= DECADE * self.least

    def y(self, value: float) -> float:
        if self.logarithmic:
            return self.bottom - BELOW - (HEIGHT - ABOVE - BELOW) * log_place(value, (self.least, self.most))
        return self.bottom - (HEIGHT - ABOVE) * value / self.most

    def draw(self) -> None:
        self.canvas.text(self.page.left, self.top - 8, self.panel.title, bold=True)
        self.grid()
        self.limit()
        if self.stacked:
            self.bars()
        else:
            self.points()

    def grid(self) -> None:
        for tick in self.ticks():
            y = self.y(tick)
            self.canvas.line(self.page.left, y, self.page.right, y, stroke=GRID)
            self.canvas.text(self.page.left - 8, y + 4, self.show(tick), size=SMALL, anchor="end")
        self.canvas.rect(self.page.left, self.top, self.page.right - self.page.left, HEIGHT, stroke=FAINT)

    def ticks(self) -> tuple[float, ...]:
        """Round numbers; of a logarithmic axis powers of ten, and 2 and 5 times those where they are few."""
        if not self.logarithmic:
            return even_ticks(self.most, MOST_TICKS)
        found = ticks(self.least, self.most)
        return found if len(found) <= MOST_TICKS else tuple(tick for tick in found if math.log10(tick).is_integer())

    def limit(self) -> None:
        if self.panel.limit:
            y = self.y(self.panel.limit)
            self.canvas.path([(self.page.left, y), (self.page.right, y)], stroke=INK, width=1.5, dash=DASH)

    def points(self) -> None:
        found = [(self.page.x(number), value) for number, value in enumerate(self.totals)]
        reference = [(self.page.x(number), self.y(value)) for number, value in enumerate(self.panel.reference) if value]
        if reference:
            self.canvas.path(reference, stroke=INK, width=1.5, dash=DASH)
        there = [(x, self.y(value)) for x, value in found if value is not None]
        if self.panel.joined and len(there) > 1:
            self.canvas.path(there, stroke=BLUE, width=2.5)
        for x, value in found:
            if value is not None:
                self.canvas.circle(x, self.y(value), 4, fill=BLUE, stroke=PAPER)
                self.label(x, self.y(value) - 8, self.show(value))

    def bars(self) -> None:
        width = self.page.width * 0.6
        for number, total in enumerate(self.totals):
            end, x = 0.0, self.page.x(number)
            for name, values in self.panel.parts.items():
                value = values[number] or 0.0
                if value > 0:
                    top = self.y(end + value)
                    height, fill = self.y(end) - top, self.colours[name]
                    self.canvas.rect(x - width / 2, top, width, height, fill=fill, stroke=PAPER, stroke_width=0.5)
                end += value
            if total is not None and self.panel.unit != "%":
                self.label(x, self.y(total) - 5, self.show(total))

    def label(self, x: float, y: float, text: str) -> None:
        """A value on the page's colour: lines of the grid and others run behind it."""
        self.canvas.text_on_paper(x, y, text, size=SMALL, anchor="middle")


def _legends(panels: Sequence[Panel]) -> Iterator[tuple[int, list[str]]]:
    """Where legends stand and what they name: beside the first of neighbouring panels that have the same parts."""
    numbered = enumerate(panels)
    for _, alike in groupby(numbered, key=lambda one: (tuple(one[1].parts), one[1].dashed)):
        run = list(alike)
        first, panel = run[0]
        names = panel.parts if len(panel.parts) > 1 else ()
        there = [name for name in names if any(any(one.parts[name]) for _, one in run)]
        yield first, [*there, *filter(None, (panel.dashed,))]
