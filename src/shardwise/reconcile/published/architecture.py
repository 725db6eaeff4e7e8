"""From a row's sizes to an `Architecture`. What has no column (norms, biases, positions) goes by the model's family."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.model.architecture import GATED, Architecture
from shardwise.reconcile.published.facts import Facts, SkippedRow

MOST_LAYERS = 10_000  # far above any model; stages are counted one by one
EVERYWHERE = ("qkv", "attention_out", "mlp")
# By what the model's name says; the first that fits. Sources: the models' reports and the modelling code of transformers.
# These choices move parameters and bytes by less than a percent.
STRUCTURES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (r"\bmpt", {"mlp": "gelu", "norm": "layer", "positions": "none"}),  # ALiBi, no bias
    (r"bloom", {"mlp": "gelu", "norm": "layer", "norm_bias": True, "positions": "none", "bias": EVERYWHERE}),  # ALiBi
    (r"nemotron", {"mlp": "relu", "norm": "layer", "norm_bias": True}),  # squared ReLU
    (r"gemma", {"mlp": "geglu", "post_norms": True, "qk_norm": True}),
    (r"qwen-?3", {"qk_norm": True}),
    (r"qwen-?2", {"bias": ("qkv",)}),
    (
        r"gpt[ _-]?oss",
        {"mlp": "clamped_swiglu", "sinks": True, "bias": ("qkv", "attention_out", "router", "experts")},
    ),
)
GPT = {"mlp": "gelu", "norm": "layer", "norm_bias": True, "bias": EVERYWHERE}  # GPT-2's block, and learned positions


def architecture_of(facts: Facts) -> Architecture:
    """The model of a row. Raises `SkippedRow` when a size is not stated, `InputError` when sizes do not go together."""
    what = "architecture"
    layers, heads, d_model = (facts.needed(c, what) for c in ("layers", "n_heads", "d_model"))
    if layers > MOST_LAYERS:
        raise SkippedRow("no number of layers", f"{layers}; at most {MOST_LAYERS:,} are planned for")
    values: dict[str, Any] = {
        "name": facts.text("model") or "model", "num_layers": layers, "d_model": d_model, "num_heads": heads,
        "num_kv_heads": facts.size("n_kv_heads") or heads, "head_dim": facts.size("head_dim") or max(d_model // heads, 1),
        "vocab_size": facts.needed("vocab", what), "tied_embeddings": bool(facts.flag("tied_embeddings")),
    }  # fmt: skip
    values |= _experts(facts, layers) if facts.count("n_experts") else {"d_ff": facts.needed("d_ff", what)}
    values |= _latent(facts) if facts.count("mla_kv_lora") else {}
    values |= _windows(facts, layers) | _structure(facts)
    if "w/ mtp" in values["name"].lower():
        values["num_predict_layers"] = 1  # as in DeepSeek-V3's report
    return Architecture(**values)


def _structure(facts: Facts) -> dict[str, Any]:
    name, gated = facts.text("model").lower(), facts.flag("gated_mlp")
    if gated is None:
        raise SkippedRow("architecture not stated", "gated_mlp")
    for pattern, found in STRUCTURES:
        if re.search(pattern, name) and (found.get("mlp", "swiglu") in GATED) == gated:
            return dict(found)
    if gated:
        return {}
    return {**GPT, "positions": "learned", "max_positions": facts.needed("seq_len", "sequence length")}


def _experts(facts: Facts, layers: int) -> dict[str, Any]:
    """Experts of width `moe_d_ff`, shared ones side by side, dense layers in front.

    Where experts alternate with dense layers (`moe_every` = 2) the dense ones lead too: the same work, but on a pipeline
    other stages have it.
    """
    width = facts.size("moe_d_ff") or facts.needed("d_ff", "architecture")
    shared = facts.count("shared_expert_d_ff") or (facts.count("n_shared_experts") or 0) * width
    every = facts.size("moe_every") or 1
    dense = facts.count("n_dense_layers")
    dense = layers - layers // every if dense is None else dense
    return {
        "d_ff": width, "num_experts": facts.needed("n_experts", "architecture"),
        "experts_per_token": facts.needed("top_k", "architecture"), "shared_expert_width": shared,
        "num_dense_layers": dense, "dense_d_ff": facts.needed("d_ff", "architecture") if dense else 0,
    }  # fmt: skip


def _latent(facts: Facts) -> dict[str, Any]:
    """Multi-head latent attention: a key has its own part and the rotary one, and every head has a key."""
    rope = facts.needed("mla_qk_rope", "architecture")
    return {
        "kv_lora_rank": facts.needed("mla_kv_lora", "architecture"), "q_lora_rank": facts.count("mla_q_lora") or 0,
        "rope_head_dim": rope, "v_head_dim": facts.needed("mla_v_dim", "architecture"),
        "head_dim": facts.needed("mla_qk_nope", "architecture") + rope,
        "num_kv_heads": facts.needed("n_heads", "architecture"),
    }  # fmt: skip


def _windows(facts: Facts, layers: int) -> dict[str, Any]:
    """A window on `window_layers` of the layers: on all but every n-th."""
    window = facts.count("window")
    if not window:
        return {}
    windowed = facts.count("window_layers")
    if windowed is None or windowed == layers:
        return {"sliding_window": window}
    whole = layers - windowed
    every = layers // (whole + 1) + 1  # the least n of which layers // n is no more
    if 0 < whole < layers and layers // every == whole:
        return {"sliding_window": window, "global_every": every}
    raise SkippedRow("windows on other layers than all but every n-th", f"{windowed} of {layers}")
