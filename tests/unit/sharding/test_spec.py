"""Shardings and meshes: shards of a device, replication, and refusals."""

from __future__ import annotations

import re

import pytest

from shardwise.sharding import Mesh, Spec, parse_tensor
from shardwise.values.errors import ShardingError
from shardwise.values.symbolic import SymbolValues

MESH = Mesh((("X", 4), ("Y", 2), ("Z", 8)))
SIZES = {"I": 64, "J": 128}


def spec(text: str) -> Spec:
    return parse_tensor(f"A{text}").spec


@pytest.mark.parametrize(
    ("text", "shape", "copies"),
    [
        ("[I, J]", (64, 128), 64),
        ("[I_X, J]", (16, 128), 16),
        ("[I_XY, J]", (8, 128), 8),
        ("[I_X, J_Y]", (16, 64), 8),
        ("[I_XYZ, J]", (1, 128), 1),
        ("[I_X, J]{U_Y}", (16, 128), 8),
        ("[I, J]{U_XYZ}", (64, 128), 1),
    ],
)
def test_local_shape_and_replication_equal_s2(text: str, shape: tuple[int, ...], copies: int) -> None:
    """S2's example: on a mesh of 4 x 2 x 8 devices, A[I_XY, J] has 1/8 of the rows on each, 8 times over."""
    assert spec(text).local_shape(MESH, SIZES) == shape
    assert spec(text).replication(MESH) == copies
    values = SymbolValues({**SIZES, **dict(MESH.axes)})
    assert spec(text).local_elements().evaluate(values) == shape[0] * shape[1]


def test_local_elements_round_up_on_the_fullest_device() -> None:
    assert spec("[I_X, J]").local_elements().evaluate(SymbolValues({"I": 10, "J": 3, "X": 4})) == 9


def test_indivisible_dims_are_named_with_the_nearest_sizes() -> None:
    message = "[I_XY, J]: dim I = 60 does not divide over X·Y = 8; the nearest sizes that do are 56 and 64"
    with pytest.raises(ShardingError, match=re.escape(message)):
        spec("[I_XY, J]").local_shape(MESH, {"I": 60, "J": 1})


@pytest.mark.parametrize(
    ("dims", "split", "partial"),
    [
        (("I", "J"), {"I": "X", "J": "X"}, ()),
        (("I",), {"I": "XX"}, ()),
        (("I",), {"I": "X"}, ("X",)),
        ((), {}, ("X", "X")),
    ],
)
def test_an_axis_is_used_once(dims: tuple[str, ...], split: dict[str, str], partial: tuple[str, ...]) -> None:
    with pytest.raises(ShardingError, match="mesh axis X is used twice; an array may use each axis once"):
        Spec.of(dims, split, partial)


def test_a_split_dim_must_exist() -> None:
    with pytest.raises(ShardingError, match="no dim 'K' among I, J"):
        Spec.of(("I", "J"), {"K": "X"})
    with pytest.raises(ShardingError, match="2 dims but 1 groups of axes"):
        Spec(("I", "J"), ((),))


def test_changes_keep_the_other_fields() -> None:
    start = spec("[I_XY, J]{U_Z}")
    assert start.gather_axis("X") == spec("[I, J]{U_Z}")  # Y is minor to X: shards stay contiguous
    assert start.gather_axis("Y") == spec("[I_X, J]{U_Z}")
    assert start.gather_axis("Z") == start
    assert start.gather_axes(["X"]) == spec("[I_Y, J]{U_Z}")
    assert start.with_axes("J", ["W"]) == spec("[I_XY, J_W]{U_Z}")
    assert start.with_partial(()) == spec("[I_XY, J]")
    assert start.rename_dims({"I": "K"}) == spec("[K_XY, J]{U_Z}")
    assert start.dim_of("Y") == "I"
    assert start.dim_of("Z") is None
    assert start.axes_of("K") == ()


def test_the_order_of_axes_matters_in_a_dim_but_not_in_a_partial_sum() -> None:
    assert spec("[I]{U_XY}") == spec("[I]{U_YX}")
    assert spec("[I_XY]") != spec("[I_YX]")


def test_a_whole_tensor_has_no_reduction() -> None:
    assert spec("[I]").with_partial((), "max") == spec("[I]")
    assert spec("[I]").with_partial("X", "max") != spec("[I]").with_partial("X", "sum")


def test_mesh_numbers_devices_with_the_first_axis_slowest() -> None:
    mesh = Mesh.of({"X": 2, "Y": 3})
    coordinates = list(mesh.coordinates())
    assert mesh.num_devices == len(coordinates) == 6
    assert coordinates[4] == {"X": 1, "Y": 1}
    assert mesh.position({"X": 1, "Y": 2}, "XY") == 5
    assert mesh.position({"X": 1, "Y": 2}, "YX") == 2 * 2 + 1
    assert mesh.size(("X", "Y")) == 6
    assert mesh.size("Y") == 3
    assert mesh.size(()) == 1


def test_all_problems_of_a_mesh_are_reported_together() -> None:
    with pytest.raises(ShardingError) as caught:
        Mesh((("X", 2), ("X", 0), ("Y", True)))
    assert caught.value.problems == (
        "mesh: axis 'X' is given twice; each axis needs a name of its own",
        "mesh: axis X has size 0; a whole number of at least 1 is required",
        "mesh: axis Y has size True; a whole number of at least 1 is required",
    )
    with pytest.raises(ShardingError, match="no axis 'W'; the mesh has X, Y, Z"):
        MESH.size(("X", "W"))
