"""What a Llama block holds while it runs backward, by hand."""

from __future__ import annotations

import pytest
from schemes import scheme_of

from shardwise.model.load import load_model
from shardwise.step.liveness import LiveSet, live_sets
from shardwise.step.unit_instructions import lower_unit
from shardwise.values.engine_policies import IssuePolicy

STRUCTURE = load_model("llama-3-8b").structure
# Of the MLP both inputs of the activation and the three gradients are there; its result has gone.
AT_ACTIVATION = {"d.x_out", "d.act#0", "d.gate#0", "d.up#0", "gate", "up"}


def of_block(policy: str) -> list[LiveSet]:
    return list(live_sets(lower_unit(scheme_of(STRUCTURE, recompute=policy), "block", IssuePolicy())))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_the_activation_runs_backward_with_its_inputs_and_all_gradients(policy: str) -> None:
    (found,) = (one for one in of_block(policy) if "d.up#0" in one.tensors and "d.act#0" in one.tensors)
    assert set(found.tensors) >= AT_ACTIVATION
    assert "act" not in found.tensors
    assert found.gradients == ()


def test_a_product_makes_both_of_its_gradients_at_once_and_then_lets_go() -> None:
    first, second, *_ = of_block("none")
    assert {"act", "d.act#0", "d.x_out"} <= set(first.tensors)
    assert [spec.dims for spec in first.gradients] == [("F", "D")]
    assert "act" not in second.tensors


def test_in_the_end_the_gradient_of_the_input_is_left_beside_what_it_is_made_of() -> None:
    last = of_block("full")[-1]
    assert set(last.tensors) == {"d.x", "d.x#1", "d.x#2", "d.x_mid"}


def test_scores_are_there_from_the_rebuilt_attention_to_its_gradient() -> None:
    found = of_block("full")
    there = [place for place, one in enumerate(found) if one.scores]
    assert there == list(range(there[0], there[-1] + 1))
    (at_gradient,) = (place for place, one in enumerate(found) if one.gradient_of_scores)
    assert at_gradient == there[-1]
    assert there[0] > 0
