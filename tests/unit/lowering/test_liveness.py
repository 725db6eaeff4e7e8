"""Live tensors of a Llama block during its backward pass, by hand."""

from __future__ import annotations

import pytest
from schemes import scheme_of

from shardwise.model.load import load_model
from shardwise.step.liveness import LiveSet, live_sets
from shardwise.step.unit_instructions import lower_unit
from shardwise.values.engine_policies import IssuePolicy

STRUCTURE = load_model("llama-3-8b").structure
# Both inputs of the MLP's activation and the three gradients are live; its result is freed.
AT_ACTIVATION = {"d.x_out", "d.act#0", "d.gate#0", "d.up#0", "gate", "up"}


def block_live_sets(policy: str) -> list[LiveSet]:
    return list(live_sets(lower_unit(scheme_of(STRUCTURE, recompute=policy), "block", IssuePolicy())))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_the_activation_runs_backward_with_its_inputs_and_all_gradients(policy: str) -> None:
    (live,) = (
        live_set
        for live_set in block_live_sets(policy)
        if "d.up#0" in live_set.tensors and "d.act#0" in live_set.tensors
    )
    assert set(live.tensors) >= AT_ACTIVATION
    assert "act" not in live.tensors
    assert live.gradients == ()


def test_a_product_computes_both_gradients_and_then_frees_its_inputs() -> None:
    first, second, *_ = block_live_sets("none")
    assert {"act", "d.act#0", "d.x_out"} <= set(first.tensors)
    assert [spec.dims for spec in first.gradients] == [("F", "D")]
    assert "act" not in second.tensors


def test_the_last_live_tensors_are_the_inputs_gradient_and_its_operands() -> None:
    last = block_live_sets("full")[-1]
    assert set(last.tensors) == {"d.x", "d.x#1", "d.x#2", "d.x_mid"}


def test_scores_are_live_from_recomputed_attention_to_its_gradient() -> None:
    live_sets = block_live_sets("full")
    places = [place for place, live_set in enumerate(live_sets) if live_set.scores]
    assert places == list(range(places[0], places[-1] + 1))
    (at_gradient,) = (place for place, live_set in enumerate(live_sets) if live_set.gradient_of_scores)
    assert at_gradient == places[-1]
    assert places[0] > 0
