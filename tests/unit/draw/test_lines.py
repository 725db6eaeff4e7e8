"""Line charts: places, axes, a legend and labels that overlap nothing, the same bytes every time."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest

from shardwise.present.charts.axis_scale import Axis
from shardwise.present.charts.curves import Band, Curve, CurvePoint, LineChart, Marker, draw_lines
from shardwise.present.charts.drawing import Area, Circle, Path
from shardwise.present.charts.palette import HUES, INK

from .page import boxes, check_texts

LINES = LineChart(
    title="title", subtitle="subtitle < of it", x=Axis(title="x"), y=Axis(title="y", unit="s"),
    lines=(
        *(Curve(label=f"line {i} with a label of some length", points=((2.0, 1e-6 * 10**i), (3e5, 1e-3 * 10**i)))
          for i in range(4)),
        Curve(label="reference", points=((2.0, 1e-4), (3e5, 1e-4)), reference=True),
    ),
    points=(CurvePoint(label="first", x=50, y=1e-3), CurvePoint(label="second", x=5000, y=1e-3)),
    markers=tuple(Marker(label=f"marker at {x:g}", x=x) for x in (100.0, 120.0, 2e5, 2.9e5)),
)  # fmt: skip
DRAWN = draw_lines(LINES)


def paths(chart: LineChart) -> list[Path]:
    return [mark for mark in draw_lines(chart).marks if isinstance(mark, Path)]


def test_texts_are_on_the_page_and_apart() -> None:
    check_texts(DRAWN)


def test_pictures_are_the_same_every_time() -> None:
    assert draw_lines(LINES).svg() == DRAWN.svg()


def test_axes_hold_everything_and_end_at_round_numbers() -> None:
    assert LINES.x_range() == (2, 5e5)
    low, high = LINES.y_range()
    assert (low, high) == (5e-7, 2.0)


def test_lines_lie_where_their_numbers_say() -> None:
    """A decade is as long anywhere; the plot's corners are the ends of its axes."""
    chart = LineChart(
        title="", subtitle="", x=Axis(title=""), y=Axis(title=""),
        lines=(Curve(label="", points=((1.0, 2.0), (10.0, 20.0), (100.0, 200.0))),),
    )  # fmt: skip
    (x0, y0), (x1, y1), (x2, y2) = next(path for path in paths(chart) if path.stroke == HUES[0]).points
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2), abs=0.02)
    assert x2 - x0 == pytest.approx(640)


def test_markers_cross_no_label() -> None:
    labels = [box for box in boxes(DRAWN) if box[0].startswith("marker")]
    verticals = [[*path.points[0], *path.points[1]] for path in paths(LINES) if path.dash == (2, 3)]
    assert len(labels) == len(verticals) == 4
    for content, left, _, right, bottom in labels:
        for x, head, _, _ in verticals:
            assert not (left < x < right and head < bottom), f"{content!r} at {x}"


def test_lines_differ_in_colour_and_dashes() -> None:
    coloured = {(path.stroke, path.dash) for path in paths(LINES) if path.stroke in HUES}
    assert len(coloured) == len({dash for _, dash in coloured}) == 4


def test_a_linear_axis_begins_at_zero() -> None:
    chart = LineChart(
        title="", subtitle="", x=Axis(title="", linear=True), y=Axis(title="", unit="s", linear=True),
        lines=(Curve(label="", points=((0.0, 0.0), (5.0, 1.0), (10.0, 4.0))),),
    )  # fmt: skip
    (x0, y0), (x1, y1), (x2, y2) = next(path for path in paths(chart) if path.stroke == HUES[0]).points
    assert (x1 - x0) / (x2 - x0) == pytest.approx(0.5)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(0.25)
    assert chart.x_range()[0] == chart.y_range()[0] == 0.0


def test_areas_of_points_are_their_shares_and_their_letters_stand_apart() -> None:
    points = tuple(
        CurvePoint(label=f"kernel {i}", x=100.0 * 1.02**i, y=1e-3, share=share)
        for i, share in enumerate((0.4, 0.1, 0.4))
    )
    chart = replace(LINES, points=points)
    circles = [mark for mark in draw_lines(chart).marks if isinstance(mark, Circle)]
    marks = sorted(mark.radius for mark in circles if mark.stroke != INK)
    assert [(radius / marks[-1]) ** 2 for radius in marks] == pytest.approx([0.25, 1.0, 1.0])
    letters = [(mark.x, mark.y) for mark in circles if mark.stroke == INK][:3]
    for (x, y), (other_x, other_y) in combinations(letters, 2):
        assert math.hypot(x - other_x, y - other_y) >= 18


def test_a_band_holds_what_is_between_its_edges() -> None:
    band = Band(label="within a tenth", edges=((2.0, 0.9e-3, 1.1e-3), (3e5, 0.9e-3, 1.1e-3)))
    drawing = draw_lines(replace(LINES, bands=(band,)))
    check_texts(drawing)
    (area,) = [mark for mark in drawing.marks if isinstance(mark, Area)]
    reference = next(path for path in paths(LINES) if path.dash == (6, 4))
    assert {y for _, y in area.points} == {min(y for _, y in area.points), max(y for _, y in area.points)}
    assert len(area.points) == 4
    assert reference.points[0][0] == min(x for x, _ in area.points)
