"""Pictures of which device holds what."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shardwise.sharding.draw import CELL_WIDTH, MARGIN, SPACE, caption, draw_svg, draw_text
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.notation import parse_tensor

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
def test_grids(text: str, grid: list[str]) -> None:
    tensor = parse_tensor(text)
    lines = draw_text(tensor.name, tensor.spec, MESH).splitlines()
    assert lines[0] == text
    assert [line for line in lines if line.startswith("|")] == grid


def test_what_the_picture_leaves_out_is_said() -> None:
    tensor = parse_tensor("A[B_X, T, D_Y, F_Z]{U_W}")
    shown = draw_text("A", tensor.spec, Mesh.of({"X": 2, "Y": 2, "Z": 2, "W": 2}))
    assert "split over F too" in shown
    assert "a partial sum on each device along W" in shown


SVG = "{http://www.w3.org/2000/svg}"


def pictured(*texts: str, mesh: Mesh) -> tuple[float, list[tuple[float, float, list[ElementTree.Element]]]]:
    """The width of a page, and of each grid its left edge, the width of its cells and its texts: the caption, then labels."""
    tensors = [parse_tensor(text) for text in texts]
    root = ElementTree.fromstring(draw_svg([(one.name, one.spec) for one in tensors], mesh))
    grids = []
    for group in root.iter(f"{SVG}g"):
        left = float(group.get("transform", "").removeprefix("translate(").split()[0])
        (width,) = {float(cell.get("width", "")) for cell in group.iter(f"{SVG}rect")}
        grids.append((left, width, list(group.iter(f"{SVG}text"))))
    return float(root.get("width", "")), grids


def test_grids_stand_side_by_side_on_a_page_that_ends_behind_the_last() -> None:
    """A grid is as wide as its cells, or as its caption where that is wider."""
    page, grids = pictured("A[I, J_XY]", "B[I_X, J]", "C[I_Y, J_X]", mesh=MESH)
    assert [cell for _, cell, _ in grids] == [CELL_WIDTH] * 3
    widths = [4 * CELL_WIDTH, max(CELL_WIDTH, 8.5 * len("B[I_X, J]")), 2 * CELL_WIDTH]
    assert [left for left, _, _ in grids] == [MARGIN + sum(widths[:n]) + n * SPACE for n in range(3)]
    assert page == grids[-1][0] + widths[-1] + MARGIN
    assert [texts[0].text for _, _, texts in grids] == ["A[I, J_XY]", "B[I_X, J]", "C[I_Y, J_X]"]


def test_cells_are_as_wide_as_the_longest_list_of_devices() -> None:
    """Every second device of sixteen holds the same: eight numbers, none of them in a run."""
    mesh = Mesh.of({"X": 8, "Y": 2})
    page, ((left, width, (title, *labels)),) = pictured("A[I_Y]", mesh=mesh)
    assert [label.text for label in labels] == [" ".join(map(str, range(start, 16, 2))) for start in range(2)]
    assert width == 8 * len(labels[1].text or "") + 16
    assert page == left + max(width, 8.5 * len(title.text or "")) + MARGIN
    assert title.text == caption("A", parse_tensor("A[I_Y]").spec)
