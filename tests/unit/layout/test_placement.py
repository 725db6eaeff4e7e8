"""Placements divide every level among the axes without a remainder."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.topology import GroupLinks
from shardwise.layout.placement import Placement, cuts_by_axis, default_placement, searched_placements
from shardwise.values.errors import InputError

ATOMIC = ("tp_kv", "tp_rep", "cp", "ep", "fsdp", "dp", "pp")
CLUSTERS = ("h100:512", "h100:24", "tpu-v5p:4x4x8", "tpu-v5e:8x16", "tpu-v5p:8x12x20", "tpu-v5e:4x8*3")


@st.composite
def degrees(draw: st.DrawFn, num_devices: int) -> dict[str, int]:
    """A random factorisation of the devices over the atomic axes."""
    degrees_by_axis = dict.fromkeys(ATOMIC, 1)
    remaining = num_devices
    while remaining > 1:
        prime = next(p for p in range(2, remaining + 1) if remaining % p == 0)
        degrees_by_axis[draw(st.sampled_from(ATOMIC))] *= prime
        remaining //= prime
    return degrees_by_axis


@given(st.data(), st.sampled_from(CLUSTERS))
def test_cuts_multiply_to_degrees_and_to_levels(data: st.DataObject, cluster: str) -> None:
    topology = load_cluster(cluster).topology
    drawn_degrees = data.draw(degrees(math.prod(topology.levels)))
    for placement in searched_placements(topology):
        cuts = cuts_by_axis(topology, placement, drawn_degrees)
        assert set(cuts) == set(ATOMIC)
        for axis, axis_cuts in cuts.items():
            assert math.prod(cut.size for cut in axis_cuts) == drawn_degrees[axis]
        for level, size in enumerate(topology.levels):
            assert math.prod(axis_cuts[level].size for axis_cuts in cuts.values()) == size


@given(st.data(), st.sampled_from(CLUSTERS))
def test_a_stride_is_the_product_of_the_inner_cuts(data: st.DataObject, cluster: str) -> None:
    """Along a level, the axes in order number its devices: each position once."""
    topology = load_cluster(cluster).topology
    drawn_degrees = data.draw(degrees(math.prod(topology.levels)))
    placement = data.draw(st.sampled_from(searched_placements(topology)))
    cuts = cuts_by_axis(topology, placement, drawn_degrees)
    for level, size in enumerate(topology.levels):
        positions = np.zeros(1, dtype=int)
        for axis_cuts in cuts.values():
            cut = axis_cuts[level]
            positions = (positions[:, None] + np.arange(cut.size) * cut.stride).ravel()
        assert sorted(positions) == list(range(size))


def test_inner_axes_take_the_fastest_links() -> None:
    topology = load_cluster("h100:64").topology
    axis_degrees = {"tp_kv": 4, "tp_rep": 1, "cp": 1, "ep": 1, "fsdp": 4, "dp": 2, "pp": 2}
    cuts = cuts_by_axis(topology, default_placement(topology), axis_degrees)
    assert cuts["tp_kv"] == (Cut(4, 1), Cut(1, 1))
    assert cuts["fsdp"] == (Cut(2, 4), Cut(2, 1))
    assert cuts["dp"] == (Cut(1, 8), Cut(2, 2))
    assert cuts["pp"] == (Cut(1, 8), Cut(2, 4))


@pytest.mark.parametrize(
    ("ep", "ep_cuts", "fsdp_cuts"),
    [
        (8, (Cut(8, 1), Cut(1, 1)), (Cut(1, 8), Cut(2, 1))),  # AllToAlls of tokens stay in the node of 8
        (4, (Cut(4, 1), Cut(1, 1)), (Cut(2, 4), Cut(2, 1))),
    ],
)
def test_expert_parallelism_borrows_the_inner_part_of_fsdp(
    ep: int, ep_cuts: tuple[Cut, ...], fsdp_cuts: tuple[Cut, ...]
) -> None:
    """The ranks of an ep group are adjacent: 16 = ep·fsdp."""
    topology = load_cluster("h100:16").topology
    axis_degrees = {**dict.fromkeys(ATOMIC, 1), "ep": ep, "fsdp": 16 // ep}
    cuts = cuts_by_axis(topology, default_placement(topology), axis_degrees)
    assert (cuts["ep"], cuts["fsdp"]) == (ep_cuts, fsdp_cuts)
    links = GroupLinks(topology, cuts)
    assert links.gather_link(("ep",)).seconds_per_byte < links.gather_link(("fsdp",)).seconds_per_byte


def test_the_default_fills_the_smallest_axis_of_a_torus_first() -> None:
    topology = load_cluster("tpu-v5p:16x4x8").topology
    assert default_placement(topology).levels == (1, 2, 0)
    assert default_placement(load_cluster("h100:16").topology).levels == (0, 1)


def test_every_placement_is_different_and_the_default_is_among_them() -> None:
    for cluster in CLUSTERS:
        topology = load_cluster(cluster).topology
        options = searched_placements(topology)
        assert (
            len(set(options)) == len(options) == 6 * math.factorial(cluster.count("x") + 1 if "tpu" in cluster else 1)
        )
        assert default_placement(topology) in options


def test_links_of_a_group_join_the_cuts_of_its_axes() -> None:
    """tp = tp_kv x tp_rep, side by side on a wrapped axis of 16, is a whole ring."""
    topology = load_cluster("tpu-v5e:16x16").topology
    axis_degrees = {"tp_kv": 4, "tp_rep": 4, "cp": 1, "ep": 1, "fsdp": 16, "dp": 1, "pp": 1}
    links = GroupLinks(topology, cuts_by_axis(topology, default_placement(topology), axis_degrees))
    assert links.gather_link(("tp_kv", "tp_rep")).seconds_per_byte == pytest.approx(1 / 9e10)
    assert links.gather_link(("tp_kv",)).seconds_per_byte == pytest.approx(3 / 4 / 4.5e10)
    # four devices, each 4 apart, all around the ring: 2 steps of a quarter, on links that 4 groups share
    assert links.gather_link(("tp_rep",)).seconds_per_byte == pytest.approx(4 * 2 / 4 / 4.5e10)
    assert links.gather_link(("dp",)).seconds_per_byte == 0
    assert links.gather_link(("tp_kv",)) is links.gather_link(("tp_kv",))


def test_a_placement_names_every_axis_and_level_once() -> None:
    with pytest.raises(InputError, match=re.escape("an order of tp, cp, fsdp, dp, pp is required")):
        Placement(axes=("tp", "cp", "fsdp", "dp", "dp"), levels=(0, 1))
    with pytest.raises(InputError, match=re.escape("levels are (0, 2); an order of 0..n-1 is required")):
        Placement(axes=("tp", "cp", "fsdp", "dp", "pp"), levels=(0, 2))
