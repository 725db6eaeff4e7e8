"""A budget of activations: the set of saved tensors fits it, and no other set that fits is faster."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import shardwise as sw
from shardwise.layout.layout import Layout
from shardwise.model.backward import saveable_results
from shardwise.model.recompute_policies import format_tensor_set
from shardwise.price import Problem
from shardwise.price.layout_pricer import Pricing
from shardwise.price.problem import with_problem_defaults
from shardwise.search.plan import plan_layout
from shardwise.search.recompute_budget import (
    RecomputeLayer,
    activation_bytes_by_stage,
    fit_recompute_budget,
    list_layer_recompute,
    recompute_layers,
)
from shardwise.values.errors import InputError

LAYOUTS = {
    "zero": ("llama-3-8b", "h100:8", "fsdp=8 micro_batch_seqs=2"),
    "tensor parallel": ("llama-3-8b", "h100:8", "fsdp=2 tp=4"),
    "pipeline": ("llama-3-8b", "h100:8", "fsdp=2 pp=4"),
    "experts": ("mixtral-8x7b", "h100:16", "fsdp=16 ep=8"),
    "two kinds of layer": ("deepseek-v3", "h100:256", "fsdp=32 tp=8 ep=32"),
}
SHARES = (0.1, 0.4, 0.7)


def pricing(name: str, policy: str) -> Pricing:
    model, cluster, text = LAYOUTS[name]
    job = sw.Job(global_batch_tokens=2**20, seq_len=4096)
    where, job = with_problem_defaults(sw.load_cluster(cluster), job)
    return Pricing(Problem(sw.load_model(model), where, job), replace(Layout.parse(text), recompute=policy))


def fit_budget(name: str, limit_bytes: float) -> Layout:
    pricing_full = pricing(name, "full")
    layout = replace(pricing_full.layout, recompute=f"budget:{limit_bytes / 1e9:.6f}GB")
    return fit_recompute_budget(Problem(pricing_full.architecture, pricing_full.cluster, pricing_full.job), layout)


def activation_range(name: str) -> tuple[float, float]:
    """Activations of the fullest device with full recomputation and without recomputation."""
    smallest, largest = (max(activation_bytes_by_stage(pricing(name, policy))) for policy in ("full", "none"))
    return smallest, largest


def random_sets(layer: RecomputeLayer, number: int) -> list[str]:
    unit, chance = layer.plain, Random(0)
    may = saveable_results(unit.forward.program, unit.backward.program.inputs)
    return [format_tensor_set({"": chance.sample(may, chance.randint(1, len(may)))}) for _ in range(number)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_activations_stay_within_the_budget_and_larger_budgets_are_no_slower(name: str) -> None:
    smallest, largest = activation_range(name)
    steps = []
    for share in SHARES if name != "two kinds of layer" else SHARES[:1]:
        budgeted = pricing(name, fit_budget(name, smallest + share * (largest - smallest)).recompute)
        steps.append(float(budgeted.slowest_s()))
        assert max(activation_bytes_by_stage(budgeted)) <= smallest + share * (largest - smallest)
    full, none = (float(pricing(name, policy).slowest_s()) for policy in ("full", "none"))
    assert full > steps[0]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > none


@pytest.mark.parametrize("name", ["zero", "tensor parallel", "experts"])
def test_no_other_set_within_the_budget_is_faster(name: str) -> None:
    """The budget's set is chosen by sums of kernels; compare it with random sets and the named policies, each priced in full."""
    smallest, largest = activation_range(name)
    (layer,) = recompute_layers(pricing(name, "full")).values()
    alternatives = [pricing(name, policy) for policy in (*random_sets(layer, 25), "selective", "full", "alternate")]
    sizes_and_steps = [
        (max(activation_bytes_by_stage(alternative)), float(alternative.slowest_s())) for alternative in alternatives
    ]
    for share in (0.2, 0.5, 0.8):
        budget = smallest + share * (largest - smallest)
        best = float(pricing(name, fit_budget(name, budget).recompute).slowest_s())
        fitting = [step for size, step in sizes_and_steps if size <= budget]
        assert fitting
        # a sum of kernels does not include the recomputation hidden by the host
        assert best <= min(fitting) * 1.005


def test_a_sufficient_budget_keeps_all_and_an_insufficient_one_is_refused() -> None:
    smallest, largest = activation_range("zero")
    assert fit_budget("zero", largest * 1.01).recompute == "none"
    assert fit_budget("zero", smallest * 1.0001).recompute == "full"
    with pytest.raises(InputError, match=r"recompute: found budget:.* GB of activations .* is required"):
        fit_budget("zero", smallest * 0.99)


@pytest.mark.parametrize("name", LAYOUTS)
def test_listed_tensors_add_up_to_the_terms(name: str) -> None:
    smallest, largest = activation_range(name)
    budgeted = pricing(name, fit_budget(name, (smallest + largest) / 2).recompute)
    plain = pricing(name, "none")
    for listed in list_layer_recompute(budgeted):
        cost = budgeted.pricer.activation(listed.layer, budgeted.scheme, budgeted.values, budgeted.links)
        assert listed.kept_bytes == pytest.approx(cost.saved_bytes)
        assert listed.seconds > 0
        (plain_layer,) = (layer for layer in list_layer_recompute(plain) if layer.layer == listed.layer)
        assert not plain_layer.recomputed
        assert plain_layer.kept_bytes >= listed.kept_bytes


def test_plans_keep_the_set_and_refuse_unknown_names() -> None:
    model, cluster, text = LAYOUTS["zero"]
    job = sw.Job(global_batch_tokens=2**20, seq_len=4096)
    plan = plan_layout(
        sw.load_model(model), sw.load_cluster(cluster), job, Layout.parse(f"{text} recompute=budget:10GB")
    )
    assert plan.layout.recompute.startswith("keep:")
    assert plan.estimate.memory["activations"] <= 10e9
    with pytest.raises(InputError, match=r"did you mean 'q'\?|found 'qq'"):
        sw.estimate(model, cluster, job, f"{text} recompute=keep:qq")
    with pytest.raises(InputError, match="no layers of kind 'dense_block'"):
        sw.estimate(model, cluster, job, f"{text} recompute=keep:dense_block:q")
