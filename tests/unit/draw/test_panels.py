"""Panels over shared columns: every value and text of the chart is in the picture, on the page, at its place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.present.charts.drawing import Circle, Drawing, Path, Rect
from shardwise.present.charts.palette import BLUE, PAPER
from shardwise.present.charts.panels import HEIGHT, Column, Panel, PanelChart, draw_panels

from .page import check_texts, texts

STEP = Panel(
    title="step", unit="s", parts={"step": (8.0, 4.1, None, 1.5)}, reference=(8.0, 4.0, None, 1.0), dashed="ideal"
)
WIDE = replace(STEP, parts={"step": (100.0, 10.0, None, 1.0)}, reference=(), dashed="")
SHARES = Panel(title="shares", unit="%", parts={"compute": (1.0, 0.75, None, 0.5), "bubble": (0.0, 0.25, None, 0.5)})
MEMORY = Panel(
    title="memory",
    unit="B",
    parts={"weights": (2e10, 1e10, None, 5e9), "rest": (1e10,) * 4},
    limit=8e10,
    dashed="capacity",
)
CHART = PanelChart(
    title="a chart", subtitle="of four columns", axis_title="devices",
    columns=tuple(Column(label=str(n), lines=(f"fsdp={n} pp=4", "gas=4 mbs=1")) for n in (8, 16, 32, 64)),
    panels=(STEP, WIDE, SHARES, MEMORY), mark=3, mark_label="knee: bound by the bubble",
)  # fmt: skip
NARROW = replace(
    CHART, mark=None, axis_title="a long title under a single column of a narrow chart", columns=CHART.columns[:1],
    panels=tuple(
        replace(one, parts={name: values[:1] for name, values in one.parts.items()}, reference=()) for one in CHART.panels
    ),
)  # fmt: skip


@pytest.mark.parametrize("drawing", [draw_panels(CHART), draw_panels(replace(CHART, mark=0)), draw_panels(NARROW)])
def test_texts_are_on_the_page_and_apart(drawing: Drawing) -> None:
    check_texts(drawing)


def test_every_value_is_written() -> None:
    written = texts(draw_panels(CHART))
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
    for column in CHART.columns:
        assert column.label in written
        assert set(column.lines) <= set(written)


def test_what_is_absent_is_drawn_nowhere() -> None:
    """Two panels of points, in three of four columns each."""
    assert sum(isinstance(mark, Circle) for mark in draw_panels(CHART).marks) == 6


def circles(panel: Panel) -> list[float]:
    """Heights of a panel's points over its lower edge, in pixels."""
    marks = draw_panels(replace(CHART, panels=(panel,))).marks
    frame = next(mark for mark in marks if isinstance(mark, Rect) and mark.height == HEIGHT)
    return [frame.y + HEIGHT - mark.y for mark in marks if isinstance(mark, Circle)]


def test_a_linear_axis_begins_at_zero_and_a_logarithmic_one_has_even_factors() -> None:
    first, second, last = circles(STEP)
    assert second / first == pytest.approx(4.1 / 8.0, abs=1e-3)
    assert last / first == pytest.approx(1.5 / 8.0, abs=1e-3)
    first, second, last = circles(WIDE)
    assert first - second == pytest.approx(second - last, abs=0.02)
    assert last > 0


def test_points_are_joined_where_columns_have_an_order() -> None:
    plain = replace(CHART, mark=None, panels=(replace(STEP, reference=(), dashed=""),))
    for joined in (True, False):
        panels = (replace(plain.panels[0], joined=joined),)
        marks = draw_panels(replace(plain, panels=panels)).marks
        assert sum(isinstance(mark, Path) and mark.stroke == BLUE for mark in marks) == joined


def test_stacked_bars_are_as_high_as_their_sum() -> None:
    marks = draw_panels(replace(CHART, mark=None, panels=(MEMORY,))).marks
    by_column: dict[float, float] = {}
    for mark in marks:
        if isinstance(mark, Rect) and mark.stroke == PAPER:
            by_column[mark.x] = by_column.get(mark.x, 0.0) + mark.height
    totals = sorted(by_column.values(), reverse=True)
    assert [total / totals[0] for total in totals] == pytest.approx([1.0, 2 / 3, 0.5, 1 / 3], abs=2e-3)
