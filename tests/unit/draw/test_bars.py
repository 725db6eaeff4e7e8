"""Stacked bars: lengths, colours, a legend that overlaps nothing, the same bytes every time."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shardwise.draw.bars import Bar, BarChart, draw_bars
from shardwise.draw.svg import COLOURS

from .page import SVG, check_texts, texts

BARS = BarChart(
    title="bars", subtitle="of bytes",
    bars=(
        Bar(label="short", parts={"a": 5e9, "b": 0.0, "c": 30e9}),
        Bar(label="long " * 40, parts={"a": 90e9, "b": 0.0, "c": 1e6}),
    ),
    limit=80e9, limit_label="chip: 80 GB",
)  # fmt: skip
DRAWN = draw_bars(BARS)


def test_texts_are_on_the_page_and_apart() -> None:
    check_texts(DRAWN)


def test_pictures_are_the_same_every_time() -> None:
    assert draw_bars(BARS) == DRAWN


def test_bars_are_as_long_as_their_bytes() -> None:
    root = ElementTree.fromstring(DRAWN)
    widths = [float(one.get("width", "0")) for one in root.iter(f"{SVG}rect") if one.get("height") == "30"]
    assert [w / widths[0] for w in widths] == pytest.approx([1, 6, 18, 2e-4], abs=2e-3)
    shown = texts(DRAWN)
    assert {"35 GB", "90 GB", "chip: 80 GB", "a", "c"} <= set(shown)
    assert "b" not in shown, "a part that no bar has is not in the legend"


def test_a_part_has_one_colour_whatever_else_is_shown() -> None:
    fills = [one.get("fill") for one in ElementTree.fromstring(DRAWN).iter(f"{SVG}rect") if one.get("height") == "14"]
    assert fills == [COLOURS[0], COLOURS[2]]
