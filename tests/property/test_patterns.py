"""A model whose kinds of layers differ in sizes, sharded unit by unit, gives what it gives on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwise.model.layer_pattern import FrozenFields

from .training_step import TOLERANCE, Case, chained_on_one_device, run_units, worst_error

NO_EXPERTS = {"num_experts": 0, "experts_per_token": 0, "shared_expert_width": 0}
# Llama 4 (chunks and no positions), Gemma (windows with other heads), Jamba and ERNIE (experts on every second layer), and
# Nemotron (layers without attention, or without an MLP).
KINDS: dict[str, dict[str, Any]] = {
    "no_positions": {"positions": "none", "num_heads": 16, "num_kv_heads": 8, "head_dim": 2},
    "dense": {**NO_EXPERTS, "d_ff": 24, "num_heads": 16, "num_kv_heads": 8},
    "attention_alone": {**NO_EXPERTS, "feed_forward": "none", "num_kv_heads": 8, "num_heads": 16, "qk_norm": True},
    "experts_alone": {"mixer": "none", "num_experts": 8, "d_ff": 16, "shared_expert_width": 0},
}
LAYERS = ("no_positions", "dense", "block", "attention_alone", "experts_alone", "block")
SIZES = {"half_head_dim": 4, "hidden": 8, "num_layers": 6, "kv_heads_per_rank": 2, "query_heads_per_rank": 2}
LAYOUTS = {
    "fsdp": Case(fsdp=2, zero_stage=3, recompute="full", **SIZES),
    "tp": Case(tp_kv=2, **SIZES),
    "tp_over_heads_of_the_fewest": Case(tp_kv=4, sequence_parallel=True, **{**SIZES, "kv_heads_per_rank": 1}),
    "tp_that_shares_heads": Case(tp_kv=2, tp_rep=2, **{**SIZES, "kv_heads_per_rank": 1}),
    "cp": Case(cp=2, zero_stage=1, **SIZES),
    "ring": Case(cp=2, cp_variant="ring", zigzag=True, positions=4, **SIZES),
    "ulysses": Case(cp=2, cp_variant="ulysses", zero_stage=2, **SIZES),
    "ep": Case(ep=4, zero_stage=3, **SIZES),
    "whole_experts": Case(ep=2, tp_kv=2, whole_experts=True, sequence_parallel=True, zero_stage=3, **SIZES),
    "all": Case(
        dp=2, fsdp=2, ep=2, cp=2, tp_kv=2, zero_stage=3, sequence_parallel=True, recompute="selective",
        **{**SIZES, "kv_heads_per_rank": 1},
    ),
}  # fmt: skip


# With seeds 0 and 1 a router's gradient is a difference of numbers so close that the order of a sum makes 2e-12 of it.
SEED = 2


def make_pattern(case: Case, **kinds: dict[str, Any]) -> Case:
    """The case with a pattern of layers, and experts on its base layer."""
    fields = {
        "num_experts": 4, "experts_per_token": 2, "shared_expert_width": 8, "layer_pattern": LAYERS,
        "layer_kinds": FrozenFields({**KINDS, **kinds}),
    }  # fmt: skip
    return dataclasses.replace(case, structure=tuple(fields.items()), seed=SEED)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pattern_of_layers_equals_one_device(layout: str) -> None:
    case = make_pattern(LAYOUTS[layout])
    assert len({case.sizes_of(unit)["K"] for unit in LAYERS}) > 1
    assert len({case.sizes_of(unit)["E"] for unit in LAYERS}) > 1
    outcome = run_units(case)
    worst, name = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived
    assert any(outcome.moved.values())


def test_a_wrong_kind_of_layer_is_noticed() -> None:
    """The judge sees a kind that was derived with another kind's structure."""
    case = make_pattern(LAYOUTS["tp"])
    wrong_kind = make_pattern(LAYOUTS["tp"], dense={**KINDS["dense"], "positions": "none"})
    worst, name = worst_error(case, run_units(wrong_kind), chained_on_one_device(case))
    assert worst > 1e-6, name
