"""Heat maps: numbers, shades, notes in the cells and the scale, the same bytes every time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.present.charts.cells import HeatMap, draw_heat_map
from shardwise.present.charts.drawing import Drawing, Rect
from shardwise.present.charts.palette import BLUE, FAINT, contrast

from .page import check_texts, texts

HEAT = HeatMap(
    title="heat", subtitle="map", row_title="model", column_title="nodes", rows=("a model", "another"),
    columns=("1", "2", "4"), values=((0.1, 0.2, 0.4), (None, 0.3, 0.05)), absent="nothing fits",
)  # fmt: skip
MAP = HeatMap(
    title="map", subtitle="of layouts", row_title="model", column_title="gpus", rows=("8b", "70b"), columns=("8", "64"),
    values=((0.5, 0.4), (None, 0.25)), absent="no plan",
    notes=(
        (("fsdp=8", "gas=4 mbs=1"), ("fsdp=64", "gas=1 mbs=1")), (("nothing fits",), ("fsdp=8 tp=8", "gas=8 mbs=1", "ZeRO 3")),
    ),
    scale="MFU",
)  # fmt: skip
DRAWN = draw_heat_map(HEAT)


@pytest.mark.parametrize("drawing", [DRAWN, draw_heat_map(MAP)])
def test_texts_are_on_the_page_and_apart(drawing: Drawing) -> None:
    check_texts(drawing)


def test_pictures_are_the_same_every_time() -> None:
    assert draw_heat_map(HEAT).svg() == DRAWN.svg()


def test_a_heat_maps_cells_deepen() -> None:
    cells = [mark for mark in DRAWN.marks if isinstance(mark, Rect) and mark.stroke == FAINT]
    fills = [mark.fill for mark in cells if mark.fill]
    for deepening in (
        [contrast(fill.light, "#ffffff") for fill in fills],
        [contrast(fill.dark, "#0f1720") for fill in fills],
    ):
        assert deepening[:3] == sorted(deepening[:3])
    assert (fills[2].light, fills[2].dark) == (BLUE.light, BLUE.dark)
    assert len(fills) == 6
    shown = texts(DRAWN)
    assert {"10.0%", "40.0%", "5.0%", "–", "–  nothing fits"} <= set(shown)
    full = replace(HEAT, rows=("a",), columns=("1",), values=((0.1,),))
    assert "nothing fits" not in draw_heat_map(full).svg()


def test_a_map_has_the_layouts_and_a_scale() -> None:
    written = texts(draw_heat_map(MAP))
    for text in ("50.0%", "25.0%", "fsdp=8 tp=8", "nothing fits", "MFU: 0% to 50.0%", "–  no plan"):
        assert text in written
    assert not any("MFU" in text for text in texts(draw_heat_map(replace(MAP, scale=""))))
