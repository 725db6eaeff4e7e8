"""Heat maps: numbers, shades, notes in the cells and the scale, the same bytes every time."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from shardwise.draw.heat_map import HeatMap, draw_heat_map
from shardwise.draw.svg import COLOURS

from .page import SVG, check_texts, texts

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


@pytest.mark.parametrize("svg", [DRAWN, draw_heat_map(MAP)])
def test_texts_are_on_the_page_and_apart(svg: str) -> None:
    check_texts(svg)


def test_pictures_are_the_same_every_time() -> None:
    assert draw_heat_map(HEAT) == DRAWN


def test_a_heat_maps_cells_deepen() -> None:
    root = ElementTree.fromstring(DRAWN)
    shades = [one.get("fill", "") for one in root.iter(f"{SVG}rect") if one.get("stroke-width") == "2"]
    light = [sum(int(shade[i : i + 2], 16) for i in (1, 3, 5)) for shade in shades[:3]]
    assert light == sorted(light, reverse=True)
    assert shades[2] == COLOURS[1]
    assert len(shades) == 6
    shown = texts(DRAWN)
    assert {"10.0%", "40.0%", "5.0%", "–", "–  nothing fits"} <= set(shown)
    assert not re.search("nothing fits", draw_heat_map(HeatMap(
        title="", subtitle="", row_title="", column_title="", rows=("a",), columns=("1",), values=((0.1,),),
        absent="nothing fits",
    )))  # fmt: skip


def test_a_map_has_the_layouts_and_a_scale() -> None:
    written = texts(draw_heat_map(MAP))
    for text in ("50.0%", "25.0%", "fsdp=8 tp=8", "nothing fits", "MFU: 0% to 50.0%", "–  no plan"):
        assert text in written
    assert not any("MFU" in text for text in texts(draw_heat_map(replace(MAP, scale=""))))
