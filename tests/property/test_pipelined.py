"""Pipelines of every kind of layer on virtual devices: equal to one device, and only the derived messages pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shardwise.model.layer_pattern import FrozenFields

from .pipelined import run_pipelined
from .test_compressed_keys import case_of as compressed_case
from .test_hybrids import DELTA, KINDS, NO_EXPERTS, SIZES, make_hybrid
from .training_step import TOLERANCE, Case, chained_on_one_device, run_units, worst_error

SHAPE: dict[str, Any] = {"key_dim": 4, "head_dim": 4, "conv_width": 3, "chunk": 4}
# RecurrentGemma (RG-LRU), Kimi Linear, Jamba (Mamba-1), MiniMax-01 (lightning), xLSTM.
RECURRENCES: dict[str, dict[str, Any]] = {
    "rg_lru": {
        "kind": "rg_lru", "num_heads": 8, "key_dim": 4, "head_dim": 4, "conv_width": 3, "conv_bias": True,
        "projection_bias": True,
    },
    "kimi_delta": {"kind": "kimi_delta", "num_heads": 8, "num_groups": 8, "gate_rank": 4, **SHAPE},
    "mamba1": {"kind": "mamba1", "num_heads": 16, "key_dim": 4, "gate_rank": 4, "conv_width": 3, "step_norms": True},
    "lightning": {"kind": "lightning", "num_heads": 8, "num_groups": 8, **SHAPE},
    "mlstm": {"kind": "mlstm", "num_heads": 8, "num_groups": 8, **SHAPE},
}  # fmt: skip
LAYERS = {name: {"mixer": "none", "recurrence": mixer, **NO_EXPERTS} for name, mixer in RECURRENCES.items()}
GRIFFIN = ("rg_lru", "rg_lru", "block")
# Layouts within a stage, schedule, layers of each stage, and ranks of the pipeline.
PIPELINES: dict[str, tuple[dict[str, Any], str, tuple[int, ...], int]] = {
    "1f1b, tp": ({"tp_kv": 2}, "1f1b", (3, 4), 2),
    "1f1b, fsdp and ring": (
        {"fsdp": 2, "cp": 2, "cp_variant": "ring", "zero_stage": 1, "recompute": "full"}, "1f1b", (2, 3, 2), 3,
    ),
    "interleaved, sequence parallel": (
        {"tp_kv": 4, "kv_heads_per_rank": 1, "sequence_parallel": True, "recompute": "selective"},
        "interleaved", (2, 2, 2, 1), 2,
    ),
    "afab, ep and ulysses": ({"ep": 2, "cp": 2, "cp_variant": "ulysses", "zero_stage": 2}, "afab", (4, 3), 2),
}  # fmt: skip


def check_stages(case: Case, pipeline: str) -> None:
    _, schedule, layers, ranks = PIPELINES[pipeline]
    result = run_pipelined(case, schedule, layers, ranks)
    worst, name = worst_error(case, result.outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert result.received == result.derived > 0


def recurrent_case(pattern: tuple[str, ...], **layout: Any) -> Case:
    fields = {
        "mlp": "geglu",
        "layer_pattern": pattern,
        "layer_kinds": FrozenFields({k: LAYERS[k] for k in LAYERS if k in pattern}),
    }
    sizes = {**SIZES, "num_layers": len(pattern), "num_micro_batches": 4, **layout}
    return Case(**sizes, structure=tuple(fields.items()), seed=0)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_recurrent_gemma_in_stages_equals_one_device(pipeline: str) -> None:
    check_stages(recurrent_case((*GRIFFIN, *GRIFFIN, "rg_lru"), **PIPELINES[pipeline][0]), pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_recurrences_in_stages_equal_one_device(pipeline: str) -> None:
    pattern = ("kimi_delta", "mamba1", "rg_lru", "lightning", "mlstm", "block", "kimi_delta")
    check_stages(recurrent_case(pattern, **PIPELINES[pipeline][0]), pipeline)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_hybrids_in_stages_equal_one_device(pipeline: str) -> None:
    assert len(KINDS) == 6
    check_stages(make_hybrid(Case(**{**SIZES, "num_micro_batches": 4, **PIPELINES[pipeline][0]})), pipeline)


@pytest.mark.parametrize("streams", [0, 2])
def test_compressed_keys_and_streams_in_stages_equal_one_device(streams: int) -> None:
    case = dataclasses.replace(compressed_case("tp", num_streams=streams), num_micro_batches=4, zero_stage=0)
    result = run_pipelined(case, "1f1b", (2, 2), 2)
    worst, name = worst_error(case, result.outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert result.received == result.derived > 0


ADAPTED: dict[str, dict[str, Any]] = {
    "tp": {"tp_kv": 2},
    "sequence parallel": {"tp_kv": 4, "kv_heads_per_rank": 1, "sequence_parallel": True, "recompute": "selective"},
    "fsdp and ring": {"fsdp": 2, "cp": 2, "cp_variant": "ring", "zero_stage": 3, "recompute": "full"},
}


@pytest.mark.parametrize("layout", ADAPTED)
def test_adapters_of_recurrences_equal_one_device(layout: str) -> None:
    """Low-rank adapters of every projection, each weight of a module with the first matrix of that module's adapter."""
    pattern = ("kimi_delta", "mamba1", "rg_lru", "mlstm", "delta", "block")
    kinds = {**LAYERS, "delta": {"mixer": "none", "recurrence": {**DELTA, "joined": "with_gate"}}}
    fields = {
        "mlp": "geglu", "attention_gate": "element", "attention_gate_module": "q_proj", "lora_rank": 4, "layer_pattern": pattern,
        "lora_targets": ("all-linear",),
        "layer_kinds": FrozenFields({kind: {**kinds[kind], "attention_gate": "none"} for kind in pattern[:-1]}),
    }  # fmt: skip
    sizes = {**SIZES, "num_layers": len(pattern), **ADAPTED[layout]}
    case = Case(**sizes, structure=tuple(fields.items()), seed=0)
    outcome = run_units(case)
    worst, name = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{name}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived
    adapters = {weight.partition(".lora_")[0] for weight in outcome.gradients}
    assert {
        "0.mixer.w_f_down",
        "1.mixer.w_step",
        "2.mixer.w_z",
        "3.mixer.w_i",
        "4.mixer.w_out",
        "5.w_attention_gate",
    } <= adapters
    shared = {weight for weight in outcome.gradients if weight.endswith(".lora_a")}
    assert "4.mixer.w_q.lora_a" in shared
    assert not shared & {"4.mixer.w_z.lora_a", "5.w_attention_gate.lora_a"}
