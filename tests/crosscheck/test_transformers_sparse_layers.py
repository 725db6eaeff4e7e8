"""Whole layers of recent decoders compute what `transformers` computes: experts beside an MLP, values from keys, key blocks.

Modules run in double precision; rotary angles and routers are in single precision in them: hence the tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from crosscheck.block_judges import (
    POSITIONS,
    ROPE,
    SEQS,
    WIDTH,
    Arrays,
    assert_equal,
    causal_mask,
    expert_weights,
    hidden_states,
    randomise,
    run_part,
)
from torch.utils.flop_counter import FlopCounterMode

from shardwise.model import Architecture
from shardwise.model.block_parts import HIDDEN
from shardwise.model.decoder import block_program
from shardwise.model.decoder_block import BlockBuilder
from shardwise.model.numerics import NORM_EPSILON, SIGMOID, SQRT_SOFTPLUS, Gating
from shardwise.model.operations import COMPRESSED_SPAN, SelectBlocks, SelectKeys
from shardwise.model.parameters_and_flops import program_flops
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.run.numpy.kernels import Router
from shardwise.values import SymbolValues

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6


def _projections(stored: Arrays, prefix: str = "self_attn.") -> dict[str, Any]:
    """Return the projections of attention and the norms of queries and keys."""
    shapes = {"q": (KV_HEADS, HEADS // KV_HEADS, HEAD_DIM), "k": (KV_HEADS, HEAD_DIM), "v": (KV_HEADS, HEAD_DIM)}
    weights = {
        f"w{name}": stored[f"{prefix}{name}_proj.weight"].reshape(*shape, WIDTH)
        for name, shape in shapes.items()
        if f"{prefix}{name}_proj.weight" in stored
    }
    weights |= {f"{name}_norm.weight": stored[f"{prefix}{name}_norm.weight"] for name in "qk"}
    return weights | {"wo": stored[f"{prefix}o_proj.weight"].T.reshape(*shapes["q"], WIDTH)}


def test_experts_beside_an_mlp_and_values_from_keys_are_those_of_gemma4() -> None:
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

    config = Gemma4TextConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        global_head_dim=HEAD_DIM, num_global_key_value_heads=KV_HEADS, attention_k_eq_v=True, enable_moe_block=True,
        num_experts=5, top_k_experts=2, moe_intermediate_size=7, intermediate_size=9, hidden_size_per_layer_input=0,
        num_hidden_layers=1, layer_types=["full_attention"], rms_norm_eps=NORM_EPSILON, vocab_size=8,
        rope_parameters={"full_attention": ROPE},
    )  # fmt: skip
    config._attn_implementation = "eager"
    layer, x = Gemma4TextDecoderLayer(config, 0), hidden_states()
    stored = randomise(layer)
    angles = Gemma4TextRotaryEmbedding(config)(torch.tensor(x), torch.arange(POSITIONS)[None], "full_attention")
    expected = layer(torch.tensor(x), position_embeddings=angles, attention_mask=causal_mask(), shared_kv_states={})
    weights = _projections(stored)
    weights["q_norm.weight"] = weights["q_norm.weight"] * HEAD_DIM**0.5  # its scores are not scaled
    gate, up = np.split(stored["experts.gate_up_proj"], 2, axis=1)
    norms = {
        "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_own_post_norm": "post_feedforward_layernorm_1",
        "experts_norm": "pre_feedforward_layernorm_2", "experts_post_norm": "post_feedforward_layernorm_2",
        "mlp_post_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    weights |= {f"{name}.weight": stored[f"{module}.weight"] for name, module in norms.items()}
    weights |= {
        "router_norm.weight": stored["router.scale"] * WIDTH**-0.5, "router": stored["router.proj.weight"].T,
        "expert_scales": stored["router.per_expert_scale"], "experts_gate": gate, "experts_up": up,
        "experts_down": stored["experts.down_proj"].swapaxes(1, 2), "w_gate": stored["mlp.gate_proj.weight"],
        "w_up": stored["mlp.up_proj.weight"], "w_down": stored["mlp.down_proj.weight"].T,
    }  # fmt: skip
    architecture = Architecture(
        name="gemma4", num_layers=1, d_model=WIDTH, d_ff=7, dense_d_ff=9, num_heads=HEADS, num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, vocab_size=8, mlp="geglu", post_norms=True, qk_norm=True, value_norm=True,
        values_from_keys=True, feed_forward="mlp_and_experts", num_experts=5, experts_per_token=2, expert_scales=True,
    )  # fmt: skip
    assert_equal(run_part(architecture, "build", weights, x), expected)


def _minimax(block: int = 2, topk: int = 2) -> tuple[Any, Architecture]:
    from transformers import MiniMaxM3VLTextConfig

    config = MiniMaxM3VLTextConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        intermediate_size=7, dense_intermediate_size=7, shared_intermediate_size=5, num_local_experts=6,
        num_experts_per_tok=2, num_hidden_layers=1, layer_types=["minimax_m3_sparse"], index_n_heads=KV_HEADS,
        index_head_dim=HEAD_DIM, index_block_size=block, index_topk_blocks=topk, rms_norm_eps=NORM_EPSILON, rotary_dim=4,
        routed_scaling_factor=2.0, rope_parameters={**ROPE, "partial_rotary_factor": 1.0}, vocab_size=8,
    )  # fmt: skip
    config._attn_implementation = "eager"
    architecture = Architecture(
        name="minimax", num_layers=1, d_model=WIDTH, d_ff=7, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
        vocab_size=8, mlp="clamped_swiglu", qk_norm=True, num_experts=6, experts_per_token=2, shared_expert_width=5,
        index_heads=KV_HEADS, index_head_dim=HEAD_DIM, index_topk=topk, index_block=block,
    )  # fmt: skip
    return config, architecture


def test_attention_to_blocks_of_keys_is_that_of_minimax_m3() -> None:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
        MiniMaxM3VLDecoderLayer,
        MiniMaxM3VLRotaryEmbedding,
    )

    config, architecture = _minimax()
    layer, x = MiniMaxM3VLDecoderLayer(config, 0), hidden_states()
    stored = randomise(layer)
    positions = torch.arange(POSITIONS)[None].expand(SEQS, -1)
    angles = MiniMaxM3VLRotaryEmbedding(config)(torch.tensor(x), positions)
    expected = layer(torch.tensor(x), angles, causal_mask(), positions)
    weights = _projections(stored)
    weights |= {f"{name}_norm.weight": 1.0 + weights[f"{name}_norm.weight"] for name in "qk"}
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    norms |= {f"index_{name}_norm": f"self_attn.indexer.{name}_norm" for name in "qk"}
    weights |= {f"{name}.weight": 1.0 + stored[f"{module}.weight"] for name, module in norms.items()}
    gate, up = np.split(stored["mlp.experts.gate_up_proj"], 2, axis=1)
    shared_gate, shared_up = np.split(stored["mlp.shared_experts.gate_up_proj.weight"], 2)
    weights |= {
        "index_w_q": stored["self_attn.indexer.q_proj.weight"].reshape(KV_HEADS, HEAD_DIM, WIDTH),
        "index_w_k": stored["self_attn.indexer.k_proj.weight"], "router": stored["mlp.gate.weight"].T,
        "experts_gate": gate, "experts_up": up, "experts_down": stored["mlp.experts.down_proj"].swapaxes(1, 2),
        "shared_gate": shared_gate, "shared_up": shared_up, "shared_down": stored["mlp.shared_experts.down_proj.weight"].T,
    }  # fmt: skip
    assert_equal(run_part(architecture, "build", weights, x, Router(Gating(scores=SIGMOID, scale=2.0))), expected)


def test_flops_of_an_indexer_of_blocks_are_counted_products() -> None:
    """The counter counts whole squares of scores, of which the causal half is required."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer

    seq_len = 32
    config, architecture = _minimax(block=4)
    indexer, angles = MiniMaxM3VLIndexer(config, 0), (torch.zeros(1, seq_len, HEAD_DIM),) * 2
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        indexer(torch.zeros(SEQS, seq_len, WIDTH), angles, None, torch.arange(seq_len)[None].expand(SEQS, -1))
    program = block_program(architecture)
    operations = [
        operation
        for operation in program.operations
        if isinstance(operation, SelectBlocks) or any(name.startswith("index_w") for name in operation.inputs)
    ]
    values = SymbolValues({**architecture.dims, "B": SEQS, "T": seq_len})
    flops = [float(program_flops(type(program)(program.tensors, (op,), (), ())).evaluate(values)) for op in operations]
    assert sum(flops[:2]) + 2 * flops[2] == counter.get_total_flops()


V4 = {
    "hidden_size": WIDTH, "num_attention_heads": 4, "head_dim": 6, "q_lora_rank": 10, "o_groups": 2, "o_lora_rank": 3,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 7, "num_hidden_layers": 1, "vocab_size": 8,
    "index_n_heads": 2, "index_head_dim": 6, "index_topk": 2, "sliding_window": 64, "hc_mult": 4, "rms_norm_eps": NORM_EPSILON,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}, "partial_rotary_factor": 1.0,
    "rope_theta": 10_000.0, "compress_rope_theta": 10_000.0, "routed_scaling_factor": 1.5,
}  # fmt: skip
PAIRS = [0, 2, 4, 1, 3, 5]  # pairs of neighbours to halves
V4_KINDS: dict[str, dict[str, Any]] = {
    "sliding_attention": {}, "heavily_compressed_attention": {"compress_window": 4},
    "compressed_sparse_attention": {
        "compress_window": 2, "overlapping_windows": True, "index_heads": 2, "index_head_dim": 6, "index_topk": 2,
    },
}  # fmt: skip


def _compressor_weights(stored: Arrays, module: str, name: str, *, overlaps: bool) -> dict[str, Any]:
    """Return the weights of compressed keys: of windows that overlap, those of the window before come first."""
    parts = {"tokens": "kv_proj.weight", "logits": "gate_proj.weight"}
    series = ("_before", "") if overlaps else ("",)
    weights = {f"{name}_norm.weight": stored[f"{module}.kv_norm.weight"][PAIRS]}
    for kind, suffix in parts.items():
        arrays = np.split(stored[f"{module}.{suffix}"], len(series))
        weights |= {f"{name}{s}_{kind}": array[PAIRS] for s, array in zip(series, arrays, strict=True)}
    biases = np.split(stored[f"{module}.position_bias"], len(series), axis=1)
    return weights | {f"{name}{s}_bias": array[:, PAIRS] for s, array in zip(series, biases, strict=True)}


def _v4_weights(stored: Arrays, kind: str) -> dict[str, Any]:
    weights = {
        "attention_norm.weight": stored["input_layernorm.weight"],
        "mlp_norm.weight": stored["post_attention_layernorm.weight"],
        "w_q_down": stored["self_attn.q_a_proj.weight"], "q_latent_norm.weight": stored["self_attn.q_a_norm.weight"],
        "wq": stored["self_attn.q_b_proj.weight"].reshape(2, 2, 6, 10)[:, :, PAIRS],
        "wk": stored["self_attn.kv_proj.weight"][PAIRS], "k_norm.weight": stored["self_attn.kv_norm.weight"][PAIRS],
        "sinks": stored["self_attn.sinks"].reshape(2, 2),
        "wo_group": stored["self_attn.o_a_proj.weight"].reshape(2, 3, 2, 6)[..., PAIRS],
        "wo": stored["self_attn.o_b_proj.weight"].T.reshape(2, 3, WIDTH), "router": stored["mlp.gate.weight"].T,
    }  # fmt: skip
    for half, module in (("attention", "attn_hc"), ("mlp", "ffn_hc")):
        weights[f"{half}_streams.weight"] = stored[f"{module}.fn"].reshape(-1, 4, WIDTH)
        weights |= {
            f"{half}_streams.bias": stored[f"{module}.base"],
            f"{half}_streams.scale": stored[f"{module}.scale"],
        }
    mlp = {name.removeprefix("mlp."): array for name, array in stored.items() if name.startswith("mlp.")}
    weights |= expert_weights(mlp, shared="shared_experts")
    compressor, overlaps = "self_attn.compressor", kind == "compressed_sparse_attention"
    if kind != "sliding_attention":
        weights |= _compressor_weights(stored, compressor, "compressed", overlaps=overlaps)
    if overlaps:
        weights |= _compressor_weights(stored, f"{compressor}.indexer", "index_compressed", overlaps=True)
        weights["index_w_q"] = stored[f"{compressor}.indexer.q_b_proj.weight"].reshape(2, 6, 10)[:, PAIRS]
        weights["index_w_heads"] = stored[f"{compressor}.indexer.scorer.weights_proj.weight"]
    return weights


@pytest.mark.parametrize("experts", ["moe", "hash_moe"])
@pytest.mark.parametrize("kind", V4_KINDS)
def test_layers_of_several_streams_with_compressed_keys_are_those_of_deepseek_v4(kind: str, experts: str) -> None:
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4DecoderLayer, DeepseekV4RotaryEmbedding

    config = DeepseekV4Config(**V4, layer_types=[kind], mlp_layer_types=[experts])
    config._attn_implementation = "eager"
    layer, rng = DeepseekV4DecoderLayer(config, 0), np.random.default_rng(0)
    x, ids = rng.normal(size=(SEQS, POSITIONS, 4, WIDTH)), rng.integers(8, size=(SEQS, POSITIONS))
    stored = randomise(layer)
    table = np.stack([rng.permutation(6)[:2] for _ in range(8)])
    if experts == "hash_moe":
        layer.mlp.gate.tid2eid.copy_(torch.tensor(table))
    positions = torch.arange(POSITIONS)[None].expand(SEQS, -1)
    rotary = DeepseekV4RotaryEmbedding(config)
    cosines = {name: rotary(torch.tensor(x), positions, name) for name in ("main", "compress")}
    expected = layer(
        torch.tensor(x), input_ids=torch.tensor(ids), position_embeddings=cosines, position_ids=positions,
        attention_mask=causal_mask(),
    )  # fmt: skip
    architecture = Architecture(
        name="v4", num_layers=1, d_model=WIDTH, d_ff=7, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=8,
        mlp="limited_swiglu", sinks=True, q_lora_rank=10, shared_keys=True, output_rank=3, num_streams=4, num_experts=6,
        experts_per_token=2, shared_expert_width=7, hashed_experts=experts == "hash_moe", **V4_KINDS[kind],
    )  # fmt: skip
    router = Router(Gating(scores=SQRT_SOFTPLUS, scale=1.5))
    weights = _v4_weights(stored, kind) | ({"hashed_experts": table[ids]} if experts == "hash_moe" else {})
    assert_equal(run_part(architecture, "build", weights, x, router), expected)


def test_flops_of_a_layer_with_compressed_keys_are_counted_products() -> None:
    """The counter counts whole squares of scores, and no sums over streams, which are elementwise there."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

    seq_len, kind = 64, "compressed_sparse_attention"
    config = DeepseekV4Config(**V4, layer_types=[kind], mlp_layer_types=["moe"])
    config._attn_implementation = "eager"
    attention, angles = DeepseekV4Attention(config, 0), (torch.zeros(1, seq_len, 3),) * 2
    positions = torch.arange(seq_len)[None].expand(SEQS, -1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        attention(torch.zeros(SEQS, seq_len, WIDTH), {"main": angles, "compress": angles}, positions, None)
    architecture = Architecture(
        name="v4", num_layers=1, d_model=WIDTH, d_ff=7, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=8, sinks=True,
        q_lora_rank=10, shared_keys=True, output_rank=3, **V4_KINDS[kind],
    )  # fmt: skip
    builder = ProgramBuilder()
    out = BlockBuilder(builder, architecture, "").attention(builder.input("y", HIDDEN, Role.RESIDUAL))
    program = builder.build([out])
    values = SymbolValues({**architecture.dims, "B": SEQS, "T": seq_len, "span": 1.0, COMPRESSED_SPAN: 1.0})
    indexer = next(operation for operation in program.operations if isinstance(operation, SelectKeys))
    whole = float(program_flops(program).evaluate(values)) + float(
        program_flops(Program(program.tensors, (indexer,), (), ())).evaluate(values)
    )
    # Its counter leaves out the products of the indexer's weights with scores: a sum there.
    weighted = 2.0 * SEQS * seq_len * (seq_len // 2) * 2
    assert whole - weighted == counter.get_total_flops()


def test_queries_see_a_window_and_half_of_the_compressed_keys() -> None:
    """Summed query by query: tokens of a window, and compressed keys whose last token is not after the query."""
    fields: dict[str, Any] = {
        "name": "v4", "num_layers": 1, "d_model": 16, "d_ff": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
        "vocab_size": 8, "sliding_window": 128, "q_lora_rank": 8, "shared_keys": True, "output_rank": 3,
    }  # fmt: skip
    seq_len = 8192
    long = Architecture(**fields, compress_window=128)
    some = Architecture(
        **fields, compress_window=4, overlapping_windows=True, index_heads=2, index_head_dim=6, index_topk=512
    )
    window = sum(min(query + 1, 128) for query in range(seq_len)) / seq_len**2
    for model, max_keys in ((long, seq_len), (some, 512)):
        width = model.compress_window
        compressed = sum(min((query + 1) // width, max_keys) for query in range(seq_len)) * width / seq_len**2
        shares = model.scan_shares(seq_len)
        assert shares["span"] == pytest.approx(window, rel=0.01)
        assert shares[COMPRESSED_SPAN] == pytest.approx(compressed, rel=0.02)
