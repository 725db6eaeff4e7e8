"""Stacks by name: the constants of a cluster, substitutes for chips without runs, and clusters from files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.chips import clock_of_similar_chip
from shardwise.hardware.cluster import replace_chip
from shardwise.hardware.cluster_loading import iterate_sizes
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.torus import Torus
from shardwise.hardware.published_constants import (
    SIMILAR_CHIP,
    SIMILAR_CHIP_DEVIATION,
    constant_values,
    load_published_fit,
    num_runs,
    published_calibration,
    with_calibration,
    with_published_constants,
    without_calibration,
)
from shardwise.hardware.stacks import get_stack, stack_names  # fmt: skip
from shardwise.values.errors import InputError

CLUSTERS = ("h100:512", "gb200:256", "tpu-v5p:4x4x4", "tpu-v5e:4x4*2", "tpu-v4:4x4x8_twisted", "local:4")


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_under_a_stack_has_its_constants_and_links_at_their_rate(name: str) -> None:
    plain, cluster = sw.load_cluster(name), sw.load_cluster(name, stack="compiled")
    assert plain.calibration is None
    assert cluster.calibration == published_calibration(plain.chip.name, get_stack("compiled"))
    assert replace(cluster, calibration=None) == plain
    inner, outer = cluster.calibration["link_fraction"], cluster.calibration["network_fraction"]
    sustained, rated = cluster.sustained_topology, plain.sustained_topology
    if isinstance(sustained, Switched):
        assert [tier.fraction for tier in sustained.tiers] == [inner] + [outer] * (len(sustained.tiers) - 1)
        return
    if isinstance(sustained, Pods):
        assert isinstance(rated, Pods)
        assert sustained.bytes_per_s == rated.bytes_per_s * outer
        sustained, rated = sustained.torus, rated.torus
    assert isinstance(sustained, Torus)
    assert isinstance(rated, Torus)
    assert sustained.bytes_per_s == rated.bytes_per_s * inner


@pytest.mark.parametrize("name", stack_names())
def test_every_stack_can_be_named(name: str) -> None:
    chip = "h100:8" if "GPU" in get_stack(name).platforms else "tpu-v5e:4x4"
    calibration = sw.load_cluster(chip, stack=name).calibration
    assert calibration is not None
    assert calibration.stack == name
    assert calibration.constants.keys() == CONSTANTS.keys()
    assert ("the defaults of its kind" in (calibration.interval_note(moe=False) or "")) == (
        name not in load_published_fit()["stacks"]
    )


def test_a_stack_has_measured_intervals_for_its_chips_and_kinds_of_models() -> None:
    """torchtitan on H100: 22 dense runs that were compiled and no mixture of experts; on B200 none at all."""
    spread = load_published_fit()["spread"]
    stack = get_stack("torchtitan")
    assert num_runs("h100", stack, "dense") == 22
    on_hopper, on_blackwell = published_calibration("h100", stack), published_calibration("b200", stack)
    assert list(on_hopper.spread["dense"]) == spread["known"]["dense"]["hopper torchtitan"]
    assert list(on_hopper.spread["moe"]) == spread["unknown"]["moe"]["hopper"]
    assert list(on_blackwell.spread["dense"]) == spread["unknown"]["dense"]["blackwell"]
    assert on_hopper.spread_notes.keys() == {"moe"}
    assert on_blackwell.spread_notes.keys() == {"dense", "moe"}
    assert all("fewer than" not in calibration.source for calibration in (on_hopper, on_blackwell))


def test_a_prediction_states_what_widens_its_interval() -> None:
    """torchtitan on H100 has runs of dense models and none of experts: only predictions of experts say so."""
    cluster = sw.load_cluster("h100:8", stack="torchtitan")
    job = sw.Job(global_batch_tokens=2**17, seq_len=4096)
    layout = sw.Layout(fsdp=8, zero_stage=3)
    notes = {
        name: sw.estimate(sw.load_model(name), cluster, job, layout).caveats for name in ("llama-3.2-1b", "olmoe-1b-7b")
    }
    assert notes["llama-3.2-1b"] == ()
    assert notes["olmoe-1b-7b"] == (
        "fewer than 5 published runs are of torchtitan on h100 with mixtures of experts: the interval is that of a new stack",
    )


def test_an_unknown_stack_lists_the_names() -> None:
    with pytest.raises(
        InputError,
        match=r"found 'nemo' \(did you mean 'nemo-24' or 'nemo-25'\?\); the stacks are .*nemo-25.*torchtitan.*compiled",
    ):
        sw.load_cluster("h100:8", stack="nemo")


def test_a_chip_without_runs_names_its_substitute_and_has_a_wider_interval() -> None:
    stack = get_stack("nemo-25")
    like, none = published_calibration("h800", stack), published_calibration("mi300x", stack)
    assert (SIMILAR_CHIP["h800"], like.constants) == ("h100", constant_values("h100", stack))
    assert like.interval_note(moe=False) == "no published run is of h800, which is taken to be as h100"
    assert none.interval_note(moe=True) == "no published run is of mi300x, which has what is expected of any chip"
    assert none["attention_fraction"] == CONSTANTS["attention_fraction"].prior
    assert none["exposed"] == load_published_fit()["stacks"]["nemo-25"]["exposed"]
    intervals = load_published_fit()["spread"]["unknown"]
    for calibration, name in ((like, "hopper"), (none, "all")):
        for kind, (low, high) in calibration.spread.items():
            half_width, wide = 1.645 * SIMILAR_CHIP_DEVIATION, intervals[kind][name]
            assert math.log(high) == pytest.approx(math.hypot(math.log(wide[1]), half_width))
            assert math.log(low) == pytest.approx(-math.hypot(math.log(wide[0]), half_width))


@pytest.mark.parametrize(
    ("chip", "clock"), [("gb300", 1.0527), ("b300", 1.0), ("h100-pcie", 0.868), ("a100-80gb-pcie", 0.9086)]
)
def test_a_similar_chip_sustains_the_share_of_its_peak_that_its_power_allows(chip: str, clock: float) -> None:
    """The sustained clock follows the power per peak FLOP/s; interval and note state the assumption."""
    cluster = with_published_constants(sw.load_cluster(f"{chip}:4"), get_stack("megatron"))
    calibration = cluster.calibration
    assert calibration is not None
    assert calibration.clock == pytest.approx(clock, abs=1e-3)
    note = calibration.interval_note(moe=False) or ""
    assert (f"at {clock:.2f} of its share of the peak" in note) == (clock != 1.0)


def test_the_power_rule_agrees_with_micro_benchmarks() -> None:
    pcie, sxm = (sw.load_cluster(f"{name}:4").chip for name in ("a100-80gb-pcie", "a100-80gb"))
    assert pcie.matmul_fraction / sxm.matmul_fraction == pytest.approx(clock_of_similar_chip(pcie, sxm), rel=0.03)


CAPPED_TOML = """
[chip]
base = "h100"
name = "h100-capped"
power_w = {power}

[[tiers]]
name = "nvlink"
size = 8
bytes_per_s = "450 GB/s"
"""


def test_a_cluster_file_has_the_stacks_constants_of_its_base_chip(tmp_path: Path) -> None:
    """The clock and the time of products follow the power limit."""
    model, job = sw.load_model("llama-3.2-1b"), sw.Job(global_batch_tokens=2**19, seq_len=4096)
    seconds = []
    for power in (700, 350):
        path = tmp_path / "own.toml"
        path.write_text(CAPPED_TOML.format(power=power), encoding="utf-8")
        cluster = sw.load_cluster(str(path), stack="nemo-25")
        assert cluster.calibration is not None
        assert cluster.calibration.constants == constant_values("h100", get_stack("nemo-25"))
        assert cluster.calibration.clock == pytest.approx((power / 700) ** (1 / 3))
        assert cluster.calibration.interval_note(moe=False) is None
        seconds.append(sw.estimate(model, cluster, job, sw.Layout(fsdp=8, zero_stage=3)).step_time_s)
    assert 1.1 < seconds[1] / seconds[0] < 2 ** (1 / 3)


def test_a_files_calibration_is_not_replaced_by_a_stack(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'{CAPPED_TOML.format(power=700)}\n[calibration]\nstack = "fused"\n', encoding="utf-8")
    calibration = sw.load_cluster(str(path)).calibration
    assert calibration is not None
    assert calibration.stack == "fused"
    with pytest.raises(InputError, match=r"found nemo-25 for own, which has a \[calibration\] of its own \(fused\)"):
        sw.load_cluster(str(path), stack="nemo-25")


@pytest.mark.parametrize("name", CLUSTERS)
def test_another_calibration_replaces_the_first(name: str) -> None:
    """Without a calibration links have their rated speed, which the books' rules use."""
    first, second = sw.load_cluster(name, stack="compiled"), sw.load_cluster(name, stack="shardwise")
    assert second.calibration is not None
    replaced = with_calibration(first, second.calibration)
    assert replaced.calibration == second.calibration
    job = sw.Job(global_batch_tokens=2**20, seq_len=4096, precision="fp32" if name == "local:4" else "bf16")
    model = sw.load_model("llama-3.2-1b")
    calibrated_rules, rated_rules = (sw.book_rules(model, cluster, job) for cluster in (first, sw.load_cluster(name)))
    assert [(rule.name, pytest.approx(rule.value)) for rule in calibrated_rules] == [
        (rule.name, rule.value) for rule in rated_rules
    ]
    assert without_calibration(first).calibration is None
    assert replaced.sustained_topology.axis_bytes_per_s() == pytest.approx(second.sustained_topology.axis_bytes_per_s())


def test_another_chip_keeps_the_rate_between_pods() -> None:
    plain, cluster = (sw.load_cluster("tpu-v5e:4x4*2", stack=stack) for stack in (None, "maxtext"))
    assert (
        replace_chip(cluster, replace(cluster.chip, memory_bytes=32e9)).sustained_topology == cluster.sustained_topology
    )
    assert replace_chip(plain, plain.chip) == plain


@pytest.mark.parametrize("name", ["h100:32", "tpu-v5e:4x4*2"])
def test_constants_do_not_depend_on_the_clusters_size(name: str) -> None:
    """A cluster proposed to meet a deadline is priced with the same constants as the one that misses it."""
    cluster = sw.load_cluster(name, stack="compiled")
    larger = next(iterate_sizes(cluster, 2.0))
    assert larger == sw.load_cluster(larger.name, stack="compiled")
    assert larger.num_devices >= 2 * cluster.num_devices
