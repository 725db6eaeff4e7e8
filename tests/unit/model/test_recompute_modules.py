"""Tensors discarded by Megatron-Core's recompute modules, against the bytes that its layers save.

Independent truth: Transformer Engine's LayerNormLinear saves its input and the normalised input, flash attention its queries,
keys, values, output and log-sum-exp, SwiGLU its two inputs, and the second matrix of the MLP the activation (Transformer Engine
2.x, pytorch/module/layernorm_linear.py, attention; Megatron-Core d98e8a64, fusions/fused_bias_swiglu.py).
"""

from __future__ import annotations

import pytest

from shardwise.model.architecture import Architecture
from shardwise.model.backward import split_saved, transpose_program
from shardwise.model.decoder import unit_program
from shardwise.model.load import load_model
from shardwise.model.program import Role, density
from shardwise.model.recompute_policies import (
    MODULES,
    get_recompute_policy,
    join_modules,
    parse_modules,
    policies_to_search,
)
from shardwise.values.symbolic import SymbolValues, multiply_symbols


def saved_bytes(model: Architecture, policy: str, unit: str = "block") -> float:
    """Bytes per token of a layer in bf16, statistics in fp32."""
    block = unit_program(model.structure, unit)
    transposed = transpose_program(block, outputs=block.outputs, inputs=block.trainable_inputs)
    values = SymbolValues({**model.dims, "T": 1, "B": 1})
    tensors = [block.tensors[name] for name in split_saved(block, transposed.program.inputs, policy).saved]
    saved = [tensor for tensor in tensors if tensor.role is not Role.CONSTANT]
    tensor_bytes = (
        (multiply_symbols(tensor.dims) * density(tensor.role)).evaluate(values)
        * (4 if tensor.role is Role.STATISTIC else 2)
        for tensor in saved
    )
    return float(sum(tensor_bytes))


def test_bytes_of_a_dense_layer_of_llama_3_70b() -> None:
    model = load_model("llama-3-70b")
    d, f, heads, kv = 8192, 28672, 64 * 128, 8 * 128
    norms, attention, mlp = 2 * 2 * 2 * d, 2 * (heads + 2 * kv + heads), 2 * 3 * f
    statistics = 2 * 4 + 64 * 4  # of two norms, and the log-sum-exp of each head
    total = norms + attention + mlp + statistics
    assert saved_bytes(model, "none") == total
    assert saved_bytes(model, "mlp") == total - mlp - 2 * d - 4  # the norm is a part of the first matrix's layer
    assert saved_bytes(model, "core_attn") == total - 64 * 4
    for nothing in ("layernorm", "moe_act", "mla_up_proj", "moe", "shared_experts"):
        assert saved_bytes(model, nothing) == total
        assert not MODULES[nothing].applies_to(model)


def test_bytes_of_a_layer_of_mixtral() -> None:
    model = load_model("mixtral-8x7b")
    total, d, f, k = saved_bytes(model, "none"), 4096, 14336, 2
    assert total - saved_bytes(model, "moe_act") == 2 * k * f
    assert total - saved_bytes(model, "layernorm") == 2 * d + 4  # a norm before experts is a separate module
    assert total - saved_bytes(model, "layernorm+moe_act") == 2 * k * f + 2 * d + 4
    gates = 2 * 8
    assert total - saved_bytes(model, "moe") == 2 * k * (3 * f + 2 * d) + gates
    assert saved_bytes(model, "mlp") == total


def test_bytes_of_a_layer_of_deepseek_v3() -> None:
    model = load_model("deepseek-v3")
    total, heads, d = saved_bytes(model, "none"), 128, 7168
    projected, latents = heads * (192 + 192 + 128), 1536 + 512
    rotary = 64  # the rotary part of the keys, one for all heads, is an input of what is run again
    assert total - saved_bytes(model, "mla_up_proj") == 2 * (projected + latents - rotary) + 2 * 4
    assert total - saved_bytes(model, "layernorm") == 2 * (2 * d + 4)
    assert total - saved_bytes(model, "shared_experts") == 2 * 3 * 2048
    dense = saved_bytes(model, "none", "dense_block")
    assert dense - saved_bytes(model, "mlp", "dense_block") == 2 * (3 * 18432 + d) + 4
    assert (
        dense - saved_bytes(model, "layernorm", "dense_block") == 2 * d + 4
    )  # a norm before the MLP is a part of the MLP's module


def test_a_policy_names_its_modules_in_order() -> None:
    assert parse_modules("layernorm+moe_act") == ("layernorm", "moe_act")
    for none in ("moe_act+layernorm", "mlp+mlp", "mlp+", "full", "none", ""):
        assert parse_modules(none) == ()
    assert parse_modules(join_modules(["shared_experts", "core_attn"])) == ("core_attn", "shared_experts")
    assert get_recompute_policy("core_attn").keeps_scores is False
    assert get_recompute_policy("mlp").keeps_scores is True


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b"])
def test_searched_policies_save_ever_fewer_bytes(name: str) -> None:
    model = load_model(name)
    bytes_by_policy = [saved_bytes(model, policy) for policy in policies_to_search(("none", *MODULES, "full"), model)]
    assert bytes_by_policy == sorted(bytes_by_policy, reverse=True)
