"""Charts of curves, points and bands over an axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from shardwise.present.charts.axis_scale import Axis
from shardwise.present.charts.drawing import HEADING, LEFT, MARGIN, ROW, SAMPLE, SMALL, Canvas, Drawing, text_width
from shardwise.present.charts.palette import EMPTY, FAINT, GRID, HUES, INK, PAPER, Colour, series

HEADROOM = 1.15  # between lines and the plot's upper and lower edge on a logarithmic axis, as a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points joined by straight lines; `reference` is drawn thin and dark, as what others are compared with."""

    label: str
    points: tuple[tuple[float, float], ...]
    reference: bool = False
    colour: Colour | None = None  # that of its term; None: the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A single point, lettered in the plot; the area of its mark is its `share` of all."""

    label: str
    x: float
    y: float
    share: float = 0.0


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
class Band:
    """What lies between two lines, each of the same x: (x, low, high)."""

    label: str
    edges: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Lines, points, clouds, bands and markers on two axes, which span all of them."""

    title: str
    subtitle: str
    x: Axis
    y: Axis
    lines: tuple[Curve, ...]
    points: tuple[CurvePoint, ...] = ()
    markers: tuple[Marker, ...] = ()
    clouds: tuple[Cloud, ...] = ()
    bands: tuple[Band, ...] = ()

    def plotted(self) -> Iterator[tuple[float, float]]:
        """The points of all lines, clouds and bands, and the lettered ones."""
        for line in self.lines:
            yield from line.points
        for cloud in self.clouds:
            yield from cloud.points
        for band in self.bands:
            for x, low, high in band.edges:
                yield x, low
                yield x, high
        for point in self.points:
            yield point.x, point.y

    def x_range(self) -> tuple[float, float]:
        return self.x.ends([*(x for x, _ in self.plotted()), *(marker.x for marker in self.markers)])

    def y_range(self) -> tuple[float, float]:
        values = [y for _, y in self.plotted()]
        room = 1.0 if self.y.linear else HEADROOM
        return self.y.ends([min(values) / room, max(values) * room])


PLOT_WIDTH, PLOT_HEIGHT = 640.0, 420.0
DASHES = ((), (9, 4), (3, 4), (12, 3, 3, 3), (18, 6), (8, 3, 2, 3, 2, 3), (5, 2))
REFERENCE, MARKER, EDGE = (6, 4), (2, 3), (1, 3)
LETTER, LEADER = 9.0, 30.0  # radius of a letter's circle; how far above its point it stands
LARGEST, LEAST = 26.0, 4.0  # radius of a point that is all there is, and of one without a share
Style = tuple[Colour, float, Sequence[float]]


def draw_lines(chart: LineChart, height: float = PLOT_HEIGHT) -> Drawing:
    """The chart as a drawing; `height` is the plot's, in pixels."""
    return _LinePlot(chart, height).drawn()


class _LinePlot:
    def __init__(self, chart: LineChart, height: float) -> None:
        self.chart, self.height = chart, height
        self.x_range, self.y_range = chart.x_range(), chart.y_range()
        self.left = MARGIN + LEFT
        self.rows = self.marker_rows()
        self.top = HEADING + ROW * (1 + max(self.rows, default=-1)) + 8.0
        self.right, self.bottom = self.left + PLOT_WIDTH, self.top + height
        labels = ((one.label for one in group) for group in (chart.lines, chart.bands, chart.clouds, chart.points))
        entries = list(chain.from_iterable(labels))
        edges = [self.right + MARGIN + SAMPLE + 10 + max(map(text_width, entries), default=0.0)]
        edges += [self.x(marker.x) + 6 + text_width(marker.label) for marker in chart.markers]
        lowest = max(self.bottom + 48.0, self.top + ROW * (1 + len(entries)))
        self.canvas = Canvas(max(edges) + MARGIN, lowest + MARGIN, chart.title, chart.subtitle)

    def x(self, value: float) -> float:
        return self.left + PLOT_WIDTH * self.chart.x.place(value, self.x_range)

    def y(self, value: float) -> float:
        return self.bottom - self.height * self.chart.y.place(value, self.y_range)

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

    def drawn(self) -> Drawing:
        for band in self.chart.bands:
            self.band(band)
        self.grid()
        self.markers()
        styled = list(zip(self.chart.lines, self.styles(), strict=True))
        for line, (stroke, width, dash) in reversed(styled):  # the first on top
            points = [(self.x(x), self.y(y)) for x, y in line.points]
            self.canvas.path(points, stroke=stroke, width=width, dash=dash)
        for number, cloud in enumerate(self.chart.clouds):
            for x, y in cloud.points:
                self.mark(self.x(x), self.y(y), number)
        self.points()
        self.legend(styled)
        return self.canvas

    def styles(self) -> Iterator[Style]:
        """Colour, width and dashes of each line."""
        index = 0
        taken = {line.colour for line in self.chart.lines}
        free = [hue for hue in HUES if hue not in taken]
        for line in self.chart.lines:
            if line.reference:
                yield INK, 2.0, REFERENCE
                continue
            turn, place = divmod(index, len(free))
            yield line.colour or free[place], 3.0, DASHES[(place + turn) % len(DASHES)]
            index += 1

    def band(self, band: Band) -> None:
        low, high = self.band_edge(band, 1), self.band_edge(band, 2)
        self.canvas.area([*low, *reversed(high)], fill=EMPTY)
        for edge in (low, high):
            self.canvas.path(edge, stroke=FAINT, width=1.0, dash=EDGE)

    def band_edge(self, band: Band, which: int) -> list[tuple[float, float]]:
        return [(self.x(edge[0]), self.y(edge[which])) for edge in band.edges]

    def grid(self) -> None:
        canvas, chart = self.canvas, self.chart
        for tick in chart.x.ticks(self.x_range):
            x = self.x(tick)
            canvas.line(x, self.top, x, self.bottom, stroke=GRID)
            canvas.text(x, self.bottom + 20, chart.x.show(tick), anchor="middle")
        for tick in chart.y.ticks(self.y_range):
            y = self.y(tick)
            canvas.line(self.left, y, self.right, y, stroke=GRID)
            canvas.text(self.left - 8, y + 4.5, chart.y.show(tick), anchor="end")
        canvas.rect(self.left, self.top, PLOT_WIDTH, self.height, stroke=FAINT)
        canvas.text((self.left + self.right) / 2, self.bottom + 44, chart.x.title, anchor="middle")
        canvas.text(MARGIN + 12, (self.top + self.bottom) / 2, chart.y.title, anchor="middle", upward=True)

    def markers(self) -> None:
        for marker, row in zip(self.chart.markers, self.rows, strict=True):
            x, head = self.x(marker.x), self.top - 8 - ROW * row
            self.canvas.path([(x, head - 12), (x, self.bottom)], stroke=INK, width=1.0, dash=MARKER)
            self.canvas.text(x + 6, head, marker.label)

    def mark(self, x: float, y: float, number: int) -> None:
        """One point of a cloud."""
        if number // len(HUES) % 2 == 0:
            self.canvas.circle(x, y, 3.5, fill=series(number), stroke=PAPER, stroke_width=0.5)
        else:
            self.canvas.rect(x - 3.2, y - 3.2, 6.4, 6.4, fill=series(number), stroke=PAPER, stroke_width=0.5)

    def points(self) -> None:
        """A mark for each point, the larger behind; its letter above it, on a line to it, clear of the other letters."""
        placed = list(zip(_letters(), self.chart.points, self.letters(), strict=False))
        for _, point, _ in sorted(placed, key=lambda one: -one[1].share):
            x, y = self.x(point.x), self.y(point.y)
            self.canvas.circle(x, y, radius(point), fill=series(len(self.chart.lines)), stroke=PAPER)
        for _, point, (x, y) in placed:
            self.canvas.line(self.x(point.x), self.y(point.y), x, y)
        for letter, _, (x, y) in placed:
            self.letter(x, y, letter)

    def letters(self) -> list[tuple[float, float]]:
        """Where letters stand: above the points, those of points at like heights side by side."""
        points = self.chart.points
        order = sorted(range(len(points)), key=lambda i: (round(self.y(points[i].y) / LEADER), self.x(points[i].x)))
        found: dict[int, tuple[float, float]] = {}
        rows: dict[int, list[int]] = {}
        for i in order:
            rows.setdefault(round(self.y(points[i].y) / LEADER), []).append(i)
        for row in rows.values():
            height = min(self.y(points[i].y) - radius(points[i]) for i in row) - LEADER + LETTER
            for i, x in zip(row, apart([self.x(points[i].x) for i in row], 2 * LETTER + 3), strict=True):
                found[i] = x, height
        return [found[i] for i in range(len(points))]

    def letter(self, x: float, y: float, letter: str) -> None:
        self.canvas.circle(x, y, LETTER, fill=PAPER, stroke=INK)
        self.canvas.text(x, y + 4.2, letter, size=SMALL, anchor="middle", bold=True)

    def legend(self, styled: Sequence[tuple[Curve, Style]]) -> None:
        left, y = self.right + MARGIN, self.top + ROW / 2
        for line, (stroke, width, dash) in styled:
            self.canvas.path([(left, y), (left + SAMPLE, y)], stroke=stroke, width=width, dash=dash)
            y = self.entry(y, line.label)
        for band in self.chart.bands:
            self.canvas.rect(left, y - 6, SAMPLE, 12, fill=EMPTY, stroke=FAINT)
            y = self.entry(y, band.label)
        for number, cloud in enumerate(self.chart.clouds):
            self.mark(left + SAMPLE / 2, y, number)
            y = self.entry(y, cloud.label)
        for letter, point in zip(_letters(), self.chart.points, strict=False):
            self.letter(left + SAMPLE / 2, y, letter)
            y = self.entry(y, point.label)

    def entry(self, y: float, label: str) -> float:
        """The text of a legend's entry; where the next one stands."""
        self.canvas.text(self.right + MARGIN + SAMPLE + 10, y + 4.5, label)
        return y + ROW


def radius(point: CurvePoint) -> float:
    """Of a point's mark, whose area is its share."""
    return max(LEAST, LARGEST * math.sqrt(point.share))


def apart(places: Sequence[float], distance: float) -> list[float]:
    """The nearest places to some in order that are no nearer to each other than a distance.

    >>> apart([0.0, 1.0, 50.0], 10.0)
    [-4.5, 5.5, 50.0]
    """
    runs: list[tuple[float, int]] = []  # sum of where runs would begin, and how many are in them
    for number, place in enumerate(places):
        total, count = place - number * distance, 1
        while runs and runs[-1][0] / runs[-1][1] > total / count:
            before, more = runs.pop()
            total, count = total + before, count + more
        runs.append((total, count))
    begins = [total / count for total, count in runs for _ in range(count)]
    return [begin + number * distance for number, begin in enumerate(begins)]


def _letters() -> Iterator[str]:
    return iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
