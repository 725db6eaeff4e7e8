"""Line charts: lines, lettered points, clouds of points and vertical markers on two logarithmic axes, the legend beside them.

Colours are those of `svg`; dashes, letters and the form of marks tell apart what colours alone would not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.draw.canvas import GRID, LEFT, LINE_COLOURS, MARGIN, ROW, SAMPLE, Canvas, text_width
from shardwise.draw.scales import log_place, round_ends, ticks
from shardwise.draw.svg import FAINT, INK, PAPER, colour
from shardwise.units import format_quantity, format_seconds

PLOT_WIDTH, PLOT_HEIGHT = 640.0, 420.0
HEADROOM = 1.15  # between lines and the plot's upper and lower edge, as a factor
DASHES = ("none", "9 4", "3 4", "12 3 3 3", "18 6", "8 3 2 3 2 3", "5 2")


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
        return round_ends([*points, *(p.x for p in self.points), *(m.x for m in self.markers)])

    def y_range(self) -> tuple[float, float]:
        values = [*(y for _, y in self.plotted()), *(p.y for p in self.points)]
        return round_ends([min(values) / HEADROOM, max(values) * HEADROOM])


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
        return self.left + PLOT_WIDTH * log_place(value, self.x_range)

    def y(self, value: float) -> float:
        return self.bottom - PLOT_HEIGHT * log_place(value, self.y_range)

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
