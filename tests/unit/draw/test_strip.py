"""Strips of frames: cells at their places, labels on a single colour, nothing outside of the page."""

from __future__ import annotations

import pytest

from shardwise.present.charts.chart import Cell
from shardwise.present.charts.common_charts import frames_chart
from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.draw_panel import LABEL_HEIGHT
from shardwise.present.charts.drawing import Drawing, Rect, Text
from shardwise.present.charts.palette import FAINT, INK, series

from .page import check_texts, texts


def strip_of(num_frames: int, num_devices: int, share: float = 0.5) -> Drawing:
    cells = [
        Cell(row=i, column=device, colour=f"series:{i}", lines=(str(i),), share=share, new=i == 0)
        for device in range(num_devices)
        for i in range(3)
    ]
    frames = {f"frame {i}": cells for i in range(num_frames)}
    names = tuple(str(i) for i in range(num_devices))
    return draw(frames_chart("title", "subtitle", frames, columns=names, rows=(), note="legend"))


def columns(drawing: Drawing) -> list[Rect]:
    """The frames around the shards of a device."""
    return [mark for mark in drawing.marks if isinstance(mark, Rect) and mark.height == 3 * 24.0]


@pytest.mark.parametrize(("num_frames", "num_devices"), [(1, 1), (5, 4), (9, 16), (3, 40)])
def test_a_strip_wraps_and_stays_on_its_page(num_frames: int, num_devices: int) -> None:
    drawing = strip_of(num_frames, num_devices)
    check_texts(drawing)
    for mark in drawing.marks:
        if isinstance(mark, Rect):
            assert 0 <= mark.x <= mark.x + mark.width <= drawing.width
            assert 0 <= mark.y <= mark.y + mark.height <= drawing.height
    assert len(columns(drawing)) == num_frames * num_devices
    assert {"title", "subtitle", "legend", "frame 0"} <= set(texts(drawing))


def test_columns_do_not_overlap() -> None:
    places = {(column.x, column.y): column.width for column in columns(strip_of(9, 4))}
    assert len(places) == 36
    for (x, y), width in places.items():
        assert not any(x < neighbour < x + width for neighbour, height in places if height == y)


def test_a_cell_is_filled_by_the_share_of_its_piece() -> None:
    (part,), (full,) = (
        [mark for mark in strip_of(1, 1, share).marks if isinstance(mark, Rect) and mark.fill == series(1)]
        for share in (0.25, 1.0)
    )
    assert part.width == pytest.approx(full.width / 4)
    assert part.height == full.height - LABEL_HEIGHT


def test_a_label_overlaps_no_edge_of_a_colour() -> None:
    """It stands on the piece where the device has all of it, otherwise above it."""
    drawing = strip_of(1, 1)
    label = next(mark for mark in drawing.marks if isinstance(mark, Text) and mark.content == "1")
    fill = next(mark for mark in drawing.marks if isinstance(mark, Rect) and mark.fill == series(1))
    assert label.fill == INK
    assert label.y <= fill.y


def test_new_pieces_have_a_thick_edge() -> None:
    edges = [mark for mark in strip_of(1, 1).marks if isinstance(mark, Rect) and mark.stroke and mark.height < 3 * 24.0]
    assert [(edge.stroke, edge.stroke_width) for edge in edges] == [(INK, 2.0), (FAINT, 1.0), (FAINT, 1.0)]
