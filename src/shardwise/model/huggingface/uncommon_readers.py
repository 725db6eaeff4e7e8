"""Readers of fields that single families compute from several keys of their config, by the name that their table gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.model.huggingface.field_readers import (
    NUM_HEADS_KEYS,
    FieldReader,
    TrackedConfig,
    read_d_model,
    read_first,
    read_flag,
)


def _read_opt_width(config: TrackedConfig) -> Any:
    width, projected = read_d_model(config), config.first("word_embed_proj_dim")
    if projected not in (None, width):
        raise ValueError(f"word_embed_proj_dim is {projected!r}; a projection behind the embedding is not known here")
    return width


def _read_offset_positions(config: TrackedConfig) -> Any:
    """Return the rows of a table of positions that has two more rows than it has positions (OPT, BioGPT)."""
    rows = read_first("max_position_embeddings")(config)
    return rows + 2 if isinstance(rows, int) else rows


def _read_falcon_kv_heads(config: TrackedConfig) -> Any:
    if read_flag("new_decoder_architecture", False)(config):
        return read_first("num_kv_heads", "n_head_kv", *NUM_HEADS_KEYS)(config)
    return 1 if read_flag("multi_query", True)(config) else read_first(*NUM_HEADS_KEYS)(config)


def _is_falcon_parallel(config: TrackedConfig) -> bool:
    parallel, new = read_flag("parallel_attn", True)(config), read_flag("new_decoder_architecture", False)(config)
    if new and not parallel:
        raise ValueError("new_decoder_architecture with parallel_attn false is not known here")
    return bool(parallel)


def _has_falcon_separate_norms(config: TrackedConfig) -> bool:
    default = 2 if config.get("new_decoder_architecture") else 1
    norms = config.first("num_ln_in_parallel_attn") or default
    return _is_falcon_parallel(config) and norms == 2


def _read_falcon_positions(config: TrackedConfig) -> str:
    return "none" if read_flag("alibi", False)(config) else "rotary"


def _read_mpt_width(config: TrackedConfig) -> Any:
    """Return the model width. Checks MPT's own table of attention settings: only what its first models have is known."""
    supported = {"attn_type": "multihead_attention", "alibi": True, "qk_ln": False, "kv_n_heads": config.get("n_heads")}
    attn_config = config.get("attn_config") or {}
    wrong = [
        f"{k} = {attn_config[k]!r}"
        for k, v in supported.items()
        if attn_config.get(k) is not None and attn_config[k] != v
    ]
    if wrong or "alibi" not in attn_config:
        raise ValueError(f"attn_config has {', '.join(wrong) or 'no alibi'}; attention with ALiBi alone is known here")
    return read_d_model(config)


def _read_bigcode_kv_heads(config: TrackedConfig) -> Any:
    return 1 if read_flag("multi_query", True)(config) else read_first(*NUM_HEADS_KEYS)(config)


def _read_whole_head_dim(config: TrackedConfig) -> Any:
    """Return the width of heads that share the model's width without a rest."""
    width, heads = read_d_model(config), read_first(*NUM_HEADS_KEYS)(config)
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        if width % heads:
            raise ValueError(f"a width of {width} does not divide over {heads} heads")
        return width // heads
    return width  # not a number: the architecture refuses it


UNCOMMON_READERS: Mapping[str, FieldReader] = {
    "opt_width": _read_opt_width, "offset_positions": _read_offset_positions, "falcon_kv_heads": _read_falcon_kv_heads,
    "falcon_parallel": _is_falcon_parallel, "falcon_separate_norms": _has_falcon_separate_norms,
    "falcon_positions": _read_falcon_positions, "mpt_width": _read_mpt_width, "bigcode_kv_heads": _read_bigcode_kv_heads,
    "whole_head_dim": _read_whole_head_dim,
}  # fmt: skip
