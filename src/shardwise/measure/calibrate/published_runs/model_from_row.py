"""From a row's sizes to an `Architecture`. What has no column (norms, biases, positions) goes by the model's family.

Sizes that sources leave out are filled where others settle them:

- layers of a dense model: as many as the parameters in its name ask for; of the published names that have both, BLOOM's
  sizing, which is where it is needed, gives the number exactly for 107 of 131
- query heads: those of which the width is closest to 128, of numbers that tp and the model's width allow
- vocabulary of a GPT-3: 51,200, that of GPT-2's tokenizer padded as Megatron does, as all others of Megatron, NeMo, Pax and
  MaxText have it
- adapters (LoRA): of rank 8, on queries, keys and values alone, as NeMo's and Megatron Bridge's recipes for these
  benchmarks have them (`peft.dim = 8`, `peft.target_modules = ["linear_qkv"]`)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow
from shardwise.model.architecture import IS_GATED, Architecture

MOST_LAYERS = 10_000  # far above any model; stages are counted one by one
MOST_WIDTH = 10**6  # likewise; numbers of heads are tried one by one
HEAD_WIDTH, GPT3_VOCABULARY = 128, 51_200
LORA = {"lora_rank": 8, "lora_targets": ("qkv",)}
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


def read_architecture(facts: RowCells) -> Architecture:
    """The model of a row. Raises `SkippedRow` when a size is not stated, `InputError` when sizes do not go together."""
    what = "architecture"
    d_model = facts.require_size("d_model", what)
    heads, vocab = _heads(facts, d_model), _vocabulary(facts)
    layers = facts.size("layers") or _layers_by_name(facts, d_model, vocab)
    if layers > MOST_LAYERS:
        raise SkippedRow("no number of layers", f"{layers}; at most {MOST_LAYERS:,} are planned for")
    values: dict[str, Any] = {
        "name": facts.text("model") or "model", "num_layers": layers, "d_model": d_model, "num_heads": heads,
        "num_kv_heads": facts.size("n_kv_heads") or heads, "head_dim": facts.size("head_dim") or max(d_model // heads, 1),
        "vocab_size": vocab, "tied_embeddings": bool(facts.flag("tied_embeddings")),
    }  # fmt: skip
    values |= _experts(facts, layers) if facts.count("n_experts") else {"d_ff": facts.require_size("d_ff", what)}
    values |= _latent(facts) if facts.count("mla_kv_lora") else {}
    values |= _windows(facts, layers) | _structure(facts)
    if facts.text("task").lower() == "lora":
        values |= LORA
    if "w/ mtp" in values["name"].lower():
        values["num_predict_layers"] = 1  # as in DeepSeek-V3's report
    return Architecture(**values)


def _vocabulary(facts: RowCells) -> int:
    gpt3 = re.search(r"gpt-?3", facts.text("model").lower())
    return facts.size("vocab") or (GPT3_VOCABULARY if gpt3 else facts.require_size("vocab", "architecture"))


def _heads(facts: RowCells, d_model: int) -> int:
    """Query heads as stated, or else those of the usual width; a width that no number of heads has skips the row."""
    stated, tp = facts.size("n_heads"), facts.size("tp") or 1
    if stated or d_model > MOST_WIDTH:
        return stated or facts.require_size("n_heads", "architecture")
    possible = [n for n in range(tp, d_model + 1, tp) if d_model % n == 0]
    if not possible:
        return facts.require_size("n_heads", "architecture")
    return min(possible, key=lambda n: abs(d_model // n - HEAD_WIDTH))


def _layers_by_name(facts: RowCells, d_model: int, vocab: int) -> int:
    """Layers of a dense model with as many key heads as query heads, of the parameters in its name: 183B."""
    named = re.search(r"\b(\d{1,4}(?:\.\d{1,3})?)b\b", facts.text("model").lower())
    if not named or facts.count("n_experts") or (facts.size("n_kv_heads") or 0) != (facts.size("n_heads") or 0):
        return facts.require_size("layers", "architecture")
    matrices = 3 if facts.flag("gated_mlp") else 2
    layer = 4 * d_model**2 + matrices * d_model * facts.require_size("d_ff", "architecture")
    ends = (1 if facts.flag("tied_embeddings") else 2) * vocab * d_model
    return max(round((float(named[1]) * 1e9 - ends) / layer), 1)


def _structure(facts: RowCells) -> dict[str, Any]:
    name, gated = facts.text("model").lower(), facts.flag("gated_mlp")
    if gated is None:
        raise SkippedRow("architecture not stated", "gated_mlp")
    for pattern, found in STRUCTURES:
        if re.search(pattern, name) and IS_GATED[found.get("mlp", "swiglu")] == gated:
            return dict(found)
    if gated:
        return {}
    return {**GPT, "positions": "learned", "max_positions": facts.require_size("seq_len", "sequence length")}


def _experts(facts: RowCells, layers: int) -> dict[str, Any]:
    """Experts of width `moe_d_ff`, shared ones side by side, dense layers in front.

    Where experts alternate with dense layers (`moe_every` = 2) the dense ones lead too: the same work, but on a pipeline
    other stages have it.
    """
    width = facts.size("moe_d_ff") or facts.require_size("d_ff", "architecture")
    shared = facts.count("shared_expert_d_ff") or (facts.count("n_shared_experts") or 0) * width
    every = facts.size("moe_every") or 1
    dense = facts.count("n_dense_layers")
    dense = layers - layers // every if dense is None else dense
    return {
        "d_ff": width, "num_experts": facts.require_size("n_experts", "architecture"),
        "experts_per_token": facts.require_size("top_k", "architecture"), "shared_expert_width": shared,
        "num_dense_layers": dense, "dense_d_ff": facts.require_size("d_ff", "architecture") if dense else 0,
    }  # fmt: skip


def _latent(facts: RowCells) -> dict[str, Any]:
    """Multi-head latent attention: a key has its own part and the rotary one, and every head has a key."""
    rope = facts.require_size("mla_qk_rope", "architecture")
    return {
        "kv_lora_rank": facts.require_size("mla_kv_lora", "architecture"), "q_lora_rank": facts.count("mla_q_lora") or 0,
        "rope_head_dim": rope, "v_head_dim": facts.require_size("mla_v_dim", "architecture"),
        "head_dim": facts.require_size("mla_qk_nope", "architecture") + rope,
        "num_kv_heads": facts.require_size("n_heads", "architecture"),
    }  # fmt: skip


def _windows(facts: RowCells, layers: int) -> dict[str, Any]:
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
