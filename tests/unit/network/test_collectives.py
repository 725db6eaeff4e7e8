"""Closed forms of collectives: the books' numbers, the exact factors, algorithms behind switches, NCCL's bandwidths."""

from __future__ import annotations

import math

import pytest

from shardwise.book_formulas.collective_times import (
    all_to_all_chunks,
    axes_report,
    hop_crossover_bytes,
    idealised_s,
    link_bytes,
    point_to_point,
    torus_of_axes,
)
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.compare_collective_algorithms import CollectiveReport, collective_report
from shardwise.hardware.network.links import COLLECTIVE_NAMES, CollectiveName, Cut, algbw, busbw, busbw_factor
from shardwise.hardware.network.switches import Switched, Tier
from shardwise.hardware.network.topology import GroupLinks, collective_s
from shardwise.hardware.network.torus import Torus
from shardwise.sharding.collectives import CollectiveKind
from shardwise.values.errors import InputError

from .topologies import load_topology

MIB = 2**20
OPERATION = {CollectiveKind(name): name for name in COLLECTIVE_NAMES if name in set(CollectiveKind)}
ARRAY = 2.0 * 2048 * 8192
MATRIX = 2.0 * 1024 * 4096


def v5e(shape: str) -> Torus:
    return load_topology(f"tpu-v5e:{shape}", Torus)


@pytest.mark.parametrize(
    ("operation", "num_bytes", "axes", "wraps", "hops", "time_us", "bound"),
    [
        ("all_gather", ARRAY, (4,), False, 3, 559.24, "bandwidth"),  # S2, quiz 2, as it is
        ("all_gather", ARRAY, (4,), True, 2, 372.83, "bandwidth"),  # and if the axis were a ring
        ("all_gather", 2.0 * 256 * 256, (4,), False, 3, 3.0, "latency"),
        ("all_gather", MATRIX / 4, (4,), True, 2, 23.302, "bandwidth"),  # question 2
        ("all_gather", MATRIX, (4, 4), True, 4, 46.603, "bandwidth"),
        ("all_reduce", MATRIX / 16, (4,), True, 4, 11.651, "bandwidth"),
        ("all_gather", 256.0, (4,), True, 2, 2.0, "latency"),  # question 3
        ("all_gather", 64.0 * MIB, (16,), True, 8, 745.65, "bandwidth"),
        ("all_to_all", 64.0 * MIB, (16,), True, 8, 745.65 / 4, "bandwidth"),
    ],
)
def test_times_equal_the_books(
    operation: CollectiveName,
    num_bytes: float,
    axes: tuple[int, ...],
    wraps: bool,
    hops: int,
    time_us: float,
    bound: str,
) -> None:
    report = axes_report(operation, num_bytes, torus_of_axes(axes, 9e10, wraps=wraps))
    assert (report.hops, report.bound) == (hops, bound)
    assert report.time_s * 1e6 == pytest.approx(time_us, rel=1e-4)


def test_a_hop_of_a_ring_of_16_equals_s2() -> None:
    """S2: T_hop = 2V / (X W), 93.2 microseconds."""
    assert axes_report("all_gather", 64.0 * MIB, torus_of_axes((16,), 9e10)).hop_s == pytest.approx(93.2e-6, rel=1e-3)
    assert hop_crossover_bytes(4.5e10, 1e-6) == pytest.approx(45e3)


def test_unidirectional_rings_have_the_exact_factor_and_the_books_limit() -> None:
    report = axes_report("all_gather", 64.0 * MIB, torus_of_axes((16,), 9e10), one_way=True)
    assert report.time_s == pytest.approx(1398.1e-6, rel=1e-4)
    assert report.hops == 15
    assert idealised_s("all_gather", 64.0 * MIB, 9e10, one_way=True) == pytest.approx(1491.3e-6, rel=1e-4)


@pytest.mark.parametrize(
    ("operation", "milliseconds"),
    [("all_gather", 5.556), ("reduce_scatter", 5.556), ("all_reduce", 11.11), ("all_to_all", 1.389)],
)
def test_times_equal_table_2_of_the_roofline_notes(operation: CollectiveName, milliseconds: float) -> None:
    """S3, table 2, and that a large even ring takes just that."""
    assert idealised_s(operation, 1e9, 1.8e11) * 1e3 == pytest.approx(milliseconds, rel=1e-3)
    assert axes_report(operation, 1e9, torus_of_axes((64,), 1.8e11)).time_s * 1e3 == pytest.approx(
        milliseconds, rel=1e-3
    )


def test_scalars_over_a_link_equal_s2() -> None:
    """S2, question 10: N^2 (1-1/D) and N^2/2 (1-1/D) one way; both ways win 2 and 4."""
    scalars, size = 1024.0**2, 16
    assert link_bytes("all_gather", scalars, size, one_way=True) == 983040
    assert link_bytes("all_to_all", scalars, size, one_way=True) == 491520
    large = 4096
    gain = {
        name: link_bytes(name, 1.0, large, one_way=True) / link_bytes(name, 1.0, large)
        for name in ("all_gather", "all_to_all")
    }
    assert gain["all_gather"] == pytest.approx(2, rel=1e-3)
    assert gain["all_to_all"] == pytest.approx(4, rel=1e-3)
    assert link_bytes("all_to_all", 1.0, large) / link_bytes("all_gather", 1.0, large) == pytest.approx(0.25)


def test_chunks_of_an_all_to_all_equal_s3() -> None:
    chunks = all_to_all_chunks(8)
    assert (chunks.right, chunks.left, chunks.total) == (10, 6, 16)
    assert chunks.bytes_sent(1.0, 8) == 0.25


@pytest.mark.parametrize("axes", [(8,), (4, 8), (4, 4, 16), (8, 8, 8)])
def test_all_to_all_over_several_axes_equals_s2(axes: tuple[int, ...]) -> None:
    """S2: V max(A, B, C) / (4 N W), and twice that on lines."""
    expected = 1e9 * max(axes) / (4 * math.prod(axes) * 9e10)
    assert axes_report("all_to_all", 1e9, torus_of_axes(axes, 9e10)).bandwidth_s == pytest.approx(expected)
    assert axes_report("all_to_all", 1e9, torus_of_axes(axes, 9e10, wraps=False)).bandwidth_s == pytest.approx(
        2 * expected
    )


def test_sending_from_corner_to_corner_equals_s0() -> None:
    """S0, question 5: six hops, two ports, 186.4 microseconds (the source rounds the bytes to 1.7e7: 188)."""
    cost = point_to_point(2.0 * 8 * 128 * 8192, v5e("4x4"), (0, 0), (3, 3))
    assert cost.hops == 6
    assert cost.latency_s == pytest.approx(6e-6)
    assert cost.bandwidth_s == pytest.approx(186.41e-6, rel=1e-4)
    assert point_to_point(1.0, v5e("16x16"), (0, 1), (15, 1)).hops == 1
    assert point_to_point(1.0, v5e("4x4"), (1, 1), (1, 1)).bandwidth_s == 0
    with pytest.raises(InputError, match="a place on 4x4"):
        point_to_point(1.0, v5e("4x4"), (0, 0), (3, 4))


@pytest.mark.parametrize("axes", [(4, 4), (4, 8), (2, 2, 2), (3, 5)])
@pytest.mark.parametrize("wraps", [True, False])
def test_no_gather_exceeds_the_ingress_of_a_device(axes: tuple[int, ...], wraps: bool) -> None:
    """(N-1)/N of the array over one link of an axis that is a line or of two devices, two of a ring."""
    links = sum(2 if wraps and size > 2 else 1 for size in axes)
    report = axes_report("all_gather", 1e9, torus_of_axes(axes, 9e10, wraps=wraps))
    assert report.bandwidth_s >= report.bytes_received_per_device / (links * 4.5e10) * (1 - 1e-12)


def test_a_part_of_a_wrapped_axis_is_a_line() -> None:
    report = collective_report("all_gather", 1e9, v5e("16x16"), [Cut(4, 1), Cut(1, 1)])
    assert (report.algorithm, report.wraps, report.hops) == ("line", (False, False), 3)
    assert {alternative.name: alternative.hops for alternative in report.alternatives} == {
        "ring": 2,
        "ring, one way": 3,
    }


def test_a_group_on_a_ring_and_a_line_gathers_over_both() -> None:
    report = collective_report("all_gather", 1e9, v5e("8x16"), [Cut(8, 1), Cut(16, 1)])
    assert (report.algorithm, report.hops) == ("ring and line", 7 + 8)
    times = {alternative.name: alternative.time_s for alternative in report.alternatives}
    assert times["ring"] < report.time_s < times["line"]


@pytest.mark.parametrize(
    "operation", [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE]
)
@pytest.mark.parametrize(
    ("cluster", "cuts"), [("tpu-v5e:16x16", [Cut(16, 1), Cut(4, 2)]), ("h100:512", [Cut(8, 1), Cut(64, 1)])]
)
def test_the_report_equals_the_price_of_a_plan(operation: CollectiveKind, cluster: str, cuts: list[Cut]) -> None:
    """A plan is priced by `collective_s`: hierarchical rings behind switches."""
    topology = load_cluster(cluster).topology
    report = collective_report(OPERATION[operation], 1e9, topology, cuts)
    assert report.algorithm in ("hierarchical", "line", "ring and line")
    assert report.time_s == pytest.approx(
        collective_s(operation, ("X",), 1e9, GroupLinks(topology, {"X": tuple(cuts)}))
    )


@pytest.mark.parametrize("cluster", ["tpu-v5e:16x16", "h100:64"])
@pytest.mark.parametrize("operation", COLLECTIVE_NAMES)
def test_the_crossover_is_where_latency_equals_streaming(cluster: str, operation: CollectiveName) -> None:
    topology, cuts = load_cluster(cluster).topology, [Cut(8, 1), Cut(1, 1)]
    report = collective_report(operation, 1e9, topology, cuts)
    crossover = collective_report(operation, report.crossover_bytes, topology, cuts)
    if crossover.algorithm == report.algorithm:
        assert crossover.latency_s == pytest.approx(crossover.bandwidth_s)
        assert collective_report(operation, report.crossover_bytes * 0.99, topology, cuts).bound == "latency"
    assert report.bound == "bandwidth"


NODE = Tier(name="in", size=8, bytes_per_s=400e9, fraction=1.0, hop_latency_s=1e-6, base_latency_s=4e-6)
NETWORK = Tier(name="out", size=16, bytes_per_s=50e9, fraction=1.0, hop_latency_s=3e-6, base_latency_s=4e-6)
SWITCHED = Switched(tiers=(NODE, NETWORK))


def by_name(report: CollectiveReport) -> dict[str, tuple[float, float, int]]:
    """Latency in microseconds, streaming time and hops of the algorithms."""
    rows = {
        alternative.name: (alternative.latency_s * 1e6, alternative.bandwidth_s, alternative.hops)
        for alternative in report.alternatives
    }
    return rows | {report.algorithm: (report.latency_s * 1e6, report.bandwidth_s, report.hops)}


def test_all_reduce_algorithms_behind_two_tiers_by_hand() -> None:
    """1 GB over 8 x 16: egress of 400 GB/s within and of 8 x 50 GB/s out of a node."""
    algorithms = by_name(collective_report("all_reduce", 1e9, SWITCHED, [Cut(8, 1), Cut(16, 1)]))
    assert algorithms["ring"] == pytest.approx((2 * (4 + 112 + 15 * 3), 2 * 127 / 128 / 400, 254))
    assert algorithms["hierarchical"] == pytest.approx((2 * (4 + 7 + 45), 2 * 15 / 16 / 400, 44))
    assert algorithms["tree"] == pytest.approx((4 + 2 * (3 + 4 * 3), 2 / 400, 14))
    assert algorithms["in-switch"] == pytest.approx((4 + 2 * (1 + 45), 2 * 15 / 16 / 400, 32))


def test_all_reduce_algorithms_within_a_node_by_hand() -> None:
    """The switch saves 2(n-1)/n against (n+1)/n; a tree sends 2V."""
    report = collective_report("all_reduce", 1e9, SWITCHED, [Cut(8, 1), Cut(1, 1)])
    algorithms = by_name(report)
    assert report.algorithm == "ring"
    assert algorithms.keys() == {"ring", "tree", "in-switch"}
    assert algorithms["ring"] == pytest.approx((2 * (4 + 7), 2 * 7 / 8 / 400, 14))
    assert algorithms["in-switch"] == pytest.approx((4 + 2, 9 / 8 / 400, 2))
    assert {alternative.name for alternative in report.alternatives if alternative.condition} == {"in-switch"}


def test_small_messages_take_trees() -> None:
    """log N hops against N: below the crossover of the two the tree is chosen."""
    cuts = [Cut(8, 1), Cut(16, 1)]
    assert collective_report("all_reduce", 1e3, SWITCHED, cuts).algorithm == "tree"
    assert collective_report("all_reduce", 1e9, SWITCHED, cuts).algorithm == "hierarchical"
    assert collective_report("broadcast", 1e9, SWITCHED, cuts).algorithm == "tree"


def test_all_to_all_behind_switches_sends_each_share_once() -> None:
    """V/N on a device: 7/8 of it leaves it in a node; over two tiers 15/16 of it leave the node."""
    within_node = collective_report("all_to_all", 1e9, SWITCHED, [Cut(8, 1), Cut(1, 1)])
    assert within_node.algorithm == "direct"
    assert within_node.bandwidth_s == pytest.approx(1 / 8 * 7 / 8 / 400)
    across_nodes = collective_report("all_to_all", 1e9, SWITCHED, [Cut(8, 1), Cut(16, 1)])
    assert across_nodes.bandwidth_s == pytest.approx(1 / 128 * 15 / 16 / 50)
    assert across_nodes.bytes_received_per_device == pytest.approx(1e9 / 128 * 127 / 128)


def test_h100_reaches_the_measured_bus_bandwidth() -> None:
    """512 MiB AllGather on 8 H100: the catalogue's fraction was measured at 335 GB/s of busbw."""
    report = collective_report("all_gather", 512.0 * MIB, load_cluster("h100:8").topology, [Cut(8, 1), Cut(1, 1)])
    assert report.busbw == pytest.approx(335e9, rel=0.01)


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_to_all", 7 / 8), ("broadcast", 1.0),
    ],
)  # fmt: skip
def test_bus_bandwidth_has_nccls_factors(operation: CollectiveName, factor: float) -> None:
    assert busbw_factor(operation, 8) == factor
    size = 1e9 / 8 if operation == "all_to_all" else 1e9
    assert algbw(operation, 1e9, 8, 0.5) == size / 0.5
    assert busbw(operation, 1e9, 8, 0.5) == size / 0.5 * factor


def test_broadcast_and_send_on_a_torus_by_hand() -> None:
    torus, cuts = v5e("16x16"), [Cut(16, 1), Cut(1, 1)]
    assert collective_report("broadcast", 1e9, torus, cuts).time_s == pytest.approx(1 / 90)
    assert collective_report("broadcast", 1e9, torus, cuts, one_way=True).time_s == pytest.approx(1 / 45)
    sent = collective_report("send_recv", 1e9, torus, cuts)
    assert sent.time_s == pytest.approx(1 / 45)
    assert (sent.hops, sent.alternatives) == (1, ())


def test_all_problems_of_the_input_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        collective_report("gather", 0.0, SWITCHED, [Cut(1, 1), Cut(1, 1)])  # type: ignore[arg-type]
    assert len(caught.value.problems) == 3
    for part in ("'gather'", "all_gather", "0.0 bytes", "group of 1 device"):
        assert part in str(caught.value)
