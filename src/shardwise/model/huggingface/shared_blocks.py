"""Layers of Zamba and Zamba2 with a block that they share: which they are in a config, whose weights they use, their sizes.

Every `num_mem_blocks`-th of the hybrid layers uses the same block; the first to use it owns its weights. Source: `get_layers` of
`Zamba2Model`, `ZambaConfig` and `Zamba2Config` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.model.huggingface.field_readers import (
    NUM_HEADS_KEYS,
    FieldReader,
    TrackedConfig,
    read_d_model,
    read_first,
    read_flag,
    read_optional,
)
from shardwise.model.huggingface.layer_lists import LayerList, ListReader, read_listed

PLAIN, HYBRID = "linear_attention", "hybrid"
LATER_USE = "_again"  # ends the name of a kind of layer that uses a block of another
ZAMBA2_LAYERS = 54  # without a list; the code's default list has so many


def _list_zamba_layers(config: TrackedConfig, num_layers: int) -> Sequence[str]:
    """Return the default types of Zamba's layers: the third is hybrid, and of the later ones each of a period."""
    period, offset = (read_optional(default, key)(config) for default, key in (
        (6, "attn_layer_period"), (4, "attn_layer_offset")
    ))  # fmt: skip
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in (period, offset)) or period < 1:
        raise ValueError(
            f"attn_layer_period is {period!r} and attn_layer_offset {offset!r}; whole numbers are required"
        )
    later = (HYBRID if layer % period == offset else PLAIN for layer in range(max(num_layers - 3, 0)))
    return [PLAIN, PLAIN, HYBRID, *later]


def _list_zamba2_layers(config: TrackedConfig, num_layers: int) -> Sequence[str]:
    """Return the default types of Zamba2's layers, whatever their number is said to be."""
    first = [PLAIN, *([PLAIN] * 5 + [HYBRID]) * 7]
    return [*first, *[PLAIN] * 4, HYBRID, *[PLAIN] * 3, HYBRID, PLAIN, PLAIN]


SHARED_BLOCK_LISTS: Mapping[str, ListReader] = {
    "zamba_layers": _list_zamba_layers,
    "zamba2_layers": _list_zamba2_layers,
}


def shared_block_list(default: str, blocks: str = "", adapters: bool = False) -> LayerList:
    """Return the list of layers with a shared block and without.

    `default` is the list of a config that has none, `blocks` the key of the number of blocks ("": one), and `adapters` says
    whether each layer has adapters of the block's MLP, and, if the config says so, of its attention. A kind of layer is named for
    its block, and for whether it is the first to use it.
    """
    types = read_listed("layers_block_type", SHARED_BLOCK_LISTS[default], frozenset({PLAIN, HYBRID}), {"mamba": PLAIN})

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        num_blocks, hybrids = read_optional(1, blocks)(config) if blocks else 1, 0
        if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
            raise ValueError(f"{blocks} is {num_blocks!r}; a whole number of at least 1 is required")
        layers, listed = [], types(config, num_layers)
        _check_hybrid_ids(config, listed)
        for layer_type in listed:
            if layer_type == HYBRID:
                block = f"shared_{hybrids % num_blocks}"
                layers.append(block if hybrids < num_blocks else block + LATER_USE)
                hybrids += 1
            else:
                layers.append(PLAIN)
        return layers

    def fields(config: TrackedConfig, value: str) -> Mapping[str, Any]:
        if value == PLAIN:
            return {"mixer": "none", "feed_forward": "none"}
        owner = value.removesuffix(LATER_USE) if value.endswith(LATER_USE) else ""
        return {"shared_block": True, "weights_of": owner, **(_read_adapters(config) if adapters else {})}

    return LayerList(read, fields)


def _check_hybrid_ids(config: TrackedConfig, listed: Sequence[str]) -> None:
    stated, hybrids = config.first("hybrid_layer_ids"), [layer for layer, kind in enumerate(listed) if kind == HYBRID]
    if stated is not None and list(stated) != hybrids:
        raise ValueError(
            f"hybrid_layer_ids are {stated!r}, and the list of layers has {hybrids}; the same are required"
        )


def _read_adapters(config: TrackedConfig) -> Mapping[str, Any]:
    with_attention = read_flag("use_shared_attention_adapter", False)(config)
    heads, width = read_first(*NUM_HEADS_KEYS)(config), 2 * read_d_model(config)
    key_heads = read_optional(heads, "num_key_value_heads")(config)
    if with_attention and not (heads == key_heads and heads * read_pair_head_dim(config) == width):
        raise ValueError(
            f"use_shared_attention_adapter has adapters of {width} outputs, and attention has {heads} query and {key_heads} "
            "key-value heads; as many of either, of that width together, are required"
        )
    return {"adapted_parts": "attention_and_mlp" if with_attention else "mlp"}


def _read_adapter_rank(config: TrackedConfig) -> Any:
    rank = read_optional(128, "adapter_rank")(config)
    if rank == 0:
        raise ValueError("adapter_rank is 0; at least 1 is required")
    return rank if _has_hybrid_layers(config) else 0


def _has_hybrid_layers(config: TrackedConfig) -> bool:
    listed = config.first("layers_block_type")
    return listed is None or HYBRID in listed


def read_pair_head_dim(config: TrackedConfig) -> Any:
    """Return the width of a head of attention to the hidden state beside the embedding: a part of both widths, if not stated."""
    width, stated = config.first("attention_hidden_size"), config.first("attention_head_dim", "head_dim")
    pair, heads = 2 * read_d_model(config), read_first(*NUM_HEADS_KEYS)(config)
    if width not in (None, pair):
        raise ValueError(f"attention_hidden_size is {width!r}; {pair}, twice the model's width, is required")
    return pair // heads if stated is None else stated


def _read_zamba2_width(config: TrackedConfig) -> Any:
    return config.first("intermediate_size") or 4 * read_d_model(config)


def _read_num_zamba2_layers(config: TrackedConfig) -> Any:
    """Return the number of layers; the code's default list has its own, which a stated number has to equal."""
    listed, stated = config.first("layers_block_type"), config.first("num_hidden_layers")
    count = ZAMBA2_LAYERS if listed is None else len(listed)
    if stated not in (None, count):
        raise ValueError(f"num_hidden_layers is {stated!r}, and the list of layers has {count}; the same are required")
    return count


def _read_zamba2_positions(config: TrackedConfig) -> str:
    return "rotary" if read_flag("use_mem_rope", False)(config) else "none"


def _read_zamba2_mixer(config: TrackedConfig) -> dict[str, Any]:
    heads, expand = read_first("n_mamba_heads")(config), read_optional(2, "mamba_expand")(config)
    width, head_dim = int(expand * read_d_model(config)), config.first("mamba_headdim")
    head_dim = width // heads if head_dim is None else head_dim
    if heads * head_dim != width:
        raise ValueError(f"{heads} heads of width {head_dim} are not mamba_expand times the model's width, {width}")
    return {
        "kind": "mamba2", "num_heads": heads, "head_dim": head_dim, "num_groups": read_optional(1, "mamba_ngroups")(config),
        "key_dim": read_optional(64, "mamba_d_state")(config), "conv_width": read_optional(4, "mamba_d_conv")(config),
        "chunk": read_optional(256, "chunk_size")(config), "norm": "after_gate", "conv_bias": True,
        "projection_bias": read_flag("add_bias_linear", False)(config),
    }  # fmt: skip


def _read_zamba_mixer(config: TrackedConfig) -> dict[str, Any]:
    width, heads = read_d_model(config), read_first("n_mamba_heads")(config)
    channels, rank = int(read_optional(2, "mamba_expand")(config) * width), config.first("mamba_dt_rank")
    if channels % heads:
        raise ValueError(f"n_mamba_heads is {heads!r}, which does not divide {channels} channels")
    return {
        "kind": "mamba1", "num_heads": channels, "num_groups": heads, "norm": "none",
        "key_dim": read_optional(16, "mamba_d_state")(config), "conv_width": read_optional(4, "mamba_d_conv")(config),
        "gate_rank": -(-width // 16) if rank in (None, "auto") else rank,
        "conv_bias": read_flag("mamba_conv_bias", True)(config),
        "projection_bias": read_flag("mamba_proj_bias", False)(config),
    }  # fmt: skip


SHARED_BLOCK_READERS: Mapping[str, FieldReader] = {
    "pair_head_dim": read_pair_head_dim, "zamba2_width": _read_zamba2_width, "num_zamba2_layers": _read_num_zamba2_layers,
    "zamba_mixer": _read_zamba_mixer, "zamba2_mixer": _read_zamba2_mixer, "zamba2_positions": _read_zamba2_positions,
    "zamba2_adapter_rank": _read_adapter_rank, "has_hybrid_layers": _has_hybrid_layers,
}  # fmt: skip
