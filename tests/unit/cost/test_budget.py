"""A budget of activations: the set of tensors that fits it, and no slower than any other that does."""

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


def chosen(name: str, most: float) -> Layout:
    one = pricing(name, "full")
    layout = replace(one.layout, recompute=f"budget:{most / 1e9:.6f}GB")
    return fit_recompute_budget(Problem(one.architecture, one.cluster, one.job), layout)


def ends(name: str) -> tuple[float, float]:
    """Activations of the fullest device where layers keep their input alone, and all that is read."""
    least, most = (max(activation_bytes_by_stage(pricing(name, policy))) for policy in ("full", "none"))
    return least, most


def some_sets(layer: RecomputeLayer, number: int) -> list[str]:
    unit, chance = layer.plain, Random(0)
    may = saveable_results(unit.forward.program, unit.backward.program.inputs)
    return [format_tensor_set({"": chance.sample(may, chance.randint(1, len(may)))}) for _ in range(number)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_activations_are_within_the_budget_and_more_is_no_slower(name: str) -> None:
    least, most = ends(name)
    steps = []
    for share in SHARES if name != "two kinds of layer" else SHARES[:1]:
        found = pricing(name, chosen(name, least + share * (most - least)).recompute)
        steps.append(float(found.slowest_s()))
        assert max(activation_bytes_by_stage(found)) <= least + share * (most - least)
    full, none = (float(pricing(name, policy).slowest_s()) for policy in ("full", "none"))
    assert full > steps[0]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] > none


@pytest.mark.parametrize("name", ["zero", "tensor parallel", "experts"])
def test_no_other_set_that_fits_is_faster(name: str) -> None:
    """Than the budget's, which was chosen by sums of kernels of their own: of sets drawn by chance and of the named policies,
    each priced as derived."""
    least, most = ends(name)
    (layer,) = recompute_layers(pricing(name, "full")).values()
    others = [pricing(name, policy) for policy in (*some_sets(layer, 25), "selective", "full", "alternate")]
    known = [(max(activation_bytes_by_stage(one)), float(one.slowest_s())) for one in others]
    for share in (0.2, 0.5, 0.8):
        budget = least + share * (most - least)
        best = float(pricing(name, chosen(name, budget).recompute).slowest_s())
        fitting = [step for size, step in known if size <= budget]
        assert fitting
        # a sum of kernels does not know what a host hides of the recomputation
        assert best <= min(fitting) * 1.005


def test_the_whole_budget_keeps_all_and_too_little_is_refused() -> None:
    least, most = ends("zero")
    assert chosen("zero", most * 1.01).recompute == "none"
    assert chosen("zero", least * 1.0001).recompute == "full"
    with pytest.raises(InputError, match=r"recompute: found budget:.* GB of activations .* is required"):
        chosen("zero", least * 0.99)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_listed_adds_up_to_the_terms(name: str) -> None:
    least, most = ends(name)
    found = pricing(name, chosen(name, (least + most) / 2).recompute)
    plain = pricing(name, "none")
    for one in list_layer_recompute(found):
        cost = found.pricer.activation(one.layer, found.scheme, found.values, found.links)
        assert one.kept_bytes == pytest.approx(cost.saved_bytes)
        assert one.seconds > 0
        (other,) = (each for each in list_layer_recompute(plain) if each.layer == one.layer)
        assert not other.recomputed
        assert other.kept_bytes >= one.kept_bytes


def test_plans_have_the_set_and_refuse_wrong_names() -> None:
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
