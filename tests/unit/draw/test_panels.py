"""Panels over shared columns: every value and text of the chart is drawn at its place on the page."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.present.charts.chart import Axis, Category, Chart, Panel, RuleLine
from shardwise.present.charts.common_charts import column_panel
from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.drawing import Circle, Drawing, Path, Rect
from shardwise.present.charts.palette import BLUE, PAPER

from .page import check_texts, texts

X = Axis(
    title="devices",
    categories=tuple(Category(label=str(n), lines=(f"fsdp={n} pp=4", "gas=4 mbs=1")) for n in (8, 16, 32, 64)),
)
NARROW_X = Axis(title="a long title under a single column of a narrow chart", categories=X.categories[:1])


def step(x: Axis = X, *, joined: bool = True, compared: bool = True) -> Panel:
    values, ideal = (8.0, 4.1, None, 1.5), (8.0, 4.0, None, 1.0)
    count = len(x.categories)
    reference = {"reference": ideal[:count], "dashed": "ideal"} if compared else {}
    return column_panel(x, "step", "s", {"step": values[:count]}, joined=joined, **reference)  # type: ignore[arg-type]


def panels(x: Axis = X) -> tuple[Panel, ...]:
    count = len(x.categories)
    shares = {"compute": (1.0, 0.75, None, 0.5)[:count], "bubble": (0.0, 0.25, None, 0.5)[:count]}
    memory = {"weights": (2e10, 1e10, None, 5e9)[:count], "rest": (1e10,) * count}
    return (
        step(x), column_panel(x, "step", "s", {"step": (100.0, 10.0, None, 1.0)[:count]}),
        column_panel(x, "shares", "%", shares), column_panel(x, "memory", "B", memory, limit=8e10, dashed="capacity"),
    )  # fmt: skip


def chart_of(*panels: Panel, knee: int | None = None) -> Chart:
    first, *lower_panels = panels
    rules = () if knee is None else (RuleLine(at=knee + 0.5, label="knee: bound by the bubble"),)
    return Chart(
        title="a chart",
        subtitle="of four columns",
        panels=(replace(first, marks=(*rules, *first.marks)), *lower_panels),
    )


CHART = chart_of(*panels(), knee=3)


@pytest.mark.parametrize("drawing", [draw(CHART), draw(chart_of(*panels(), knee=0)), draw(chart_of(*panels(NARROW_X)))])
def test_texts_are_on_the_page_and_do_not_overlap(drawing: Drawing) -> None:
    check_texts(drawing)


def test_every_value_is_written() -> None:
    written = texts(draw(CHART))
    for text in (
        "8 s",
        "4.1 s",
        "1.5 s",
        "ideal",
        "compute",
        "bubble",
        "weights",
        "capacity",
        "30 GB",
        "15 GB",
        "devices",
    ):
        assert text in written
    assert written.count("knee: bound by the bubble") == 1
    for column in X.categories:
        assert column.label in written
        assert set(column.lines) <= set(written)


def test_absent_values_are_not_drawn() -> None:
    """Two panels of points, in three of four columns each."""
    assert sum(isinstance(mark, Circle) for mark in draw(CHART).marks) == 6


def circles(panel: Panel) -> list[float]:
    """Heights of a panel's points over its lower edge, in pixels."""
    marks = draw(chart_of(panel)).marks
    frame = next(mark for mark in marks if isinstance(mark, Rect) and mark.height == panel.size[1])
    return [frame.y + frame.height - mark.y for mark in marks if isinstance(mark, Circle)]


def test_a_linear_axis_begins_at_zero_and_a_logarithmic_one_has_even_factors() -> None:
    first, second, last = circles(step())
    assert second / first == pytest.approx(4.1 / 8.0, abs=1e-3)
    assert last / first == pytest.approx(1.5 / 8.0, abs=1e-3)
    first, second, last = circles(panels()[1])
    assert first - second == pytest.approx(second - last, abs=0.02)
    assert last > 0


def test_points_are_joined_where_columns_have_an_order() -> None:
    for joined in (True, False):
        marks = draw(chart_of(step(joined=joined, compared=False))).marks
        assert sum(isinstance(mark, Path) and mark.stroke == BLUE for mark in marks) == joined


def test_stacked_bars_are_as_high_as_their_sum() -> None:
    marks = draw(chart_of(panels()[3])).marks
    by_column: dict[float, float] = {}
    for mark in marks:
        if isinstance(mark, Rect) and mark.stroke == PAPER:
            by_column[mark.x] = by_column.get(mark.x, 0.0) + mark.height
    totals = sorted(by_column.values(), reverse=True)
    assert [total / totals[0] for total in totals] == pytest.approx([1.0, 2 / 3, 0.5, 1 / 3], abs=2e-3)
