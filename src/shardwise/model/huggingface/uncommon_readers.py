"""Readers of fields that single families compute from several keys of their config, by the name that their table gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.model.huggingface.block_configs import read_first_heads, read_largest_width
from shardwise.model.huggingface.field_readers import (
    NUM_HEADS_KEYS,
    FieldReader,
    MissingKey,
    TrackedConfig,
    read_d_model,
    read_first,
    read_flag,
)
from shardwise.model.huggingface.key_sharing import (
    read_laurel_rank,
    read_layer_input_dim,
    read_layer_input_rows,
)
from shardwise.model.huggingface.layer_lists import DENSE, FULL, SLIDING, SPARSE, ListReader
from shardwise.model.huggingface.recent_readers import RECENT_LISTS, RECENT_READERS
from shardwise.model.huggingface.recurrence_readers import RECURRENCE_READERS
from shardwise.model.huggingface.shared_blocks import SHARED_BLOCK_READERS
from shardwise.model.huggingface.variant_readers import VARIANT_LISTS, VARIANT_READERS


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


def _read_lfm2_width(config: TrackedConfig) -> Any:
    """Return the width of LFM2's MLP: two thirds of what the config says, rounded up to a multiple, unless it says otherwise."""
    width = read_first("intermediate_size")(config)
    if not read_flag("block_auto_adjust_ff_dim", False)(config) or not isinstance(width, int):
        return width
    multiple = read_first("block_multiple_of")(config)
    factor = config.first("block_ffn_dim_multiplier")
    width = int(2 * width / 3)
    width = width if factor is None else int(factor * width)
    return -(-width // multiple) * multiple


def _read_head_gate(config: TrackedConfig) -> str:
    return "head" if read_flag("use_attention_gate", True)(config) else "none"


def _read_multiple_width(config: TrackedConfig) -> Any:
    return read_first("intermediate_multiple_size")(config) * read_d_model(config)


def _read_nemotron_shared_width(config: TrackedConfig) -> Any:
    return (config.first("n_shared_experts") or 0) * (config.first("moe_shared_expert_intermediate_size") or 0)


NEMOTRON_MARKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _read_listed_layers(config: TrackedConfig) -> Any:
    """Return the number of layers of a config that lists them: the list goes before a number."""
    listed = config.first("layers_block_type", "hybrid_override_pattern", "layer_types")
    return read_first("num_hidden_layers")(config) if listed is None else len(listed)


INDEXED_TYPES = frozenset({"indexed_attention", "deepseek_sparse_attention"})


def _read_indexed_topk(config: TrackedConfig) -> Any:
    """Return how many keys an indexer selects. Checks that all layers attend to selected keys."""
    kinds = config.get("layer_types") or []
    if not all(kind in INDEXED_TYPES for kind in kinds):
        raise ValueError(f"layer_types has other types than {' and '.join(sorted(INDEXED_TYPES))}")
    return read_first("index_topk")(config)


UNCOMMON_READERS: Mapping[str, FieldReader] = {
    "opt_width": _read_opt_width, "offset_positions": _read_offset_positions, "falcon_kv_heads": _read_falcon_kv_heads,
    "falcon_parallel": _is_falcon_parallel, "falcon_separate_norms": _has_falcon_separate_norms,
    "falcon_positions": _read_falcon_positions, "mpt_width": _read_mpt_width, "bigcode_kv_heads": _read_bigcode_kv_heads,
    "whole_head_dim": _read_whole_head_dim, "lfm2_width": _read_lfm2_width, "head_gate": _read_head_gate,
    "multiple_width": _read_multiple_width, "nemotron_shared_width": _read_nemotron_shared_width,
    "listed_layers": _read_listed_layers, "indexed_topk": _read_indexed_topk,
    "largest_block_width": read_largest_width, "first_block_heads": read_first_heads,
    "layer_input_rows": read_layer_input_rows, "layer_input_dim": read_layer_input_dim, "laurel_rank": read_laurel_rank,
    **RECURRENCE_READERS, **RECENT_READERS, **VARIANT_READERS, **SHARED_BLOCK_READERS,
}  # fmt: skip


def _require_list(config: TrackedConfig, num_layers: int) -> list[str]:
    raise MissingKey("layer_types")


def _first_of_four(config: TrackedConfig, num_layers: int) -> list[str]:
    return [FULL if layer % 4 == 0 else SLIDING for layer in range(num_layers)]


def _last_layer(config: TrackedConfig, num_layers: int) -> list[str]:
    return ["plain"] * (num_layers - 1) + ["final"]


def _flint_layers(config: TrackedConfig, num_layers: int) -> list[str]:
    full = {0, num_layers - 1}
    return [FULL if layer in full or layer % 4 == 1 else SLIDING for layer in range(num_layers)]


def _sparse_step(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers have experts: every n-th, but for those that a list leaves out (Qwen)."""
    step, dense = config.first("decoder_sparse_step"), config.first("mlp_only_layers") or []
    step = 1 if step is None else step
    if not isinstance(step, int) or step < 1:
        raise ValueError(f"decoder_sparse_step is {step!r}; an interval of layers is required")
    return [SPARSE if layer not in dense and (layer + 1) % step == 0 else DENSE for layer in range(num_layers)]


def _nemotron_pattern(config: TrackedConfig, num_layers: int) -> list[str]:
    pattern = read_first("hybrid_override_pattern")(config)
    return [NEMOTRON_MARKS.get(mark, mark) for mark in pattern]


def _bamba_layers(config: TrackedConfig, num_layers: int) -> list[str]:
    attention = config.first("attn_layer_indices") or []
    return [FULL if layer in attention else "linear_attention" for layer in range(num_layers)]


def _at_offset(config: TrackedConfig, num_layers: int, name: str) -> list[bool]:
    period, offset = read_first(f"{name}_period")(config), read_first(f"{name}_offset")(config)
    return [layer % period == offset for layer in range(num_layers)]


def _jamba_layers(config: TrackedConfig, num_layers: int) -> list[str]:
    return [FULL if is_at else "linear_attention" for is_at in _at_offset(config, num_layers, "attn_layer")]


def _jamba_experts(config: TrackedConfig, num_layers: int) -> list[str]:
    return [SPARSE if is_at else DENSE for is_at in _at_offset(config, num_layers, "expert_layer")]


def _lfm2_layers(config: TrackedConfig, num_layers: int) -> list[str]:
    attention = config.first("full_attn_idxs")
    attention = range(num_layers) if attention is None else attention
    return [FULL if layer in attention else "conv" for layer in range(num_layers)]


def _llama4_layers(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers attend in chunks, and which to all tokens without positions: every n-th, or those of a list."""
    listed, interval = config.first("no_rope_layers"), config.first("no_rope_layer_interval") or 4
    rotary = listed if listed else [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(rotary) != num_layers:
        raise ValueError("no_rope_layers is not a list of a value for each layer")
    return ["chunked_attention" if value else FULL for value in rotary]


def _llama4_experts(config: TrackedConfig, num_layers: int) -> list[str]:
    listed, step = config.first("moe_layers"), config.first("interleave_moe_layer_step") or 1
    sparse = range(step - 1, num_layers, step) if listed is None else listed
    return [SPARSE if layer in sparse else DENSE for layer in range(num_layers)]


UNCOMMON_LISTS: Mapping[str, ListReader] = {
    "required": _require_list,
    "first_of_four": _first_of_four, "last_layer": _last_layer, "flint_layers": _flint_layers, "sparse_step": _sparse_step,
    "nemotron_pattern": _nemotron_pattern, "bamba_layers": _bamba_layers, "jamba_layers": _jamba_layers,
    "jamba_experts": _jamba_experts, "lfm2_layers": _lfm2_layers, "llama4_layers": _llama4_layers,
    "llama4_experts": _llama4_experts, **RECENT_LISTS, **VARIANT_LISTS,
}  # fmt: skip
