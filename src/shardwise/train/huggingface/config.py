"""A model's config.json: what the planner reads of it, and what its arithmetic needs besides; and such a file written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import InputError, require
from shardwise.model.architecture import Architecture
from shardwise.model.huggingface import parse_config
from shardwise.model.numerics import Numerics
from shardwise.train.huggingface.names import FAMILIES, StoredFamily
from shardwise.train.huggingface.rotary import FULL, SLIDING, read_rotaries, write_rotaries

ACTIVATIONS: Mapping[str, tuple[str, ...]] = {  # what `transformers` calls them; the first is what is written
    "swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",),
}  # fmt: skip
REFUSED = ("use_bidirectional_attention", "quantization_config")  # what would change the values of our models


def read_config(config: Mapping[str, Any], *, name: str = "model") -> tuple[Architecture, Numerics, StoredFamily]:
    """Architecture and constants of a config, and its family. Raises `InputError` that says what is not known."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise InputError(
            f"model: weights of model_type {config.get('model_type')!r} cannot be read; one of {', '.join(FAMILIES)} is required"
        )
    architecture = parse_config(config, name=name)
    require(list(_problems(config, architecture, family)))
    return architecture, _numerics(config, architecture, family), family


def _problems(config: Mapping[str, Any], architecture: Architecture, family: StoredFamily) -> Iterator[str]:
    yield from (f"model: the config sets {key}, which is not known here" for key in REFUSED if config.get(key))
    known, found = ACTIVATIONS[architecture.mlp], config.get(family.activation)
    if found not in (None, *known):
        yield f"model: {family.activation} is {found!r}; {' or '.join(known)} is required"
    if config.get("rms_norm_eps") is None:
        yield "model: the config lacks rms_norm_eps"
    kinds, mixed = config.get("layer_types"), bool(architecture.sliding_window and architecture.global_every)
    if mixed and not family.layer_types:
        yield "model: layers with and without a sliding window; this family has one kind of layer"
    elif mixed and kinds and kinds != _layer_types(architecture):
        yield f"model: layer_types is {kinds}; full_attention on every {architecture.global_every}-th layer is required"


def _layer_types(architecture: Architecture) -> list[str]:
    return [SLIDING if architecture.window(layer) else FULL for layer in range(architecture.num_layers)]


def _numerics(config: Mapping[str, Any], architecture: Architecture, family: StoredFamily) -> Numerics:
    rotary, local = read_rotaries(config, family)
    scalar = config.get("query_pre_attn_scalar") if family.scaled_scores else None
    return Numerics(
        norm_epsilon=config["rms_norm_eps"], norm_offset=float(family.gemma), rotary=rotary, local_rotary=local,
        embedding_scale=math.sqrt(architecture.d_model) if family.gemma else 1.0,
        attention_scale=None if scalar in (None, architecture.head_dim) else scalar**-0.5,
        attention_cap=config.get("attn_logit_softcapping") if family.scaled_scores else None,
        logit_cap=config.get("final_logit_softcapping") if family.scaled_scores else None,
        normalised_gates=bool(config.get(family.gates, False)) if family.gates else True,
    )  # fmt: skip


def write_config(
    architecture: Architecture, numerics: Numerics, seq_len: int, model_type: str = ""
) -> tuple[dict[str, Any], StoredFamily]:
    """The config of the first family (or of the one named) that such a model is of: read again, it says the same.

    Raises `InputError` where no family has what the model has.
    """
    for kind in (model_type,) if model_type else FAMILIES:
        config = _draft(architecture, numerics, seq_len, kind)
        try:
            read, constants, family = read_config(config)
        except InputError:
            continue
        same = replace(
            read, name=architecture.name, source=architecture.source, nominal_num_params=architecture.nominal_num_params
        )
        if (same, constants) == (architecture, numerics):
            return config, family
    raise InputError(
        f"model {architecture.name}: none of {model_type or ', '.join(FAMILIES)} has what it has, so that it cannot be written "
        "as a model of transformers"
    )


def _draft(architecture: Architecture, numerics: Numerics, seq_len: int, kind: str) -> dict[str, Any]:
    """What a config of this family would say of the model, as far as the family has words for it."""
    if kind not in FAMILIES:
        raise InputError(f"model: found model_type {kind!r}; one of {', '.join(FAMILIES)} is required")
    family, qkv = FAMILIES[kind], "qkv" in architecture.bias
    config: dict[str, Any] = {
        "architectures": [family.built_as], "model_type": kind, "hidden_size": architecture.d_model,
        "num_hidden_layers": architecture.num_layers, "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads, "head_dim": architecture.head_dim,
        "intermediate_size": architecture.d_ff, "vocab_size": architecture.vocab_size,
        "max_position_embeddings": seq_len, "rms_norm_eps": numerics.norm_epsilon,
        "tie_word_embeddings": architecture.tied_embeddings, family.activation: ACTIVATIONS.get(architecture.mlp, ("",))[0],
        "attention_bias": qkv, "qkv_bias": qkv, "mlp_bias": "mlp" in architecture.bias,
        "sliding_window": architecture.sliding_window,
        "rope_parameters": write_rotaries(numerics.rotary, numerics.local_rotary, family),
    }  # fmt: skip
    if family.layer_types:
        config["layer_types"] = _layer_types(architecture)
    if family.scaled_scores:
        scale = numerics.attention_scale
        config |= {
            "query_pre_attn_scalar": architecture.head_dim if scale is None else round(scale**-2),
            "attn_logit_softcapping": numerics.attention_cap, "final_logit_softcapping": numerics.logit_cap,
        }  # fmt: skip
    number, width = family.experts
    if number:
        config |= {
            number: architecture.num_experts, "num_experts_per_tok": architecture.experts_per_token,
            width: architecture.d_ff, "norm_topk_prob": numerics.normalised_gates, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "shared_expert_intermediate_size": architecture.shared_expert_width,
        }  # fmt: skip
    return config
