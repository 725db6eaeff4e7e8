"""Attention to one head of keys and to compressed keys, several residual streams, experts that tokens choose: unit by unit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwise.layout import Layout
from shardwise.layout.rules.engine import unrunnable_parts
from shardwise.layout.rules.table import violations
from shardwise.model import Architecture, Job
from shardwise.model.layer_pattern import FrozenFields
from shardwise.model.numerics import SQRT_SOFTPLUS, Gating, Numerics

from .test_gradients import check
from .training_step import TOLERANCE, Case, chained_on_one_device, run_units, worst_error

INDEXER = {"index_heads": 2, "index_head_dim": 8, "index_topk": 2}
# Layers of DeepSeek-V4: a window alone, and compressed keys of windows that overlap, of which an indexer selects or not.
KINDS: dict[str, dict[str, Any]] = {
    "window": {"compress_window": 0, "overlapping_windows": False, "hashed_experts": True},
    "sparse": {"compress_window": 2, "overlapping_windows": True, **INDEXER},
    "overlapping": {"compress_window": 2, "overlapping_windows": True},
}
FIELDS: dict[str, Any] = {
    "shared_keys": True, "sinks": True, "q_lora_rank": 8, "output_rank": 8, "compress_window": 4, "num_experts": 4,
    "experts_per_token": 2, "shared_expert_width": 8, "mlp": "limited_swiglu", "layer_kinds": FrozenFields(KINDS),
    "layer_pattern": ("window", "sparse", "overlapping", "block"),
    "numerics": Numerics(gating=Gating(scores=SQRT_SOFTPLUS, scale=1.5)),
}  # fmt: skip
SIZES = {"half_head_dim": 4, "hidden": 8, "num_layers": 4, "kv_heads_per_rank": 2, "positions": 8}
LAYOUTS = {
    "fsdp": Case(fsdp=2, zero_stage=3, recompute="full", query_heads_per_rank=2, **SIZES),
    "tp": Case(tp_kv=2, tp_rep=2, query_heads_per_rank=2, **SIZES),
    "sequence_parallel": Case(
        tp_kv=2, tp_rep=2, sequence_parallel=True, recompute="selective", query_heads_per_rank=2, **SIZES
    ),
    "cp": Case(cp=4, cp_variant="ring", query_heads_per_rank=4, **SIZES),
    "cp, zero": Case(cp=2, cp_variant="ulysses", zero_stage=2, query_heads_per_rank=2, **SIZES),
    "ep": Case(ep=2, zero_stage=3, query_heads_per_rank=2, **SIZES),
    "all": Case(
        dp=2, fsdp=2, ep=2, cp=2, tp_kv=2, zero_stage=3, cp_variant="ring", sequence_parallel=True, recompute="selective",
        query_heads_per_rank=8, **{**SIZES, "kv_heads_per_rank": 1},
    ),
}  # fmt: skip


def case_of(layout: str, **fields: Any) -> Case:
    return dataclasses.replace(LAYOUTS[layout], structure=tuple({**FIELDS, **fields}.items()), seed=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_with_compressed_keys_equal_one_device(layout: str) -> None:
    case = case_of(layout)
    outcome = run_units(case)
    worst, name = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_residual_streams_equal_one_device(layout: str, mixed: bool) -> None:
    """Without ZeRO, since a scale is a single number, which is not split."""
    case = dataclasses.replace(case_of(layout, num_streams=2, mixed_streams=mixed), zero_stage=0)
    outcome = run_units(case)
    worst, name = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived


GRADIENT_CASE = Case(
    width=6,
    hidden=4,
    positions=7,
    seqs=2,
    num_micro_batches=1,
    query_heads_per_rank=2,
    half_head_dim=2,
    kv_heads_per_rank=2,
    seed=1,
)


@pytest.mark.parametrize(
    "window",
    [
        {"compress_window": 3},
        {"compress_window": 2, "overlapping_windows": True},
        {**KINDS["sparse"]},
        {"mixed_streams": False},
    ],
)
def test_gradients_equal_slopes_of_the_loss(window: dict[str, Any]) -> None:
    """Of sequences whose last token fills no window. With this seed no token is close to another choice of experts."""
    fields = {
        "num_streams": 2, "shared_keys": True, "sinks": True, "q_lora_rank": 4, "output_rank": 3, "mlp": "limited_swiglu",
        "num_experts": 4, "experts_per_token": 2, "numerics": FIELDS["numerics"], **window,
    }  # fmt: skip
    check(dataclasses.replace(GRADIENT_CASE, structure=tuple(fields.items())))


def model(**fields: Any) -> Architecture:
    kinds = fields.pop("layer_kinds", {})
    sizes: dict[str, Any] = {
        "name": "v4", "num_layers": 2, "d_model": 32, "d_ff": 16, "num_heads": 8, "num_kv_heads": 4, "head_dim": 8,
        "vocab_size": 64, "shared_keys": True, "q_lora_rank": 8, "output_rank": 4, "compress_window": 4,
    }  # fmt: skip
    return Architecture(**{**sizes, **fields, "layer_kinds": kinds})


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (
            Layout(cp=2),
            "all_gather gives each of cp = 2 ranks two pieces, one from either end; cp_variant=ring or cp=1 is required",
        ),
        (
            Layout(cp=8, cp_variant="ring"),
            "a segment of 16 / cp = 2 tokens is not a multiple of the windows of 4 tokens, which are one compressed key each; "
            "cp may be one of 1, 2, 4",
        ),
        (Layout(cp=4, cp_variant="ring"), ""),
    ],
)  # fmt: skip
def test_sequences_are_split_into_whole_windows(layout: Layout, message: str) -> None:
    problems = violations(model(), Job(global_batch_tokens=64, seq_len=16), layout.cp, layout)
    assert bool(message) == any(message in problem for problem in problems)
    assert not message or sum("compressed key" in problem for problem in problems) == 1


def test_training_refuses_what_the_engine_lacks_by_name() -> None:
    parts = unrunnable_parts(case_of("tp", num_streams=2).architecture.structure)
    for part in (
        "several residual streams", "compressed keys", "attention of all heads to one head of keys", "an indexer of keys",
        "experts that the token chooses",
    ):  # fmt: skip
        assert part in parts
