"""Variants of attention and of experts compute what modules of `transformers` compute that are given the same weights."""

from __future__ import annotations

from typing import Any

import torch
from crosscheck.block_judges import (
    ROPE,
    WIDTH,
    angles,
    assert_equal,
    attention_weights,
    causal_mask,
    expert_weights,
    hidden_states,
    randomise,
    run_part,
)

from shardwise.model.architecture import Architecture
from shardwise.model.numerics import NORM_EPSILON, SIGMOID, Gating
from shardwise.run.numpy.kernels import Router

SIZES: dict[str, Any] = {
    "name": "part", "num_layers": 1, "d_model": WIDTH, "d_ff": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "vocab_size": 8,
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": NORM_EPSILON,
    "num_hidden_layers": 2, "attn_implementation": "eager",
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "hidden_size": WIDTH, "moe_intermediate_size": 5, "num_experts_per_tok": 2, "num_hidden_layers": 2, "hidden_act": "silu",
}  # fmt: skip


def head_norms(stored: Any) -> dict[str, Any]:
    return {f"{name}_norm.weight": stored[f"{name}_norm.weight"] for name in ("q", "k")}


def test_narrow_values_with_sinks_are_those_of_mimo_v2() -> None:
    from transformers import MiMoV2FlashConfig
    from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import (
        MiMoV2FlashAttention,
        MiMoV2FlashRotaryEmbedding,
    )

    rope = {**ROPE, "partial_rotary_factor": 1.0}
    config = MiMoV2FlashConfig(
        **{**ATTENTION, "num_key_value_heads": 1}, v_head_dim=3, layer_types=["full_attention", "sliding_attention"],
        mlp_layer_types=["dense", "dense"], attention_value_scale=1.0,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
    )  # fmt: skip
    module, x = MiMoV2FlashAttention(config, 1), hidden_states()
    stored = randomise(module)
    cosines = angles(MiMoV2FlashRotaryEmbedding(config), x, "sliding_attention")
    expected, _ = module(torch.tensor(x), cosines, causal_mask())
    weights = {**attention_weights(stored, (2, 2), (6, 3)), "sinks": stored["sinks"].reshape(2, 2)}
    architecture = Architecture(**SIZES, v_head_dim=3, sinks=True)
    assert_equal(run_part(architecture, "attention", weights, x), expected)


def test_softplus_gates_are_those_of_laguna() -> None:
    from transformers import LagunaConfig
    from transformers.models.laguna.modeling_laguna import LagunaAttention, LagunaRotaryEmbedding

    for gating, kind, shape in ((True, "head", (2, 2, WIDTH)), ("per-element", "element", (2, 2, 6, WIDTH))):
        rope = {**ROPE, "partial_rotary_factor": 1.0}
        config = LagunaConfig(
            **ATTENTION, gating=gating, rope_parameters={"full_attention": rope, "sliding_attention": rope}
        )
        module, x = LagunaAttention(config, 0, 4), hidden_states()
        stored = randomise(module)
        cosines = angles(LagunaRotaryEmbedding(config), x, "full_attention")
        expected, _ = module(torch.tensor(x), cosines, causal_mask())
        weights = {
            **attention_weights(stored, (2, 2), (6, 6)), **head_norms(stored),
            "w_attention_gate": stored["g_proj.weight"].reshape(shape),
        }  # fmt: skip
        architecture = Architecture(**SIZES, qk_norm=True, attention_gate=kind, attention_gate_function="softplus")
        assert_equal(run_part(architecture, "attention", weights, x), expected)


def test_biases_of_gates_without_positions_are_those_of_beam() -> None:
    from transformers import BeamConfig
    from transformers.models.beam.modeling_beam import BeamAttention

    config = BeamConfig(**ATTENTION, layer_types=["full_attention"] * 2, mlp_layer_types=["dense"] * 2)
    module, x = BeamAttention(config, 0), hidden_states()
    stored = randomise(module)
    expected, _ = module(torch.tensor(x), None, causal_mask())
    weights = {
        **attention_weights(stored, (2, 2), (6, 6)), **head_norms(stored),
        "w_attention_gate": stored["gate_proj.weight"].reshape(2, 2, 6, WIDTH),
        "attention_gate.bias": stored["gate_bias"].reshape(2, 2),
    }  # fmt: skip
    architecture = Architecture(
        **SIZES, qk_norm=True, attention_gate="element", bias=("attention_gate",), positions="none"
    )
    assert_equal(run_part(architecture, "attention", weights, x), expected)


def test_a_trained_activation_is_that_of_apertus() -> None:
    from transformers import ApertusConfig
    from transformers.models.apertus.modeling_apertus import ApertusMLP

    module, x = ApertusMLP(ApertusConfig(hidden_size=WIDTH, intermediate_size=5, dtype="float64")), hidden_states()
    stored = randomise(module)
    weights = {
        "w_up": stored["up_proj.weight"], "w_down": stored["down_proj.weight"].T, "act.alpha_p": stored["act_fn.alpha_p"],
        "act.alpha_n": stored["act_fn.alpha_n"],
    }  # fmt: skip
    architecture = Architecture(**SIZES, mlp="xielu")
    assert_equal(run_part(architecture, "feed_forward", weights, x), module(torch.tensor(x)))


def test_biased_choices_of_experts_are_those_of_afmoe_laguna_and_ernie() -> None:
    from transformers import AfmoeConfig, Ernie4_5_MoeConfig, LagunaConfig
    from transformers.models.afmoe.modeling_afmoe import AfmoeSparseMoeBlock
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeSparseMoeBlock
    from transformers.models.laguna.modeling_laguna import LagunaSparseMoeBlock

    ernie: dict[str, Any] = {"moe_num_experts": 6, "moe_num_shared_experts": 1, "moe_k": 2, "use_bias": False}
    sigmoid, softmax = Router(Gating(scores=SIGMOID, scale=2.5)), Router()
    cases = (
        (AfmoeSparseMoeBlock(AfmoeConfig(**EXPERTS, num_experts=6, num_shared_experts=1, route_scale=2.5)), sigmoid,
         "router.gate.weight", "expert_bias"),
        (LagunaSparseMoeBlock(LagunaConfig(**EXPERTS, num_experts=6, shared_expert_intermediate_size=5,
                                           moe_routed_scaling_factor=2.5)), sigmoid, "gate.weight",
         "gate.e_score_correction_bias"),
        (Ernie4_5_MoeSparseMoeBlock(Ernie4_5_MoeConfig(**EXPERTS, **ernie)), softmax, "gate.weight",
         "gate.moe_statics.e_score_correction_bias"),
    )  # fmt: skip
    architecture = Architecture(**SIZES, num_experts=6, experts_per_token=2, shared_expert_width=5, choice_bias=True)
    for module, router, gate, bias in cases:
        x, stored = hidden_states(), randomise(module)
        weights = {
            **expert_weights(stored, "shared_experts"), "router": stored[gate].T, "choice_bias": stored[bias].reshape(6)
        }  # fmt: skip
        assert_equal(run_part(architecture, "feed_forward", weights, x, router), module(torch.tensor(x)))


def test_a_norm_behind_experts_alone_is_that_of_axk1() -> None:
    from transformers import AXK1Config
    from transformers.models.axk1.modeling_axk1 import AXK1MoE

    config = AXK1Config(
        **EXPERTS, n_routed_experts=6, n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5,
        rms_norm_eps=NORM_EPSILON,
    )  # fmt: skip
    module, x = AXK1MoE(config), hidden_states()
    stored = randomise(module)
    weights = {
        **expert_weights(stored, "shared_experts"), "router": stored["gate.weight"].T,
        "mlp_post_norm.weight": stored["post_mlp_layernorm.weight"],
    }  # fmt: skip
    architecture = Architecture(
        **SIZES, num_experts=6, experts_per_token=2, shared_expert_width=5, mixer="none", pre_norms=False, post_norms=True,
        post_norms_over="feed_forward", recurrence=None,
    )  # fmt: skip
    router = Router(Gating(scores=SIGMOID, scale=2.5))
    assert_equal(run_part(architecture, "build", weights, x, router), torch.tensor(x) + module(torch.tensor(x)))
