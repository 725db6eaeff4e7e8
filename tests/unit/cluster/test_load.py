"""Chips and clusters by name and from files, and errors that list what is available."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shardwise as sw
from shardwise.hardware import chips
from shardwise.hardware.chips import chip_names, load_chip
from shardwise.hardware.cluster import replace_chip
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.torus import Torus
from shardwise.model.job import Job
from shardwise.price.estimate import BOUND
from shardwise.values.errors import InputError, MissingValueError

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "extending.md").read_text("utf-8").partition("## A software stack")[0]
CLUSTER_TOML, SLICE_TOML, FABRIC_TOML, CHIP_TOML = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
JOB = Job(global_batch_tokens=2**19, seq_len=4096)


@pytest.mark.parametrize(
    ("name", "bf16", "memory", "bandwidth"),
    [
        ("h100", 989e12, 80e9, 3.35e12),
        ("tpu-v5e", 197e12, 16 * 2**30, 810e9),
        ("tpu-v5p", 459e12, 95 * 2**30, 2.8e12),
    ],
)
def test_chips_have_the_published_figures(name: str, bf16: float, memory: float, bandwidth: float) -> None:
    chip = load_chip(name)
    assert (chip.peak("bf16"), chip.memory_bytes, chip.memory_bytes_per_s) == (bf16, memory, bandwidth)
    assert chip.matmul_flops_per_s("bf16") <= bf16
    assert chip.memory_bytes_per_s * chip.memory_fraction <= bandwidth


def test_a_missing_peak_is_an_error_that_names_it() -> None:
    with pytest.raises(MissingValueError, match="chip tpu-v5e: no sourced fp8 peak; it has bf16, int8"):
        load_chip("tpu-v5e").peak("fp8")


def test_an_unknown_chip_lists_the_names() -> None:
    for find in (load_chip, lambda name: load_cluster(f"{name}:8")):
        with pytest.raises(InputError) as caught:
            find("v1000")
        assert (
            str(caught.value)
            == f"chip: found 'v1000' (did you mean 'v100'?); the catalogue has {', '.join(chip_names())}"
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "h100",
            "cluster: found 'h100' (did you mean 'h100:8'?); CHIP:COUNT for switched chips (h100:512) or CHIP:SHAPE for a torus",
        ),
        ("256xH100", "(did you mean 'h100:256'?)"),
        ("8 x h100", "(did you mean 'h100:8'?)"),
        ("h100-64", "(did you mean 'h100:64'?)"),
        ("tpu-v5p-512", "(did you mean 'tpu-v5p:4x8x8'?)"),
        ("v5litepod-256", "(did you mean 'tpu-v5e:16x16'?)"),
        ("tpu-v5p:256", "tpu-v5p is a torus of 3 axes (did you mean 'tpu-v5p:4x8x8'?)"),
        ("tpu-v5e:4x4x4", "tpu-v5e is a torus of 2 axes (did you mean 'tpu-v5e:8x8'?)"),
        ("h100:", "cluster: found 'h100:' (did you mean 'h100:8'?); CHIP:COUNT"),
        ("h100:0", "cluster: found 'h100:0'; every size must be at least 1"),
        ("h100:12", "cluster: h100 comes in nodes of 8; 12 is not a multiple of it, the nearest counts are 8 and 16"),
        ("h100:8x8", "h100 is connected by switches; a count such as h100:512 is required"),
        (
            "tpu-v5e:256",
            "tpu-v5e is a torus of 2 axes (did you mean 'tpu-v5e:16x16'?); a shape such as tpu-v5e:16x16 is",
        ),
        ("tpu-v5e:16x32", "tpu-v5e:16x32 is larger than a pod, 16x16 (256 chips)"),
        (
            "gb200:100",
            "gb200 comes in nodes of 72 or equal parts of them, in hosts of 4; 100 is not a multiple of it, "
            "the nearest counts are 96 and 104",
        ),
        ("tpu-v7x:32x32x32", "cluster: tpu-v7x:32x32x32 is larger than a pod of 9216 chips"),
        (
            "tpu-v7x:64",
            "tpu-v7x is a torus of 3 axes (did you mean 'tpu-v7x:4x4x4'?); a shape such as tpu-v7x:4x4x4 is required",
        ),
        ("tpu-v5e:16x16**4", "cluster: found 'tpu-v5e:16x16**4'; CHIP:COUNT"),
        ("tpu-v5e:16x16*", "cluster: found 'tpu-v5e:16x16*'; CHIP:COUNT"),
        ("tpu-v5e:16x16*0", "cluster: found 'tpu-v5e:16x16*0'; every size must be at least 1"),
        ("tpu-v5e:16x16*40000", "at most 10,000,000 devices are planned for"),
        ("tpu-v5e:16x32*2", "tpu-v5e:16x32 is larger than a pod, 16x16 (256 chips)"),
        (
            "h100:8*4",
            "h100 is connected by switches, which have no twisted slices and no pods; a count such as h100:512 is",
        ),
        ("local:4*2", "local:N with a number of processes is required, such as local:4"),
        ("tpu-v5e:8x16_twisted", "no twisted slices of tpu-v5e are known, but of tpu-v4, tpu-v5p"),
        (
            "tpu-v4:4x4x4_twisted",
            "KxKx2K or Kx2Kx2K in any order, with K a multiple of 4, such as 4x4x8 or 4x8x8, is required",
        ),
        ("tpu-v4:4x4x16_twisted", "found tpu-v4:4x4x16_twisted; KxKx2K or Kx2Kx2K in any order"),
        ("tpu-v4:2x2x4_twisted", "found tpu-v4:2x2x4_twisted; KxKx2K or Kx2Kx2K in any order"),
        ("h100:99999999999", "cluster: found 'h100:99999999999'; at most 10,000,000 devices are planned for"),
        ("h100:" + "9" * 5000, "at most 10,000,000 devices are planned for"),
        ("h100:\u0664", "CHIP:COUNT"),
        ("local:2x2", "local:N with a number of processes is required, such as local:4"),
        ("tpu-v5p:16x20x29", "tpu-v5p:16x20x29 is larger than a pod, 16x20x28 (8960 chips)"),
    ],
)
def test_an_invalid_cluster_is_refused_with_the_fix(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_cluster(text)


@pytest.mark.parametrize(
    ("text", "num_devices", "levels"),
    [
        ("h100:8", 8, (8, 1)),
        ("H100:16384", 16384, (8, 2048)),
        ("tpu-v5p:16x20x28", 8960, (16, 20, 28)),
        (" tpu-v5e:4x4 ", 16, (4, 4)),
        ("tpu-v5p:28x16x20", 8960, (28, 16, 20)),
        ("tpu-v5e:16x16*4", 1024, (16, 16, 4)),
        ("tpu-v5e:16x16*1", 256, (16, 16)),
        ("tpu-v4:8x4x4_twisted", 128, (8, 4, 4)),
        ("tpu-v4:4x8x8_twisted*2", 512, (4, 8, 8, 2)),
        ("gb200:8", 8, (8, 1)),
        ("gb200:144", 144, (72, 2)),
        ("gb300:256", 256, (64, 4)),
        ("mi355x:8", 8, (8,)),
        ("cpu:4", 4, (4,)),
        ("local:3", 3, (3,)),
    ],
)
def test_clusters_have_the_topology_of_their_text(text: str, num_devices: int, levels: tuple[int, ...]) -> None:
    cluster = load_cluster(text)
    assert cluster.num_devices == num_devices
    assert cluster.topology.levels == levels
    assert cluster.name == text.strip().lower()


def test_only_a_whole_pod_of_v3_wraps() -> None:
    full, part = load_cluster("tpu-v3:32x32").topology, load_cluster("tpu-v3:16x32").topology
    assert isinstance(full, Torus)
    assert isinstance(part, Torus)
    assert (full.wraps, part.wraps) == ((True, True), (False, False))


def test_local_processes_share_a_host() -> None:
    host, cluster = load_chip("cpu"), load_cluster("local:4")
    assert cluster.chip.peak("fp32") * 4 == host.peak("fp32")
    assert cluster.chip.memory_bytes * 4 == host.memory_bytes
    assert cluster.topology.neighbour_bytes_per_s() * 8 == host.memory_bytes_per_s
    assert all("1/4" in source for source in cluster.chip.sources.values())
    model = sw.load_model("gpt-2")
    job = Job(global_batch_tokens=2**16, seq_len=1024, precision="fp32")
    assert sw.plan(model, cluster, job).estimate.fits


def write_cluster(folder: Path, text: str, name: str = "my-cluster.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_documents_cluster_file_is_loaded(tmp_path: Path) -> None:
    cluster, base = load_cluster(write_cluster(tmp_path, CLUSTER_TOML)), load_chip("h100")
    assert (cluster.name, cluster.chip.name, cluster.num_devices) == ("my-cluster", "h100-500w", 32)
    assert (cluster.chip.power_w, cluster.chip.matmul_fraction, cluster.chip.memory_bytes) == (500, 0.71, 80e9)
    assert cluster.chip.sources["matmul_fraction"].startswith("our GEMM sweep")
    assert cluster.chip.sources["power_w"] == "my-cluster.toml"
    assert cluster.chip.sources["memory_bytes"] == base.sources["memory_bytes"]
    assert cluster.topology.levels == (8, 4)
    slower = sw.plan(sw.load_model("llama-3-8b"), cluster, JOB).estimate
    assert slower.step_time_s > sw.plan(sw.load_model("llama-3-8b"), load_cluster("h100:32"), JOB).estimate.step_time_s


def test_the_documents_slice_file_is_loaded(tmp_path: Path) -> None:
    cluster, sold = load_cluster(write_cluster(tmp_path, SLICE_TOML, "my-slice.toml")), load_cluster("tpu-v5p:4x4x8")
    assert (cluster.name, cluster.topology, cluster.chip) == ("my-slice", sold.topology, sold.chip)


def test_the_documents_levels_are_loaded(tmp_path: Path) -> None:
    file = tmp_path / "my-fabric.toml"
    file.write_text(FABRIC_TOML, encoding="utf-8")
    cluster = load_cluster(str(file))
    assert isinstance(cluster.topology, Switched)
    assert [(tier.size, tier.bytes_per_s) for tier in cluster.topology.tiers] == [(8, 450e9), (32, 50e9)]
    assert [level.num_switches for level in cluster.levels] == [4, 8]


def test_a_file_of_pods_equals_the_shorthand(tmp_path: Path) -> None:
    """Also with custom hosts, whose egress four chips share."""
    path = write_cluster(tmp_path, 'chip = "tpu-v5e"\npods = 4\ntorus = { shape = [16, 16] }')
    assert load_cluster(path).topology == load_cluster("tpu-v5e:16x16*4").topology
    path = write_cluster(tmp_path, """
        pods = 2
        torus = { shape = [4, 4, 8], twisted = true }
        [chip]
        base = "tpu-v7x"
        dcn_bytes_per_s_per_host = "50 GB/s"
    """)  # fmt: skip
    topology = load_cluster(path).topology
    assert isinstance(topology, Pods)
    assert (topology.bytes_per_s, topology.levels, topology.torus.twisted) == (12.5e9, (4, 4, 8, 2), True)


def test_pods_need_the_egress_of_a_host(tmp_path: Path) -> None:
    (problem,) = problems_of_file(tmp_path, """
        pods = 2
        torus = { shape = [4, 4, 4], bytes_per_s = "90 GB/s", hop_latency_s = 1e-6, wrap_rule = "always" }
        [chip]
        name = "x1"
        peak_flops_per_s = { bf16 = "800 TFLOP/s" }
        memory_bytes = "96 GB"
        memory_bytes_per_s = "3 TB/s"
        host_shape = [2, 2, 1]
    """)  # fmt: skip
    assert "2 pods: chip x1: no sourced dcn_bytes_per_s_per_host; one pod, or the value in the [chip] table" in problem


@pytest.mark.parametrize(
    ("name", "gigabits"),
    [("tpu-v5e:16x16*2", 25), ("tpu-v5p:4x4x4*2", 50), ("tpu-v6e:16x16*2", 100), ("tpu-v7x:4x4x4*2", 100)],
)
def test_egress_of_a_chip_to_other_pods_equals_googles(name: str, gigabits: float) -> None:
    """Google Cloud documentation: Gb/s of the data-centre network for each chip; on v5e and v6e that of a pod over its 256."""
    topology = load_cluster(name).topology
    assert isinstance(topology, Pods)
    assert topology.bytes_per_s == gigabits * 1e9 / 8


def test_another_chip_sets_the_rate_between_pods() -> None:
    cluster = load_cluster("tpu-v5e:16x16*4")
    faster = replace_chip(cluster, dataclasses.replace(cluster.chip, dcn_bytes_per_s_per_host=100e9))
    assert isinstance(faster.topology, Pods)
    assert (faster.topology.bytes_per_s, faster.topology.levels) == (12.5e9, (16, 16, 4))
    single_slice = load_cluster("tpu-v5e:16x16")
    assert replace_chip(single_slice, single_slice.chip) == single_slice


def test_a_chip_and_torus_without_a_base_are_loaded(tmp_path: Path) -> None:
    path = write_cluster(tmp_path, """
        name = "two by two"
        torus = { shape = [2, 2], bytes_per_s = 45e9, hop_latency_s = 0, wrap_rule = "never" }
        [chip]
        peak_flops_per_s = { bf16 = "100 TFLOP/s" }
        memory_bytes = "96 GB"
        memory_bytes_per_s = 1e12
        host_shape = [2, 2]
        price_usd_per_hour = 1.5
        price_date = "2026-03-01"
    """)  # fmt: skip
    cluster = load_cluster(path)
    assert (cluster.name, cluster.num_devices, cluster.chip.host_shape) == ("two by two", 4, (2, 2))
    assert cluster.chip.require_value("price_usd_per_hour") == 1.5
    assert set(cluster.chip.sources.values()) == {"my-cluster.toml"}
    assert sw.plan(sw.load_model("llama-3-8b"), cluster, JOB).estimate.fits


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the catalogue that a file can be added to."""
    folder = tmp_path / "catalog"
    shutil.copytree(ROOT / "src" / "shardwise" / "hardware" / "catalog" / "chips", folder)
    monkeypatch.setattr(chips, "CHIP_CATALOG", folder)
    chips._load_chip_tables.cache_clear()
    yield folder
    chips._load_chip_tables.cache_clear()


def test_a_chip_is_added_by_a_data_file(catalogue: Path) -> None:
    write_cluster(catalogue, CHIP_TOML, "example.toml")
    assert "example-x1" in chip_names()
    cluster = load_cluster("example-x1:64")
    assert isinstance(cluster.topology, Switched)
    assert cluster.topology.levels == (16, 4)
    assert cluster.topology.tiers[0].fraction == 0.7
    assert cluster.chip.sources["memory_bytes"].startswith("Example Semiconductors, X1 datasheet")
    plan = sw.plan(sw.load_model("llama-3-8b"), cluster, JOB)
    assert plan.estimate.fits
    assert plan.estimate.notes == (
        BOUND,
        "example-x1 has no measured matmul rate in the catalogue: compute is priced at the peak, a bound",
    )


def problems_of_file(folder: Path, text: str) -> list[str]:
    """The problems of a file, without its name."""
    with pytest.raises(InputError) as caught:
        load_cluster(write_cluster(folder, text, "f.toml"))
    return [problem.split("f.toml: ", 1)[-1] for problem in caught.value.problems]


NETWORK = 'tiers = [{ name = "t", size = 8, bytes_per_s = "1 GB/s" }]\n'
NONE = 'chip: nothing found; chip = "NAME" or a [chip] table is required'


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", [NONE, "found no network; one of torus, tiers and levels is required"]),
        (NETWORK + "chip = 'h1000'", ["chip: found 'h1000' (did you mean 'h100'?); the catalogue has "]),
        (NETWORK + "chip = 7", ["chip: found 7; the name of a chip or a [chip] table is required"]),
        (NETWORK + "chip = ['h100']", ["chip: found ['h100']; the name of a chip"]),
        (
            NETWORK + "chip = 'h100'\nchips = 4",
            ["found 'chips' (did you mean 'chip'?); the keys are name, chip, torus, pods, tiers"],
        ),
        (NETWORK + "chip = 'h100'\npods = 2", ["pods: found 2; a torus beside it: "]),
        (NETWORK + "chip = 'h100'\nname = 4", ["name: found 4; a text is required"]),
        (NETWORK + "chip = 'h100'\ntorus = 4", ["found torus and tiers; one of torus, tiers and levels is required"]),
    ],
)
def test_problems_of_a_cluster_file_are_reported(tmp_path: Path, text: str, problems: list[str]) -> None:
    lines = problems_of_file(tmp_path, text)
    assert len(lines) == len(problems)
    assert all(line.startswith(problem) for line, problem in zip(lines, problems, strict=True)), lines


@pytest.mark.parametrize("text", ["a = [", "x = " + "[" * 5000, "x = " + "9" * 5000, "a = 1\na = 2"])
def test_invalid_toml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match=r"^cluster: .*f\.toml is not TOML: "):
        load_cluster(write_cluster(tmp_path, text, "f.toml"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("memory = 4", "chip: found 'memory' (did you mean 'memory_bytes'?); the keys are vendor, peak_flops_per_s, "),
        ("name = 4", "chip: name: found 4; a text is required"),
        ("memory_bytes = -1", "chip: memory_bytes: found -1; a number above 0"),
        ("memory_bytes = nan", "chip: memory_bytes: found nan; a number above 0"),
        ("memory_bytes = 1e99", "chip: memory_bytes: found 1e+99; a number above 0"),
        ("memory_bytes = true", "chip: memory_bytes: found True; a number above 0"),
        (
            "memory_bytes = '80 GX'",
            "chip: memory_bytes: found '80 GX'; a number above 0, such as 8e10 or \"80 GB\", is",
        ),
        (
            "memory_bytes = '80 GB/s'",
            "chip: memory_bytes: found '80 GB/s'; a number above 0, such as 8e10 or \"80 GB\", is",
        ),
        (
            "peak_flops_per_s = { bf16 = '989 GB/s' }",
            "chip: peak_flops_per_s: bf16: found '989 GB/s'; a number above 0",
        ),
        ("memory_bytes = 96", 'chip: memory_bytes: found 96; a unit, such as "80 GB", is required'),
        ("memory_bytes = '96'", "chip: memory_bytes: found '96'; a unit, such as \"80 GB\", is required"),
        ("runtime_bytes = 1.5", 'chip: runtime_bytes: found 1.5; a unit, such as "80 GB", is required'),
        ("memory_bytes_per_s = 3350", 'chip: memory_bytes_per_s: found 3350; a unit, such as "3.35 TB/s", is required'),
        ("peak_flops_per_s = { bf16 = 989 }", "chip: peak_flops_per_s: bf16: found 989; a unit, such as "),
        ("runtime_bytes = -1", "chip: runtime_bytes: found -1; a number of at least 0"),
        ("matmul_fraction = 1.1", "chip: matmul_fraction: found 1.1; a number above 0 and at most 1 is required"),
        ("host_shape = [2, 0]", "chip: host_shape: found [2, 0]; a list of whole numbers of 1 to 10,000,000 is"),
        ("matrix_unit = 1.5", "chip: matrix_unit: found 1.5; a whole number of 1 to 10,000,000 is required"),
        ("sources = ['x']", "chip: sources: found ['x']; a table of texts is required"),
        ("price_date = 2026-01-01", "chip: price_date: found datetime.date(2026, 1, 1); a text is required"),
        (
            "peak_flops_per_s = { bf17 = 1 }",
            "chip: peak_flops_per_s: found 'bf17' (did you mean 'bf16'?); the keys are fp64,",
        ),
        ("peak_flops_per_s = { bf16 = 0 }", "chip: peak_flops_per_s: bf16: found 0; a number above 0"),
        ("peak_flops_per_s = 4", "chip: peak_flops_per_s: found 4; dense peaks by number format, such as "),
    ],
)
def test_problems_of_a_chips_values_are_reported(tmp_path: Path, line: str, problem: str) -> None:
    (message,) = problems_of_file(tmp_path, f"{NETWORK}[chip]\nbase = 'h100'\n{line}")
    assert message.startswith(problem)


def test_a_chip_without_a_base_requires_all_values(tmp_path: Path) -> None:
    memory, rate, peaks = problems_of_file(tmp_path, NETWORK + "[chip]\nvendor = 'x'")
    assert memory == 'chip: memory_bytes: missing; a number above 0, such as 8e10 or "80 GB", is required'
    assert rate.startswith("chip: memory_bytes_per_s: missing; ")
    assert peaks.startswith("chip: peak_flops_per_s: missing; dense peaks by number format")
    (empty,) = problems_of_file(
        tmp_path, NETWORK + "[chip]\npeak_flops_per_s = {}\nmemory_bytes = 1e9\nmemory_bytes_per_s = 1e9"
    )
    assert empty.startswith("chip: peak_flops_per_s is empty; ")


WRONG_TIER = "{ name = '', size = true, bytes_per_s = 0, fraction = 0, hop_latency_s = -1 }"
HUGE = "[{ name = 'a', size = 10000000, bytes_per_s = 1e9 }, { name = 'b', size = 2, bytes_per_s = 1e9 }]"


@pytest.mark.parametrize(
    ("network", "problems"),
    [
        ("tiers = []", ["tiers: found []; a list of tables such as"]),
        (f"tiers = [{WRONG_TIER}]", [
            "tiers[0]: name: found ''; a text is required",
            "tiers[0]: size: found True; a whole number of 1 to 10,000,000 is required",
            'tiers[0]: bytes_per_s: found 0; a number above 0, such as 8e10 or "3.35 TB/s", is required',
            "tiers[0]: fraction: found 0; a number above 0 and at most 1 is required",
            "tiers[0]: hop_latency_s: found -1; a number of seconds from 0 to 1, such as 2.7e-6, is required",
        ]),
        ("tiers = [{}]", [f"tiers[0]: {key}: missing; " for key in ("name", "size", "bytes_per_s")]),
        ("tiers = [{ name = 't', size = 8, bytes_per_s = '450 GB' }]", ["tiers[0]: bytes_per_s: found '450 GB'; a number"]),
        ("tiers = [{ name = 't', size = 8, bytes_per_s = 1e9, links = 6 }]",
         ["tiers[0]: links: found 6; a link to each of the 7 others is required"]),
        ("tiers = [{ name = 't', size = 8, bytes_per_s = 1e9, links = 0 }]",
         ["tiers[0]: links: found 0; a whole number of 1 to 10,000,000 is required"]),
        (f"tiers = {HUGE}", ["20,000,000 devices; at most 10,000,000 are planned for"]),
        ("torus = 4", ["torus: found 4; a table with shape, bytes_per_s, hop_latency_s and wrap_rule is required"]),
        ("torus = { shape = [4, 4] }", [f"torus: {key}: missing; " for key in ("bytes_per_s", "hop_latency_s", "wrap_rule")]),
    ],
)  # fmt: skip
def test_problems_of_the_network_are_reported(tmp_path: Path, network: str, problems: list[str]) -> None:
    lines = problems_of_file(tmp_path, f"chip = 'h100'\n{network}")
    assert len(lines) == len(problems), lines
    assert all(line.startswith(problem) for line, problem in zip(lines, problems, strict=True)), lines


@pytest.mark.parametrize(
    ("torus", "problem"),
    [
        (
            "shape = [4, 4], wrap_rule = 'whole_pod'",
            "torus: wrap_rule: found 'whole_pod'; one of multiple_of_4, only_16, ",
        ),
        ("shape = [2, 2, 2, 2]", "torus: shape: found [2, 2, 2, 2]; a list of at most 3 sizes is required"),
        (
            "shape = [4, 4, 4], twisted = true, wrap_rule = 'always'",
            "torus: twisted: found True; false, or a torus that wraps",
        ),
        (
            "shape = [4, 4, 8], twisted = true, wrap_rule = 'never'",
            "torus: twisted: found True; false, or a torus that wraps",
        ),
        ("shape = [4, 4, 8], twisted = 1", "torus: twisted: found 1; true or false is required"),
        ("shape = 4", "torus: shape: found 4; a list of whole numbers of 1 to 10,000,000 is required"),
    ],
)
def test_problems_of_a_torus_are_reported(tmp_path: Path, torus: str, problem: str) -> None:
    (message,) = problems_of_file(tmp_path, f"chip = 'tpu-v3'\ntorus = {{ {torus} }}")
    assert message.startswith(problem)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    for path, message in (
        ("nowhere.toml", "cluster: cannot read nowhere.toml: No such file or directory"),
        ("a\0b.toml", "embedded null byte"),
    ):
        with pytest.raises(InputError, match=message):
            load_cluster(path)
    (tmp_path / "f.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="is not text: byte 0xff"):
        load_cluster(str(tmp_path / "f.toml"))


ODD = st.sampled_from(
    ["nan", "inf", "-inf", "-1", "0", "1e400", "9" * 400, "0x" + "f" * 400, "true", "'x'", "''", "[]", "[[]]", "{}",
     "[1, 'a']", "2026-01-01", "'80 GB'", "'-3 TB/s'", "[8]", "8", "0.5", "{ bf16 = 'x' }", "{ bf16 = '1 TFLOP/s' }",
     "'h100'", "'tpu-v5e'", "'only_16'", "[2, 2]", "'torchtitan'", "{ dense = [0.9, 1.1] }", "{ moe = [2, 1] }",
     "{ exposed = 0.5 }", "{ launch_s = 1 }"]
)  # fmt: skip
KEY = st.sampled_from(
    ["name", "base", "vendor", "peak_flops_per_s", "memory_bytes", "memory_bytes_per_s", "runtime_bytes", "matmul_fraction",
     "host_shape", "matrix_unit", "price_date", "sources", "shape", "size", "bytes_per_s", "fraction", "hop_latency_s",
     "base_latency_s", "links", "wrap_rule", "twisted", "odd"]
)  # fmt: skip
PAIRS = st.dictionaries(KEY, ODD, max_size=6)
CALIBRATION = st.dictionaries(
    st.sampled_from(["stack", "constants", "clock", "fused_attention", "has_capacity", "spread", "source", "odd"]),
    ODD, max_size=4,
)  # fmt: skip


def lines(pairs: dict[str, str]) -> str:
    return "".join(f"{key} = {value}\n" for key, value in pairs.items())


def replace_value(text: str, place: int, value: str) -> str:
    """The text with the value of one of its lines replaced."""
    lines = text.splitlines()
    number = [number for number, line in enumerate(lines) if "=" in line][place % 8]
    lines[number] = f"{lines[number].partition('=')[0]}= {value}"
    return "\n".join(lines)


FILES = st.one_of(
    st.text(max_size=60),
    st.builds(replace_value, st.just(CLUSTER_TOML), st.integers(0, 7), ODD),
    st.builds(
        lambda top, chip, tiers, torus: (
            lines(top)
            + (f"[chip]\n{lines(chip)}" if chip is not None else "")
            + (f"[torus]\n{lines(torus)}" if torus is not None else "")
            + "".join(f"[[tiers]]\n{lines(tier)}" for tier in tiers)
        ),
        st.dictionaries(st.sampled_from(["name", "chip", "torus", "pods", "tiers", "odd"]), ODD, max_size=2),
        st.none() | PAIRS, st.lists(PAIRS, max_size=2), st.none() | PAIRS,
    ),
    st.builds(lambda pairs: f"{CLUSTER_TOML}[calibration]\n{lines(pairs)}", CALIBRATION),
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=FILES)
def test_no_file_ends_in_a_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.toml"
    path.write_text(text, encoding="utf-8", errors="replace")
    problems: tuple[str, ...] = ()
    try:
        assert load_cluster(str(path)).num_devices >= 1
    except InputError as error:
        problems = error.problems
    assert all("f.toml" in problem for problem in problems), problems
