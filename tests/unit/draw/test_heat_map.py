"""Tables of cells: texts, shades and the scale, the same bytes every time."""

from __future__ import annotations

from dataclasses import replace

from shardwise.present.charts.chart import Axis, Cell, Cells, Chart, LegendEntry, Panel
from shardwise.present.charts.common_charts import categories
from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.drawing import Rect
from shardwise.present.charts.palette import BLUE, FAINT, contrast

from .page import check_texts, texts

CELLS = (
    Cell(row=0, column=0, colour="shade:0.25", lines=("10.0%", "fsdp=8", "gas=4 mbs=1")),
    Cell(row=0, column=1, colour="shade:0.5", lines=("20.0%", "fsdp=64", "gas=1 mbs=1")),
    Cell(row=0, column=2, colour="shade:1", lines=("40.0%", "fsdp=8 tp=8", "gas=8 mbs=1", "ZeRO 3")),
    Cell(row=1, column=0, colour="empty", lines=("–", "nothing fits")),
)  # fmt: skip
PANEL = Panel(
    x=Axis(title="gpus", categories=categories(["8", "64", "512"]), side="top"),
    y=Axis(title="model", categories=categories(["a model", "another"])), marks=(Cells(cells=CELLS),), size=(84.0, 34.0),
)  # fmt: skip
MAP = Chart(
    title="map", subtitle="of layouts", panels=(PANEL,), note="–  nothing fits",
    legend=(LegendEntry(label="MFU: 0% to 40.0%", colour="ink", sample="scale"),),
)  # fmt: skip
DRAWING = draw(MAP)


def test_texts_are_on_the_page_and_do_not_overlap() -> None:
    check_texts(DRAWING)
    check_texts(draw(replace(MAP, legend=())))
    check_texts(draw(replace(MAP, note="")))


def test_pictures_are_deterministic() -> None:
    assert draw(MAP).svg() == DRAWING.svg()


def test_shades_deepen_with_the_values() -> None:
    fills = [mark.fill for mark in DRAWING.marks if isinstance(mark, Rect) and mark.stroke == FAINT and mark.fill]
    assert len(fills) == len(CELLS)
    for deepening in (
        [contrast(fill.light, "#ffffff") for fill in fills],
        [contrast(fill.dark, "#0f1720") for fill in fills],
    ):
        assert deepening[:3] == sorted(deepening[:3])
    assert (fills[2].light, fills[2].dark) == (BLUE.light, BLUE.dark)


def test_a_map_has_the_layouts_and_a_scale() -> None:
    written = texts(DRAWING)
    for text in (
        "10.0%",
        "40.0%",
        "–",
        "fsdp=8 tp=8",
        "nothing fits",
        "MFU: 0% to 40.0%",
        "–  nothing fits",
        "gpus",
        "model",
    ):
        assert text in written
