"""Charts: ticks, places, legends that overlap nothing, text within the page, the same bytes every time."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from shardwise.draw.charts import (
    Axis,
    Bar,
    BarChart,
    HeatMap,
    Line,
    LineChart,
    Marker,
    Point,
    draw_bars,
    draw_heat_map,
    draw_lines,
    even_ticks,
    text_width,
    ticks,
)
from shardwise.draw.svg import COLOURS

SVG = "{http://www.w3.org/2000/svg}"
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
BARS = BarChart(
    title="bars", subtitle="of bytes",
    bars=(
        Bar(label="short", parts={"a": 5e9, "b": 0.0, "c": 30e9}),
        Bar(label="long " * 40, parts={"a": 90e9, "b": 0.0, "c": 1e6}),
    ),
    limit=80e9, limit_label="chip: 80 GB",
)  # fmt: skip
HEAT = HeatMap(
    title="heat", subtitle="map", row_title="model", column_title="nodes", rows=("a model", "another"),
    columns=("1", "2", "4"), values=((0.1, 0.2, 0.4), (None, 0.3, 0.05)), absent="nothing fits",
)  # fmt: skip
DRAWN = {"lines": draw_lines(LINES), "bars": draw_bars(BARS), "heat": draw_heat_map(HEAT)}


def texts(svg: str) -> list[tuple[str, float, float, float, float]]:
    """Content and box (left, top, right, bottom) of every horizontal text."""
    found = []
    for one in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        if one.get("transform") is None:
            content, size = one.text or "", float(one.get("font-size", "13"))
            x, y, width = float(one.get("x", "0")), float(one.get("y", "0")), text_width(content, size)
            left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[one.get("text-anchor", "start")] * width
            found.append((content, left, y - 0.75 * size, left + width, y))
    return found


@pytest.mark.parametrize("name", DRAWN)
def test_texts_are_on_the_page_and_apart(name: str) -> None:
    root = ElementTree.fromstring(DRAWN[name])
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    boxes = texts(DRAWN[name])
    for content, left, top, right, bottom in boxes:
        assert left >= 0, content
        assert top >= 0, content
        assert right <= width, content
        assert bottom <= height - 4, content
    for (one, *a), (other, *b) in combinations(boxes, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, f"{one!r} on {other!r}"


def test_pictures_are_the_same_every_time() -> None:
    assert draw_lines(LINES) == DRAWN["lines"]
    assert draw_bars(BARS) == DRAWN["bars"]
    assert draw_heat_map(HEAT) == DRAWN["heat"]


def test_ticks() -> None:
    assert ticks(1.0, 100.0) == (1, 2, 5, 10, 20, 50, 100)
    assert ticks(0.1, 1e4) == (0.1, 1, 10, 100, 1e3, 1e4)
    assert ticks(0.05, 0.5) == (0.05, 0.1, 0.2, 0.5)
    assert even_ticks(156e9) == tuple(i * 20e9 for i in range(8))
    assert even_ticks(80e9) == tuple(i * 10e9 for i in range(9))


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
    root = ElementTree.fromstring(DRAWN["lines"])
    labels = [box for box in texts(DRAWN["lines"]) if box[0].startswith("marker")]
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
    root = ElementTree.fromstring(DRAWN["lines"])
    styles = [(line.get("stroke"), line.get("stroke-dasharray")) for line in root.iter(f"{SVG}polyline")]
    coloured = {style for style in styles if style[0] in COLOURS}
    assert len(coloured) == len({dash for _, dash in coloured}) == 4


def test_bars_are_as_long_as_their_bytes() -> None:
    root = ElementTree.fromstring(DRAWN["bars"])
    widths = [float(one.get("width", "0")) for one in root.iter(f"{SVG}rect") if one.get("height") == "30"]
    assert [w / widths[0] for w in widths] == pytest.approx([1, 6, 18, 2e-4], abs=2e-3)
    shown = [content for content, *_ in texts(DRAWN["bars"])]
    assert {"35 GB", "90 GB", "chip: 80 GB", "a", "c"} <= set(shown)
    assert "b" not in shown, "a part that no bar has is not in the legend"


def test_a_part_has_one_colour_whatever_else_is_shown() -> None:
    fills = [
        one.get("fill") for one in ElementTree.fromstring(DRAWN["bars"]).iter(f"{SVG}rect") if one.get("height") == "14"
    ]
    assert fills == [COLOURS[0], COLOURS[2]]


def test_a_heat_maps_cells_deepen() -> None:
    root = ElementTree.fromstring(DRAWN["heat"])
    shades = [one.get("fill", "") for one in root.iter(f"{SVG}rect") if one.get("stroke-width") == "2"]
    light = [sum(int(shade[i : i + 2], 16) for i in (1, 3, 5)) for shade in shades[:3]]
    assert light == sorted(light, reverse=True)
    assert shades[2] == COLOURS[1]
    assert len(shades) == 6
    shown = [content for content, *_ in texts(DRAWN["heat"])]
    assert {"10.0%", "40.0%", "5.0%", "–", "–  nothing fits"} <= set(shown)
    assert not re.search("nothing fits", draw_heat_map(HeatMap(
        title="", subtitle="", row_title="", column_title="", rows=("a",), columns=("1",), values=((0.1,),),
        absent="nothing fits",
    )))  # fmt: skip
