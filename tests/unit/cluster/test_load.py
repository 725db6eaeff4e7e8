"""Chips and clusters by name, and errors that say what there is."""

from __future__ import annotations

import re

import pytest

from shardwise.cluster.load import chip_names, load_chip, load_cluster
from shardwise.errors import InputError, MissingValueError


@pytest.mark.parametrize(
    ("name", "bf16", "memory", "bandwidth"),
    [
        ("h100", 989e12, 80e9, 3.35e12),
        ("tpu-v5e", 197e12, 16e9, 810e9),
        ("tpu-v5p", 459e12, 95e9, 2.8e12),
    ],
)
def test_chips_have_the_published_figures(name: str, bf16: float, memory: float, bandwidth: float) -> None:
    chip = load_chip(name)
    assert (chip.peak("bf16"), chip.memory_bytes, chip.memory_bytes_per_s) == (bf16, memory, bandwidth)
    assert chip.matmul_flops_per_s("bf16") <= bf16
    assert chip.sustained_bytes_per_s() <= bandwidth


@pytest.mark.parametrize("name", chip_names())
def test_every_value_has_a_source(name: str) -> None:
    chip = load_chip(name)
    for value in ("peak_flops_per_s", "memory_bytes", "memory_bytes_per_s", "runtime_bytes"):
        assert len(chip.sources[value]) > 10 if value in chip.sources else value == "memory_bytes_per_s"
    if chip.matmul_fraction != 1.0:
        assert "matmul_fraction" in chip.sources


def test_a_peak_without_a_source_is_an_error_that_names_it() -> None:
    with pytest.raises(MissingValueError, match="chip tpu-v5e: no sourced fp8 peak; it has bf16, int8"):
        load_chip("tpu-v5e").peak("fp8")


def test_an_unknown_chip_lists_the_names() -> None:
    for load in (load_chip, lambda name: load_cluster(f"{name}:8")):
        with pytest.raises(InputError) as caught:
            load("v100")
        assert str(caught.value) == f"chip: found 'v100'; the catalogue has {', '.join(chip_names())}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "cluster: found 'h100'; CHIP:COUNT for switched chips (h100:512) or CHIP:SHAPE for a torus"),
        ("h100:", "cluster: found 'h100:'; CHIP:COUNT"),
        ("h100:0", "cluster: found 'h100:0'; every size must be at least 1"),
        ("h100:12", "cluster: h100 comes in nodes of 8; 12 is no multiple of it, the nearest counts are 8 and 16"),
        ("h100:8x8", "h100 is connected by switches; a count such as h100:512 is required"),
        ("tpu-v5e:256", "tpu-v5e is a torus of 2 axes; a shape such as tpu-v5e:16x16 is required"),
        ("tpu-v5e:16x32", "tpu-v5e:16x32 is larger than a pod, 16x16 (256 chips)"),
        ("tpu-v5p:16x20x29", "tpu-v5p:16x20x29 is larger than a pod, 16x20x28 (8960 chips)"),
    ],
)
def test_what_is_no_cluster_is_refused_with_the_fix(text: str, message: str) -> None:
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
    ],
)
def test_clusters(text: str, num_devices: int, levels: tuple[int, ...]) -> None:
    cluster = load_cluster(text)
    assert cluster.num_devices == num_devices
    assert cluster.topology.levels == levels
    assert cluster.name == text.strip().lower()
