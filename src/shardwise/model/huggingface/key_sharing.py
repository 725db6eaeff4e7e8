"""Layers of Gemma 3n and Gemma 4 that reuse keys and values: which they are in a config, and what else they differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.model.huggingface.field_readers import TrackedConfig, read_first, read_flag
from shardwise.model.huggingface.layer_lists import FULL, SLIDING, LayerList

STORE, REUSE, PLAIN = "store", "reuse", "plain"


def key_sharing_list(every: int) -> LayerList:
    """Return the list of layers that store keys and values for the last `num_kv_shared_layers`, or are of these.

    A layer stores them if it is the last one of its type before those that reuse them. Where the config does not list the types,
    every n-th layer has no window; the last one never has. Source: `kv_sharing_modes` of Gemma4TextConfig, transformers 5.23.
    """

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        count = config.first("num_kv_shared_layers") or 0
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < num_layers:
            raise ValueError(f"num_kv_shared_layers is {count!r}; less than the {num_layers} layers are required")
        if not count:
            return [PLAIN] * num_layers
        types = config.first("layer_types") or [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]
        types, first = [*types[:-1], FULL], num_layers - count
        if {*types[:first]} != {*types}:
            raise ValueError("no layer before those that reuse keys and values is of the same type as one of them")
        last = {kind: layer for layer, kind in enumerate(types[:first])}
        stores = [STORE if layer in last.values() else PLAIN for layer in range(first)]
        return [*stores, *[REUSE] * count]

    def fields(config: TrackedConfig, value: str) -> Mapping[str, Any]:
        if value != REUSE:
            return {"key_sharing": "store"} if value == STORE else {}
        is_wide = read_flag("use_double_wide_mlp", False)(config)
        if is_wide and read_flag("enable_moe_block", False)(config):
            raise ValueError("use_double_wide_mlp beside enable_moe_block; one of the two is known here")
        width = {"d_ff": 2 * read_first("intermediate_size")(config)} if is_wide else {}
        return {"key_sharing": "reuse", "values_from_keys": False, "value_norm": False, **width}

    return LayerList(read, fields)


def read_layer_input_rows(config: TrackedConfig) -> int:
    """Return the rows of the table of layers' embeddings; 0 without one, and where they are the vocabulary's."""
    width, rows = config.first("hidden_size_per_layer_input"), config.first("vocab_size_per_layer_input")
    return 0 if width == 0 else int(262_144 if rows is None else rows)
