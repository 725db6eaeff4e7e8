"""A model's config.json: the family that it is of, and whether its weights can be read; and such a file written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.errors import InputError, require
from shardwise.model.architecture import Architecture
from shardwise.model.families import FAMILIES as RULES
from shardwise.model.huggingface import parse_config
from shardwise.model.numerics_reader import ACTIVATIONS
from shardwise.model.rotary_reader import FULL, SLIDING
from shardwise.planning.runnable import rotary_problem
from shardwise.train.huggingface.names import FAMILIES, StoredFamily
from shardwise.train.huggingface.rotary import write_rotaries


def read_config(config: Mapping[str, Any], *, name: str = "model") -> tuple[Architecture, StoredFamily]:
    """The architecture of a config, its numerics with it, and its family. Raises `InputError` that says what is not known."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        raise InputError(
            f"model: weights of model_type {config.get('model_type')!r} cannot be read; one of {', '.join(FAMILIES)} is required"
        )
    config = {**family.silent, **config}
    architecture = parse_config(config, name=name)
    require(list(_problems(config, architecture, family)))
    return architecture, replace(family, side_by_side=bool(config.get("rope_interleave")))


def _problems(config: Mapping[str, Any], architecture: Architecture, family: StoredFamily) -> Iterator[str]:
    yield from (f"model: the config sets {what}, which is not known here" for what in architecture.numerics.unread)
    yield from (f"model: {problem}" for problem in filter(None, [rotary_problem(architecture)]))
    for key, value in family.needed.items():
        if config.get(key, value) != value:
            yield f"model: the config has {key} = {config[key]!r}; {value!r}, which this family's code has in places, is required"
    kinds, mixed = config.get("layer_types"), bool(architecture.sliding_window and architecture.global_every)
    if mixed and not family.layer_types:
        yield "model: layers with and without a sliding window; this family has one kind of layer"
    elif mixed and kinds and kinds != _layer_types(architecture):
        yield f"model: layer_types is {kinds}; full_attention on every {architecture.global_every}-th layer is required"


def _layer_types(architecture: Architecture) -> list[str]:
    return [SLIDING if architecture.window(layer) else FULL for layer in range(architecture.num_layers)]


def write_config(architecture: Architecture, seq_len: int, model_type: str = "") -> tuple[dict[str, Any], StoredFamily]:
    """The config of the first family (or of the one named) that such a model is of: read again, it says the same.

    Raises `InputError` where no family has what the model has.
    """
    for kind in (model_type,) if model_type else FAMILIES:
        config = _draft(architecture, seq_len, kind)
        try:
            read, family = read_config(config)
        except InputError:
            continue
        same = replace(
            read, name=architecture.name, source=architecture.source, nominal_num_params=architecture.nominal_num_params
        )
        if same == architecture:
            return config, family
    raise InputError(
        f"model {architecture.name}: none of {model_type or ', '.join(FAMILIES)} has what it has, so that it cannot be written "
        "as a model of transformers"
    )


def _draft(architecture: Architecture, seq_len: int, kind: str) -> dict[str, Any]:
    """The model in the terms of this family's configs, as far as the family has fields for it."""
    if kind not in FAMILIES:
        raise InputError(f"model: found model_type {kind!r}; one of {', '.join(FAMILIES)} is required")
    family, rule, numerics = FAMILIES[kind], RULES[kind].numerics, architecture.numerics
    qkv = "qkv" in architecture.bias
    config: dict[str, Any] = {
        "architectures": [family.built_as], "model_type": kind, "hidden_size": architecture.d_model,
        "num_hidden_layers": architecture.num_layers, "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads, "head_dim": architecture.head_dim,
        "intermediate_size": architecture.dense_d_ff or architecture.d_ff, "vocab_size": architecture.vocab_size,
        "max_position_embeddings": seq_len, "rms_norm_eps": numerics.norm_epsilon,
        "tie_word_embeddings": architecture.tied_embeddings, family.activation: ACTIVATIONS.get(architecture.mlp, ("",))[0],
        "attention_bias": qkv, "qkv_bias": qkv, "mlp_bias": "mlp" in architecture.bias,
        "sliding_window": architecture.sliding_window,
        **({"rope_parameters": write_rotaries(numerics, rule.rotary, architecture.head_dim)} if rule.rotary else {}),
    }  # fmt: skip
    if architecture.num_predict_layers:
        config["num_nextn_predict_layers"] = architecture.num_predict_layers
    if family.layer_types:
        config["layer_types"] = _layer_types(architecture)
    if rule.scaled_scores:
        scale = numerics.attention_scale
        config |= {
            "query_pre_attn_scalar": architecture.head_dim if scale is None else round(scale**-2),
            "attn_logit_softcapping": numerics.attention_cap, "final_logit_softcapping": numerics.logit_cap,
        }  # fmt: skip
    if architecture.kv_lora_rank:
        config |= _latent(architecture)
    if family.experts[0]:
        config |= _experts(architecture, family) | (_router(architecture) if rule.router else _everywhere(architecture))
    return config


def _experts(architecture: Architecture, family: StoredFamily) -> dict[str, Any]:
    number, width = family.experts
    return {
        number: architecture.num_experts, "num_experts_per_tok": architecture.experts_per_token, width: architecture.d_ff,
        "norm_topk_prob": architecture.numerics.normalised_gates,
    }  # fmt: skip


def _latent(architecture: Architecture) -> dict[str, Any]:
    """Fields of latent attention; a head's width is there that of its rotary part.

    Pairs that turn together lie side by side, as in the files of DeepSeek-V3, whose own code knows no other order.
    """
    return {
        "q_lora_rank": architecture.q_lora_rank or None, "kv_lora_rank": architecture.kv_lora_rank,
        "qk_rope_head_dim": architecture.rope_head_dim, "head_dim": architecture.rope_head_dim,
        "qk_nope_head_dim": architecture.head_dim - architecture.rope_head_dim, "v_head_dim": architecture.v_head_dim,
        "rope_interleave": True,
    }  # fmt: skip


def _everywhere(architecture: Architecture) -> dict[str, Any]:
    """Fields of experts on all layers."""
    return {
        "decoder_sparse_step": 1, "mlp_only_layers": [], "shared_expert_intermediate_size": architecture.shared_expert_width,
    }  # fmt: skip


def _router(architecture: Architecture) -> dict[str, Any]:
    """Fields of DeepSeek's router, of shared experts and of the dense layers before those with experts."""
    gating = architecture.numerics.gating
    return {
        "n_group": gating.groups, "topk_group": gating.chosen_groups, "routed_scaling_factor": gating.scale,
        "n_shared_experts": architecture.shared_expert_width // max(architecture.d_ff, 1),
        "first_k_dense_replace": architecture.num_dense_layers, "use_qk_norm": architecture.qk_norm,
        "num_nextn_predict_layers": architecture.num_predict_layers,
    }  # fmt: skip
