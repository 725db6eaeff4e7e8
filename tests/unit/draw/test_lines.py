"""Line charts: places, axes, a legend and labels that overlap nothing, the same bytes every time."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shardwise.draw.lines import Axis, Line, LineChart, Marker, Point, draw_lines
from shardwise.draw.svg import COLOURS

from .page import SVG, boxes, check_texts

LINES = LineChart(
    title="title", subtitle="subtitle < of it", x=Axis(title="x"), y=Axis(title="y", unit="s"),
    lines=(
        *(Line(label=f"line {i} with a label of some length", points=((2.0, 1e-6 * 10**i), (3e5, 1e-3 * 10**i)))
          for i in range(4)),
        Line(label="reference", points=((2.0, 1e-4), (3e5, 1e-4)), reference=True),
    ),
    points=(Point(label="first", x=50, y=1e-3), Point(label="second", x=5000, y=1e-3)),
    markers=tuple(Marker(label=f"marker at {x:g}", x=x) for x in (100.0, 120.0, 2e5, 2.9e5)),
)  # fmt: skip
DRAWN = draw_lines(LINES)


def test_texts_are_on_the_page_and_apart() -> None:
    check_texts(DRAWN)


def test_pictures_are_the_same_every_time() -> None:
    assert draw_lines(LINES) == DRAWN


def test_axes_hold_everything_and_end_at_round_numbers() -> None:
    assert LINES.x_range() == (2, 5e5)
    low, high = LINES.y_range()
    assert (low, high) == (5e-7, 2.0)


def test_lines_lie_where_their_numbers_say() -> None:
    """A decade is as long anywhere; the plot's corners are the ends of its axes."""
    chart = LineChart(
        title="", subtitle="", x=Axis(title=""), y=Axis(title=""),
        lines=(Line(label="", points=((1.0, 2.0), (10.0, 20.0), (100.0, 200.0))),),
    )  # fmt: skip
    plotted = ElementTree.fromstring(draw_lines(chart)).find(f"{SVG}polyline")
    assert plotted is not None
    (x0, y0), (x1, y1), (x2, y2) = [map(float, pair.split(",")) for pair in plotted.get("points", "").split()]
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2), abs=0.02)
    assert x2 - x0 == pytest.approx(640)


def test_markers_cross_no_label() -> None:
    root = ElementTree.fromstring(DRAWN)
    labels = [box for box in boxes(DRAWN) if box[0].startswith("marker")]
    verticals = [
        [float(value) for pair in line.get("points", "").split() for value in pair.split(",")]
        for line in root.iter(f"{SVG}polyline")
        if line.get("stroke-dasharray") == "2 3"
    ]
    assert len(labels) == len(verticals) == 4
    for content, left, _, right, bottom in labels:
        for x, head, _, _ in verticals:
            assert not (left < x < right and head < bottom), f"{content!r} at {x}"


def test_lines_differ_in_colour_and_dashes() -> None:
    root = ElementTree.fromstring(DRAWN)
    styles = [(line.get("stroke"), line.get("stroke-dasharray")) for line in root.iter(f"{SVG}polyline")]
    coloured = {style for style in styles if style[0] in COLOURS}
    assert len(coloured) == len({dash for _, dash in coloured}) == 4
