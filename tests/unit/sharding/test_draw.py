"""Pictures of the shards of each device."""

from __future__ import annotations

import pytest

from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.drawing import Drawing, Rect, Text, text_width
from shardwise.present.charts.palette import PAPER
from shardwise.present.charts.sharding_charts import Moment, draw_text, shards_chart
from shardwise.sharding.notation import parse_tensor
from shardwise.sharding.spec import Mesh
from unit.draw.page import check_texts

MESH = Mesh.of({"X": 2, "Y": 2})


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("A[I_X, J_Y]", ["| 0 | 1 |", "| 2 | 3 |"]),
        ("A[I_Y, J_X]", ["| 0 | 2 |", "| 1 | 3 |"]),
        ("A[I_XY, J]", ["| 0 |", "| 1 |", "| 2 |", "| 3 |"]),
        ("A[I_YX, J]", ["| 0 |", "| 2 |", "| 1 |", "| 3 |"]),
        ("A[I, J_X]", ["| 0-1 | 2-3 |"]),
        ("A[I, J]", ["| 0-3 |"]),
    ],
)
def test_grids_show_the_devices_of_each_shard(text: str, grid: list[str]) -> None:
    tensor = parse_tensor(text)
    lines = draw_text(tensor.name, tensor.spec, MESH).splitlines()
    assert lines[0] == text
    assert [line for line in lines if line.startswith("|")] == grid


def test_dims_left_out_of_the_picture_are_named() -> None:
    tensor = parse_tensor("A[B_X, T, D_Y, F_Z]{U_W}")
    picture = draw_text("A", tensor.spec, Mesh.of({"X": 2, "Y": 2, "Z": 2, "W": 2}))
    assert "split over F too" in picture
    assert "a partial sum on each device along W" in picture


def draw_moments(*notations: str, mesh: Mesh) -> tuple[Drawing, list[Rect], list[str]]:
    """The picture, its cells, and the texts in the cells."""
    tensors = [parse_tensor(text) for text in notations]
    moments = [Moment(heading="start", name=tensor.name, spec=tensor.spec) for tensor in tensors]
    drawing = draw(shards_chart("title", moments, mesh))
    cells = [mark for mark in drawing.marks if isinstance(mark, Rect) and mark.stroke == PAPER]
    written = [mark for mark in drawing.marks if isinstance(mark, Text)]
    labels = [
        text.content
        for cell in cells
        for text in written
        if cell.x < text.x < cell.x + cell.width and cell.y < text.y < cell.y + cell.height
    ]
    return drawing, cells, labels


def test_grids_stand_side_by_side_on_a_page_that_holds_them() -> None:
    drawing, cells, labels = draw_moments("A[I, J_XY]", "B[I_X, J]", "C[I_Y, J_X]", mesh=MESH)
    check_texts(drawing)
    assert labels == ["0", "1", "2", "3", "0-1", "2-3", "0", "2", "1", "3"]
    assert max(cell.x + cell.width for cell in cells) <= drawing.width
    lefts = [min(cell.x for cell in group) for group in (cells[:4], cells[4:6], cells[6:])]
    assert lefts == sorted(lefts)
    assert cells[3].x + cells[3].width < lefts[1]


def test_grids_without_room_are_placed_below() -> None:
    mesh = Mesh.of({"X": 16})
    drawing, cells, _ = draw_moments("A[I, J_X]", "B[I, J_X]", mesh=mesh)
    check_texts(drawing)
    assert cells[16].x == cells[0].x
    assert cells[16].y > cells[0].y + cells[0].height


def test_cells_fit_the_longest_list_of_devices() -> None:
    """Every second of sixteen devices has the same shard: eight numbers without a run."""
    drawing, cells, labels = draw_moments("A[I_Y]", mesh=Mesh.of({"X": 8, "Y": 2}))
    check_texts(drawing)
    assert labels == [" ".join(map(str, range(start, 16, 2))) for start in range(2)]
    assert all(cell.width > text_width(label) for cell, label in zip(cells, labels, strict=True))


def test_summands_of_a_partial_sum_are_distinguished_from_copies() -> None:
    """Along X devices hold copies, along Y summands: a plus between them, and a line around."""
    drawing, cells, labels = draw_moments("C[I, K_Z]{U_Y}", mesh=Mesh.of({"X": 2, "Y": 2, "Z": 2}))
    assert labels == ["0 4 + 2 6", "1 5 + 3 7"]
    lines = [mark for mark in drawing.marks if isinstance(mark, Rect) and mark.stroke and mark.stroke != PAPER]
    assert len(lines) == len(cells)
    _, _, sixteen = draw_moments("C[I]{U_X}", mesh=Mesh.of({"X": 16}))
    assert sixteen == ["0 + 1 + … + 15"]
