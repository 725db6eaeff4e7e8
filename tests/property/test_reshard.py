"""Executed on virtual devices, the collectives of `reshard` give the target's shards and move what they say."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.run.numpy.devices import VirtualDevices
from shardwise.sharding import Collective, Mesh, Spec, parse_tensor, reshard
from shardwise.sharding.collectives import CollectiveKind
from shardwise.values.errors import ShardingError
from shardwise.values.symbolic import SymbolValues

DIMS = ("I", "J", "K")


@st.composite
def specs(draw: st.DrawFn, dims: tuple[str, ...], axes: tuple[str, ...], partial: tuple[str, ...]) -> Spec:
    """A spec over `dims`: each axis splits a dim, in any order, or nothing, or (those in `partial`) is a partial sum."""
    split: dict[str, list[str]] = {dim: [] for dim in dims}
    summed = []
    for axis in draw(st.permutations(axes)):
        place = draw(st.sampled_from([*dims, "nowhere", *(["partial"] if axis in partial else [])]))
        if place == "partial":
            summed.append(axis)
        elif place != "nowhere":
            split[place].append(axis)
    return Spec.of(dims, split, summed)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Mesh, dict[str, int], Spec, Spec]:
    axes = ("X", "Y", "Z")[: draw(st.integers(1, 3))]
    mesh = Mesh(tuple((axis, draw(st.integers(1, 3))) for axis in axes))
    dims = DIMS[: draw(st.integers(1, 3))]
    sizes = {dim: mesh.num_devices * draw(st.integers(1, 2)) for dim in dims}
    before = draw(specs(dims, axes, axes))
    after = draw(specs(dims, axes, before.partial))
    return mesh, sizes, before, after


def check(
    mesh: Mesh, sizes: dict[str, int], before: Spec, after: Spec, reduction: str = "sum"
) -> tuple[Collective, ...]:
    """Every device ends with its window of the target, and every collective moved what it says."""
    before = before.with_partial(before.partial, reduction)
    after = after.with_partial(after.partial, reduction)
    devices = VirtualDevices(mesh, sizes)
    combine = np.add if reduction == "sum" else np.maximum
    rng = np.random.default_rng(0)
    shape = [sizes[dim] for dim in before.dims]
    summands: dict[tuple[int, ...], Any] = {
        at: rng.integers(-50, 50, size=shape)
        for at in itertools.product(*(range(mesh.size(a)) for a in before.partial))
    }
    devices.live_shards["A", before] = [
        devices.local_part(summands[tuple(c[a] for a in before.partial)], before, c) for c in devices.coordinates
    ]
    collectives = reshard(before, after)
    expected: Counter[Any] = Counter()
    values = SymbolValues({**sizes, **dict(mesh.axes)})
    for collective in collectives:
        devices.communicate("A", collective)
        expected[collective.kind, collective.axes] += round(
            collective.received_elements.evaluate(values) * mesh.num_devices
        )
    assert +devices.moved == +expected
    _check_shards(devices, after, combine.reduce(list(summands.values())), combine)
    return collectives


def _check_shards(devices: VirtualDevices, after: Spec, whole: Any, combine: Any) -> None:
    """Where no axis stays partial each shard is a window of the whole; else the shards of a group combine to it."""
    shards = devices.live_shards["A", after]
    for group in devices.groups(after.partial):
        window = devices.local_part(whole, after, devices.coordinates[group[0]])
        np.testing.assert_array_equal(combine.reduce([shards[device] for device in group]), window)


@given(pairs(), st.sampled_from(["sum", "max"]))
def test_reshard_gives_the_target(pair: tuple[Mesh, dict[str, int], Spec, Spec], reduction: str) -> None:
    mesh, sizes, before, after = pair
    check(mesh, sizes, before, after, reduction)


MESH = Mesh((("X", 2), ("Y", 3), ("Z", 2)))
SIZES = {"I": 12, "J": 24}
KNOWN = [
    ("A[I, J]", "A[I, J]", []),
    ("A[I_X, J]", "A[I, J]", [(CollectiveKind.ALL_GATHER, "X")]),
    ("A[I, J]", "A[I_X, J]", [(CollectiveKind.SLICE, "X")]),
    ("A[I, J]{U_X}", "A[I, J]", [(CollectiveKind.ALL_REDUCE, "X")]),
    ("A[I, J]{U_X}", "A[I_X, J]", [(CollectiveKind.REDUCE_SCATTER, "X")]),
    ("A[I_X, J]", "A[I, J_X]", [(CollectiveKind.ALL_TO_ALL, "X")]),
    ("A[I_XY, J]", "A[I_X, J]", [(CollectiveKind.ALL_GATHER, "Y")]),
    ("A[I_XY, J]", "A[I_X, J_Y]", [(CollectiveKind.ALL_TO_ALL, "Y")]),
    ("A[I_XY, J]", "A[I_Y, J]", [(CollectiveKind.ALL_GATHER, "XY"), (CollectiveKind.SLICE, "Y")]),
    ("A[I_XY, J]", "A[I_YX, J]", [(CollectiveKind.ALL_GATHER, "XY"), (CollectiveKind.SLICE, "YX")]),
    (
        "A[I_X, J_Y]",
        "A[I_Y, J_X]",
        [
            (CollectiveKind.ALL_GATHER, "X"),
            (CollectiveKind.ALL_GATHER, "Y"),
            (CollectiveKind.SLICE, "Y"),
            (CollectiveKind.SLICE, "X"),
        ],
    ),
    ("A[I, J]{U_XY}", "A[I_X, J]", [(CollectiveKind.REDUCE_SCATTER, "X"), (CollectiveKind.ALL_REDUCE, "Y")]),
    ("A[I, J]{U_XY}", "A[I_X, J_Y]", [(CollectiveKind.REDUCE_SCATTER, "X"), (CollectiveKind.REDUCE_SCATTER, "Y")]),
    ("A[I_Z, J]{U_XY}", "A[I, J]{U_Y}", [(CollectiveKind.ALL_REDUCE, "X"), (CollectiveKind.ALL_GATHER, "Z")]),
]


@pytest.mark.parametrize(("before", "after", "expected"), KNOWN)
def test_reshardings_have_the_known_collectives(
    before: str, after: str, expected: list[tuple[CollectiveKind, str]]
) -> None:
    collectives = check(MESH, SIZES, parse_tensor(before).spec, parse_tensor(after).spec)
    assert [(c.kind, "".join(c.axes)) for c in collectives] == expected


@given(pairs())
def test_steps_connect_and_equal_specs_need_none(pair: tuple[Mesh, dict[str, int], Spec, Spec]) -> None:
    _, _, before, after = pair
    way = reshard(before, after)
    at = before
    for collective in way:
        assert collective.before == at
        at = collective.after
    assert at == after
    assert reshard(after, after) == ()
    assert bool(way) == (before != after)


def test_axis_order_matters() -> None:
    """A[I_XY] and A[I_YX] put different rows on a device."""
    devices = VirtualDevices(MESH, SIZES)
    rows = np.arange(12)[:, None] * np.ones((1, 24), dtype=int)
    devices.scatter_array("A", parse_tensor("A[I_XY, J]").spec, rows)
    devices.scatter_array("B", parse_tensor("B[I_YX, J]").spec, rows)
    second = 2  # X = 0, Y = 1, Z = 0
    assert devices.coordinates[second] == {"X": 0, "Y": 1, "Z": 0}
    assert devices.live_shards["A", parse_tensor("A[I_XY, J]").spec][second][:, 0].tolist() == [2, 3]
    assert devices.live_shards["B", parse_tensor("B[I_YX, J]").spec][second][:, 0].tolist() == [4, 5]


def test_impossible_reshardings_are_refused() -> None:
    whole = parse_tensor("A[I, J]").spec
    with pytest.raises(ShardingError, match="different dims"):
        reshard(whole, Spec.of(("J", "I")))
    with pytest.raises(ShardingError, match="partial over axes that"):
        reshard(whole, parse_tensor("A[I, J]{U_X}").spec)
