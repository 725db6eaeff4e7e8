"""Levels of switches: the books' SuperPod, oversubscription, ports, bytes through switches, and cluster files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.hardware.cluster_files import format_cluster_toml
from shardwise.hardware.network.links import COLLECTIVE_NAMES, Cut
from shardwise.hardware.network.switch_levels import SwitchLevel, level_inventories, switched_by_levels
from shardwise.hardware.network.switch_traffic import SwitchTraffic, switch_traffic
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.topology import GroupLinks, collective_s
from shardwise.hardware.published_constants import published_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.layout.network_groups import describe_network
from shardwise.sharding.collectives import CollectiveKind
from shardwise.values.errors import InputError

CLUSTERS = Path(__file__).parents[3] / "examples" / "clusters"
SUPERPOD = str(CLUSTERS / "dgx-h100-superpod.toml")
ETHERNET = str(CLUSTERS / "three-layer-ethernet.toml")
LEVEL = SwitchLevel(name="node", size=8, num_switches=4, radix=64, port_bytes_per_s=25e9, links_per_device=18)


def test_the_superpod_equals_the_books() -> None:
    """How to Scale Your Model, chapter 12: the table of the SuperPod, its 560 switches, and 514, 413 and 17,100 GB/s."""
    cluster = sw.load_cluster(SUPERPOD)
    node, leaf, spine = level_inventories(cluster.topology, cluster.levels)  # type: ignore[arg-type]
    assert [level.across_bytes_per_s for level in (node, leaf, spine)] == [3.6e12, 12.8e12, 51.2e12]
    assert [level.collective_bytes_per_s for level in (node, leaf, spine)] == [
        pytest.approx(value, rel=2e-3) for value in (514e9, 413e9, 17.1e12)
    ]
    assert node.bisection_bytes_per_s == 3.6e12
    assert (node.out_bytes_per_s, leaf.out_bytes_per_s, spine.out_bytes_per_s) == (400e9, 12.8e12, None)
    assert sum(level.num_switches or 0 for level in (node, leaf, spine)) == 512 + 32 + 16
    assert (leaf.used_ports, leaf.ports, spine.used_ports, spine.ports) == (512, 512, 1024, 1024)
    assert (leaf.oversubscription, spine.oversubscription) == (9.0, 1.0)


def test_an_oversubscribed_core_has_a_seventh_of_the_bandwidth() -> None:
    cluster = sw.load_cluster(ETHERNET)
    assert isinstance(cluster.topology, Switched)
    assert cluster.num_devices == 24576
    assert [tier.bytes_per_s for tier in cluster.topology.tiers] == [450e9, 50e9, 50e9, pytest.approx(50e9 / 7)]
    core = list(level_inventories(cluster.topology, cluster.levels))[-1]
    assert core.oversubscription == pytest.approx(7)


def test_cables_between_switches_carry_no_more_than_enters_below() -> None:
    leaf = replace(LEVEL, name="leaf", size=4, num_switches=8, port_bytes_per_s=50e9, links_per_device=1)
    spine = replace(
        LEVEL, name="spine", size=2, num_switches=64, port_bytes_per_s=50e9, links_per_device=None, links_per_unit=256
    )
    assert switched_by_levels([LEVEL, leaf, spine]).tiers[2].bytes_per_s == 50e9
    thin = replace(spine, links_per_unit=8)
    assert switched_by_levels([LEVEL, leaf, thin]).tiers[2].bytes_per_s == 8 * 50e9 / 32


def test_stating_switches_changes_no_price() -> None:
    """The first two levels of the SuperPod have the tiers of the catalogue's nodes of 8, except for measured fractions."""
    stated, catalogue = sw.load_cluster(SUPERPOD).topology, sw.load_cluster("h100:256").topology
    assert isinstance(stated, Switched)
    assert isinstance(catalogue, Switched)
    assert [tier.bytes_per_s for tier in stated.tiers[:2]] == [tier.bytes_per_s for tier in catalogue.tiers]
    assert not catalogue.reduces


def test_quiz_4_bytes_of_a_gather_and_of_a_reduction_in_the_switch() -> None:
    """M nodes of N: B in and B·N - B/M out of a node's switch in a gather, B·N in and out in a node's AllReduce."""
    gpus, nodes, num_bytes = 8, 32, 3.2e9
    cuts = [Cut(gpus, 1), Cut(nodes, 1)]
    node, leaf = (switch_traffic("all_gather", num_bytes, cuts, level, in_network=True) for level in (0, 1))
    assert node.from_below == node.to_above == pytest.approx(num_bytes / nodes)
    assert node.from_above == pytest.approx(num_bytes * (nodes - 1) / nodes)
    assert node.to_below == pytest.approx(gpus * num_bytes - num_bytes / nodes)
    assert node.bytes_in == pytest.approx(num_bytes)
    assert (leaf.bytes_in, leaf.bytes_out) == (pytest.approx(num_bytes), pytest.approx(num_bytes * (nodes - 1)))
    single_node = switch_traffic("all_reduce", num_bytes, [Cut(gpus, 1)], 0, in_network=True)
    assert single_node.bytes_in == single_node.bytes_out == pytest.approx(gpus * num_bytes)


def ring_messages(sizes: tuple[int, ...], num_bytes: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], float]]:
    """Messages of a gather level by level, the outermost first: each device forwards its data to the next of its ring."""
    devices = list(itertools.product(*(range(size) for size in sizes)))
    share = num_bytes / len(devices)
    for level in reversed(range(len(sizes))):
        for device in devices:
            following = (*device[:level], (device[level] + 1) % sizes[level], *device[level + 1 :])
            for _ in range(sizes[level] - 1):
                yield device, following, share
        share *= sizes[level]


def count_traffic(sizes: tuple[int, ...], num_bytes: float, level: int) -> SwitchTraffic:
    """Traffic of one unit of a level, counted message by message."""
    unit = (0,) * (len(sizes) - level - 1)
    inside = lambda device: device[level + 1 :] == unit  # noqa: E731
    flows = dict.fromkeys(("from_below", "to_below", "to_above", "from_above"), 0.0)
    for source, target, moved in ring_messages(sizes, num_bytes):
        if source[level:] == target[level:]:
            continue  # within a unit below: not over this level's switches
        flows["from_below"] += moved * inside(source)
        flows["to_below"] += moved * inside(target)
        flows["to_above"] += moved * (inside(source) and not inside(target))
        flows["from_above"] += moved * (inside(target) and not inside(source))
    return SwitchTraffic(**flows)


@pytest.mark.parametrize("sizes", [(4,), (4, 3), (2, 3, 4), (3, 1, 5)])
def test_traffic_of_rings_equals_a_count_of_their_messages(sizes: tuple[int, ...]) -> None:
    cuts = [Cut(size, 1) for size in sizes]
    for level in (level for level, size in enumerate(sizes) if size > 1):
        gather, messages = switch_traffic("all_gather", 1200.0, cuts, level), count_traffic(sizes, 1200.0, level)
        for name in ("from_below", "to_below", "to_above", "from_above"):
            assert getattr(gather, name) == pytest.approx(getattr(messages, name))


@pytest.mark.parametrize("operation", COLLECTIVE_NAMES)
def test_switches_that_reduce_never_carry_more(operation: str) -> None:
    cuts = [Cut(8, 1), Cut(4, 1), Cut(3, 1)]
    for level in range(3):
        rings, summed = (switch_traffic(operation, 1.0, cuts, level, in_network=flag) for flag in (False, True))  # type: ignore[arg-type]
        assert summed.bytes_in <= rings.bytes_in * (1 + 1e-12)
        assert summed.bytes_out <= rings.bytes_out * (1 + 1e-12)
        assert (summed == rings) == (operation in ("all_to_all", "send_recv"))


def test_an_all_reduce_passes_each_reducing_level_once() -> None:
    """The book: B/W instead of 2·B/W; NVLink's switch sums at (n + 1)/n, as NCCL has it."""
    plain = sw.load_cluster(SUPERPOD)
    levels = [replace(level, reduces=True) for level in plain.levels]
    cuts = {"X": (Cut(1, 8), Cut(32, 1), Cut(4, 1)), "Y": (Cut(8, 1), Cut(1, 1), Cut(1, 1))}
    summed, rings = GroupLinks(switched_by_levels(levels), cuts), GroupLinks(plain.topology, cuts)
    assert collective_s(CollectiveKind.ALL_REDUCE, ("X",), 1e9, rings) == pytest.approx(2 * 31 / 32 * 1e9 / 50e9)
    assert collective_s(CollectiveKind.ALL_REDUCE, ("X",), 1e9, summed) == pytest.approx(1e9 / 50e9)
    assert collective_s(CollectiveKind.ALL_REDUCE, ("Y",), 1e9, summed) == pytest.approx(9 / 8 * 1e9 / 450e9)
    for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        assert collective_s(kind, ("X",), 1e9, summed) == collective_s(kind, ("X",), 1e9, rings)


def test_search_and_estimate_agree_on_reducing_levels(tmp_path: Path) -> None:
    """The vectorised search and the estimate of its winner agree where AllReduces have a separate link."""
    text = (
        Path(SUPERPOD)
        .read_text(encoding="utf-8")
        .replace("size = 32", "size = 2")
        .replace("size = 4  #", "size = 1  #")
    )
    text = text.replace("links_per_device = 18", "links_per_device = 18\nreduces = true")
    file = tmp_path / "reducing.toml"
    file.write_text(text, encoding="utf-8")
    cluster = sw.load_cluster(str(file))
    assert isinstance(cluster.topology, Switched)
    assert cluster.topology.reduces
    job = {"global_batch_tokens": "512Ki", "seq_len": "8Ki"}
    plan = sw.plan("llama-3-8b", cluster, **job)
    assert plan.estimate.step_time_s == sw.estimate("llama-3-8b", plan.cluster, layout=plan.layout, **job).step_time_s
    plain = replace(cluster, topology=Switched(tiers=tuple(replace(t, reduces=False) for t in cluster.topology.tiers)))
    sw.dump_plan(plan, str(tmp_path / "plan.json"))
    assert sw.load_plan(str(tmp_path / "plan.json")).cluster.topology == cluster.topology
    layout = "tp=8 dp=2 sequence_parallel=false recompute=full"
    faster, slower = (sw.estimate("llama-3-8b", c, layout=layout, **job).time["tp"] for c in (cluster, plain))
    assert faster / slower == pytest.approx((9 / 8) / (2 * 7 / 8), rel=1e-6)


def test_a_file_with_levels_is_read_back_to_the_last_digit(tmp_path: Path) -> None:
    for path in (SUPERPOD, ETHERNET):
        cluster = sw.load_cluster(path)
        file = tmp_path / "again.toml"
        file.write_text(
            format_cluster_toml(cluster, published_calibration("h100", get_stack("nemo-25"))), encoding="utf-8"
        )
        read_back = sw.load_cluster(str(file))
        assert (read_back.levels, read_back.topology) == (cluster.levels, cluster.topology)


def level_text(**changes: object) -> str:
    values = {
        "name": '"leaf"',
        "size": 8,
        "num_switches": 4,
        "radix": 64,
        "port_bytes_per_s": '"25 GB/s"',
        "links_per_device": 18,
    }
    lines = "\n".join(f"{key} = {value}" for key, value in {**values, **changes}.items() if value is not None)
    return f'chip = "h100"\n[[levels]]\n{lines}\n'


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (level_text(radix=4), ["found 144 cables at a unit of 'leaf'", "at most 16, the ports of 4 switches of 4"]),
        (level_text(links_per_device=None), ["levels[0]: found no cables", "links_per_device is required"]),
        (
            level_text(oversubscription=2),
            ["found links_per_device and oversubscription", "links_per_device is required"],
        ),
        (
            level_text() + level_text(links_per_device=None, oversubscription=0.5).partition("\n")[2],
            ["at least 1", "0.5"],
        ),
        (level_text(radix='"many"', name=3), ["levels[0]: radix: found 'many'", "levels[0]: name: found 3"]),
        (level_text(ports=3), ["'ports'", "the keys are name, size"]),
        (level_text() + '[[tiers]]\nname = "x"\nsize = 2\nbytes_per_s = "1 GB/s"\n', ["found tiers and levels"]),
        ('chip = "h100"\nlevels = 3\n', ["levels: found 3", "a list of tables"]),
        (level_text() + "pods = 2\n", ["'pods'"]),
    ],
)
def test_errors_of_levels_state_the_requirement(text: str, problems: list[str], tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as error:
        sw.load_cluster(str(file))
    message = "\n".join(error.value.problems)
    assert all(problem in message for problem in problems), message


def test_groups_of_a_layout_cross_the_levels_that_the_placement_gives_them() -> None:
    groups = {group.axis: list(group.sizes) for group in sw.network(SUPERPOD, layout="tp=8 pp=8 fsdp=16").groups}
    assert groups == {"tp": [8, 1, 1], "fsdp": [1, 16, 1], "pp": [1, 2, 4]}
    experts = {group.axis: list(group.sizes) for group in sw.network(SUPERPOD, layout="fsdp=512 ep=64 pp=2").groups}
    assert experts == {"fsdp": [8, 32, 2], "ep": [8, 8, 1], "pp": [1, 1, 2]}
    all_groups = sw.network("h100:64").groups
    assert [(group.axis, list(group.sizes)) for group in all_groups] == [("all", [8, 8])]


def test_impossible_networks_are_refused() -> None:
    with pytest.raises(InputError, match="a torus, which has no switches"):
        sw.network("tpu-v5p:4x4x4")
    with pytest.raises(InputError, match=r"8 devices .* has 1024"):
        sw.network(SUPERPOD, layout="tp=8")
    with pytest.raises(InputError, match="bytes above 0"):
        sw.network("h100:64", size="0B")


def test_a_cluster_without_stated_switches_has_rates_only() -> None:
    network = describe_network(sw.load_cluster("gb200:144"))
    assert [level.num_switches for level in network.levels] == [None, None]
    assert [level.link_bytes_per_s for level in network.levels] == [900e9, 3600e9]  # the book: a rack's egress
