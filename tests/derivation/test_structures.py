"""What parts of a block may and may not cost in communication, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from schemes import scheme_id, scheme_of

from shardwise.derive.sharded_unit import derived_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.load import load_model
from shardwise.step.collectives import list_unit_collectives
from shardwise.step.instructions import UnitCollective
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.symbolic import LocalDim, SymbolValues

SCHEMES = [
    scheme_of(load_model("llama-3-8b").structure, zero, sp, policy)
    for zero in (1, 3)
    for sp in (False, True)
    for policy in ("none", "selective", "full")
]
DEGREES = {"dp": 2, "fsdp": 4, "ep": 2, "cp": 2, "tp_kv": 4, "tp_rep": 1, "pp": 1}


def sum_communication(
    model: str, scheme: ShardingScheme, **changes: Any
) -> list[tuple[str, str, tuple[str, ...], float]]:
    """What the activations of a block cost in communication: pass, kind, axes, elements."""
    architecture = replace(load_model(model), **changes)
    values = SymbolValues({**architecture.dims, "B": 1, "T": 4096, **DEGREES})
    values[LocalDim("B", ("dp", "fsdp"))], values[LocalDim("B", ("dp", "fsdp", "ep"))] = DEGREES["ep"], 1
    unit = derived_unit(replace(scheme, structure=architecture.structure), "block")
    return sorted(
        described(collective, values)
        for collective in list_unit_collectives(unit, IssuePolicy())
        if not collective.moves_weights and collective.scope != "step"
    )


def described(collective: UnitCollective, values: SymbolValues) -> tuple[str, str, tuple[str, ...], float]:
    passed = (
        "forward" if collective.phase == "forward" else "backward"
    )  # what is run again belongs to the backward pass
    return passed, str(collective.kind), collective.axes, collective.elements.evaluate(values)


@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
@pytest.mark.parametrize("model", ["gpt-3-175b", "gpt-oss-20b"])
def test_biases_move_no_activations(model: str, scheme: ShardingScheme) -> None:
    """A bias is added to a sum where the sum rests: a product with one scatters just as a product without."""
    assert sum_communication(model, scheme) == sum_communication(model, scheme, bias=())


@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
def test_sinks_and_clamps_move_nothing(scheme: ShardingScheme) -> None:
    assert sum_communication("gpt-oss-20b", scheme) == sum_communication(
        "gpt-oss-20b", scheme, sinks=False, mlp="swiglu"
    )


@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
def test_a_norm_over_the_projection_moves_sums_only(scheme: ShardingScheme) -> None:
    """Over a head it is local to the device that has the head; over all heads a number for each token is added up."""
    plain, whole = (sum_communication("olmo-2-7b", scheme, qk_norm_over=over) for over in ("head", "projection"))
    added = list(whole)
    for row in plain:
        added.remove(row)
    assert {kind for _, kind, _, _ in added} == {"all_reduce"}
    assert {axes for _, _, axes, _ in added} == {("tp_kv",), ("tp_kv", "tp_rep")}  # of the keys, and of the queries
    assert max(elements for *_, elements in added) <= 4096


@pytest.mark.parametrize("scheme", [f for f in SCHEMES if f.recompute != "full"], ids=scheme_id)
def test_a_gate_of_the_shared_expert_moves_no_hidden_states(scheme: ShardingScheme) -> None:
    """Unless the block is run again: the gate's gradient reads the result that it weighted."""
    gated, plain = (sum_communication("qwen2-57b-a14b", scheme, shared_gate=gate) for gate in (True, False))
    added = list(gated)
    for row in plain:
        added.remove(row)
    assert all(elements <= 4096 for *_, elements in added)
