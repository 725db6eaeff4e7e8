"""Several pods: rates of their links, axes that cross them, and the books' worked numbers."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import shardwise as sw
from shardwise.book_formulas.rules import book_rules
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.mesh_links import place_mesh
from shardwise.hardware.network.compare_collective_algorithms import collective_report
from shardwise.hardware.network.links import Cut
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.topology import GroupLinks, collective_s
from shardwise.layout.placement import cuts_by_axis, default_placement, degrees_across_pods, searched_placements
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.search.explain.constant_sensitivity import rank_constants
from shardwise.search.plan_file import dump_plan, load_plan, parse_plan, plan_payload
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Mesh
from shardwise.values.errors import InputError

from .topologies import load_topology

pods = partial(load_topology, kind=Pods)
V5E = "tpu-v5e:16x16*4"  # hosts of 8 chips with 25 GB/s: 3.125 GB/s for each


@pytest.mark.parametrize(("name", "rate"), [(V5E, 3.125e9), ("tpu-v5p:4x4x4*2", 6.25e9), ("tpu-v4:4x4x4*3", 6.25e9)])
def test_a_chip_has_a_share_of_its_hosts_egress(name: str, rate: float) -> None:
    """The book, chapter 2, with the hosts of its table: 3.125 GB/s where 8 chips share a host, 6.25 where 4 do."""
    assert pods(name).bytes_per_s == rate


@pytest.mark.parametrize("inside", [(1, 1), (16, 1), (16, 16)])
def test_a_group_gathers_between_pods_and_then_inside(inside: tuple[int, int]) -> None:
    topology = pods(V5E)
    cuts = [Cut(inside[0], 1), Cut(inside[1], 1)]
    torus, link = topology.torus.gather_link(cuts), topology.gather_link([*cuts, Cut(4, 1)])
    received = 3 / 4 / math.prod(inside)  # of the array, by each chip, from other pods
    assert link.seconds_per_byte == pytest.approx(torus.seconds_per_byte + received / 3.125e9)
    assert link.latency_s == torus.latency_s
    assert topology.gather_link([*cuts, Cut(1, 1)]) == torus


def test_unidirectional_gathers_affect_only_the_torus() -> None:
    """A line of half a torus gathers half as fast over one direction; between pods nothing changes."""
    topology, cuts = pods(V5E), [Cut(16, 1), Cut(1, 1), Cut(4, 1)]
    two_way_s, one_way_s = (topology.gather_link(cuts, one_way=one_way).seconds_per_byte for one_way in (False, True))
    torus_two_way_s, torus_one_way_s = (
        topology.torus.gather_link(cuts[:-1], one_way=one_way).seconds_per_byte for one_way in (False, True)
    )
    assert torus_one_way_s > torus_two_way_s
    assert one_way_s - two_way_s == pytest.approx(torus_one_way_s - torus_two_way_s)


def test_sends_and_permutes_take_the_slower_network() -> None:
    topology = pods(V5E)
    for send in (topology.neighbour_link, topology.permute_link):
        assert send([Cut(1, 1), Cut(1, 1), Cut(2, 1)]).seconds_per_byte == pytest.approx(1 / 3.125e9)
        assert send([Cut(4, 1), Cut(1, 1), Cut(2, 1)]).seconds_per_byte == pytest.approx(1 / 3.125e9)
    inside = [Cut(4, 1), Cut(1, 1)]
    assert topology.neighbour_link([*inside, Cut(1, 1)]) == topology.torus.neighbour_link(inside)
    assert topology.permute_link([*inside, Cut(1, 1)]) == topology.torus.permute_link(inside)


def test_an_all_to_all_sends_each_chunk_once() -> None:
    """3/4 of each device's V/N leave the pod; inside, the pod's V/16 are exchanged."""
    topology, shard = pods(V5E), 1e6
    links = GroupLinks(topology, {"X": (Cut(16, 1), Cut(16, 1), Cut(4, 1)), "Y": (Cut(16, 1), Cut(16, 1), Cut(1, 1))})
    assert collective_s(CollectiveKind.ALL_TO_ALL, ("X",), shard, links) == pytest.approx(shard * 3 / 4 / 3.125e9)
    inner = GroupLinks(topology.torus, {"Y": (Cut(16, 1), Cut(16, 1))})
    assert collective_s(CollectiveKind.ALL_TO_ALL, ("Y",), shard, links) == collective_s(
        CollectiveKind.ALL_TO_ALL, ("Y",), shard, inner
    )


def test_arrays_of_cuts_equal_single_cuts() -> None:
    topology = pods(V5E)
    sizes, across = np.array([1, 4, 16, 16, 1]), np.array([1, 2, 4, 1, 4])
    for link_of in (topology.gather_link, topology.neighbour_link, topology.permute_link):
        batched = link_of([Cut(sizes, sizes**0), Cut(4, 1), Cut(across, across**0)])
        for index in range(len(sizes)):
            single = link_of([Cut(int(sizes[index]), 1), Cut(4, 1), Cut(int(across[index]), 1)])
            assert batched.seconds_per_byte[index] == pytest.approx(single.seconds_per_byte, rel=1e-14)


def test_the_pods_are_filled_last() -> None:
    topology = pods("tpu-v5p:16x4x8*2")
    options = searched_placements(topology)
    assert {option.levels[-1] for option in options} == {3}
    assert len(set(options)) == len(options) == 36
    assert default_placement(topology).levels == (1, 2, 0, 3)
    axis_degrees = {"tp_kv": 4, "tp_rep": 2, "cp": 1, "ep": 1, "fsdp": 32, "dp": 4, "pp": 1}
    assert degrees_across_pods(topology, default_placement(topology), axis_degrees) == {"dp": 2}
    assert degrees_across_pods(topology.torus, default_placement(topology.torus), axis_degrees | {"dp": 2}) == {}
    cuts = cuts_by_axis(topology, default_placement(topology), axis_degrees)
    assert cuts["dp"][-1] == Cut(2, 1)


def test_a_mesh_gives_its_first_axis_to_the_pods() -> None:
    placed = place_mesh(Mesh((("D", 4), ("X", 16), ("Y", 16))), V5E)
    assert [cut.size for cut in placed.links.cuts["D"]] == [1, 1, 4]
    assert {placed.links.cuts[axis][-1].size for axis in "XY"} == {1}
    shared = place_mesh(Mesh((("D", 2), ("X", 32), ("Y", 16))), V5E)
    assert [shared.links.cuts[axis][-1] for axis in "DXY"] == [Cut(2, 2), Cut(2, 1), Cut(1, 1)]
    assert math.prod(cut.size for cut in shared.links.cuts["X"]) == 32


def test_a_collective_over_pods_is_hierarchical() -> None:
    topology = pods(V5E)
    full_torus = [Cut(16, 1), Cut(16, 1)]
    report = collective_report("all_reduce", 1e9, topology, [*full_torus, Cut(4, 1)])
    torus = collective_report("all_reduce", 1e9, topology.torus, full_torus)
    between = 2 * 1e9 * 3 / 4 / (256 * 3.125e9)
    assert (report.network, report.wraps) == ("pods", (True, True, False))
    assert report.time_s == pytest.approx(torus.time_s + between)
    (bound,) = report.alternatives
    assert bound.time_s == pytest.approx(max(torus.time_s, between))
    assert collective_report("all_reduce", 1e9, topology, [*full_torus, Cut(1, 1)]) == torus
    send = collective_report("send_recv", 1e9, topology, [Cut(1, 1), Cut(1, 1), Cut(4, 1)])
    assert send.time_s == pytest.approx(1e9 / 3.125e9)
    broadcast = collective_report("broadcast", 1e9, topology, [*full_torus, Cut(4, 1)])
    first = collective_report("broadcast", 1e9, topology.torus, full_torus).time_s
    gathered = collective_report("all_gather", 1e9, topology.torus, full_torus).time_s
    assert broadcast.time_s == pytest.approx(first + 1e9 / (256 * 3.125e9) + gathered)


LLAMA_70B = Job(global_batch_tokens=4 * 2**20, seq_len=4096, tokens=15e12)


def test_book_rules_of_llama_3_70b_on_four_pods() -> None:
    """S0, section 5, question 1, which prints no answer. By its formulas: 117 tokens a chip hide behind compute only where
    both kinds of communication overlap; a pod's million tokens are far above the 73,440 that the network between needs."""
    rules = {r.name: r for r in book_rules(load_model("llama-3-70b"), load_cluster("tpu-v5p:16x20x28*4"), LLAMA_70B)}
    assert rules["tokens_per_chip"].value == pytest.approx(117.03, abs=0.01)
    assert rules["dcn_min_tokens_per_pod"].value == pytest.approx(73440)
    assert rules["dcn_min_tokens_per_pod"].verdict == (
        "data parallelism between 4 pods is compute-bound: 1,048,576 ≥ 73,440 tokens per pod"
    )
    assert rules["mixed_min_tokens_per_chip_sum"].verdict.startswith("FSDP with TP is communication-bound")
    assert rules["mixed_min_tokens_per_chip_max"].verdict.startswith("FSDP with TP is compute-bound")
    assert rules["train_days_at_40_mfu"].value == pytest.approx(11.08, abs=0.01)
    # Each of the four pods, with its quarter of the batch, splits as a single pod would.
    single_pod = book_rules(load_model("llama-3-70b"), load_cluster("tpu-v5p:16x20x28"),
                       Job(global_batch_tokens=2**20, seq_len=4096))  # fmt: skip
    degree = {rule.name: rule for rule in single_pod}["fsdp_optimal_degree"]
    assert rules["fsdp_optimal_degree"].value == pytest.approx(degree.value)
    assert "dcn_min_tokens_per_pod" not in {rule.name for rule in single_pod}


def test_a_small_batch_is_bound_by_the_network_between_pods() -> None:
    job = Job(global_batch_tokens=2**17, seq_len=4096)
    rules = book_rules(load_model("llama-3-8b"), load_cluster("tpu-v5p:4x4x4*2"), job)
    assert {r.name: r for r in rules}["dcn_min_tokens_per_pod"].verdict.startswith(
        "data parallelism between 2 pods is communication-bound: 65,536 < 73,440"
    )


def test_a_plan_puts_replicas_or_stages_across_pods_and_keeps_its_file(tmp_path: Path) -> None:
    plan = sw.plan(sw.load_model("llama-3-70b"), load_cluster("tpu-v5p:16x16x16*2"),
                   Job(global_batch_tokens=8 * 2**20, seq_len=4096))  # fmt: skip
    layout = plan_payload(plan)["layout"]
    crossing = {axis for axis, sizes in layout["placement"]["cuts"].items() if sizes[-1] > 1}
    assert crossing in ({"dp"}, {"fsdp"}, {"pp"})
    assert any("between pods only bandwidth" in note for note in plan.estimate.notes)
    path = tmp_path / "plan.json"
    dump_plan(plan, path)
    assert load_plan(path) == plan
    assert {c.name for c in rank_constants(plan)} >= {"torus.bytes_per_s", "pods.bytes_per_s"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pods": 0}, "cluster.topology: sizes are (4, 4, 0); sizes of 1 to 10,000,000 devices are required"),
        ({"bytes_per_s": 0.0}, "cluster.topology: bytes_per_s 0, fraction 1"),
        ({"bytes_per_s": math.nan}, "cluster.topology: bytes_per_s nan, fraction 1"),
        ({"kind": "ring"}, "cluster.topology: found kind 'ring'; one of torus, pods, switched is required"),
        ({"torus": 4}, "cluster.topology: torus: found 4"),
    ],
)
def test_a_plan_file_with_impossible_pods_is_refused(change: dict[str, object], message: str) -> None:
    plan = sw.plan(
        load_model("llama-3.2-1b"), load_cluster("tpu-v5e:4x4*2"), Job(global_batch_tokens=2**17, seq_len=1024)
    )
    payload = plan_payload(plan)
    payload["cluster"]["topology"] |= change
    with pytest.raises(InputError) as caught:
        parse_plan(payload)
    assert str(caught.value).startswith(message)
