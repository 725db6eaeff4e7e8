"""Layers that a config describes one by one in a list of blocks, as a search over architectures leaves them (Nemotron-NAS).

Source: the modelling code of nvidia/Llama-3_3-Nemotron-Super-49B-v1 (modeling_decilm.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.model.huggingface.field_readers import NUM_HEADS_KEYS, TrackedConfig, read_d_model, read_first
from shardwise.model.huggingface.layer_lists import FieldValues, LayerList

WIDTH_MULTIPLE = 256  # that widths of MLPs are rounded up to
# Parts of a block that its code has beside a plain one, by the half that they are in: none may be set.
UNSUPPORTED_PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("replace_with_linear", "sparsify", "window_length", "num_sink_tokens", "unshifted_sink"),
    "ffn": ("replace_with_linear", "sparsify"),
}


def _list_blocks(config: TrackedConfig) -> Sequence[Mapping[str, Mapping[str, Any]]]:
    """Return the table of each layer. Raises `ValueError` for one that is no table of an attention and an MLP, or has more."""
    blocks = read_first("block_configs")(config)
    for number, block in enumerate(blocks):
        for half, parts in UNSUPPORTED_PARTS.items():
            extra = [f"{half}.{part} = {block[half][part]!r}" for part in parts if block[half].get(part)]
            if extra:
                raise ValueError(f"block {number} of block_configs has {extra[0]}, which is not known here")
        if block["attention"].get("no_op") and block["ffn"].get("no_op"):
            raise ValueError(f"block {number} of block_configs has neither attention nor an MLP; one is required")
    return list(blocks)


def _mlp_width(config: TrackedConfig, block: Mapping[str, Mapping[str, Any]]) -> int:
    """Return the width of a block's MLP: two thirds of a multiple of the model's, rounded up."""
    width = int(2 * block["ffn"]["ffn_mult"] * read_d_model(config) / 3)
    return -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _block_fields(config: TrackedConfig, block: Mapping[str, Mapping[str, Any]]) -> tuple[str, FieldValues]:
    """Return the name of a block's kind, which says its sizes, and the fields in which it differs from a plain layer."""
    names: list[str] = []
    fields: dict[str, Any] = {}
    if block["attention"].get("no_op"):
        fields["mixer"] = "none"
    else:
        heads, per_group = read_first(*NUM_HEADS_KEYS)(config), block["attention"]["n_heads_in_group"]
        fields["num_kv_heads"] = heads // per_group
        names.append(f"attention_{heads // per_group}")
    if block["ffn"].get("no_op"):
        fields["feed_forward"] = "none"
    else:
        fields["d_ff"] = _mlp_width(config, block)
        names.append(f"mlp_{fields['d_ff']}")
    return "_".join(names), fields


def _read_names(config: TrackedConfig, num_layers: int) -> Sequence[str]:
    names = [_block_fields(config, block)[0] for block in _list_blocks(config)]
    if len(names) != num_layers:
        raise ValueError(f"block_configs has {len(names)} blocks for {num_layers} layers; one for each is required")
    return names


def _read_kind(config: TrackedConfig, name: str) -> FieldValues:
    return dict(_block_fields(config, block) for block in _list_blocks(config))[name]


def read_first_heads(config: TrackedConfig) -> int:
    """Return the key-value heads of the first block with attention."""
    kinds = (_block_fields(config, block)[1] for block in _list_blocks(config))
    return next((int(fields["num_kv_heads"]) for fields in kinds if "num_kv_heads" in fields), 1)


def read_largest_width(config: TrackedConfig) -> int:
    """Return the width of the widest MLP of all blocks."""
    blocks = [block for block in _list_blocks(config) if not block["ffn"].get("no_op")]
    return max((_mlp_width(config, block) for block in blocks), default=1)


BLOCK_LIST = LayerList(_read_names, _read_kind)
