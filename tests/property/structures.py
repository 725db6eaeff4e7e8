"""Structures of decoders beyond the plain one: what a family of models adds, by the field that adds it."""

from __future__ import annotations

from typing import Any

from shardwise.model.layer_pattern import FrozenFields
from shardwise.model.numerics import SIGMOID, Gating, Numerics

Structure = tuple[tuple[str, Any], ...]

LATENT: Structure = (("kv_lora_rank", 8), ("rope_head_dim", 2), ("v_head_dim", 3), ("head_dim", 5))

STRUCTURES: dict[str, Structure] = {
    "qk_norm": (("qk_norm", True),),
    "qkv_bias": (("bias", ("qkv",)),),
    "layer_norm": (("norm", "layer"),),
    "layer_norm_and_all_biases": (
        ("norm", "layer"), ("norm_bias", True), ("bias", ("qkv", "attention_out", "mlp")), ("mlp", "gelu"),
    ),
    "learned_positions": (("positions", "learned"), ("max_positions", 32), ("tied_embeddings", True)),
    "post_norms": (("post_norms", True), ("mlp", "geglu")),
    "parallel": (("parallel", True), ("norm", "layer")),
    "no_positions": (("positions", "none"),),
    "experts": (("num_experts", 4), ("experts_per_token", 2)),
    "experts_and_a_shared_one": (("num_experts", 4), ("experts_per_token", 1), ("shared_expert_width", 4), ("mlp", "gelu")),
    "latent_attention": (*LATENT, ("q_lora_rank", 8)),
    "latent_keys_alone": LATENT,
    "leading_dense_layers": (
        ("num_experts", 4), ("experts_per_token", 2), ("num_layers", 2), ("num_dense_layers", 1), ("dense_d_ff", 8),
    ),
    "multi_token_prediction": (("num_predict_layers", 2),),
    "deepseek_v3": (
        *LATENT, ("q_lora_rank", 8), ("num_experts", 4), ("experts_per_token", 2), ("shared_expert_width", 4),
        ("num_layers", 2), ("num_dense_layers", 1), ("dense_d_ff", 8), ("num_predict_layers", 1),
    ),
    "norms_and_bias": (("qk_norm", True), ("post_norms", True), ("bias", ("qkv",))),
    "projection_norm": (("qk_norm", True), ("qk_norm_over", "projection")),
    "post_norms_only": (("qk_norm", True), ("qk_norm_over", "projection"), ("pre_norms", False), ("post_norms", True)),
    "embedding_norm": (("embedding_norm", True), ("norm", "layer"), ("norm_bias", True), ("positions", "none")),
    "separate_norms": (("parallel", True), ("separate_norms", True), ("norm", "layer"), ("bias", ("qkv", "attention_out"))),
    "sinks": (("sinks", True),),
    "clamped_swiglu": (("mlp", "clamped_swiglu"), ("bias", ("mlp",))),
    "gated_shared_expert": (
        ("num_experts", 4), ("experts_per_token", 2), ("shared_expert_width", 4), ("shared_gate", True), ("bias", ("qkv",)),
    ),
    "adapters": (("lora_rank", 2), ("lora_targets", ("qkv", "attention_out", "mlp"))),
    "adapters_and_biases": (("lora_rank", 1), ("lora_targets", ("qkv", "mlp")), ("bias", ("qkv", "attention_out", "mlp"))),
    "adapters_of_latent_attention": (
        *LATENT, ("v_head_dim", 8), ("lora_rank", 2), ("lora_targets", ("attention_out",)),
    ),
    "adapters_beside_experts": (("num_experts", 4), ("experts_per_token", 2), ("lora_rank", 2), ("lora_targets", ("qkv",))),
    "groups_of_experts": (
        ("num_experts", 8), ("experts_per_token", 2), ("shared_expert_width", 4),
        ("numerics", Numerics(gating=Gating(scores=SIGMOID, scale=2.5, groups=4, chosen_groups=2, votes=2))),
    ),
    "gates_as_they_are": (
        ("num_experts", 8), ("experts_per_token", 2),
        ("numerics", Numerics(gating=Gating(scale=3.0, groups=4, chosen_groups=1), normalised_gates=False)),
    ),
    "kinds_of_layers": (
        ("num_experts", 4), ("experts_per_token", 2), ("shared_expert_width", 8), ("num_layers", 5), ("d_ff", 8),
        ("layer_kinds", FrozenFields({
            "dense": {"num_experts": 0, "experts_per_token": 0, "shared_expert_width": 0, "positions": "none"},
            "attention": {"num_experts": 0, "experts_per_token": 0, "shared_expert_width": 0, "feed_forward": "none"},
            "experts": {"mixer": "none", "shared_expert_width": 0},
        })),
        ("layer_pattern", ("dense", "block", "attention", "experts")),
    ),
    "gpt_oss": (
        ("num_experts", 8), ("experts_per_token", 2), ("sinks", True), ("mlp", "clamped_swiglu"),
        ("bias", ("qkv", "attention_out", "router", "experts")),
    ),
    "squared_relu": (("mlp", "relu2"),),
    "values_from_keys": (("values_from_keys", True), ("value_norm", True), ("qk_norm", True), ("bias", ("qkv",))),
    "mlp_and_experts": (
        ("feed_forward", "mlp_and_experts"), ("num_experts", 8), ("experts_per_token", 2), ("dense_d_ff", 8),
        ("expert_scales", True), ("post_norms", True), ("mlp", "geglu"),
    ),
    "norms_without_weights": (("norm_weight", False), ("qk_norm", True)),
    "layer_norms_without_weights": (("norm", "layer"), ("norm_weight", False)),
    "inner_norms": (("inner_norms", True), ("mlp", "gated_relu2")),
    "layer_norm_of_queries": (("norm", "layer"), ("norm_bias", True), ("qk_norm", True)),
    "weights_of_each_head": (("norm", "layer"), ("qk_norm", True), ("qk_norm_over", "each_head"), ("parallel", True)),
    "bias_of_the_choice_of_experts": (
        ("num_experts", 8), ("experts_per_token", 2), ("choice_bias", True),
        ("numerics", Numerics(gating=Gating(scores=SIGMOID, scale=2.5))),
    ),
    "narrow_values": (("v_head_dim", 4), ("sinks", True)),
    "softplus_gate": (("attention_gate", "element"), ("attention_gate_function", "softplus"), ("bias", ("attention_gate",))),
    "trained_activation": (("mlp", "xielu"),),
    "norms_of_one_half": (("pre_norms_over", "feed_forward"), ("post_norms", True), ("post_norms_over", "mixer")),
    "norms_of_the_stream": (("pre_norms", False), ("stream_norms", "before")),
    "norms_behind_sums": (
        ("pre_norms", False), ("stream_norms", "behind"), ("final_norm", False), ("norm", "layer"), ("norm_bias", True),
        ("embedding_norm", True), ("mlp", "gelu"), ("bias", ("qkv", "attention_out", "mlp")),
    ),
    "layer_of_the_head": (("head_layer", True), ("tied_embeddings", True)),
    "differential_attention": (("differential", True), ("v_head_dim", 16)),
    "gates_of_norms": (("norm_gate_rank", 4), ("norm_gates_over", "mixer")),
    "queries_of_two_latents": (
        *LATENT, ("q_lora_rank", 8), ("raw_query_latent", True), ("attention_gate", "element"), ("norm_gate_rank", 4),
    ),
    "norm_of_rotary_keys": (*LATENT, ("rope_head_dim", 8), ("head_dim", 11), ("rotary_key_norm", True)),
    "bias_of_the_head": (
        ("bias", ("mlp", "head")), ("mlp", "gelu"), ("parallel", True), ("norm", "layer"), ("vocab_size", 32),
    ),
}  # fmt: skip
WITH_EXPERTS = tuple(name for name, fields in STRUCTURES.items() if "num_experts" in dict(fields))
