"""Models with a pattern of layers: the search's tables against the price of each layout, and equivalent spellings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.choices import Choices
from shardwise.layout.layers_per_stage import count_kinds, layer_ranges, layers_by_virtual_stage
from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.layout_pricer import Pricing
from shardwise.search.planner import make_plan
from shardwise.search.recompute_budget import activation_bytes_by_stage, fit_recompute_budget
from shardwise.search.vectorised.search_layouts import SearchChecks, search_layouts
from shardwise.step.pipeline_stages import stage_units

NO_EXPERTS = {"num_experts": 0, "experts_per_token": 0}
HYBRID = replace(
    load_model("llama-3-8b"), name="hybrid", layer_pattern=("window*3", "block", "wide", "attention", "mlp"),
    layer_kinds={
        "window": {"sliding_window": 1024, "num_heads": 16, "num_kv_heads": 4, "positions": "none"}, "wide": {"d_ff": 28672},
        "attention": {"feed_forward": "none"}, "mlp": {"mixer": "none"},
    },
)  # fmt: skip
ALTERNATING = replace(
    load_model("qwen3-30b-a3b"), name="alternating", layer_pattern=("dense", "block"),
    layer_kinds={"dense": {**NO_EXPERTS, "d_ff": 6144}},
)  # fmt: skip
JOB = Job(global_batch_tokens=2**19, seq_len=4096)
CHOICES: dict[str, Choices] = {
    "all": Choices(),
    "virtual stages, a part recomputes": Choices(
        num_virtual_stages=(1, 2, 3), recompute=("none", "full"), recompute_layers=(None, 0.5)
    ),
    "split backward": Choices(schedule=("zb_h1",)),
    "both ends": Choices(schedule=("dualpipe",)),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("model", [HYBRID, ALTERNATING], ids=lambda model: model.name)
def test_the_search_prices_each_layout_as_its_estimate_does(model: Architecture, name: str) -> None:
    problem = Problem(model, load_cluster("h100:64"), JOB).with_defaults()
    result = search_layouts(problem, choices=CHOICES[name], checks=SearchChecks(num_samples=40, seed=3))
    assert any(row.layout.pp > 2 for row in result.sampled)
    for row in result.sampled:
        estimated = estimate(problem, row.layout)
        assert row.step_time_s == pytest.approx(estimated.step_time_s, rel=1e-12), row.layout
        assert row.memory_bytes == pytest.approx(estimated.memory_bytes, rel=1e-12), row.layout


@pytest.mark.parametrize("text", ["fsdp=8 ep=8 zero_stage=3", "fsdp=4 pp=2 ep=4 zero_stage=1 schedule=1f1b"])
def test_leading_dense_layers_written_as_a_kind_cost_the_same(text: str) -> None:
    model, layout = load_model("deepseek-v2-lite"), Layout.parse(text)
    dense = {**NO_EXPERTS, "shared_expert_width": 0, "d_ff": model.dense_d_ff}
    as_kind = replace(
        model, num_dense_layers=0, dense_d_ff=0, layer_kinds={"lead": dense},
        layer_pattern=("lead", f"block*{model.num_layers - 1}"),
    )  # fmt: skip
    cluster = load_cluster("h100:8")
    first, second = (estimate(Problem(variant, cluster, JOB), layout) for variant in (model, as_kind))
    assert first.time == pytest.approx(second.time, rel=1e-12)
    assert first.memory == pytest.approx(second.memory, rel=1e-12)


def test_a_stage_with_windows_takes_less_time_than_one_without() -> None:
    """Windows of one token in the first half: FLOPs of each stage follow its own layers, not their mean."""
    model = replace(
        load_model("llama-3-8b"), layer_pattern=("window*16", "block*16"), layer_kinds={"window": {"sliding_window": 1}}
    )
    pricing = Pricing(
        Problem(model, load_cluster("h100:2"), replace(JOB, seq_len=32768)), Layout(pp=2, schedule="1f1b")
    )
    first, second = (stage.sum_activation("forward_s") for stage in pricing.stages())
    assert first < 0.7 * second


def test_the_units_of_stages_are_the_counted_kinds() -> None:
    layout = Layout(pp=4, schedule="interleaved", num_virtual_stages=2)
    ranges = layer_ranges(layers_by_virtual_stage(HYBRID, layout))
    for layers, units in zip(ranges, stage_units(HYBRID, layout), strict=True):
        kinds = [unit.kind for unit in units if unit.path.startswith("layers.")]
        assert count_kinds(HYBRID, [layers]) == {kind: kinds.count(kind) for kind in HYBRID.layer_counts}
        first = count_kinds(HYBRID, [layers], max_layers=2)
        assert first == {kind: kinds[:2].count(kind) for kind in HYBRID.layer_counts}


def test_a_plan_of_a_hybrid_balances_its_stages() -> None:
    """The layers of the second half cost a multiple of those of the first: even stages wait for the last."""
    model = replace(
        load_model("llama-3-8b"),
        name="steep",
        layer_pattern=("light*16", "block*16"),
        layer_kinds={"light": {"d_ff": 2048}},
    )
    pins: dict[str, Any] = {"pp": 4, "num_virtual_stages": 1}
    problem = Problem(model, load_cluster("h100:16"), JOB)
    balanced = make_plan(problem, choices=Choices().with_pins(pins, {}))
    even = make_plan(problem, choices=Choices().with_pins({**pins, "stages": "even"}, {}))
    assert balanced.layout.layers_per_stage is not None
    assert balanced.layout.layers_per_stage[0] > 10 > balanced.layout.layers_per_stage[-1]
    assert balanced.estimate.step_time_s < 0.9 * even.estimate.step_time_s


@pytest.mark.parametrize("model", [HYBRID, ALTERNATING], ids=lambda model: model.name)
def test_a_budget_of_a_hybrid_is_kept(model: Architecture) -> None:
    """Tensors of each kind of layer are chosen; more bytes are no slower."""
    problem, layout = Problem(model, load_cluster("h100:8"), replace(JOB, seq_len=8192)), Layout(fsdp=8, zero_stage=3)
    full_bytes = max(activation_bytes_by_stage(Pricing(problem, layout)))
    seconds = []
    for share in (0.3, 0.6, 0.9):
        budget = int(share * full_bytes / 1e9)
        fitted = fit_recompute_budget(problem, replace(layout, recompute=f"budget:{budget}GB"))
        pricing = Pricing(problem, fitted)
        assert 0.5 * budget * 1e9 < max(activation_bytes_by_stage(pricing)) <= budget * 1e9
        seconds.append(float(pricing.slowest_s()))
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (
            Layout(tp=3),
            "tp = 3 does not split the 16 query heads (4 key-value heads) and 32 query heads (8 key-value heads)",
        ),
        (Layout(tp=32), "tp = 32 does not split"),
        (Layout(recompute="keep:wide:q/narrow:k"), "hybrid has no layers of kind 'narrow'"),
        (Layout(recompute="keep:mlp:q"), "'q'"),
    ],
    ids=str,
)
def test_choices_impossible_for_a_kind_are_refused(layout: Layout, problem: str) -> None:
    lines = violations(HYBRID, JOB, layout.num_devices, layout)
    assert any(problem in line for line in lines), lines
