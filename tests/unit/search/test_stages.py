"""Layers of pipeline stages by their cost: the dynamic program against every division, and its use in plans."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.layout_pricer import Pricing
from shardwise.search.balance_stages import balance_stages
from shardwise.search.planner import make_plan
from shardwise.search.vectorised.search_layouts import search_layouts

DENSE = Architecture(
    name="dense", num_layers=9, d_model=1024, d_ff=4096, num_heads=16, num_kv_heads=4, head_dim=64, vocab_size=128_000
)
LEADING = replace(
    DENSE, name="leading", num_experts=8, experts_per_token=2, d_ff=2048, num_dense_layers=2, dense_d_ff=2048
)
HYBRID = replace(
    DENSE, name="hybrid", layer_pattern=("wide", "block*2", "attention", "window*3"),
    layer_kinds={
        "wide": {"d_ff": 16_384}, "attention": {"feed_forward": "none"}, "window": {"sliding_window": 128, "num_kv_heads": 8},
    },
)  # fmt: skip
PREDICTING = replace(DENSE, name="predicting", num_predict_layers=1)
JOB = Job(global_batch_tokens=16 * 1024, seq_len=1024)
EVERYTHING = float("inf")


def cluster(devices: int) -> Cluster:
    return load_cluster(f"h100:{devices}")


def every_division(layout: Layout, num_layers: int) -> list[tuple[int, ...]]:
    divisions = []
    for cut in itertools.combinations_with_replacement(range(num_layers + 1), layout.pp - 1):
        layers = tuple(b - a for a, b in itertools.pairwise((0, *cut, num_layers)))
        if not violations(
            replace(DENSE, num_layers=num_layers), JOB, layout.pp, replace(layout, layers_per_stage=layers)
        ):
            divisions.append(layers)
    return divisions


@pytest.mark.parametrize("model", [DENSE, LEADING, HYBRID, PREDICTING], ids=lambda model: model.name)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, schedule="1f1b"),
        Layout(pp=3, schedule="zb_h1"),
        Layout(pp=4, schedule="1f1b", recompute="full"),
        Layout(pp=3, schedule="1f1b", recompute="full", recompute_layers=2),
        Layout(pp=2, schedule="dualpipe"),
    ],
    ids=str,
)
def test_no_division_is_faster(model: Architecture, layout: Layout) -> None:
    balanced = balance_stages(Pricing(Problem(model, cluster(layout.pp), JOB), layout), EVERYTHING)

    def seconds(layers: tuple[int, ...] | None) -> float:
        return float(
            Pricing(Problem(model, cluster(layout.pp), JOB), replace(layout, layers_per_stage=layers)).slowest_s()
        )

    divisions = [seconds(layers) for layers in every_division(layout, model.num_layers)]
    assert len(divisions) > 5
    assert seconds(balanced.layers_per_stage) == pytest.approx(min(divisions), rel=1e-12)


def test_a_large_head_has_fewer_layers_beside_it() -> None:
    balanced = balance_stages(Pricing(Problem(DENSE, cluster(3), JOB), Layout(pp=3, schedule="1f1b")), EVERYTHING)
    assert balanced.layers_per_stage is not None
    *earlier, last = balanced.layers_per_stage
    assert last < min(earlier)


def test_the_memory_of_a_device_bounds_its_layers() -> None:
    """For any memory the result is the fastest division that fits, if it is faster than even stages; it changes with memory."""
    model, layout = replace(DENSE, num_layers=12, vocab_size=64_000), Layout(pp=4, schedule="1f1b")
    pricing = Pricing(Problem(model, cluster(4), JOB), layout)
    every = (replace(layout, layers_per_stage=layers) for layers in every_division(layout, model.num_layers))
    priced = [(candidate, estimate(Problem(model, cluster(4), JOB), candidate)) for candidate in every]
    chosen = set()
    for room in {priced_step.memory_bytes for _, priced_step in priced}:
        best = min(priced_step.step_time_s for _, priced_step in priced if priced_step.memory_bytes <= room)
        bounded = balance_stages(pricing, room)
        if best < float(pricing.slowest_s()):
            estimated = estimate(Problem(model, cluster(4), JOB), bounded)
            assert (estimated.step_time_s, estimated.memory_bytes <= room) == (pytest.approx(best, rel=1e-12), True)
            chosen.add(bounded)
        else:
            assert bounded == layout
    assert len(chosen) > 1


@pytest.mark.parametrize("text", ["fsdp=2", "pp=2 num_virtual_stages=3"])
def test_layers_are_not_balanced_without_a_pipeline_or_with_virtual_stages(text: str) -> None:
    layout = Layout.parse(text)
    assert balance_stages(Pricing(Problem(DENSE, cluster(2), JOB), layout), EVERYTHING) is layout


def plan_with_stages(**pins: Any) -> Any:
    return make_plan(Problem(DENSE, cluster(8), JOB), choices=Choices().with_pins({"pp": 4, "tp": 2, **pins}, {}))


def test_a_plan_balances_its_stages_unless_pinned() -> None:
    balanced_plan, even = plan_with_stages(num_virtual_stages=1), plan_with_stages(num_virtual_stages=1, stages="even")
    assert balanced_plan.layout.layers_per_stage is not None
    assert even.layout.layers_per_stage is None
    assert balanced_plan.estimate.step_time_s < even.estimate.step_time_s
    assert balanced_plan.estimate.waste["stages"] < even.estimate.waste["stages"]


def test_a_search_has_equal_virtual_stages() -> None:
    """Uneven ones are used on request."""
    rows = search_layouts(Problem(DENSE, cluster(8), JOB), choices=Choices().with_pins({"pp": 2}, {})).best
    assert {row.layout.num_virtual_stages for row in rows} == {1}  # 9 and 11 over 2 v
    longer = replace(DENSE, num_layers=10)
    rows = search_layouts(Problem(longer, cluster(8), JOB), choices=Choices().with_pins({"pp": 2}, {}), top=10**6).best
    assert {row.layout.num_virtual_stages for row in rows} == {1, 2, 3, 5, 6}  # 12 over 4 and 12, 10 over 10, 12 over 6
    assert search_layouts(
        Problem(longer, cluster(8), JOB), choices=Choices().with_pins({"pp": 2, "num_virtual_stages": 4}, {})
    ).best


def test_the_estimate_of_a_plan_equals_a_separate_estimate() -> None:
    plan = plan_with_stages(num_virtual_stages=1)
    separate = estimate(Problem(plan.model, plan.cluster, plan.job), plan.layout)
    assert separate == plan.estimate
