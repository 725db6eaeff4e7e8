"""A row's sizes as an `Architecture`; norms, biases and positions, which have no column, follow the model's family.

Sizes that sources leave out are filled if others determine them:

- layers of a dense model: as many as the parameters in its name need; of the published names that have both, BLOOM's
  sizing, which is where it is needed, gives the number exactly for 107 of 131
- query heads: the number whose width is closest to 128, of those that tp and the model's width allow
- vocabulary of a GPT-3: 51,200, that of GPT-2's tokenizer padded as Megatron does, as all others of Megatron, NeMo, Pax
  and MaxText have it
- adapters (LoRA): of rank 8, on queries, keys and values alone, as NeMo's and Megatron Bridge's recipes for these
  benchmarks have them (`peft.dim = 8`, `peft.target_modules = ["linear_qkv"]`)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow
from shardwise.model import Architecture
from shardwise.model.architecture import IS_GATED

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
    (r"gpt[ _-]?oss", {"mlp": "clamped_swiglu", "sinks": True, "bias": ("qkv", "attention_out", "router", "experts")}),
)
GPT = {"mlp": "gelu", "norm": "layer", "norm_bias": True, "bias": EVERYWHERE}  # GPT-2's block, and learned positions


def read_architecture(cells: RowCells) -> Architecture:
    """Return the model of a row. Raises `SkippedRow` if a size is not stated, `InputError` if sizes contradict."""
    missing_text = "architecture"
    d_model = cells.require_size("d_model", missing_text)
    heads, vocab = _heads(cells, d_model), _vocabulary(cells)
    layers = cells.size("layers") or _layers_by_name(cells, d_model, vocab)
    if layers > MOST_LAYERS:
        raise SkippedRow("no number of layers", f"{layers}; at most {MOST_LAYERS:,} are planned for")
    values: dict[str, Any] = {
        "name": cells.text("model") or "model", "num_layers": layers, "d_model": d_model, "num_heads": heads,
        "num_kv_heads": cells.size("n_kv_heads") or heads,
        "head_dim": cells.size("head_dim") or max(d_model // heads, 1), "vocab_size": vocab,
        "tied_embeddings": bool(cells.flag("tied_embeddings")),
    }  # fmt: skip
    values |= (
        _experts(cells, layers) if cells.count("n_experts") else {"d_ff": cells.require_size("d_ff", missing_text)}
    )
    values |= _latent(cells) if cells.count("mla_kv_lora") else {}
    values |= _windows(cells, layers) | _structure(cells)
    if cells.text("task").lower() == "lora":
        values |= LORA
    if "w/ mtp" in values["name"].lower():
        values["num_predict_layers"] = 1  # as in DeepSeek-V3's report
    return Architecture(**values)


def _vocabulary(cells: RowCells) -> int:
    is_gpt3 = re.search(r"gpt-?3", cells.text("model").lower())
    return cells.size("vocab") or (GPT3_VOCABULARY if is_gpt3 else cells.require_size("vocab", "architecture"))


def _heads(cells: RowCells, d_model: int) -> int:
    """Return the query heads as stated, or those of the usual width. Raises `SkippedRow` if none divides."""
    stated, tp = cells.size("n_heads"), cells.size("tp") or 1
    if stated or d_model > MOST_WIDTH:
        return stated or cells.require_size("n_heads", "architecture")
    possible = [n for n in range(tp, d_model + 1, tp) if d_model % n == 0]
    if not possible:
        return cells.require_size("n_heads", "architecture")
    return min(possible, key=lambda n: abs(d_model // n - HEAD_WIDTH))


def _layers_by_name(cells: RowCells, d_model: int, vocab: int) -> int:
    """Return the layers of a dense model without grouped queries from the parameters in its name, such as 183B."""
    match = re.search(r"\b(\d{1,4}(?:\.\d{1,3})?)b\b", cells.text("model").lower())
    if not match or cells.count("n_experts") or (cells.size("n_kv_heads") or 0) != (cells.size("n_heads") or 0):
        return cells.require_size("layers", "architecture")
    num_matrices = 3 if cells.flag("gated_mlp") else 2
    layer_params = 4 * d_model**2 + num_matrices * d_model * cells.require_size("d_ff", "architecture")
    end_params = (1 if cells.flag("tied_embeddings") else 2) * vocab * d_model
    return max(round((float(match[1]) * 1e9 - end_params) / layer_params), 1)


def _structure(cells: RowCells) -> dict[str, Any]:
    name, gated = cells.text("model").lower(), cells.flag("gated_mlp")
    if gated is None:
        raise SkippedRow("architecture not stated", "gated_mlp")
    for pattern, structure in STRUCTURES:
        if re.search(pattern, name) and IS_GATED[structure.get("mlp", "swiglu")] == gated:
            return dict(structure)
    if gated:
        return {}
    return {**GPT, "positions": "learned", "max_positions": cells.require_size("seq_len", "sequence length")}


def _experts(cells: RowCells, layers: int) -> dict[str, Any]:
    """Return experts of width `moe_d_ff`, shared ones side by side, with the dense layers first.

    If experts alternate with dense layers (`moe_every` = 2) the dense ones come first too: the same work, but other
    pipeline stages do it.
    """
    width = cells.size("moe_d_ff") or cells.require_size("d_ff", "architecture")
    shared_width = cells.count("shared_expert_d_ff") or (cells.count("n_shared_experts") or 0) * width
    moe_every = cells.size("moe_every") or 1
    num_dense_layers = cells.count("n_dense_layers")
    num_dense_layers = layers - layers // moe_every if num_dense_layers is None else num_dense_layers
    return {
        "d_ff": width, "num_experts": cells.require_size("n_experts", "architecture"),
        "experts_per_token": cells.require_size("top_k", "architecture"), "shared_expert_width": shared_width,
        "num_dense_layers": num_dense_layers,
        "dense_d_ff": cells.require_size("d_ff", "architecture") if num_dense_layers else 0,
    }  # fmt: skip


def _latent(cells: RowCells) -> dict[str, Any]:
    """Return the sizes of multi-head latent attention: a key has its own part and the rotary one; each head has a key."""
    rope = cells.require_size("mla_qk_rope", "architecture")
    return {
        "kv_lora_rank": cells.require_size("mla_kv_lora", "architecture"),
        "q_lora_rank": cells.count("mla_q_lora") or 0, "rope_head_dim": rope,
        "v_head_dim": cells.require_size("mla_v_dim", "architecture"),
        "head_dim": cells.require_size("mla_qk_nope", "architecture") + rope,
        "num_kv_heads": cells.require_size("n_heads", "architecture"),
    }  # fmt: skip


def _windows(cells: RowCells, layers: int) -> dict[str, Any]:
    """Return a window on `window_layers` of the layers: on all but every n-th."""
    window = cells.count("window")
    if not window:
        return {}
    num_windowed = cells.count("window_layers")
    if num_windowed is None or num_windowed == layers:
        return {"sliding_window": window}
    num_global = layers - num_windowed
    global_every = layers // (num_global + 1) + 1  # the least n of which layers // n is no more
    if 0 < num_global < layers and layers // global_every == num_global:
        return {"sliding_window": window, "global_every": global_every}
    raise SkippedRow("windows on other layers than all but every n-th", f"{num_windowed} of {layers}")
