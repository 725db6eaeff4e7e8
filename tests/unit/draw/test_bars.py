"""Stacked bars: lengths, colours, a legend that overlaps nothing, the same bytes every time."""

from __future__ import annotations

import pytest

from shardwise.present.charts.common_charts import bar_chart
from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.drawing import Rect
from shardwise.present.charts.palette import BLUE, GREEN, TERM_COLOURS

from .page import check_texts, texts

BARS = bar_chart(
    "bars", "of bytes",
    {"short": {"a": 5e9, "b": 0.0, "c": 30e9}, "long " * 40: {"a": 90e9, "b": 0.0, "c": 1e6}},
    limit=80e9, limit_label="chip: 80 GB",
)  # fmt: skip
DRAWING = draw(BARS)
HEIGHT = BARS.panels[0].size[1]


def test_texts_are_on_the_page_and_do_not_overlap() -> None:
    check_texts(DRAWING)


def test_pictures_are_deterministic() -> None:
    assert draw(BARS).svg() == DRAWING.svg()


def test_bars_are_as_long_as_their_bytes() -> None:
    widths = [mark.width for mark in DRAWING.marks if isinstance(mark, Rect) and mark.height == HEIGHT]
    assert [w / widths[0] for w in widths] == pytest.approx([1, 6, 18, 2e-4], abs=2e-3)
    labels = texts(DRAWING)
    assert {"35 GB", "90 GB", "chip: 80 GB", "a", "c"} <= set(labels)
    assert "b" not in labels, "a part that no bar has is not in the legend"


def test_a_parts_colour_does_not_depend_on_other_parts() -> None:
    fills = [mark.fill for mark in DRAWING.marks if isinstance(mark, Rect) and mark.height == 14]
    assert fills == [BLUE, GREEN]


def test_terms_have_the_colours_of_the_palette() -> None:
    chart = bar_chart("", "", {"": {"tp": 1.0, "bubble": 2.0, "weights": 1.0}}, unit="s")
    fills = [mark.fill for mark in draw(chart).marks if isinstance(mark, Rect) and mark.height == HEIGHT]
    assert fills == [TERM_COLOURS["tp"], TERM_COLOURS["bubble"], BLUE]
