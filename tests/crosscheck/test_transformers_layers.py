"""Layers with norms in other places, differential and latent attention, and heads compute what modules of `transformers` do."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from crosscheck.block_judges import (
    POSITIONS,
    ROPE,
    WIDTH,
    angles,
    assert_equal,
    attention_weights,
    causal_mask,
    hidden_states,
    randomise,
    run_part,
)
from torch import nn

from shardwise.model.architecture import Architecture
from shardwise.model.decoder import head_program
from shardwise.model.numerics import NORM_EPSILON

SIZES: dict[str, Any] = {
    "name": "layer", "num_layers": 1, "d_model": WIDTH, "d_ff": 5, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4,
    "vocab_size": 8,
}  # fmt: skip
PAIRS = [0, 2, 1, 3]  # pairs of neighbours to halves


def test_differential_attention_is_that_of_diffllama() -> None:
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

    config = DiffLlamaConfig(
        hidden_size=WIDTH, num_attention_heads=8, num_key_value_heads=4, head_dim=4, rms_norm_eps=NORM_EPSILON,
        num_hidden_layers=1, rope_parameters=ROPE, attn_implementation="eager",
    )  # fmt: skip
    module, x = DiffLlamaAttention(config, 0), hidden_states()
    stored = randomise(module)
    expected, _ = module(torch.tensor(x), angles(DiffLlamaRotaryEmbedding(config), x), causal_mask())
    q, k, v = (stored[f"{name}_proj.weight"].reshape(2, -1, 4, WIDTH) for name in "qkv")  # halves: the two attentions
    weights = {
        **{f"wq{i + 1}": q[i].reshape(2, 2, 4, WIDTH) for i in range(2)},
        **{f"wk{i + 1}": k[i] for i in range(2)}, "wv": np.concatenate([v[0], v[1]], axis=1),
        **{f"lambda_{name}{i}": stored[f"lambda_{name}{i}"] for name in "qk" for i in (1, 2)},
        "wo": stored["o_proj.weight"].T.reshape(2, 2, 8, WIDTH),
    }  # fmt: skip
    architecture = Architecture(**{**SIZES, "num_kv_heads": 2}, differential=True, v_head_dim=8)
    assert_equal(run_part(architecture, "attention", weights, x), expected)


def test_norms_behind_sums_are_those_of_git() -> None:
    from transformers import GitConfig
    from transformers.models.git.modeling_git import GitLayer

    config = GitConfig(
        hidden_size=WIDTH, num_attention_heads=4, intermediate_size=5, layer_norm_eps=NORM_EPSILON, hidden_act="gelu_new",
        num_hidden_layers=1, attn_implementation="eager",
    )  # fmt: skip
    module, x = GitLayer(config, 0), hidden_states()
    stored = randomise(module)
    expected = module(torch.tensor(x), causal_mask())
    prefix = {"q": "self.query", "k": "self.key", "v": "self.value"}
    weights = {
        **{f"w{name}": stored[f"attention.{path}.weight"].reshape(4, 4, WIDTH) for name, path in prefix.items()},
        **{f"{name}_flat.bias": stored[f"attention.{path}.bias"].reshape(4, 4) for name, path in prefix.items()},
        "wo": stored["attention.output.dense.weight"].T.reshape(4, 1, 4, WIDTH),
        "attention_out.bias": stored["attention.output.dense.bias"], "w_up": stored["intermediate.dense.weight"],
        "up.bias": stored["intermediate.dense.bias"], "w_down": stored["output.dense.weight"].T,
        "mlp_out.bias": stored["output.dense.bias"],
        **{f"attention_norm.{name}": stored[f"attention.output.LayerNorm.{name}"] for name in ("weight", "bias")},
        **{f"mlp_norm.{name}": stored[f"output.LayerNorm.{name}"] for name in ("weight", "bias")},
    }  # fmt: skip
    weights["wq"] = weights["wq"].reshape(4, 1, 4, WIDTH)
    weights["q_flat.bias"] = weights["q_flat.bias"].reshape(4, 1, 4)
    weights["v.bias"] = weights.pop("v_flat.bias")
    architecture = Architecture(
        **SIZES, mlp="gelu", norm="layer", norm_bias=True, positions="none", pre_norms=False, stream_norms="behind",
        bias=("qkv", "attention_out", "mlp"),
    )  # fmt: skip
    assert_equal(run_part(architecture, "build", weights, x), expected[0] if isinstance(expected, tuple) else expected)


def test_norms_of_the_stream_are_those_of_minimax() -> None:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxDecoderLayer, MiniMaxRotaryEmbedding

    config = MiniMaxConfig(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4, head_dim=4, intermediate_size=5, num_local_experts=3,
        num_experts_per_tok=2, rms_norm_eps=NORM_EPSILON, num_hidden_layers=2, rope_parameters=ROPE,
        layer_types=["full_attention", "linear_attention"], attn_implementation="eager",
    )  # fmt: skip
    module, x = MiniMaxDecoderLayer(config, 0), hidden_states()
    stored = randomise(module)
    expected = module(torch.tensor(x), angles(MiniMaxRotaryEmbedding(config), x), causal_mask())
    gate, up = np.split(stored["mlp.experts.gate_up_proj"], 2, axis=1)
    attention = {name.removeprefix("self_attn."): array for name, array in stored.items()}
    weights = {
        **attention_weights(attention, (4, 1), (4, 4)), "attention_norm.weight": stored["input_layernorm.weight"],
        "mlp_norm.weight": stored["post_attention_layernorm.weight"], "router": stored["mlp.gate.weight"].T,
        "experts_gate": gate, "experts_up": up, "experts_down": stored["mlp.experts.down_proj"].swapaxes(1, 2),
    }  # fmt: skip
    architecture = Architecture(**SIZES, num_experts=3, experts_per_token=2, pre_norms=False, stream_norms="before")
    assert_equal(run_part(architecture, "build", weights, x), expected)


def test_gated_norms_and_two_latents_are_those_of_axk2() -> None:
    from transformers import AXK2Config
    from transformers.models.axk2.modeling_axk2 import AXK2Attention, AXK2GatedRMSNorm, AXK2RotaryEmbedding

    config = AXK2Config(
        hidden_size=WIDTH, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=10, kv_lora_rank=7, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=5, index_n_heads=8, index_head_dim=4, index_topk=3, rms_norm_eps=NORM_EPSILON,
        rope_parameters=ROPE, num_hidden_layers=1, attention_bias=False, gated_norm_rank=3, attn_implementation="eager",
    )  # fmt: skip
    norm, module, x = AXK2GatedRMSNorm(config), AXK2Attention(config, 0), hidden_states()
    for latent_norm in (module.q_a_layernorm, module.kv_a_layernorm):
        latent_norm.variance_epsilon = NORM_EPSILON  # the model gives these their default
    module.indexer.k_norm.eps = NORM_EPSILON
    stored_norm, stored = randomise(norm), randomise(module)
    cosines = angles(AXK2RotaryEmbedding(config), x)
    expected, _ = module(norm(torch.tensor(x)), cosines, causal_mask(), position_ids=torch.arange(POSITIONS)[None])
    queries, gates = np.split(stored["q_gate_proj.weight"].reshape(3, 15, 20), [10], axis=1)
    kv, down = stored["kv_b_proj.weight"].reshape(3, 11, 7), stored["kv_a_proj_with_mqa.weight"]
    weights = {
        "attention_norm.weight": stored_norm["norm.weight"], "attention_norm.gate_down": stored_norm["mlp.fc1.weight"],
        "attention_norm.gate_up": stored_norm["mlp.fc2.weight"], "w_q_down": stored["q_a_proj.weight"],
        "q_latent_norm.weight": stored["q_a_layernorm.weight"], "w_q_plain": queries[:, None, :6],
        "w_q_rotary": queries[:, None, 6:][:, :, PAIRS], "w_attention_gate": gates[:, None], "w_kv_down": down[:7],
        "kv_latent_norm.weight": stored["kv_a_layernorm.weight"], "w_k_rotary": down[7:][PAIRS], "w_k_up": kv[:, :6],
        "w_v_up": kv[:, 6:], "wo": stored["o_proj.weight"].T.reshape(3, 1, 5, WIDTH),
        "index_w_q": stored["indexer.wq_b.weight"].reshape(8, 4, 10), "index_w_k": stored["indexer.wk.weight"],
        "index_norm.weight": stored["indexer.k_norm.weight"], "index_norm.bias": stored["indexer.k_norm.bias"],
        "index_w_heads": stored["indexer.weights_proj.weight"],
    }  # fmt: skip
    architecture = Architecture(
        **{**SIZES, "num_heads": 3, "num_kv_heads": 3, "head_dim": 10}, q_lora_rank=10, kv_lora_rank=7, rope_head_dim=4,
        v_head_dim=5, index_heads=8, index_head_dim=4, index_topk=3, raw_query_latent=True, attention_gate="element",
        norm_gate_rank=3, feed_forward="none",
    )  # fmt: skip
    assert_equal(run_part(architecture, "build", weights, x), torch.tensor(x) + expected)


def test_norms_of_rotary_keys_and_gates_of_heads_are_those_of_dots3() -> None:
    from transformers import Dots3NoteTextConfig
    from transformers.models.dots3_note.modeling_dots3_note import Dots3NoteTextAttention, Dots3NoteTextRotaryEmbedding

    config = Dots3NoteTextConfig(
        hidden_size=WIDTH, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=10, kv_lora_rank=7, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=5, head_dim=10, rms_norm_eps=NORM_EPSILON, num_hidden_layers=1, use_dsa=False,
        layer_types=["full_attention"], rope_theta=ROPE["rope_theta"], n_routed_experts=4, attn_implementation="eager",
    )  # fmt: skip
    module, x = Dots3NoteTextAttention(config, 0), hidden_states()
    module.q_lora_scale = module.kv_lora_scale = 1.0  # scales of latents are not modelled, and the reader says so
    stored = randomise(module)
    cosines = angles(Dots3NoteTextRotaryEmbedding(config), x, "full_attention")
    expected, _ = module(torch.tensor(x), cosines, causal_mask())
    q, kv = stored["q_b_proj.weight"].reshape(3, 1, 10, 10), stored["kv_b_proj.weight"].reshape(3, 11, 7)
    down = stored["kv_a_proj_with_mqa.weight"]
    weights = {
        "w_q_down": stored["q_a_proj.weight"], "q_latent_norm.weight": stored["q_a_layernorm.weight"], "w_q_plain": q[:, :, :6],
        "w_q_rotary": q[:, :, 6:][:, :, PAIRS], "w_kv_down": down[:7], "kv_latent_norm.weight": stored["kv_a_layernorm.weight"],
        "w_k_rotary": down[7:][PAIRS], "k_rotary_norm.weight": stored["k_rope_only_layernorm.weight"][PAIRS],
        "w_k_up": kv[:, :6], "w_v_up": kv[:, 6:], "w_attention_gate": stored["g_proj.weight"].reshape(3, 1, WIDTH),
        "wo": stored["o_proj.weight"].T.reshape(3, 1, 5, WIDTH),
    }  # fmt: skip
    architecture = Architecture(
        **{**SIZES, "num_heads": 3, "num_kv_heads": 3, "head_dim": 10}, q_lora_rank=10, kv_lora_rank=7, rope_head_dim=4,
        v_head_dim=5, rotary_key_norm=True, attention_gate="head",
    )  # fmt: skip
    assert_equal(run_part(architecture, "attention", weights, x), expected)


def test_a_layer_of_the_head_is_that_of_modernbert() -> None:
    from crosscheck.block_judges import run_program
    from transformers import ModernBertDecoderConfig
    from transformers.models.modernbert_decoder.modeling_modernbert_decoder import ModernBertDecoderPredictionHead

    config = ModernBertDecoderConfig(
        hidden_size=WIDTH, norm_eps=NORM_EPSILON, classifier_activation="gelu_pytorch_tanh"
    )
    module, x = ModernBertDecoderPredictionHead(config), hidden_states()
    final = nn.LayerNorm(WIDTH, eps=NORM_EPSILON, bias=False)
    stored, stored_final = randomise(module), randomise(final)
    head = np.random.default_rng(1).normal(size=(8, WIDTH))
    logits = module(final(torch.tensor(x))) @ torch.tensor(head).T
    weights = {
        "final_norm.weight": stored_final["weight"], "head_layer": stored["dense.weight"],
        "head_norm.weight": stored["norm.weight"], "head": head,
    }  # fmt: skip
    architecture = Architecture(**SIZES, norm="layer", head_layer=True)
    assert_equal(run_program(architecture, head_program(architecture), "logits", weights, x), logits)


def test_streams_that_are_not_mixed_are_those_of_hy_v4() -> None:
    from crosscheck.block_judges import SEQS, run_program
    from transformers import HYV4Config
    from transformers.models.hy_v4.modeling_hy_v4 import HYV4HyperConnection

    from shardwise.model.program import ProgramBuilder, Role
    from shardwise.model.residual_streams import StreamBuilder, residual_dims

    config = HYV4Config(hidden_size=WIDTH, hc_mult=4, hc_magnitude=2.0, rms_norm_eps=NORM_EPSILON, num_hidden_layers=1)
    module, x = HYV4HyperConnection(config), np.random.default_rng(0).normal(size=(SEQS, POSITIONS, 4, WIDTH))
    stored = randomise(module)
    write, read = module(torch.tensor(x))
    expected = write[..., None] * read[:, :, None] + torch.tensor(x)
    builder = ProgramBuilder()
    streams = builder.input("x", residual_dims(has_streams=True), Role.RESIDUAL)
    out = StreamBuilder(builder, "", mixed=False).update(
        streams,
        "attention",
        ("f", "g"),
        lambda y: builder.elementwise("identity", [y], "half", ("B", "T", "D")),
        "x_out",
    )
    weights = {
        "attention_streams.weight": stored["fn"].reshape(8, 4, WIDTH), "attention_streams.bias": stored["base"],
        "attention_streams.scale": stored["scale"],
    }  # fmt: skip
    architecture = Architecture(**SIZES, num_streams=4, mixed_streams=False)
    squares = builder.elementwise("sum_square", [out], "squares", ("B", "T"), Role.STATISTIC)
    scale = builder.input("loss_scale", (), Role.CONSTANT)
    program = builder.build([builder.elementwise("scaled_sum", [squares, scale], "loss", (), Role.STATISTIC)])
    assert_equal(run_program(architecture, program, out, weights, x), expected)
