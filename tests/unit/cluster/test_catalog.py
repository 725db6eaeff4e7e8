"""The catalogue of chips: a source for every value, measured fractions, and a plan on every chip."""

from __future__ import annotations

import dataclasses
import re

import pytest

import shardwise as sw
from shardwise.hardware.chips import Chip, chip_names, get_catalog_entry, load_chip
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.network.switches import Switched
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.values.errors import InputError, MissingValueError
from shardwise.values.units import parse_quantity

CHIPS = (
    "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x", "a100-40gb", "a100-80gb", "a100-80gb-pcie", "h100",
    "h100-pcie", "h200", "h800", "l40s", "rtx-4090", "b200", "b300", "gb200", "gb300", "mi250x", "mi300x", "mi325x",
    "mi355x", "v100", "cpu",
)  # fmt: skip
MATMUL = {
    "a100-40gb": (271.2, 312), "a100-80gb": (271.2, 312), "a100-80gb-pcie": (252.9, 312), "h100": (794.5, 989),
    "h200": (794.5, 989), "b200": (1745.0, 2250), "b300": (1769.0, 2250), "gb200": (1822.0, 2500), "mi300x": (668.4, 1307),
    "mi325x": (784.9, 1300), "mi355x": (1565.0, 2500),
}  # fmt: skip
# Published busbw in GB/s, and microseconds of the smallest message on 2 GPUs and on the most measured.
NCCL = {
    "a100-80gb": (205.3, 8, 8.98, 15.56), "h100": (335.2, 8, 5.31, 10.14), "h200": (336.8, 8, 5.08, 10.30),
    "b200": (617.0, 8, 8.84, 16.06), "b300": (620.6, 8, 7.98, 15.71), "gb200": (563.6, 4, 9.36, 11.65),
    "gb300": (571.7, 4, 8.21, 11.21),
}  # fmt: skip
SMALL = Architecture(
    name="small", num_layers=4, d_model=512, d_ff=2048, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=32000
)


def test_the_catalogue_has_the_listed_chips() -> None:
    assert set(chip_names()) == set(CHIPS)


@pytest.mark.parametrize("name", CHIPS)
def test_every_value_has_a_source(name: str) -> None:
    entry = get_catalog_entry(name)
    sources = entry["sources"]
    assert all(len(source) > 20 for source in sources.values())
    for key in set(entry) - {"vendor", "sources", "torus", "tiers"}:
        assert key in sources, key
    if "torus" in entry:
        assert {"torus", "hop_latency_s"} <= set(sources)
    for tier in entry.get("tiers", ()):
        assert tier["name"] in sources
        if "hop_latency_s" in tier and f"{tier['name']}_latency" not in sources:
            assert "microseconds" in sources[tier["name"]]
        if "fraction" in tier:
            assert any(word in sources[tier["name"]] for word in ("all_gather", "all_reduce", "reaches"))
    used = (
        set(entry)
        | {"hop_latency_s", *(key for key in ("twists",) if entry.get("torus", {}).get(key))}
        | {f"{t['name']}{end}" for t in entry.get("tiers", ()) for end in ("", "_latency")}
    )
    assert set(sources) <= used


@pytest.mark.parametrize("name", CHIPS)
def test_a_cluster_has_the_links_of_the_catalogue(name: str) -> None:
    """A neighbour on a torus is reached over both directions of a ring, one on a switch over all of a GPU's links."""
    entry, topology = get_catalog_entry(name), load_cluster(examples(name)[0]).topology
    if "torus" in entry:
        assert topology.neighbour_bytes_per_s() == 2 * parse_quantity(entry["torus"]["bytes_per_s"])
    else:
        assert topology.neighbour_bytes_per_s() == pytest.approx(
            parse_quantity(entry["tiers"][0]["bytes_per_s"]), rel=1e-12
        )


@pytest.mark.parametrize("name", CHIPS)
def test_peaks_are_dense_and_double_with_half_the_width(name: str) -> None:
    peaks = load_chip(name).peak_flops_per_s
    for wide, narrow in (("bf16", "fp8"), ("tf32", "bf16"), ("fp8", "fp4")):
        halves = {("tpu-v6e", "fp8"): 1, ("gb300", "fp4"): 3}.get((name, narrow), 2)
        if wide in peaks and narrow in peaks:
            assert peaks[narrow] / peaks[wide] == pytest.approx(halves, rel=0.013)  # L40S: 362.05 and 733
    if "bf16" in peaks and "fp16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]


@pytest.mark.parametrize("name", CHIPS)
def test_matmul_fractions_equal_the_measured_ones(name: str) -> None:
    chip = load_chip(name)
    assert chip.matmul_fraction == (
        pytest.approx(MATMUL[name][0] / MATMUL[name][1], abs=6e-4) if name in MATMUL else 1.0
    )
    if name in MATMUL:
        assert f"{MATMUL[name][0]} of {MATMUL[name][1]} TFLOP/s" in chip.sources["matmul_fraction"]
        assert chip.peak("bf16") == MATMUL[name][1] * 1e12


@pytest.mark.parametrize("name", NCCL)
def test_links_reproduce_the_collectives_of_their_source(name: str) -> None:
    topology = load_cluster(f"{name}:8").topology
    assert isinstance(topology, Switched)
    tier, (busbw, max_ranks, two_ranks_us, max_ranks_us) = topology.tiers[0], NCCL[name]
    assert tier.bytes_per_s * tier.fraction == pytest.approx(busbw * 1e9, rel=2e-3)
    for size, measured in ((2, two_ranks_us), (max_ranks, max_ranks_us)):
        assert tier.base_latency_s + (size - 1) * tier.hop_latency_s == pytest.approx(measured * 1e-6, rel=0.02)


@pytest.mark.parametrize("name", CHIPS)
def test_host_sizes_agree_with_the_network(name: str) -> None:
    entry, chip = get_catalog_entry(name), load_chip(name)
    if "torus" in entry:
        assert chip.host_shape is not None
        assert len(chip.host_shape) == entry["torus"]["num_axes"]
    else:
        assert chip.devices_per_host in (1, 4, 8)
        assert all(tier["size"] % chip.devices_per_host == 0 for tier in entry["tiers"] if "size" in tier)


def examples(name: str) -> tuple[str, ...]:
    """Clusters of 8 devices, or of one node where it is larger, and some of the next size."""
    entry = get_catalog_entry(name)
    if "torus" in entry:
        return (f"{name}:2x4", f"{name}:8x8") if entry["torus"]["num_axes"] == 2 else (f"{name}:2x2x2", f"{name}:4x4x4")
    node = min(8, entry["tiers"][0].get("size", 8))
    return (f"{name}:{node}", f"{name}:{2 * entry['tiers'][0].get('size', 8)}")[: len(entry["tiers"])]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", CHIPS)
def test_a_small_model_is_planned_on_every_chip(name: str) -> None:
    job = Job(
        global_batch_tokens=2**18,
        seq_len=1024,
        overlap="per_axis",
        precision="bf16" if "bf16" in load_chip(name).peak_flops_per_s else "fp32",
    )
    for cluster in map(load_cluster, examples(name)):
        estimate = sw.plan(SMALL, cluster, job).estimate
        assert 0 < estimate.mfu < cluster.chip.matmul_fraction
        assert any("at the peak" in note for note in estimate.notes) == (name not in MATMUL)


# USD for an hour of one chip, and the day.
PRICES = {
    "tpu-v5e": (1.2, "2025-02"), "tpu-v5p": (4.2, "2025-02"), "h100": (4.916, "2024-Q4"), "h200": (5.408, "2024-Q4"),
    "a100-40gb": (1.844, "2024-Q4"), "a100-80gb": (4.0, "2026-04-14"), "b200": (6.03, "2026-03-17"),
    "gb200": (4.54, "2026-03-17"), "mi300x": (1.85, "2026-05-18"), "mi325x": (1.95, "2026-05-18"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHIPS)
def test_a_price_has_a_date_a_source_and_a_kind_of_sale(name: str) -> None:
    chip = load_chip(name)
    assert (chip.price_usd_per_hour, chip.price_date) == PRICES.get(name, (None, None))
    if name in PRICES:
        source = chip.sources["price_usd_per_hour"]
        assert chip.sources["price_date"] == source
        assert re.match(r"(on demand|reserved|list price)\b.* 20\d\d", source)
        assert re.search(r"\bUSD for an hour of\b", source)


def test_a_published_model_on_a_node_has_a_plausible_mfu() -> None:
    plan = sw.plan(sw.load_model("llama-3-8b"), load_cluster("h200:8"), Job(global_batch_tokens=2**19, seq_len=8192))
    assert plan.estimate.fits
    assert 0.3 < plan.estimate.mfu < 0.803


def test_a_faster_chip_takes_less_time() -> None:
    model, job = sw.load_model("llama-3-8b"), Job(global_batch_tokens=2**19, seq_len=8192)
    steps = [
        sw.plan(model, load_cluster(f"{name}:16"), job).estimate.step_time_s for name in ("a100-80gb", "h200", "b200")
    ]
    assert steps == sorted(steps, reverse=True)


def test_a_value_without_a_source_is_an_error_that_names_it() -> None:
    assert load_chip("h100").require_value("power_w") == 700
    with pytest.raises(MissingValueError, match=r"^chip tpu-v5e: no sourced power_w$"):
        load_chip("tpu-v5e").require_value("power_w")
    with pytest.raises(
        MissingValueError, match=r"^chip v100: no sourced bf16 peak; it has fp16, fp32; choose --precision fp16"
    ):
        sw.plan(SMALL, load_cluster("v100:4"), Job(global_batch_tokens=2**16, seq_len=1024))
    with pytest.raises(
        MissingValueError, match="mi325x has no sourced network between nodes of 8; mi325x:8 is the largest"
    ):
        load_cluster("mi325x:16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_bytes": -1.0}, "chip h100: memory_bytes is -1; a positive number of at most 1e+21 is required"),
        ({"memory_bytes_per_s": float("nan")}, "chip h100: memory_bytes_per_s is nan; a positive number"),
        ({"runtime_bytes": -1.0}, "chip h100: runtime_bytes is -1; a positive number"),
        ({"peak_flops_per_s": {"bf16": 0.0}}, "chip h100: peak_flops_per_s.bf16 is 0; a positive number"),
        ({"peak_flops_per_s": {}}, "chip h100: peak_flops_per_s is empty"),
        ({"matmul_fraction": 1.5}, "chip h100: matmul_fraction is 1.5; a part of the peak"),
        ({"host_shape": ()}, "chip h100: host_shape is (); numbers of chips of at least 1"),
    ],
)
def test_impossible_values_of_a_chip_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(InputError) as caught:
        dataclasses.replace(load_chip("h100"), **change)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_without_a_runtime_all_memory_is_free() -> None:
    chip = load_chip("mi300x")
    assert isinstance(chip, Chip)
    assert chip.runtime_bytes == 0
    assert "runtime_bytes" not in chip.sources
