"""Line charts: places, axes, a legend and labels that overlap nothing, the same bytes every time."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from shardwise.present.charts.chart import Axis, Band, Chart, Curve, Mark, Points, RuleLine
from shardwise.present.charts.common_charts import curve_chart
from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.drawing import Area, Circle, Path
from shardwise.present.charts.palette import HUES, INK

from .page import boxes, check_texts

X, Y = Axis(title="x", log=True), Axis(title="y", unit="s", log=True)
CURVES: tuple[Mark, ...] = (
    *(Curve(label=f"line {i} with a label of some length", points=((2.0, 1e-6 * 10**i), (3e5, 1e-3 * 10**i)))
      for i in range(4)),
    Curve(label="reference", points=((2.0, 1e-4), (3e5, 1e-4)), reference=True),
    *(RuleLine(label=f"marker at {x:g}", at=x) for x in (100.0, 120.0, 2e5, 2.9e5)),
)  # fmt: skip
LETTERED = (
    Points(label="first", letter="A", points=((50, 1e-3),)),
    Points(label="second", letter="B", points=((5000, 1e-3),)),
)


def chart_of(*marks: Mark, x: Axis = X, y: Axis = Y) -> Chart:
    return curve_chart("title", "subtitle < of it", x, y, marks)


LINES = chart_of(*CURVES, *LETTERED)
DRAWING = draw(LINES)


def paths(chart: Chart) -> list[Path]:
    return [mark for mark in draw(chart).marks if isinstance(mark, Path)]


def test_texts_are_on_the_page_and_do_not_overlap() -> None:
    check_texts(DRAWING)


def test_pictures_are_deterministic() -> None:
    assert draw(LINES).svg() == DRAWING.svg()


def test_axes_contain_all_points_and_end_at_round_numbers() -> None:
    (panel,) = LINES.panels
    assert panel.x.domain == (2, 5e5)
    assert panel.y.domain == (5e-7, 2.0)


def test_lines_pass_through_their_points() -> None:
    """A decade is as long anywhere; the plot's corners are the ends of its axes."""
    chart = chart_of(Curve(points=((1.0, 2.0), (10.0, 20.0), (100.0, 200.0))))
    (x0, y0), (x1, y1), (x2, y2) = next(path for path in paths(chart) if path.stroke == HUES[0]).points
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2), abs=0.02)
    assert x2 - x0 == pytest.approx(640)


def test_markers_cross_no_label() -> None:
    labels = [box for box in boxes(DRAWING) if box[0].startswith("marker")]
    verticals = [[*path.points[0], *path.points[1]] for path in paths(LINES) if path.dash == (2, 3)]
    assert len(labels) == len(verticals) == 4
    for content, left, _, right, bottom in labels:
        for x, head, _, _ in verticals:
            assert not (left < x < right and head < bottom), f"the marker at {x} crosses {content!r}"


def test_lines_differ_in_colour_and_dashes() -> None:
    coloured = {(path.stroke, path.dash) for path in paths(LINES) if path.stroke in HUES}
    assert len(coloured) == len({dash for _, dash in coloured}) == 4


def test_a_linear_axis_begins_at_zero() -> None:
    chart = chart_of(Curve(points=((0.0, 0.0), (5.0, 1.0), (10.0, 4.0))), x=Axis(), y=Axis(unit="s"))
    (x0, y0), (x1, y1), (x2, y2) = next(path for path in paths(chart) if path.stroke == HUES[0]).points
    assert (x1 - x0) / (x2 - x0) == pytest.approx(0.5)
    assert (y0 - y1) / (y0 - y2) == pytest.approx(0.25)
    assert chart.panels[0].x.domain[0] == chart.panels[0].y.domain[0] == 0.0


def test_areas_of_points_are_their_shares_and_letters_do_not_overlap() -> None:
    points = tuple(
        Points(label=f"kernel {i}", letter="ABC"[i], points=((100.0 * 1.02**i, 1e-3),), share=share)
        for i, share in enumerate((0.4, 0.1, 0.4))
    )
    circles = [mark for mark in draw(chart_of(*CURVES, *points)).marks if isinstance(mark, Circle)]
    marks = sorted(mark.radius for mark in circles if mark.stroke != INK)
    assert [(radius / marks[-1]) ** 2 for radius in marks] == pytest.approx([0.25, 1.0, 1.0])
    letters = [(mark.x, mark.y) for mark in circles if mark.stroke == INK][:3]
    for (x, y), (other_x, other_y) in combinations(letters, 2):
        assert math.hypot(x - other_x, y - other_y) >= 18


def test_a_band_holds_what_is_between_its_edges() -> None:
    band = Band(label="within a tenth", edges=((2.0, 0.9e-3, 1.1e-3), (3e5, 0.9e-3, 1.1e-3)))
    drawing = draw(chart_of(*CURVES, band))
    check_texts(drawing)
    (area,) = [mark for mark in drawing.marks if isinstance(mark, Area)]
    reference = next(path for path in paths(LINES) if path.dash == (6, 4))
    assert {y for _, y in area.points} == {min(y for _, y in area.points), max(y for _, y in area.points)}
    assert len(area.points) == 4
    assert reference.points[0][0] == min(x for x, _ in area.points)
