"""Readers of recurrent mixers and short convolutions from a config, by the names that families' tables give them.

Each returns the fields of a `RecurrentMixer`. Sources: the configuration and modelling code of each family in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.model.huggingface.field_readers import (
    FieldReader,
    TrackedConfig,
    read_d_model,
    read_first,
    read_flag,
    read_optional,
)

MixerFields = dict[str, Any]


def _read_gated_delta(config: TrackedConfig) -> MixerFields:
    return {
        "kind": "gated_delta", "num_heads": read_first("linear_num_value_heads")(config),
        "num_groups": read_first("linear_num_key_heads")(config), "key_dim": read_first("linear_key_head_dim")(config),
        "head_dim": read_first("linear_value_head_dim")(config), "conv_width": read_first("linear_conv_kernel_dim")(config),
    }  # fmt: skip


def _read_gated_delta_with_gate(config: TrackedConfig) -> MixerFields:
    return {**_read_gated_delta(config), "joined": "with_gate"}


def _read_separate_gated_delta(config: TrackedConfig) -> MixerFields:
    return {**_read_gated_delta(config), "joined": "none"}


def _read_kimi_delta(config: TrackedConfig) -> MixerFields:
    heads, width = read_first("linear_num_heads")(config), read_first("linear_head_dim")(config)
    return {
        "kind": "kimi_delta", "num_heads": heads, "num_groups": heads, "key_dim": width, "head_dim": width, "gate_rank": width,
        "conv_width": read_first("linear_conv_kernel_dim")(config),
    }  # fmt: skip


def _read_bailing_delta(config: TrackedConfig) -> MixerFields:
    heads = read_first("linear_num_heads", "num_attention_heads")(config)
    width = read_first("linear_head_dim")(config)
    return {
        "kind": "kimi_delta", "num_heads": heads, "num_groups": heads, "key_dim": width, "head_dim": width,
        "conv_width": read_first("linear_conv_kernel_dim", "short_conv_kernel_size")(config), "full_rank_gates": True,
        "bounded_decay": read_flag("kda_safe_gate", True)(config),
    }  # fmt: skip


def _read_lightning(config: TrackedConfig) -> MixerFields:
    heads, width = read_first("num_attention_heads")(config), config.first("head_dim")
    width = read_d_model(config) // heads if width is None else width
    return {
        "kind": "lightning", "num_heads": heads, "num_groups": heads, "key_dim": width, "head_dim": width, "conv_width": 1,
        "chunk": read_first("block_size")(config),
    }  # fmt: skip


def _read_mlstm(config: TrackedConfig) -> MixerFields:
    heads, width = read_first("num_heads")(config), read_d_model(config)
    key_width, value_width = (int(width * read_optional(default, key)(config)) for key, default in (
        ("qk_dim_factor", 0.5), ("v_dim_factor", 1.0)
    ))  # fmt: skip
    if key_width % heads or value_width % heads:
        raise ValueError(f"widths of {key_width} and {value_width} do not divide over {heads} heads")
    return {
        "kind": "mlstm", "num_heads": heads, "num_groups": heads, "key_dim": key_width // heads, "head_dim": value_width // heads,
        "conv_width": 1, "chunk": read_first("chunk_size")(config),
    }  # fmt: skip


# Keys of Mamba-2's sizes: those of Bamba and Granite 4, of Nemotron-H, of Mamba-2's own models.
MAMBA2_KEYS: Mapping[str, tuple[str, ...]] = {
    "num_heads": ("mamba_n_heads", "mamba_num_heads", "num_heads"), "head_dim": ("mamba_d_head", "mamba_head_dim", "head_dim"),
    "num_groups": ("mamba_n_groups", "n_groups"), "key_dim": ("mamba_d_state", "ssm_state_size", "state_size"),
    "conv_width": ("mamba_d_conv", "conv_kernel"), "chunk": ("mamba_chunk_size", "chunk_size"),
}  # fmt: skip


def _read_mamba2(config: TrackedConfig) -> MixerFields:
    sizes = {name: read_first(*keys)(config) for name, keys in MAMBA2_KEYS.items()}
    has_bias = read_flag("mamba_conv_bias", True)(config) and read_flag("use_conv_bias", True)(config)
    in_projections = read_flag("mamba_proj_bias", False)(config) or read_flag("use_bias", False)(config)
    return {"kind": "mamba2", **sizes, "norm": "after_gate", "conv_bias": has_bias, "projection_bias": in_projections}


def _read_expanded_mamba2(config: TrackedConfig) -> MixerFields:
    """Return Mamba-2's sizes, whose heads make up a stated multiple of the model's width."""
    mixer = _read_mamba2(config)
    width, expand = read_d_model(config), read_optional(2, "mamba_expand", "expand")(config)
    if mixer["num_heads"] * mixer["head_dim"] != int(expand * width):
        raise ValueError(
            f"{mixer['num_heads']} heads of width {mixer['head_dim']} are not {expand} times a width of {width}"
        )
    return mixer


def _read_falcon_mamba2(config: TrackedConfig) -> MixerFields:
    mixer = _read_mamba2(config)
    width = config.first("mamba_d_ssm")
    if width is not None and mixer["num_heads"] * mixer["head_dim"] != width:
        raise ValueError(
            f"mamba_d_ssm is {width}; {mixer['num_heads']} heads of width {mixer['head_dim']} are known here"
        )
    order = "before_gate" if read_flag("mamba_norm_before_gate", True)(config) else "after_gate"
    return {**mixer, "norm": order if read_flag("mamba_rms_norm", False)(config) else "none"}


def _read_mamba1(config: TrackedConfig) -> MixerFields:
    expand = read_optional(2, "mamba_expand", "expand")(config)
    rank = config.first("mamba_dt_rank", "time_step_rank")
    width = read_d_model(config)
    return {
        "kind": "mamba1", "num_heads": int(expand * width), "key_dim": read_first("mamba_d_state", "state_size")(config),
        "gate_rank": -(-width // 16) if rank in (None, "auto") else rank,
        "conv_width": read_first("mamba_d_conv", "conv_kernel")(config),
        "conv_bias": read_flag("mamba_conv_bias", True)(config) and read_flag("use_conv_bias", True)(config),
        "projection_bias": read_flag("mamba_proj_bias", False)(config) or read_flag("use_bias", False)(config), "norm": "none",
    }  # fmt: skip


def _read_pure_mamba(config: TrackedConfig) -> MixerFields:
    """Return the sizes of Mamba's own models, whose config has the number of channels in a key beside its factor."""
    mixer, stated = _read_mamba1(config), config.first("intermediate_size")
    if stated not in (None, mixer["num_heads"]):
        raise ValueError(
            f"intermediate_size is {stated!r}; {mixer['num_heads']}, its factor times the width, is required"
        )
    return mixer


def _read_jamba(config: TrackedConfig) -> MixerFields:
    return {**_read_mamba1(config), "step_norms": True}


def _read_rg_lru(config: TrackedConfig) -> MixerFields:
    blocks, width = read_first("num_attention_heads")(config), read_optional(None, "lru_width")(config)
    width = read_d_model(config) if width is None else width
    if width % blocks:
        raise ValueError(f"a width of {width} does not divide over {blocks} blocks")
    return {
        "kind": "rg_lru", "num_heads": blocks, "key_dim": width // blocks, "head_dim": width // blocks,
        "conv_width": read_first("conv1d_width")(config), "norm": "none", "conv_bias": True, "projection_bias": True,
    }  # fmt: skip


def _read_short_conv(config: TrackedConfig) -> MixerFields:
    return {
        "kind": "short_conv", "num_heads": read_d_model(config), "conv_width": read_first("conv_L_cache")(config), "norm": "none",
        "conv_bias": read_flag("conv_bias", False)(config), "projection_bias": read_flag("conv_bias", False)(config),
    }  # fmt: skip


RECURRENCE_READERS: Mapping[str, FieldReader] = {
    "gated_delta": _read_gated_delta, "gated_delta_with_gate": _read_gated_delta_with_gate,
    "separate_gated_delta": _read_separate_gated_delta, "kimi_delta": _read_kimi_delta, "bailing_delta": _read_bailing_delta,
    "lightning": _read_lightning, "mlstm": _read_mlstm, "mamba2": _read_mamba2,
    "expanded_mamba2": _read_expanded_mamba2, "falcon_mamba2": _read_falcon_mamba2, "mamba1": _read_mamba1,
    "pure_mamba": _read_pure_mamba, "jamba": _read_jamba, "rg_lru": _read_rg_lru, "short_conv": _read_short_conv,
}  # fmt: skip
