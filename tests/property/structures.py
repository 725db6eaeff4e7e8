"""Structures of dense decoders beyond the plain one: what a family of models adds, by the field that adds it."""

from __future__ import annotations

from typing import Any

Structure = tuple[tuple[str, Any], ...]

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
    "norms_and_bias": (("qk_norm", True), ("post_norms", True), ("bias", ("qkv",))),
}  # fmt: skip
