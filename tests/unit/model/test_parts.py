"""Parameters and training FLOPs by part are read off the program: sums, closed forms by hand, and the derivation's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.book_formulas.rules import block_training_flops, params_by_part
from shardwise.model import parameters_and_flops
from shardwise.model.backward import transpose_program
from shardwise.model.decoder import build_unit_program, unit_counts
from shardwise.model.load import load_model, model_names
from shardwise.model.operations import Contract
from shardwise.model.program import ModelPart, Program
from shardwise.values.symbolic import SymbolValues

UNLIKE = (
    "mixtral-8x7b",
    "deepseek-v3",
    "deepseek-v2-lite",
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "llama-3-70b",
    "gpt-2",
    "gemma-2-9b",
)


def seq_len_of(name: str) -> int:
    return min(load_model(name).max_positions or 4096, 4096)


@pytest.mark.parametrize("name", model_names())
def test_every_weight_belongs_to_a_part(name: str) -> None:
    model = load_model(name)
    for unit in unit_counts(model):
        program = build_unit_program(model, unit)
        parts = {weight: program.tensors[weight].part for weight in program.weights}
        assert None not in parts.values(), parts
        norms = {weight for weight in parts if "norm" in weight}
        assert {weight for weight, part in parts.items() if part is ModelPart.NORM} == norms


@pytest.mark.parametrize("name", model_names())
def test_the_parts_add_up_to_the_whole(name: str) -> None:
    model = load_model(name)
    parts = params_by_part(model)
    assert parts.total == parameters_and_flops.num_params(model)
    tables = (1 if model.tied_embeddings else 2) * model.vocab_size + (model.max_positions or 0) * (
        model.positions == "learned"
    )
    assert parts.vocabulary == tables * model.d_model + ("head" in model.bias) * model.vocab_size
    assert parts.norms < 2e-3 * parts.total


def test_the_parts_of_mixtral_by_hand() -> None:
    parts = params_by_part(load_model("mixtral-8x7b"))
    assert parts.mlp == 32 * (8 * 3 * 4096 * 14336 + 8 * 4096)
    assert parts.attention == 32 * 2 * 4096 * (32 + 8) * 128
    assert parts.norms == (2 * 32 + 1) * 4096


def test_the_parts_of_deepseek_v3_by_hand() -> None:
    d, heads = 7168, 128
    parts = params_by_part(load_model("deepseek-v3"))
    assert parts.mlp == 58 * (257 * 3 * d * 2048 + 256 * d) + 3 * 3 * d * 18432
    assert parts.attention == 61 * (
        d * 1536 + 1536 * heads * 192 + d * (512 + 64) + 512 * heads * 256 + heads * 128 * d
    )
    assert parts.norms == 61 * (2 * d + 1536 + 512) + d


def test_biases_and_sinks_belong_to_their_projections() -> None:
    """gpt-oss-20b: 24 layers of D 2880, 64 heads of 64 on 8, biases everywhere, a sink for each head, 32 experts."""
    d, m, parts = 2880, 2880, params_by_part(load_model("gpt-oss-20b"))
    assert parts.attention == 24 * ((d + 1) * (64 + 2 * 8) * 64 + (64 * 64 + 1) * d + 64)
    assert parts.mlp == 24 * ((d + 1) * 32 + 32 * (2 * (d + 1) * m + (m + 1) * d))


def test_adapters_belong_to_their_projections() -> None:
    model = load_model("llama-3-8b")
    adapted = params_by_part(replace(model, lora_rank=16, lora_targets=("qkv", "mlp")))
    plain = params_by_part(model)
    assert adapted.mlp - plain.mlp == 32 * 16 * 3 * (4096 + 14336)
    assert adapted.attention - plain.attention == 32 * 16 * (3 * 4096 + 4096 + 2 * 1024)


@pytest.mark.parametrize("name", model_names())
def test_a_model_trains_with_the_flops_of_its_layers_and_heads(name: str) -> None:
    """Blocks by part, head and modules of multi-token prediction add up to the FLOPs of MFU."""
    model, seq_len = load_model(name), seq_len_of(name)
    block = block_training_flops(model, 3, seq_len, causal=True)
    end_units = {unit: count for unit, count in unit_counts(model).items() if unit in ("head", "predict")}
    ends = sum(
        count * sum(parameters_and_flops.unit_training_flops(model, unit, seq_len)) for unit, count in end_units.items()
    )
    total = model.num_layers * (block.mlp + block.projections + block.scores) / 3 + ends
    assert total == pytest.approx(parameters_and_flops.model_flops_per_token(model, seq_len) * seq_len, rel=1e-12)


def contraction_flops(program: Program, values: SymbolValues) -> float:
    products = replace(program, operations=tuple(o for o in program.operations if isinstance(o, Contract)))
    return float(parameters_and_flops.program_flops(products).evaluate(values))


@pytest.mark.parametrize("name", UNLIKE)
def test_flops_of_products_equal_those_of_the_derived_passes(name: str) -> None:
    """The program and its transpose, product by product, which do not assume that a backward pass is twice a forward pass."""
    model, seq_len = load_model(name), seq_len_of(name)
    values = SymbolValues({**model.dims, "B": 1, "T": seq_len, "span": 1.0})
    layers = {unit: count for unit, count in unit_counts(model).items() if unit in ("block", "dense_block")}
    derived = 0.0
    for unit, count in layers.items():
        program = build_unit_program(model, unit)
        transposed = transpose_program(program, outputs=program.outputs, inputs=program.trainable_inputs).program
        derived += count * (contraction_flops(program, values) + contraction_flops(transposed, values))
    block = block_training_flops(model, 1, seq_len)
    assert model.num_layers * (block.mlp + block.projections) == pytest.approx(derived, rel=1e-12)


def test_deepseek_v3_by_hand() -> None:
    """8 of 256 experts with the shared one, heads of 192 and 128, latents: 6 FLOPs a weight that a token meets."""
    d, heads, tokens = 7168, 128, 4096
    active_weights = (58 * (9 * 3 * d * 2048 + 256 * d) + 3 * 3 * d * 18432) / 61
    attention = d * 1536 + 1536 * heads * 192 + d * (512 + 64) + 512 * heads * 256 + heads * 128 * d
    block = block_training_flops(load_model("deepseek-v3"), 1, tokens, causal=True)
    assert block.mlp == pytest.approx(6 * tokens * active_weights, rel=1e-12)
    assert block.projections == pytest.approx(6 * tokens * attention, rel=1e-12)
    assert block.scores == pytest.approx(6 * tokens**2 * heads * (192 + 128) / 2, rel=1e-12)
