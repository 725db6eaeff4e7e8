"""Models whose layers read weights, keys or streams of other layers: sharded steps, gradients, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shardwise.layout import Layout
from shardwise.layout.rules.engine import unrunnable_parts
from shardwise.layout.rules.table import violations
from shardwise.model import Job
from shardwise.model.layer_pattern import FrozenFields
from shardwise.values import InputError

from .linked_layers import (
    BLOCK,
    BLOCK_KINDS,
    KEY_KINDS,
    MAMBA1,
    MAMBA2,
    MODELS,
    PROMPT_TOKENS,
    SHARED_BLOCKS,
    SHARED_KEYS,
    STREAM_FIELDS,
    STREAMS,
)
from .test_gradients import check
from .training_step import TOLERANCE, Case, chained_on_one_device, run_units, run_unsharded, whole, worst_error

STEPS: dict[str, Case] = {
    **{
        f"shared blocks {layout}": SHARED_BLOCKS.case(layout)
        for layout in ("fsdp", "zero_2", "replicated_keys", "sequence_parallel", "ring", "all")
    },
    **{
        f"shared blocks, channels in groups {layout}": SHARED_BLOCKS.case(layout, recurrence=FrozenFields(MAMBA1))
        for layout in ("fsdp", "sequence_parallel", "all")
    },
    **{
        f"shared keys {layout}": SHARED_KEYS.case(layout)
        for layout in ("fsdp", "tp", "sequence_parallel_4", "ring", "ulysses", "all")
    },
    **{f"streams {layout}": STREAMS.case(layout) for layout in ("fsdp", "sequence_parallel_4", "ring", "all")},
}


@pytest.mark.parametrize("name", STEPS)
def test_units_one_after_the_other_equal_one_device(name: str) -> None:
    """A reader of a weight gathers it, and the layer that owns the weight reduces the sum of its gradients."""
    case = STEPS[name]
    outcome = run_units(case)
    worst, part = worst_error(case, outcome, chained_on_one_device(case))
    assert worst <= TOLERANCE, f"{part}: relative error {worst:.2e}"
    assert outcome.moved == outcome.derived


@pytest.mark.parametrize(
    "name",
    [
        "shared blocks fsdp", "shared blocks sequence_parallel", "shared blocks all", "shared keys sequence_parallel_4",
        "shared keys all", "streams sequence_parallel_4",
    ],
)  # fmt: skip
def test_the_program_of_the_whole_model_equals_its_units(name: str) -> None:
    """In the program of the whole model a shared weight is one tensor with several uses."""
    case = STEPS[name]
    for outcome in (whole(case), run_unsharded(case)):
        worst, part = worst_error(case, outcome, chained_on_one_device(case))
        assert worst <= TOLERANCE, f"{part}: relative error {worst:.2e}"


SLOPE_CASES: dict[str, Case] = {
    "shared blocks": SHARED_BLOCKS.slope_case(),
    "shared blocks, channels in groups": SHARED_BLOCKS.slope_case(recurrence=FrozenFields(MAMBA1)),
    "shared keys": SHARED_KEYS.slope_case(layer_input_dim=3, layer_input_rows=5),
    "streams": Case(
        num_layers=1, width=6, hidden=8, positions=5, half_head_dim=2, num_micro_batches=1, seed=1,
        structure=tuple({"layer_input_dim": 3, "mlp": "geglu", "post_norms": True, **STREAM_FIELDS}.items()),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLOPE_CASES)
def test_gradients_equal_slopes_of_the_loss(name: str) -> None:
    check(SLOPE_CASES[name])


@pytest.mark.parametrize(
    ("name", "fields", "chunks", "tp"),
    [
        ("shared blocks", {"recurrence": MAMBA2}, (2, 4), 1), ("shared blocks", {"recurrence": MAMBA2}, (3, 1, 2), 2),
        ("shared blocks", {"recurrence": MAMBA1}, (2, 4), 1), ("shared blocks", {"recurrence": MAMBA1}, (3, 1, 2), 2),
        ("shared keys", {}, (2, 4), 1), ("shared keys", {}, (3, 1, 2), 2), ("streams", {}, (3, 1, 2), 2),
    ],
)  # fmt: skip
def test_chunks_of_a_prompt_give_the_logits_of_the_whole(
    name: str, fields: dict[str, Any], chunks: tuple[int, ...], tp: int
) -> None:
    """In one chunk on one device, and in several on several devices."""
    expected, _ = MODELS[name].serve_prompt((PROMPT_TOKENS,), 1, **fields)
    logits, _ = MODELS[name].serve_prompt(chunks, tp, **fields)
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize(
    ("name", "carried"),
    [
        ("shared blocks", "the embedding that shared blocks read"),
        ("shared keys", "an embedding for each layer and keys and values that layers share"),
    ],
)
def test_stages_of_a_pipeline_are_refused(name: str, carried: str) -> None:
    model, job = MODELS[name].architecture(), Job(global_batch_tokens=128, seq_len=16)
    (problem,) = violations(model, job, 2, Layout(pp=2, schedule="1f1b"))
    assert f"pp = 2, but small has {carried}, which pass between layers" in problem
    assert "so pp=1 is required" in problem
    assert not violations(model, job, 2, Layout(dp=2))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("shared blocks", {"blocks that layers share"}),
        ("shared keys", {"an embedding for each layer", "keys and values that layers share"}),
        ("streams", {"streams that layers predict", "a learned residual of low rank", "gaussian_top_k"}),
    ],
)
def test_training_refuses_linked_layers_by_name(name: str, parts: set[str]) -> None:
    assert parts <= {*unrunnable_parts(MODELS[name].architecture().structure)}


CONTRADICTIONS: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("shared blocks", {"carried_embedding": False}, "reads the embedding; mixer = attention"),
    ("shared blocks", {"adapter_rank": 0}, "with adapters of a rank, found adapter_rank = 0"),
    ("shared blocks", {"layer_kinds": {**BLOCK_KINDS, "second_again": {**BLOCK, "weights_of": "third"}}},
     "weights_of = 'third'; one of block, first"),
    ("shared blocks", {"layer_pattern": ("block", "first_again", "first", "second", "second_again")},
     "one layer before layer 1 is required"),
    ("shared blocks", {"layer_pattern": ("first", "first", "first_again", "second", "second_again", "block"), "num_layers": 6},
     "which is 2 layers"),
    ("shared blocks", {"layer_kinds": {**BLOCK_KINDS, "second_again": {**BLOCK, "weights_of": "second", "d_ff": 64}}},
     "weights_of = second, from which it differs in d_ff"),
    ("shared blocks", {"layer_kinds": {**BLOCK_KINDS, "second_again": {"weights_of": "second"}}},
     "is about a shared_block, and there is none"),
    ("shared blocks", {"layer_kinds": {}, "layer_pattern": (), "adapter_rank": 0, "num_predict_layers": 1},
     "num_predict_layers = 0 are required"),
    ("shared blocks", {"lora_rank": 4, "lora_targets": ("q_proj",)}, "adapters of a shared block"),
    ("shared keys", {"layer_pattern": ("block", "reuse", "store", "reuse")},
     "layer 1 reuses keys and values, and no layer before it"),
    ("shared keys", {"layer_kinds": {"store": KEY_KINDS["store"], "reuse": {**KEY_KINDS["reuse"], "num_kv_heads": 1}}},
     "layer 2 reuses keys"),
    ("shared keys", {"num_streams": 2}, "num_streams = 0, parallel = false and num_predict_layers = 0 are required"),
    ("shared keys", {"layer_input_dim": 0, "layer_input_rows": 9}, "layer_input_dim is required"),
    ("streams", {"num_streams": 1}, "found num_streams = 1; at least 2 are required"),
    ("streams", {"num_streams": 0}, "found num_streams = 0; at least 2 are required"),
    ("streams", {"alternating_streams": False}, "num_streams = 0, parallel = false"),
    ("streams", {"pre_norms": False}, "laurel_rank is that of a residual beside attention's"),
    ("streams", {"mlp": "gelu"}, "sparse_activation is about the gates of an MLP, and there are none"),
    ("streams", {"lora_rank": 4, "lora_targets": ("all-linear",)},
     "of streams that layers predict and of a learned residual are not known"),
)  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "message"), CONTRADICTIONS)
def test_contradicting_fields_are_refused(name: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        MODELS[name].architecture(**fields)
