"""Line charts as values: lines, lettered points, clouds of points, bands and vertical markers on two axes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.present.draw.axis import Axis
from shardwise.present.draw.palette import Colour

HEADROOM = 1.15  # between lines and the plot's upper and lower edge on a logarithmic axis, as a factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points joined by straight lines; `reference` is drawn thin and dark, as what others are compared with."""

    label: str
    points: tuple[tuple[float, float], ...]
    reference: bool = False
    colour: Colour | None = None  # that of its term; None: the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
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
    lines: tuple[Line, ...]
    points: tuple[Point, ...] = ()
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
