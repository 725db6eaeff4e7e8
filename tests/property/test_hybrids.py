"""Models with recurrences, several mixers in a block, sparse attention, gates and latent experts, unit by unit."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from shardwise.layout import Layout
from shardwise.layout.rules.engine import unrunnable_parts
from shardwise.layout.rules.table import violations
from shardwise.model import Architecture, Job
from shardwise.model.layer_pattern import FrozenFields
from shardwise.model.recurrent_mixers import RecurrentMixer, parse_recurrence
from shardwise.values import InputError

from .training_step import TOLERANCE, Case, chained_on_one_device, run_units, worst_error

NO_EXPERTS = {"num_experts": 0, "experts_per_token": 0, "shared_expert_width": 0, "expert_latent_dim": 0}
SHAPE = {"key_dim": 8, "head_dim": 8, "conv_width": 3, "chunk": 4}
DELTA = {"kind": "gated_delta", "num_heads": 32, "num_groups": 4, **SHAPE}
MAMBA = {"kind": "mamba2", "num_heads": 32, "num_groups": 4, "norm": "after_gate", "conv_bias": True, **SHAPE}
# Qwen3-Next (a delta rule before experts, gated attention), Nemotron 3 (a state space alone, experts of a latent), Falcon-H1
# (both mixers in one block), LFM2 (a short convolution), DeepSeek-V3.2 (latent attention to keys that an indexer
# selects) and MiniMax-M3 (to blocks of them).
KINDS: dict[str, dict[str, Any]] = {
    "delta": {"mixer": "none", "recurrence": DELTA, "attention_gate": "none"},
    "mamba": {"mixer": "none", "recurrence": MAMBA, "feed_forward": "none", **NO_EXPERTS, "attention_gate": "none"},
    "both": {"recurrence": {**MAMBA, "num_groups": 1, "norm": "none"}, **NO_EXPERTS, "attention_gate": "head"},
    "conv": {
        "mixer": "none", "recurrence": {"kind": "short_conv", "num_heads": 16, "conv_width": 3}, **NO_EXPERTS, "d_ff": 16,
        "attention_gate": "none",
    },
    "sparse": {
        "num_heads": 8, "num_kv_heads": 8, "q_lora_rank": 8, "kv_lora_rank": 8, "rope_head_dim": 4, "v_head_dim": 4,
        "index_heads": 2, "index_head_dim": 8, "index_topk": 3, "expert_latent_dim": 0,
    },
    "blocks": {
        "num_heads": 16, "num_kv_heads": 8, "index_heads": 8, "index_head_dim": 8, "index_topk": 2, "index_block": 2,
        "expert_latent_dim": 0,
    },
}  # fmt: skip
LAYERS = ("delta", "mamba", "both", "conv", "sparse", "blocks", "block")
SIZES = {
    "half_head_dim": 4, "hidden": 8, "num_layers": 7, "kv_heads_per_rank": 2, "query_heads_per_rank": 2, "positions": 4,
}  # fmt: skip
LAYOUTS = {
    "fsdp": Case(fsdp=2, zero_stage=3, recompute="full", **SIZES),
    "tp": Case(tp_kv=2, **SIZES),
    "sequence_parallel": Case(tp_kv=4, sequence_parallel=True, recompute="selective", **{**SIZES, "kv_heads_per_rank": 1}),
    "cp": Case(cp=2, zero_stage=1, **SIZES),
    "ring": Case(cp=4, cp_variant="ring", **SIZES),
    "ep": Case(ep=4, zero_stage=3, **SIZES),
    "whole_experts": Case(ep=2, tp_kv=2, whole_experts=True, sequence_parallel=True, zero_stage=3, **SIZES),
    "all": Case(
        dp=2, fsdp=2, ep=2, cp=2, tp_kv=2, zero_stage=3, cp_variant="ring", sequence_parallel=True, recompute="selective",
        **{**SIZES, "kv_heads_per_rank": 1},
    ),
}  # fmt: skip


def make_hybrid(case: Case) -> Case:
    fields = {
        "num_experts": 4, "experts_per_token": 2, "shared_expert_width": 8, "expert_latent_dim": 8, "attention_gate": "element",
        "mlp": "relu2", "layer_pattern": LAYERS, "layer_kinds": FrozenFields(KINDS), "embedding_rows": 48,
    }  # fmt: skip
    return dataclasses.replace(case, structure=tuple(fields.items()), seed=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hybrids_equal_one_device(layout: str) -> None:
    case = make_hybrid(LAYOUTS[layout])
    outcome = run_units(case)
    worst, name = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived
    assert any(outcome.moved.values())


def test_training_refuses_what_the_engine_lacks_by_name() -> None:
    parts = unrunnable_parts(make_hybrid(Case(**SIZES)).architecture.structure)
    for part in (
        "the delta rule of linear attention", "a state space recurrence", "a short convolution", "an indexer of keys",
        "sparse attention", "a gate of attention", "experts of a latent",
    ):  # fmt: skip
        assert part in parts


def recurrent_model(**fields: Any) -> Architecture:
    return Architecture(
        name="hybrid", num_layers=2, d_model=64, d_ff=64, num_heads=8, num_kv_heads=8, head_dim=8, vocab_size=64,
        recurrence=RecurrentMixer(**{**DELTA, **fields}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (
            recurrent_model(), Layout(tp=8),
            "tp = 8 does not split the 4 heads of keys of gated_delta evenly, and a state's rows and columns are not split; tp "
            "may be one of 1, 2, 4",
        ),
        (
            recurrent_model(), Layout(cp=2),
            "all_gather gives each of cp = 2 ranks two pieces, one from either end; cp_variant=ring or cp=1 is required",
        ),
        (
            recurrent_model(conv_width=9), Layout(cp=4, cp_variant="ring"),
            "a segment of 16 / cp = 4 tokens is shorter than the 8 rows before a token that a short convolution reads",
        ),
        (recurrent_model(), Layout(cp=4, tp=4, cp_variant="ring"), ""),
    ],
)  # fmt: skip
def test_unsplittable_recurrences_are_refused(model: Architecture, layout: Layout, message: str) -> None:
    devices = layout.tp * layout.cp
    problems = violations(model, Job(global_batch_tokens=64, seq_len=16), devices, layout)
    assert [problem for problem in problems if "recurrence" in problem or "convolution" in problem] == (
        [problem for problem in problems if message in problem] if message else []
    )
    assert bool(message) == any(message in problem for problem in problems)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "gated_delt"}, "recurrent kind is 'gated_delt'"),
        ({"num_heads": 6}, "recurrent num_heads = 6 is not a multiple of num_groups = 4"),
        ({"chunk": 0}, "recurrent chunk is 0; a whole number of at least 1 is required"),
        ({"kind": "kimi_delta"}, "kimi_delta has a key for each of num_heads = 32 heads; num_groups = 32 is required, found 4"),
    ],
)  # fmt: skip
def test_sizes_of_a_recurrence_are_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        recurrent_model(**fields)


def test_fields_of_a_recurrence_are_checked() -> None:
    with pytest.raises(
        InputError, match=r"recurrence has 'heads' \(did you mean 'num_heads'\?\); one of kind, num_heads"
    ):
        parse_recurrence({"kind": "short_conv", "heads": 4, "num_heads": 4, "conv_width": 3})
    with pytest.raises(InputError, match="recurrence has no conv_width; it is required"):
        parse_recurrence({"kind": "short_conv", "num_heads": 4})
