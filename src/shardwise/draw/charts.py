"""Charts as values, and their pictures: lines on logarithmic axes, stacked bars, a table shaded by its numbers.

A legend stands beside or under the plot, never in it; widths are those of a wide sans serif, so that nothing is clipped.
Colours are those of `drawing`, dashes and letters tell apart what colours alone would not.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardwise.draw.svg import COLOURS, FAINT, INK, PAPER, Drawing, colour
from shardwise.units import format_bytes, format_quantity, format_seconds

SIZE, CHARACTER = 13.0, 0.6  # of text, and the width of a character for each unit of size
MARGIN, ROW = 24.0, 22.0
PLOT_WIDTH, PLOT_HEIGHT = 640.0, 420.0
LEFT, SAMPLE = 84.0, 30.0
GRID, EMPTY = "#e3e7eb", "#eef0f2"
HEADROOM = 1.15  # between lines and the plot's upper and lower edge, as a factor
LINE_COLOURS = (0, 4, 2, 5, 6, 1, 7)  # dark enough on white; yellow is not
DASHES = ("none", "9 4", "3 4", "12 3 3 3", "18 6", "8 3 2 3 2 3", "5 2")
BAR_WIDTH, BAR_HEIGHT = 860.0, 30.0
CELL_WIDTH, CELL_HEIGHT = 84.0, 34.0
NOTE, NOTE_LINE = 11.0, 15.0  # size of text under a cell's number, and a line of it
SCALE_WIDTH, SCALE_STEPS = 160.0, 16  # of the strip of colours


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A logarithmic axis: what it counts; "s" is shown in seconds, anything else with decimal prefixes."""

    title: str
    unit: str = ""

    def show(self, value: float) -> str:
        return format_seconds(value) if self.unit == "s" else format_quantity(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points joined by straight lines; `reference` is drawn thin and dark, as what others are compared with."""

    label: str
    points: tuple[tuple[float, float], ...]
    reference: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A single point, lettered in the plot."""

    label: str
    x: float
    y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cloud:
    """Many points under one label, a mark each: circles, and squares once the colours repeat."""

    label: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A vertical line with a label over the plot."""

    label: str
    x: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines, points, clouds and markers on two logarithmic axes, which span all of them."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    points: tuple[Point, ...] = ()
    markers: tuple[Marker, ...] = ()
    clouds: tuple[Cloud, ...] = ()

    def plotted(self) -> Iterator[tuple[float, float]]:
        """The points of all lines and clouds."""
        for line in self.lines:
            yield from line.points
        for cloud in self.clouds:
            yield from cloud.points

    def x_range(self) -> tuple[float, float]:
        points = [x for x, _ in self.plotted()]
        return _outer([*points, *(p.x for p in self.points), *(m.x for m in self.markers)])

    def y_range(self) -> tuple[float, float]:
        values = [*(y for _, y in self.plotted()), *(p.y for p in self.points)]
        return _outer([min(values) / HEADROOM, max(values) * HEADROOM])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """A table of parts of 1, written as percentages; None is where there is none, and `absent` says why.

    `notes` are lines of text for each cell, under its number; `scale` says what the colours mean, beside a strip of them.
    """

    title: str
    subtitle: str
    row_title: str
    column_title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    absent: str
    notes: tuple[tuple[tuple[str, ...], ...], ...] = ()
    scale: str = ""


def ticks(low: float, high: float) -> tuple[float, ...]:
    """Powers of ten from `low` to `high`; 1, 2 and 5 times those where there are at most three decades."""
    steps = (1, 2, 5) if math.log10(high / low) <= 3.0 + 1e-9 else (1,)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    found = (float(f"{step}e{decade}") for decade in decades for step in steps)
    return tuple(tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9))


def even_ticks(high: float, most: int = 10) -> tuple[float, ...]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to `high`, at most `most` and one."""
    decade = math.floor(math.log10(high / most))
    step = next(s for s in (float(f"{m}e{decade}") for m in (1, 2, 5, 10)) if high / s <= most + 1e-9)
    return tuple(i * step for i in range(int(high / step + 1e-9) + 1))


def _outer(values: Sequence[float]) -> tuple[float, float]:
    """The nearest 1, 2 or 5 times a power of ten that hold all values between them."""
    decades = range(math.floor(math.log10(min(values))) - 1, math.ceil(math.log10(max(values))) + 2)
    steps = [float(f"{step}e{decade}") for decade in decades for step in (1, 2, 5)]
    low = max(step for step in steps if step <= min(values) * (1 + 1e-9))
    return low, min(step for step in steps if step >= max(values) * (1 - 1e-9) and step > low)


def text_width(text: str, size: float = SIZE) -> float:
    """Pixels that a text takes at most in a usual sans serif."""
    return CHARACTER * size * len(text)


class Canvas(Drawing):
    """A drawing with the primitives that only charts need."""

    def polyline(
        self, points: Sequence[tuple[float, float]], *, stroke: str, stroke_width: float, dash: str = "none"
    ) -> None:
        """Straight lines through points, with round joints."""
        shown = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._put(
            "polyline", points=shown, fill="none", stroke=stroke, stroke_width=stroke_width, stroke_dasharray=dash,
            stroke_linejoin="round",
        )  # fmt: skip

    def circle(self, x: float, y: float, radius: float, *, fill: str, stroke: str, stroke_width: float = 1.5) -> None:
        """A circle around (x, y)."""
        self._put("circle", cx=x, cy=y, r=radius, fill=fill, stroke=stroke, stroke_width=stroke_width)

    def upward_text(self, x: float, y: float, content: str) -> None:
        """Text that reads upwards, centred on (x, y)."""
        turn = f"rotate(-90 {x:.2f} {y:.2f})"
        self._put("text", content, x=x, y=y, font_size=SIZE, fill=INK, text_anchor="middle", transform=turn)

    def heading(self, title: str, subtitle: str) -> None:
        """Title and subtitle in the upper left corner."""
        self.text(MARGIN, MARGIN + 16.0, title, size=18.0, weight="bold")
        self.text(MARGIN, MARGIN + 38.0, subtitle)


def draw_lines(chart: LineChart) -> str:
    """The chart as an SVG."""
    return _LinePlot(chart).render()


class _LinePlot:
    def __init__(self, chart: LineChart) -> None:
        self.chart = chart
        self.x_range, self.y_range = chart.x_range(), chart.y_range()
        self.left = MARGIN + LEFT
        self.rows = self.marker_rows()
        self.top = MARGIN + 56.0 + ROW * (1 + max(self.rows, default=-1)) + 8.0
        self.right, self.bottom = self.left + PLOT_WIDTH, self.top + PLOT_HEIGHT
        labels = [*(line.label for line in chart.lines), *(cloud.label for cloud in chart.clouds)]
        legend = [text_width(label) for label in (*labels, *(point.label for point in chart.points))]
        edges = [self.right + MARGIN + SAMPLE + 10 + max(legend, default=0.0)]
        edges += [self.x(marker.x) + 6 + text_width(marker.label) for marker in chart.markers]
        edges += [MARGIN + text_width(chart.title, 19.0), MARGIN + text_width(chart.subtitle)]
        entries = self.top + ROW * (1 + len(legend))
        self.canvas = Canvas(max(edges) + MARGIN, max(self.bottom + 48.0, entries) + MARGIN, chart.title)

    def x(self, value: float) -> float:
        return self.left + PLOT_WIDTH * _place(value, self.x_range)

    def y(self, value: float) -> float:
        return self.bottom - PLOT_HEIGHT * _place(value, self.y_range)

    def marker_rows(self) -> list[int]:
        """The row of each marker's label, from the plot upwards: above every marker whose line it would cross."""
        places = [(self.x(marker.x), text_width(marker.label) + 12) for marker in self.chart.markers]
        rows, done = [0] * len(places), list[int]()
        for i in sorted(range(len(places)), key=lambda i: places[i][0], reverse=True):
            x, width = places[i]
            crossed = [rows[j] for j in done if places[j][0] <= x + width]
            rows[i] = 1 + max(crossed, default=-1)
            done.append(i)
        return rows

    def render(self) -> str:
        self.canvas.heading(self.chart.title, self.chart.subtitle)
        self.grid()
        self.markers()
        styled = list(zip(self.chart.lines, self.styles(), strict=True))
        for line, (stroke, width, dash) in reversed(styled):  # the first on top
            points = [(self.x(x), self.y(y)) for x, y in line.points]
            self.canvas.polyline(points, stroke=stroke, stroke_width=width, dash=dash)
        for number, cloud in enumerate(self.chart.clouds):
            for x, y in cloud.points:
                self.mark(self.x(x), self.y(y), number)
        for letter, point in zip(_letters(), self.chart.points, strict=False):
            self.letter(self.x(point.x), self.y(point.y), letter)
        self.legend(styled)
        return self.canvas.render()

    def styles(self) -> Iterator[tuple[str, float, str]]:
        """Colour, width and dashes of each line."""
        index = 0
        for line in self.chart.lines:
            if line.reference:
                yield INK, 2.0, "6 4"
                continue
            turn, place = divmod(index, len(LINE_COLOURS))
            yield colour(LINE_COLOURS[place]), 3.0, DASHES[(place + turn) % len(DASHES)]
            index += 1

    def grid(self) -> None:
        canvas = self.canvas
        for tick in ticks(*self.x_range):
            x = self.x(tick)
            canvas.line(x, self.top, x, self.bottom, stroke=GRID)
            canvas.text(x, self.bottom + 20, self.chart.x.show(tick), anchor="middle")
        for tick in ticks(*self.y_range):
            y = self.y(tick)
            canvas.line(self.left, y, self.right, y, stroke=GRID)
            canvas.text(self.left - 8, y + 4.5, self.chart.y.show(tick), anchor="end")
        canvas.rect(self.left, self.top, PLOT_WIDTH, PLOT_HEIGHT, stroke=FAINT)
        canvas.text((self.left + self.right) / 2, self.bottom + 44, self.chart.x.title, anchor="middle")
        canvas.upward_text(MARGIN + 12, (self.top + self.bottom) / 2, self.chart.y.title)

    def markers(self) -> None:
        for marker, row in zip(self.chart.markers, self.rows, strict=True):
            x, head = self.x(marker.x), self.top - 8 - ROW * row
            self.canvas.polyline([(x, head - 12), (x, self.bottom)], stroke=INK, stroke_width=1.0, dash="2 3")
            self.canvas.text(x + 6, head, marker.label)

    def mark(self, x: float, y: float, number: int) -> None:
        """One point of a cloud."""
        turn, place = divmod(number, len(LINE_COLOURS))
        fill = colour(LINE_COLOURS[place])
        if turn % 2 == 0:
            self.canvas.circle(x, y, 3.5, fill=fill, stroke=INK, stroke_width=0.5)
        else:
            self.canvas.rect(x - 3.2, y - 3.2, 6.4, 6.4, fill=fill, stroke=INK, stroke_width=0.5)

    def letter(self, x: float, y: float, letter: str) -> None:
        self.canvas.circle(x, y, 9, fill=PAPER, stroke=INK)
        self.canvas.text(x, y + 4.2, letter, size=12, anchor="middle", weight="bold")

    def legend(self, styled: Sequence[tuple[Line, tuple[str, float, str]]]) -> None:
        left, y = self.right + MARGIN, self.top + ROW / 2
        for line, (stroke, width, dash) in styled:
            self.canvas.polyline([(left, y), (left + SAMPLE, y)], stroke=stroke, stroke_width=width, dash=dash)
            self.canvas.text(left + SAMPLE + 10, y + 4.5, line.label)
            y += ROW
        for number, cloud in enumerate(self.chart.clouds):
            self.mark(left + SAMPLE / 2, y, number)
            self.canvas.text(left + SAMPLE + 10, y + 4.5, cloud.label)
            y += ROW
        for letter, point in zip(_letters(), self.chart.points, strict=False):
            self.letter(left + SAMPLE / 2, y, letter)
            self.canvas.text(left + SAMPLE + 10, y + 4.5, point.label)
            y += ROW


def _letters() -> Iterator[str]:
    return iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")


def _place(value: float, span: tuple[float, float]) -> float:
    """Where on a logarithmic axis a value is, from 0 to 1."""
    low, high = span
    return math.log(value / low) / math.log(high / low)


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


def draw_heat_map(chart: HeatMap) -> str:
    """The table as an SVG: the larger a number the deeper its cell."""
    return _HeatPlot(chart).render()


class _HeatPlot:
    def __init__(self, chart: HeatMap) -> None:
        self.chart = chart
        lines = [cell for row in chart.notes for cell in row]
        self.width = max([CELL_WIDTH, *(text_width(line, NOTE) + 20 for cell in lines for line in cell)])
        self.height = CELL_HEIGHT + NOTE_LINE * max(map(len, lines), default=0)
        self.left = MARGIN + max(map(text_width, (*chart.rows, chart.row_title))) + 12
        self.top = MARGIN + 56.0 + 2 * ROW
        self.right = self.left + self.width * len(chart.columns)
        self.bottom = self.top + self.height * len(chart.rows)
        self.most = max((value for row in chart.values for value in row if value is not None), default=1.0)
        absent = any(value is None for row in chart.values for value in row)
        self.footer = chart.absent if absent else ""
        texts = [text_width(chart.title, 19.0), text_width(chart.subtitle), text_width(chart.absent) + 18]
        texts += [SCALE_WIDTH + 8 + text_width(self.scale())] if chart.scale else []
        foot = ROW * (bool(self.footer) + 1.5 * bool(chart.scale))
        self.canvas = Canvas(max(self.right, MARGIN + max(texts)) + MARGIN, self.bottom + MARGIN + foot, chart.title)

    def scale(self) -> str:
        return f"{self.chart.scale}: 0% to {self.most:.1%}"

    def render(self) -> str:
        canvas, chart = self.canvas, self.chart
        canvas.heading(chart.title, chart.subtitle)
        canvas.text((self.left + self.right) / 2, self.top - ROW - 6, chart.column_title, anchor="middle")
        canvas.text(self.left - 12, self.top - 8, chart.row_title, anchor="end")
        for column, name in enumerate(chart.columns):
            canvas.text(self.left + self.width * (column + 0.5), self.top - 8, name, anchor="middle", weight="bold")
        for number, (name, row) in enumerate(zip(chart.rows, chart.values, strict=True)):
            y = self.top + self.height * number
            canvas.text(self.left - 12, y + self.height / 2 + 4.5, name, anchor="end")
            for column, value in enumerate(row):
                notes = chart.notes[number][column] if chart.notes else ()
                self.cell(self.left + self.width * column, y, value, notes)
        self.foot()
        return canvas.render()

    def cell(self, x: float, y: float, value: float | None, notes: Sequence[str]) -> None:
        """One number, in a colour as deep as its part of the largest, and its notes, all in the middle."""
        fill = EMPTY if value is None else _shade(value / self.most)
        self.canvas.rect(x, y, self.width, self.height, fill=fill, stroke=PAPER, stroke_width=2)
        middle, base = x + self.width / 2, y + (self.height - NOTE_LINE * len(notes)) / 2 + 4.5
        shown = "–" if value is None else f"{value:.1%}"
        self.canvas.text(middle, base, shown, anchor="middle", weight="bold" if notes else "normal")
        for line, note in enumerate(notes, 1):
            self.canvas.text(middle, base + NOTE_LINE * line, note, size=NOTE, anchor="middle")

    def foot(self) -> None:
        """Why numbers are absent, and under that the scale of colours."""
        y = self.bottom + ROW
        if self.footer:
            self.canvas.text(MARGIN, y, f"–  {self.footer}")
            y += 1.5 * ROW
        if self.chart.scale:
            width = SCALE_WIDTH / SCALE_STEPS
            for step in range(SCALE_STEPS):
                self.canvas.rect(MARGIN + width * step, y - 11, width, 14, fill=_shade((step + 0.5) / SCALE_STEPS))
            self.canvas.text(MARGIN + SCALE_WIDTH + 8, y, self.scale())


def _shade(part: float) -> str:
    """From white to blue; dark text is legible on all of it."""
    deep = [int(COLOURS[1][i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 + (c - 255) * part):02x}" for c in deep)
