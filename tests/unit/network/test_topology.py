"""The books' times of collectives on tori and switches, and which axes wrap."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.compare_collective_algorithms import collective_report
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.switches import Switched, Tier, all_to_all_seconds_per_byte
from shardwise.hardware.network.topology import GroupLinks, collective_s
from shardwise.hardware.network.torus import Torus
from shardwise.sharding.collectives import MESSAGE_ENDS, CollectiveKind

from .topologies import load_topology

MIB = 2**20


torus = partial(load_topology, kind=Torus)
switched = partial(load_topology, kind=Switched)


def test_a_full_ring_gathers_both_ways() -> None:
    """S2: V / W with W = 9e10, both directions of an axis: 64 MiB take 745.65 microseconds."""
    link = torus("tpu-v5e:16x16").gather_link([Cut(16, 1), Cut(1, 16)])
    assert link.all_gather_s(64 * MIB) == pytest.approx(745.65e-6, rel=1e-5)


def test_an_axis_that_does_not_wrap_gathers_one_way() -> None:
    """S2: bf16[2048, 8192] over 4 of v5e: 3 hops of a quarter over 4.5e10, 559.2 microseconds."""
    link = torus("tpu-v5e:4x4").gather_link([Cut(4, 1), Cut(1, 1)])
    assert link.all_gather_s(2 * 2048 * 8192) == pytest.approx(559.2e-6, rel=1e-4)


@pytest.mark.parametrize(
    ("cluster", "wraps"),
    [
        ("tpu-v5p:4x4x8", (True, True, True)),
        ("tpu-v5p:16x20x28", (True, True, True)),
        ("tpu-v5p:2x2x4", (False, False, False)),
        ("tpu-v5p:4x4x6", (False, False, False)),
        ("tpu-v5e:8x16", (False, True)),
        ("tpu-v5e:16x16", (True, True)),
        ("tpu-v5e:4x8", (False, False)),
    ],
)
def test_wrapped_axes_follow_the_rules_of_each_generation(cluster: str, wraps: tuple[bool, ...]) -> None:
    assert torus(cluster).wraps == wraps


def test_a_part_of_a_wrapped_axis_is_a_line() -> None:
    topology = torus("tpu-v5e:16x16")
    part = topology.gather_link([Cut(8, 1), Cut(1, 1)])
    full_axis = topology.gather_link([Cut(16, 1), Cut(1, 1)])
    assert part.seconds_per_byte == pytest.approx(7 / 8 / 4.5e10)
    assert full_axis.seconds_per_byte == pytest.approx(1 / 9e10)


def test_devices_apart_share_their_links() -> None:
    """Two groups of 4, interleaved on one line, each take twice as long per hop."""
    topology = torus("tpu-v5e:8x8")
    near = topology.gather_link([Cut(4, 1), Cut(1, 1)])
    apart = topology.gather_link([Cut(4, 2), Cut(1, 1)])
    assert apart.seconds_per_byte == pytest.approx(2 * near.seconds_per_byte)
    assert apart.latency_s == pytest.approx(2 * near.latency_s)
    assert near.latency_s == pytest.approx(3e-6)


def test_axes_of_a_torus_gather_at_once() -> None:
    """S2: M axes give M times the bandwidth."""
    topology = torus("tpu-v5e:16x16")
    assert topology.gather_link([Cut(16, 1), Cut(16, 1)]).seconds_per_byte == pytest.approx(0.5 / 9e10)
    assert topology.axis_bytes_per_s() == 9e10


def test_small_messages_take_the_hops_latency() -> None:
    """S2: 1 microsecond a hop, 8 hops half around a ring of 16; a longer transfer hides it."""
    link = torus("tpu-v5e:16x16").gather_link([Cut(16, 1), Cut(1, 1)])
    assert link.all_gather_s(1000) == pytest.approx(8e-6)
    assert not link.additive


def test_tiers_of_h100_equal_the_published_rates() -> None:
    """450 GB/s within a node of 8, one 50 GB/s card for each GPU to the network."""
    nvlink, network = switched("h100:512").tiers
    assert (nvlink.name, nvlink.size, nvlink.bytes_per_s) == ("nvlink", 8, 450e9)
    assert (network.name, network.size, network.bytes_per_s) == ("network", 64, 50e9)
    assert switched("h100:512").levels == (8, 64)
    assert switched("h100:4").levels == (4, 1)
    assert load_cluster("h100:512").num_devices == 512


TWO_TIERS = Switched(
    tiers=(
        Tier(name="in", size=8, bytes_per_s=400e9, fraction=0.5, hop_latency_s=1e-6, base_latency_s=4e-6),
        Tier(name="out", size=4, bytes_per_s=50e9, fraction=1.0, hop_latency_s=3e-6, base_latency_s=4e-6),
    )
)


@pytest.mark.parametrize(
    ("inside", "outside", "seconds_per_byte", "latency_s"),
    [
        (8, 1, 7 / 8 / 200e9, 4e-6 + 7e-6),  # within the node: (n-1)/n of the sustained egress
        (1, 4, 3 / 4 / 50e9, 4e-6 + 3 * 3e-6),  # one device of each node: its own card
        (8, 4, 7 / 8 / 200e9, 4e-6 + 7e-6 + 9e-6),  # eight cards, each an eighth: the node sets the pace
        (2, 4, 3 / (4 * 2 * 50e9), 4e-6 + 1e-6 + 9e-6),  # two cards: the network sets it
        (1, 1, 0.0, 0.0),
    ],
)
def test_gathers_behind_tiers_equal_the_closed_form(
    inside: int, outside: int, seconds_per_byte: float, latency_s: float
) -> None:
    link = TWO_TIERS.gather_link([Cut(inside, 1), Cut(outside, 1)])
    assert link.seconds_per_byte == pytest.approx(seconds_per_byte)
    assert link.latency_s == pytest.approx(latency_s)
    assert link.all_gather_s(1e6) == pytest.approx(1e6 * seconds_per_byte + latency_s)


def test_a_send_crosses_the_outermost_tier_of_its_group() -> None:
    assert TWO_TIERS.neighbour_link([Cut(2, 1), Cut(1, 1)]).seconds_per_byte == pytest.approx(1 / 200e9)
    assert TWO_TIERS.neighbour_link([Cut(2, 1), Cut(2, 1)]).seconds_per_byte == pytest.approx(1 / 50e9)
    assert torus("tpu-v5e:8x8").neighbour_link([Cut(2, 4), Cut(1, 1)]).seconds_per_byte == pytest.approx(4 / 45e9)


@pytest.mark.parametrize("cluster", ["tpu-v5e:16x16", "tpu-v5p:4x4x8", "tpu-v5e:8x8"])
def test_arrays_of_cuts_equal_single_cuts(cluster: str) -> None:
    topology = torus(cluster)
    sizes, strides = [1, 2, 4, 8, 16, 4], [1, 2, 1, 1, 1, 4]
    other_cuts = [Cut(2, 1)] * (len(topology.shape) - 1)
    batched = topology.gather_link([Cut(np.array(sizes), np.array(strides)), *other_cuts])
    for index, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
        single = topology.gather_link([Cut(size, stride), *other_cuts])
        assert batched.seconds_per_byte[index] == pytest.approx(single.seconds_per_byte, rel=1e-14)
        assert batched.latency_s[index] == pytest.approx(single.latency_s, rel=1e-14)


def test_collectives_are_multiples_of_the_all_gather() -> None:
    """S2 and S3, table 2: an AllReduce is two AllGathers, an AllToAll a quarter of one, a slice zero."""
    links = GroupLinks(torus("tpu-v5e:16x16"), {"X": (Cut(16, 1), Cut(1, 1))})
    seconds = {kind: collective_s(kind, ("X",), 64 * MIB, links) for kind in CollectiveKind if kind not in MESSAGE_ENDS}
    gather = seconds[CollectiveKind.ALL_GATHER]
    assert gather == pytest.approx(745.65e-6, rel=1e-5)
    assert seconds[CollectiveKind.REDUCE_SCATTER] == gather
    assert seconds[CollectiveKind.ALL_REDUCE] == 2 * gather
    assert collective_s(CollectiveKind.ALL_TO_ALL, ("X",), 64 * MIB / 16, links) == pytest.approx(gather / 4)
    assert seconds[CollectiveKind.SEND_RECV] == pytest.approx(64 * MIB / 45e9)
    assert seconds[CollectiveKind.PERMUTE] == pytest.approx(2 * 64 * MIB / 45e9)
    assert seconds[CollectiveKind.SLICE] == 0


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_a_part_of_a_mesh_has_the_links_between_its_devices(size: int) -> None:
    """Each device sends its Nth to every other over a separate link, 64 of 448 GB/s on a MI300X."""
    node = switched("mi300x:8")
    (tier, _), cuts = node.tiers, [Cut(size, 1), Cut(1, 1)]
    link_bytes_per_s = 64e9 * tier.fraction
    assert node.gather_link(cuts).seconds_per_byte == pytest.approx(1 / size / link_bytes_per_s)
    assert (
        node.neighbour_link(cuts).seconds_per_byte
        == node.permute_link(cuts).seconds_per_byte
        == pytest.approx(1 / link_bytes_per_s)
    )
    assert all_to_all_seconds_per_byte(node, cuts) == pytest.approx(1 / size**2 / link_bytes_per_s)


def test_a_full_mesh_reproduces_the_bus_bandwidth_of_two_gpus() -> None:
    """stas00/ml-engineering: all_reduce of 4 GiB at a busbw of 313 GB/s on 8 MI300X, 47.7 on 2; a switch would give 313."""
    for size, busbw in ((8, 313e9), (2, 47.7e9)):
        report = collective_report("all_reduce", 4 * 2**30, switched("mi300x:8"), [Cut(size, 1), Cut(1, 1)])
        assert report.busbw == pytest.approx(busbw, rel=0.07)
        assert "in-switch" not in {alternative.name for alternative in report.alternatives}


def test_fewer_gpus_of_a_node_keep_the_links_of_the_node() -> None:
    half = switched("mi300x:4")
    assert half.tiers[0].links == 7
    assert half.neighbour_bytes_per_s() == half.axis_bytes_per_s() == pytest.approx(3 * 64e9)
    assert switched("mi300x:1").neighbour_bytes_per_s() == 448e9
    batched = half.gather_link([Cut(np.array([1, 2, 4]), np.array([1, 1, 1])), Cut(1, 1)])
    assert batched.seconds_per_byte == pytest.approx([0, 1 / 2 / 64e9 / 0.698, 1 / 4 / 64e9 / 0.698])
