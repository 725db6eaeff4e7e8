"""Readers of families of 2026 that spell a size in several ways, or only where a flag is set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.model.huggingface.field_readers import FieldReader, TrackedConfig, read_first, read_flag, read_positive
from shardwise.model.huggingface.layer_lists import DENSE, FULL, SLIDING, SPARSE, ListReader

# Kinds of layers of DeepSeek-V4, and the tokens of a compressed key that stand for them in older configs.
HEAVILY_COMPRESSED, COMPRESSED_SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
LAYERS_BY_RATIO: Mapping[int, str] = {0: SLIDING, 4: COMPRESSED_SPARSE, 128: HEAVILY_COMPRESSED}
_has_gemma4_experts = read_flag("enable_moe_block", False)


def _if_experts(with_experts: FieldReader, without: FieldReader) -> FieldReader:
    """Return the reader of a size that Gemma 4 has beside its MLP where it has experts."""
    return lambda config: (with_experts if _has_gemma4_experts(config) else without)(config)


def _constant(value: Any) -> FieldReader:
    return lambda config: value


def _read_layer_override(config: TrackedConfig, field: str) -> Any:
    """Return a field of Gemma 4's layers without a window in the table of each layer; None where it lacks it."""
    values = {fields.get(field) for fields in (config.get("per_layer_config") or {}).values()} - {None}
    if len(values) > 1:
        raise ValueError(
            f"per_layer_config has several values of {field}; one for all layers without a window is known here"
        )
    return next(iter(values), None)


def _read_gemma4_global_width(config: TrackedConfig) -> Any:
    """Return the width of heads of Gemma 4's layers without a window: its own key's, or that of each layer in a table."""
    override = _read_layer_override(config, "head_dim")
    if config.get("per_layer_config"):  # which names what differs from the other layers, and nothing else
        return override or read_first("head_dim")(config)
    return config.first("global_head_dim") or 512


def _read_gemma4_global_heads(config: TrackedConfig) -> Any:
    """Return the key-value heads of Gemma 4's layers without a window: of their own number where their values are keys."""
    from_keys = read_flag("attention_k_eq_v", False)(config)
    global_heads = config.first("num_global_key_value_heads") if from_keys else None
    heads = global_heads or read_first("num_key_value_heads")(config)
    return _read_layer_override(config, "num_key_value_heads") or heads


def _read_sparse_setting(key: str, legacy: str, default: int) -> FieldReader:
    """Read a size of MiniMax-M3's indexer: from a table of sparse attention, where there is one, or a key of its own."""

    def read(config: TrackedConfig) -> Any:
        table = config.get("sparse_attention_config") or {}
        return table.get(legacy, config.get(key, default))

    return read


def _read_step_window_heads(config: TrackedConfig) -> Any:
    """Return the query heads of Step 3.5's layers with a window: of their own number, or as many as the others have."""
    windowed = config.first("attention_other_setting") or {}
    heads = config.first("num_sliding_attention_heads") or windowed.get("num_attention_heads")
    return heads or read_first("num_attention_heads")(config)


def _read_window_of(kind: str, legacy: str, default: int) -> FieldReader:
    """Read the tokens of a compressed key of DeepSeek-V4: from a table by the kind of layer, or a key of its own."""

    def read(config: TrackedConfig) -> Any:
        stated = config.first(legacy)
        return (config.get("compress_rates") or {}).get(kind, default) if stated is None else stated

    return read


RECENT_READERS: Mapping[str, FieldReader] = {
    "gemma4_global_width": _read_gemma4_global_width, "gemma4_global_heads": _read_gemma4_global_heads,
    "gemma4_experts": _if_experts(read_positive("num_experts"), _constant(0)),
    "gemma4_experts_per_token": _if_experts(read_first("top_k_experts"), _constant(0)),
    "gemma4_expert_width": _if_experts(read_first("moe_intermediate_size"), read_first("intermediate_size")),
    "gemma4_dense_width": _if_experts(read_first("intermediate_size"), _constant(0)),
    "gemma4_feed_forward": _if_experts(_constant("mlp_and_experts"), _constant("mlp")),
    "long_window": _read_window_of(HEAVILY_COMPRESSED, "compress_rate_hca", 128),
    "short_window": _read_window_of(COMPRESSED_SPARSE, "compress_rate_csa", 4),
    "step_window_heads": _read_step_window_heads,
    "minimax_index_heads": _read_sparse_setting("index_n_heads", "sparse_num_index_heads", 4),
    "minimax_index_width": _read_sparse_setting("index_head_dim", "sparse_index_dim", 128),
    "minimax_index_topk": _read_sparse_setting("index_topk_blocks", "sparse_topk_blocks", 16),
    "minimax_index_block": _read_sparse_setting("index_block_size", "sparse_block_size", 128),
}  # fmt: skip


def _minimax_layers(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers have an indexer, from the table of sparse attention; none without it. Checks its other settings."""
    table = config.get("sparse_attention_config") or {}
    if table.get("sparse_local_block", 1) != 1 or table.get("sparse_init_block", 0):
        raise ValueError(
            "sparse_attention_config has several local blocks, or first ones; one local block is known here"
        )
    return [
        "minimax_m3_sparse" if is_sparse else FULL for is_sparse in table.get("sparse_attention_freq", [0] * num_layers)
    ]


def _minimax_experts(config: TrackedConfig, num_layers: int) -> list[str]:
    flags = config.first("moe_layer_freq")
    return [SPARSE] * num_layers if flags is None else [SPARSE if has_experts else DENSE for has_experts in flags]


def _step_experts(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers have experts: those that a list or its text names, or all from the fourth on."""
    numbers = config.first("moe_layers_enum")
    names = numbers.split(",") if isinstance(numbers, str) else numbers
    sparse = {*map(str, range(3, num_layers))} if names is None else {str(name).strip() for name in names}
    return [SPARSE if str(layer) in sparse else DENSE for layer in range(num_layers)]


def _deepseek_v4_layers(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return the kind of each layer: by its tokens of a compressed key, or two that compress most and then both in turn."""
    ratios = config.first("compress_ratios")
    if ratios is None:
        return [COMPRESSED_SPARSE if layer > 2 and layer % 2 else HEAVILY_COMPRESSED for layer in range(num_layers)]
    return [LAYERS_BY_RATIO[ratio] for ratio in ratios[:num_layers]]


def _deepseek_v4_experts(config: TrackedConfig, num_layers: int) -> list[str]:
    count = config.first("num_hash_layers")
    return ["hash_moe" if layer < (3 if count is None else count) else "moe" for layer in range(num_layers)]


RECENT_LISTS: Mapping[str, ListReader] = {
    "minimax_layers": _minimax_layers, "minimax_experts": _minimax_experts,
    "step_experts": _step_experts, "deepseek_v4_layers": _deepseek_v4_layers, "deepseek_v4_experts": _deepseek_v4_experts,
}  # fmt: skip
