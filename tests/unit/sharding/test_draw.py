"""Pictures of which device holds what."""

from __future__ import annotations

import pytest

from shardwise.sharding.draw import draw_text
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
