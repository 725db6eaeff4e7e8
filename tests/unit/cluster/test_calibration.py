"""The constants of chips and stacks: their number, their limits and their origin."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from shardwise.hardware.calibration_constants import CONSTANTS, Calibration, scale_rates
from shardwise.hardware.chips import chip_names
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import (
    SIMILAR_CHIP,
    constant_values,
    load_published_fit,
    published_calibration,
    with_calibration,
)
from shardwise.hardware.stacks import STACK_KINDS, get_stack, match_stack, stack_names
from shardwise.values.errors import InputError


def test_a_chip_has_at_most_ten_constants_and_a_stack_at_most_five() -> None:
    owners = [constant.owner for constant in CONSTANTS.values()]
    assert owners.count("chip") <= 10
    assert owners.count("stack") <= 5


def test_the_published_fit_has_the_fitted_constants_of_chips_and_stacks_only() -> None:
    fit = load_published_fit()
    assert set(fit) == {"source", "spread", "runs", "chips", "stacks"}
    assert set(fit["chips"]) <= set(chip_names())
    assert set(fit["stacks"]) <= set(stack_names()) - set(STACK_KINDS)
    for group, owner in (("chips", "chip"), ("stacks", "stack")):
        owner_constants = {name for name, constant in CONSTANTS.items() if constant.owner == owner}
        for name, values in fit[group].items():
            fitted = owner_constants - (get_stack(name).shares.keys() if owner == "stack" else set())
            assert set(values) == fitted | {"deviations"}
            assert set(values["deviations"]) == fitted
            for constant in fitted:
                assert CONSTANTS[constant].low <= values[constant] <= CONSTANTS[constant].high
    assert "published runs" in fit["source"]


@pytest.mark.parametrize("name", CONSTANTS)
def test_mapping_a_constant_to_the_unbounded_line_is_invertible(name: str) -> None:
    constant = CONSTANTS[name]
    assert constant.low < constant.prior < constant.high
    assert constant.from_unbounded(constant.to_unbounded(constant.prior)) == pytest.approx(constant.prior)
    far = constant.from_unbounded(np.array([-50.0, 50.0]))
    assert far[0] == pytest.approx(constant.low, rel=1e-6, abs=1e-9)
    assert far[1] == pytest.approx(constant.high, rel=1e-6)
    assert constant.meaning


@pytest.mark.parametrize(
    ("software", "stack"),
    [
        ("NeMo 24.07", "nemo-24"), ("NeMo; dgxc-benchmarking v25.04.02", "nemo-25"),
        ("NeMo container 25.11", "megatron-bridge-25"),
        ("NeMo container 26.02.01", "megatron-bridge-26"), ("NeMo container 26.08", "megatron-bridge-26-06"),
        ("Megatron-DeepSpeed (BigScience), Jean Zay", "megatron-deepspeed"), ("Megatron-LM + TE 2.11", "megatron"),
        ("torch 38410cf9 2025-06-14", "torchtitan"), ("PyTorch FSDP nightly + compile", "torch-fsdp"), ("MaxText", "maxtext"),
        ("Pax+TE", "pax-te"), ("a trainer of our own in JAX", "compiled"), ("Primus 1.0", "fused"), ("", "eager"),
    ],
)  # fmt: skip
def test_software_versions_select_a_stack(software: str, stack: str) -> None:
    assert match_stack(software).name == stack


def test_an_unknown_stack_has_the_priors_of_its_kind_and_wider_intervals() -> None:
    kind, fitted = get_stack("fused"), get_stack("nemo-25")
    assert constant_values("h100", kind)["elementwise"] == STACK_KINDS["fused"].priors["elementwise"]
    assert constant_values("h100", kind)["matmul_fraction"] == constant_values("h100", fitted)["matmul_fraction"]
    widths = [high / low for low, high in (published_calibration("h100", s).spread["dense"] for s in (fitted, kind))]
    assert widths[0] < widths[1]
    with pytest.raises(InputError, match=r"the stacks are .*nemo-25.*eager"):
        get_stack("nemo-2025")


@pytest.mark.parametrize("chip", SIMILAR_CHIP)
def test_a_chip_without_runs_starts_from_a_similar_chip(chip: str) -> None:
    stack = get_stack("megatron")
    assert chip in chip_names()
    if chip not in load_published_fit()["chips"]:
        assert constant_values(chip, stack) == constant_values(SIMILAR_CHIP[chip], stack)


def test_a_chip_without_a_similar_one_has_the_priors() -> None:
    constants = constant_values("mi300x", get_stack("fused"))
    assert constants["attention_fraction"] == CONSTANTS["attention_fraction"].prior
    measured = load_cluster("mi300x:8").chip.matmul_fraction
    assert (
        constants["matmul_fraction"] == measured < CONSTANTS["matmul_fraction"].prior
    )  # no faster than a micro-benchmark


def test_links_are_scaled_by_the_fractions_within_and_between_nodes() -> None:
    cluster = load_cluster("h100:64")
    inner, outer = scale_rates(cluster.topology, 0.5, 0.25).tiers  # type: ignore[union-attr]
    assert (inner.fraction, outer.fraction) == (0.5, 0.25)
    pods = load_cluster("tpu-v5e:16x16*4").topology
    slower = scale_rates(pods, 0.5, 0.25)
    assert slower.torus.bytes_per_s == pods.torus.bytes_per_s * 0.5  # type: ignore[union-attr]
    assert slower.bytes_per_s == pods.bytes_per_s * 0.25  # type: ignore[union-attr]


def test_impossible_calibrations_are_refused() -> None:
    good = published_calibration("h100", get_stack("nemo-25"))
    with pytest.raises(InputError, match=r"matmul_fraction is 1.5; .* of 0.3 to 1, is required"):
        replace(good, constants={**good.constants, "matmul_fraction": 1.5})
    with pytest.raises(InputError, match="constants are launch_s; matmul_fraction"):
        replace(good, constants={"launch_s": 1e-5})
    with pytest.raises(InputError, match="clock is 3"):
        replace(good, clock=3.0)
    with pytest.raises(InputError, match=r"spread of dense is 1.1 to 1.2"):
        replace(good, spread={"dense": (1.1, 1.2)})
    assert isinstance(with_calibration(load_cluster("h100:8"), good).calibration, Calibration)


def test_sizes_are_varied_by_factors_and_shares_within_limits() -> None:
    """A size is varied by factors, and one deviation is as large a factor anywhere; a share nears its limits."""
    sizes = {name for name, constant in CONSTANTS.items() if constant.is_size}
    assert sizes == {"matmul_ramp", "elementwise", "launch_s", "routing_s", "attention"}
    for name, constant in CONSTANTS.items():
        free = constant.to_unbounded(constant.prior)
        up, down = constant.from_unbounded(free + constant.width), constant.from_unbounded(free - constant.width)
        if name in sizes:
            assert (
                up / constant.prior == pytest.approx(constant.prior / down) == pytest.approx(math.exp(constant.width))
            ), name
        else:
            assert constant.low < down < constant.prior < up < constant.high, name
            assert constant.from_unbounded(free + 40) == pytest.approx(constant.high), name
