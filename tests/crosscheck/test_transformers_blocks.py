"""Gated attention, sparse attention with an indexer, and experts of a latent compute what modules of `transformers` compute.

Modules run in double precision; rotary angles and routers are in single precision in them: hence the tolerance.
"""

from __future__ import annotations

import numpy as np
import torch
from crosscheck.block_judges import (
    POSITIONS,
    ROPE,
    WIDTH,
    assert_equal,
    causal_mask,
    hidden_states,
    randomise,
    run_part,
)

from shardwise.model.architecture import Architecture
from shardwise.model.numerics import NORM_EPSILON, SIGMOID, Gating
from shardwise.run.numpy.kernels import Router


def test_gated_attention_is_that_of_qwen3_next() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

    config = Qwen3NextConfig(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=NORM_EPSILON,
        rope_parameters={**ROPE, "partial_rotary_factor": 1.0}, num_hidden_layers=4,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module, x = Qwen3NextAttention(config, 3), hidden_states()
    stored = randomise(module)
    angles = Qwen3NextRotaryEmbedding(config)(torch.tensor(x), torch.arange(POSITIONS)[None])
    expected, _ = module(torch.tensor(x), angles, causal_mask())
    q, gate = np.split(stored["q_proj.weight"].reshape(2, 2, 12, WIDTH), 2, axis=2)
    weights = {
        "wq": q, "w_attention_gate": gate, "wk": stored["k_proj.weight"].reshape(2, 6, WIDTH),
        "wv": stored["v_proj.weight"].reshape(2, 6, WIDTH), "wo": stored["o_proj.weight"].T.reshape(2, 2, 6, WIDTH),
        "q_norm.weight": 1.0 + stored["q_norm.weight"], "k_norm.weight": 1.0 + stored["k_norm.weight"],
    }  # fmt: skip
    architecture = Architecture(
        name="gated", num_layers=1, d_model=WIDTH, d_ff=8, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=8, qk_norm=True,
        attention_gate="element",
    )  # fmt: skip
    assert_equal(run_part(architecture, "attention", weights, x), expected)


def test_sparse_attention_is_that_of_deepseek_v3_2() -> None:
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

    config = DeepseekV32Config(
        hidden_size=WIDTH, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=10, kv_lora_rank=7, qk_rope_head_dim=4,
        qk_nope_head_dim=6, v_head_dim=5, index_n_heads=2, index_head_dim=4, index_topk=3, rms_norm_eps=NORM_EPSILON,
        rope_parameters=ROPE, num_hidden_layers=1, attention_bias=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    module, x = DeepseekV32Attention(config, 0), hidden_states()
    for norm in (module.q_a_layernorm, module.kv_a_layernorm):
        norm.variance_epsilon = NORM_EPSILON  # the model gives these their default
    module.indexer.k_norm.eps = NORM_EPSILON
    stored = randomise(module)
    angles = DeepseekV32RotaryEmbedding(config)(torch.tensor(x), torch.arange(POSITIONS)[None])
    expected, _ = module(torch.tensor(x), angles, causal_mask())
    pairs = [0, 2, 1, 3]  # pairs of neighbours to halves
    q = stored["q_b_proj.weight"].reshape(3, 1, 10, 10)
    kv = stored["kv_b_proj.weight"].reshape(3, 11, 7)
    down = stored["kv_a_proj_with_mqa.weight"]
    weights = {
        "w_q_down": stored["q_a_proj.weight"], "q_latent_norm.weight": stored["q_a_layernorm.weight"], "w_q_plain": q[:, :, :6],
        "w_q_rotary": q[:, :, 6:][:, :, pairs], "w_kv_down": down[:7], "kv_latent_norm.weight": stored["kv_a_layernorm.weight"],
        "w_k_rotary": down[7:][pairs], "w_k_up": kv[:, :6], "w_v_up": kv[:, 6:],
        "wo": stored["o_proj.weight"].T.reshape(3, 1, 5, WIDTH),
        "index_w_q": stored["indexer.wq_b.weight"].reshape(2, 4, 10), "index_w_k": stored["indexer.wk.weight"],
        "index_norm.weight": stored["indexer.k_norm.weight"], "index_norm.bias": stored["indexer.k_norm.bias"],
        "index_w_heads": stored["indexer.weights_proj.weight"],
    }  # fmt: skip
    architecture = Architecture(
        name="sparse", num_layers=1, d_model=WIDTH, d_ff=8, num_heads=3, num_kv_heads=3, head_dim=10, vocab_size=8,
        q_lora_rank=10, kv_lora_rank=7, rope_head_dim=4, v_head_dim=5, index_heads=2, index_head_dim=4, index_topk=3,
    )  # fmt: skip
    assert_equal(run_part(architecture, "attention", weights, x), expected)


def test_experts_of_a_latent_are_those_of_nemotron_h() -> None:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    config = NemotronHConfig(
        hidden_size=WIDTH, n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=5, moe_latent_size=4, n_group=1,
        moe_shared_expert_intermediate_size=7, n_shared_experts=1, mlp_hidden_act="relu2", routed_scaling_factor=2.5,
        norm_topk_prob=True, topk_group=1, mlp_bias=False,
    )  # fmt: skip
    module, x = NemotronHMoE(config), hidden_states()
    stored = randomise(module)
    expected = module(torch.tensor(x))
    weights = {
        "router": stored["gate.weight"].T, "expert_latent_down": stored["fc1_latent_proj.weight"],
        "experts_up": stored["experts.up_proj"], "experts_down": stored["experts.down_proj"].swapaxes(1, 2),
        "expert_latent_up": stored["fc2_latent_proj.weight"], "shared_up": stored["shared_experts.up_proj.weight"],
        "shared_down": stored["shared_experts.down_proj.weight"].T,
    }  # fmt: skip
    architecture = Architecture(
        name="latent", num_layers=1, d_model=WIDTH, d_ff=5, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=8, mlp="relu2",
        num_experts=6, experts_per_token=2, shared_expert_width=7, expert_latent_dim=4,
    )  # fmt: skip
    router = Router(Gating(scores=SIGMOID, scale=2.5), normalised=True)
    assert_equal(run_part(architecture, "feed_forward", weights, x, router), expected)
