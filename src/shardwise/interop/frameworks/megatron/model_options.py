"""Megatron-LM's pretraining arguments for a model's sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.huggingface_hub_names import hub_model
from shardwise.interop.frameworks.megatron.rotary_options import read_rotary, write_rotary
from shardwise.interop.frameworks.megatron.weight_names import default_biases
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import OptionMapping, OptionReader, map_flag, map_names, map_required, map_value
from shardwise.interop.text_formats.option_tables import Options
from shardwise.model import SIGMOID, SWIGLU_CLAMP, Architecture
from shardwise.values import InputError
from shardwise.values.input_texts import parse_integer

# The options of each MLP. The clamp and the sigmoid's slope of 1.702 are those of gpt-oss (model/numerics.py).
ACTIVATIONS: Mapping[str, Options] = {
    "swiglu": {"swiglu": True},
    "clamped_swiglu": {"quick-geglu": True, "glu-linear-offset": 1.0, "activation-func-clamp-value": SWIGLU_CLAMP},
    "gelu": {},
}
_DENSE_FIRST = re.compile(r"^\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?$")


def _head_options(launch: Launch) -> Options:
    model = launch.model
    if model.kv_lora_rank or model.num_kv_heads == model.num_heads:
        return {}
    return {"group-query-attention": True, "num-query-groups": model.num_kv_heads}


def _read_heads(reader: OptionReader) -> Mapping[str, Any]:
    heads = reader.require("num-attention-heads")
    grouped = reader.get("group-query-attention", False)
    return {"model.num_kv_heads": reader.get("num-query-groups", 1) if grouped else heads}


def _head_dim_options(launch: Launch) -> Options:
    model = launch.model
    if model.kv_lora_rank:
        return {}
    return {} if model.head_dim * model.num_heads == model.d_model else {"kv-channels": model.head_dim}


def _read_head_and_latent_dims(reader: OptionReader) -> Mapping[str, Any]:
    if reader.get("multi-latent-attention", False):
        rotary = reader.get("qk-pos-emb-head-dim", 64)
        return {
            "model.kv_lora_rank": reader.get("kv-lora-rank", 32), "model.q_lora_rank": reader.get("q-lora-rank", 0),
            "model.rope_head_dim": rotary, "model.head_dim": reader.get("qk-head-dim", 128) + rotary,
            "model.v_head_dim": reader.get("v-head-dim", 128),
        }  # fmt: skip
    head_dim = reader.get("kv-channels") or reader.require("hidden-size") // reader.require("num-attention-heads")
    return {"model.head_dim": head_dim}


def _latent_options(launch: Launch) -> Options:
    model = launch.model
    if not model.kv_lora_rank:
        return {}
    queries = {"q-lora-rank": model.q_lora_rank} if model.q_lora_rank else {}
    return {
        "multi-latent-attention": True, **queries, "kv-lora-rank": model.kv_lora_rank,
        "qk-head-dim": model.head_dim - model.rope_head_dim, "qk-pos-emb-head-dim": model.rope_head_dim,
        "v-head-dim": model.v_head_dim,
    }  # fmt: skip


def _bias_options(launch: Launch) -> Options:
    bias = set(launch.model.bias)
    if bias == set(default_biases(bool(launch.model.num_experts), bool(launch.model.num_dense_layers))):
        return {}
    return {"disable-bias-linear": True, **({"add-qkv-bias": True} if bias == {"qkv"} else {})}


def _read_biases(reader: OptionReader) -> Mapping[str, Any]:
    added = ("qkv",) if reader.get("add-qkv-bias", False) else ()
    default = default_biases(bool(reader.get("num-experts")), bool(_DENSE_FIRST.match(_expert_layer_text(reader))))
    return {"model.bias": added if reader.get("disable-bias-linear", False) else default}


def _mlp_options(launch: Launch) -> Options:
    model = launch.model
    dense = model.dense_d_ff or model.d_ff
    experts = {"moe-ffn-hidden-size": model.d_ff} if model.num_experts else {}
    return {"ffn-hidden-size": dense, **experts, **_expert_layer_options(launch)}


def _expert_layer_options(launch: Launch) -> Options:
    dense, layers = launch.model.num_dense_layers, launch.model.num_layers
    return {"moe-layer-freq": f"([0]*{dense}+[1]*{layers - dense})"} if dense else {}


def _expert_layer_text(reader: OptionReader) -> str:
    return str(reader.get("moe-layer-freq", "1")).replace(" ", "")


def _read_mlp(reader: OptionReader) -> Mapping[str, Any]:
    width = reader.get("ffn-hidden-size") or _default_width(reader)
    frequency = _expert_layer_text(reader)
    launch_fields: dict[str, Any] = {"model.d_ff": width}
    if not reader.get("num-experts"):
        return launch_fields
    launch_fields["model.d_ff"] = reader.get("moe-ffn-hidden-size", width)
    match = _DENSE_FIRST.match(frequency)
    if match:
        return {**launch_fields, "model.num_dense_layers": parse_integer(match[1]), "model.dense_d_ff": width}
    if frequency != "1":
        raise InputError(
            f"moe-layer-freq: found {frequency!r}; 1 or ([0]*M+[1]*N), dense layers first, is what can be read"
        )
    return launch_fields


def _default_width(reader: OptionReader) -> int:
    """Return the width of an MLP without `ffn-hidden-size`. Source: validate_args (megatron/training/arguments.py, d98e8a64)."""
    hidden: int = reader.require("hidden-size")
    return int((4 * hidden * 2 / 3) / 64) * 64 if reader.get("swiglu", False) else 4 * hidden


def _activation_options(launch: Launch) -> Options:
    return ACTIVATIONS.get(launch.model.mlp, {})


def _read_activation(reader: OptionReader) -> Mapping[str, Any]:
    """Return the MLP whose options are set. Only which are set counts: other values of them keep the kind of gate."""
    options_by_mlp = {name: {key: reader.get(key) for key in options} for name, options in ACTIVATIONS.items()}
    mlp = next(name for name, settings in options_by_mlp.items() if any(settings.values()) or not settings)
    return {"model.mlp": mlp}


def _position_options(launch: Launch) -> Options:
    model = launch.model
    kind = {"rotary": "rope", "learned": "learned_absolute", "none": "none"}[model.positions]
    rows = max(model.max_positions or 0, launch.job.seq_len)
    return {"position-embedding-type": kind, "max-position-embeddings": rows}


def _read_position_kind(reader: OptionReader) -> Mapping[str, Any]:
    kinds = {"rope": "rotary", "yarn": "rotary", "learned_absolute": "learned", "none": "none"}
    kind = reader.get("position-embedding-type", "learned_absolute")
    kind = "rope" if reader.get("use-rotary-position-embeddings", False) else kind
    if kind not in kinds:
        raise InputError(f"position-embedding-type: found {kind!r}; one of {', '.join(kinds)} is what can be read")
    rows = reader.get("max-position-embeddings")
    return {"model.positions": kinds[kind], **({"model.max_positions": rows} if kinds[kind] == "learned" else {})}


def _norm_options(launch: Launch) -> Options:
    return {"normalization": {"rms": "RMSNorm", "layer": "LayerNorm"}[launch.model.norm]}


def _read_norm(reader: OptionReader) -> Mapping[str, Any]:
    layer = reader.get("normalization", "LayerNorm") == "LayerNorm"
    return {"model.norm": "layer" if layer else "rms", "model.norm_bias": layer}


def _mtp_options(launch: Launch) -> Options:
    return {"mtp-num-layers": launch.model.num_predict_layers} if launch.model.num_predict_layers else {}


def _window_options(launch: Launch) -> Options:
    model = launch.model
    if model.sliding_window is None:
        return {}
    every = {"window-attn-skip-freq": str(model.global_every)} if model.global_every else {}
    return {"window-size": f"{model.sliding_window - 1},0", **every}


def _read_window(reader: OptionReader) -> Mapping[str, Any]:
    window, every = reader.get("window-size"), reader.get("window-attn-skip-freq")
    if window is None:
        return {}
    size = parse_integer(str(window).strip("()").split(",")[0]) + 1
    return {"model.sliding_window": size, "model.global_every": int(every) if every is not None else 0}


def _balances_by_bias(model: Architecture) -> bool:
    """Return whether the router balances its experts by a bias on their scores: those of sigmoids do (DeepSeek-V3, 2.1.2)."""
    return bool(model.num_experts) and model.numerics.gating.scores == SIGMOID


def _read_expert_bias(reader: OptionReader) -> Mapping[str, Any]:
    """Return how many scores of a group count for it (megatron/core/transformer/moe/moe_utils.py, group_limited_topk)."""
    reader.acknowledge("moe-router-enable-expert-bias", "moe-router-bias-update-rate")
    groups, chosen = reader.get("moe-router-num-groups") or 1, reader.get("moe-router-group-topk")
    if groups == 1 or not chosen:
        return {}
    return {"numerics.gating.votes": max(reader.get("moe-router-topk", 2) // chosen, 1)}


def _query_key_norm_options(launch: Launch) -> Options:
    """Return the flag of norms of queries and keys; of latent attention those of its compressed vectors, which it always has."""
    return {"qk-layernorm": True} if launch.model.qk_norm or launch.model.kv_lora_rank else {}


def _read_query_key_norm(reader: OptionReader) -> Mapping[str, Any]:
    has_norm = bool(reader.get("qk-layernorm", False))
    if not reader.get("multi-latent-attention", False):
        return {"model.qk_norm": has_norm}
    if not has_norm:
        reader.notes.append(
            "latent attention without qk-layernorm has no norms of its compressed vectors; it is priced with them, some kilobytes"
        )
    return {"model.qk_norm": False}


# Tokens of a tokenizer that needs no file to tell. Sources: GPT-2's vocabulary (openai-community/gpt2, config.json); Llama 2's
# (meta-llama/Llama-2-7b-hf, config.json); DEFAULT_TIKTOKEN_MAX_VOCAB (megatron/core/tokenizers, d98e8a64).
TOKENIZER_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "TikTokenizer": 1 << 17}


def _read_vocabulary(reader: OptionReader) -> Mapping[str, Any]:
    """Return the vocabulary: `vocab-size`, or that of the tokenizer where its kind or its name on the hub tells it."""
    size, kind, name = (reader.get(option) for option in ("vocab-size", "tokenizer-type", "tokenizer-model"))
    if size is not None:
        return {"model.vocab_size": size + 1 if kind == "NullTokenizer" else size}  # and the end of a document
    if kind is None and "merge-file" in reader:
        kind = "GPT2BPETokenizer"
    hub = hub_model(name) if isinstance(name, str) else None
    size = TOKENIZER_VOCABULARIES.get(str(kind)) or (hub.vocab_size if hub else None)
    if size is None:
        return {"model.vocab_size": None}
    reader.notes.append(f"the vocabulary is that of the tokenizer, {name if hub else kind}: {size:,} tokens")
    return {"model.vocab_size": size}


MODEL_MAPPINGS: tuple[OptionMapping, ...] = (
    map_required("model.num_layers", "num-layers"),
    map_required("model.d_model", "hidden-size"),
    map_required("model.num_heads", "num-attention-heads"),
    OptionMapping(_head_options, _read_heads),
    OptionMapping(_head_dim_options, _read_head_and_latent_dims),
    OptionMapping(_latent_options, lambda reader: {}),
    OptionMapping(_mlp_options, _read_mlp),
    OptionMapping(_activation_options, _read_activation),
    OptionMapping(_bias_options, _read_biases),
    OptionMapping(_norm_options, _read_norm),
    map_value("numerics.norm_epsilon", "norm-epsilon", 1e-5),
    OptionMapping(
        lambda launch: {"apply-layernorm-1p": True} if launch.model.numerics.norm_offset == 1.0 else {},
        lambda reader: {"numerics.norm_offset": float(bool(reader.get("apply-layernorm-1p", False)))},
    ),
    OptionMapping(_position_options, _read_position_kind),
    OptionMapping(write_rotary, read_rotary),
    map_flag("model.tied_embeddings", "untie-embeddings-and-output-weights", inverted=True),
    OptionMapping(_query_key_norm_options, _read_query_key_norm),
    OptionMapping(lambda launch: {"vocab-size": launch.model.vocab_size}, _read_vocabulary),
    map_names("model.num_experts", "num-experts", None, 0),
    OptionMapping(
        lambda launch: {"moe-router-topk": launch.model.experts_per_token} if launch.model.num_experts else {},
        lambda reader: (
            {"model.experts_per_token": reader.get("moe-router-topk", 2)} if reader.get("num-experts") else {}
        ),
    ),
    map_value("model.shared_expert_width", "moe-shared-expert-intermediate-size", 0),
    map_flag("model.shared_gate", "moe-shared-expert-gate"),
    map_value("numerics.gating.scores", "moe-router-score-function", "softmax"),
    OptionMapping(
        lambda launch: {"moe-router-enable-expert-bias": True} if _balances_by_bias(launch.model) else {},
        _read_expert_bias,
    ),
    map_value("numerics.gating.groups", "moe-router-num-groups", 1),
    map_value("numerics.gating.chosen_groups", "moe-router-group-topk", 1),
    map_value("numerics.gating.scale", "moe-router-topk-scaling-factor", 1.0),
    map_flag("numerics.normalised_gates", "moe-router-pre-softmax", inverted=True),
    OptionMapping(_mtp_options, lambda reader: {"model.num_predict_layers": reader.get("mtp-num-layers") or 0}),
    map_names("model.sinks", "softmax-type", {False: "vanilla", True: "learnable"}, "vanilla"),
    OptionMapping(_window_options, _read_window),
)
