"""Layers of Gemma 3n and Gemma 4 that reuse keys and values: which they are in a config, and what else they differ in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.model.huggingface.field_readers import TrackedConfig, read_first, read_flag
from shardwise.model.huggingface.layer_lists import FULL, SLIDING, LayerList

STORE, REUSE, PLAIN = "store", "reuse", "plain"


def key_sharing_list(every: int, last: str = "") -> LayerList:
    """Return the list of layers that store keys and values for the last `num_kv_shared_layers`, or are of these.

    A layer stores them if it is the last one of its type before those that reuse them. Where the config does not list the types,
    every n-th layer has no window. `last` is the type of the last layer, whatever the list says. Source: `kv_sharing_modes` of
    Gemma3nTextConfig and Gemma4TextConfig, transformers 5.23.
    """

    def read(config: TrackedConfig, num_layers: int) -> Sequence[str]:
        count = config.first("num_kv_shared_layers") or 0
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < num_layers:
            raise ValueError(f"num_kv_shared_layers is {count!r}; less than the {num_layers} layers are required")
        if not count:
            return [PLAIN] * num_layers
        types = config.first("layer_types") or [SLIDING if (layer + 1) % every else FULL for layer in range(num_layers)]
        types, first = [*types[:-1], last or types[-1]], num_layers - count
        if {*types[:first]} != {*types}:
            raise ValueError("no layer before those that reuse keys and values is of the same type as one of them")
        storing = {kind: layer for layer, kind in enumerate(types[:first])}
        stores = [STORE if layer in storing.values() else PLAIN for layer in range(first)]
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


def read_layer_input_rows(config: TrackedConfig) -> Any:
    """Return the rows of the table of layers' embeddings; 0 without one, and where they are the vocabulary's."""
    width, rows = config.first("hidden_size_per_layer_input"), config.first("vocab_size_per_layer_input")
    return 0 if width == 0 else 262_144 if rows is None else rows


def read_layer_input_dim(config: TrackedConfig) -> Any:
    """Return the width of the layers' embeddings, which Gemma 3n always has."""
    return _read_count(config, "hidden_size_per_layer_input", 256)


def read_laurel_rank(config: TrackedConfig) -> Any:
    """Return the rank of the learned residual, which Gemma 3n always has."""
    return _read_count(config, "laurel_rank", 64)


def _read_count(config: TrackedConfig, key: str, default: int) -> Any:
    stated = config.first(key)
    if stated == 0:
        raise ValueError(f"{key} is 0; at least 1 is required")
    return default if stated is None else stated


# Leading layers that keep the largest gates alone where the config lists no shares, of more layers than these.
SPARSE_LAYERS = 10
SHARES = (0.0, 0.95)  # of zeros among gates: none, and that of every published Gemma 3n, which the arithmetic here has


def _list_gates(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers keep the largest of their MLP's gates alone: those with a share of zeros above 0 (Gemma 3n)."""
    shares = config.first("activation_sparsity_pattern")
    if shares is None:
        num_sparse = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
        return [LARGEST_GATES] * num_sparse + [ALL_GATES] * (num_layers - num_sparse)
    if not isinstance(shares, (list, tuple)) or len(shares) != num_layers:
        raise ValueError(f"activation_sparsity_pattern is not a list of a share for each of {num_layers} layers")
    unknown = next((share for share in shares if isinstance(share, bool) or share not in SHARES), None)
    if unknown is not None:
        raise ValueError(f"activation_sparsity_pattern has {unknown!r}; shares of 0 and 0.95 are known here")
    return [LARGEST_GATES if share else ALL_GATES for share in shares]


LARGEST_GATES, ALL_GATES = "largest_gates", "all_gates"
GATE_LIST = LayerList(_list_gates, lambda config, value: {"sparse_activation": True} if value == LARGEST_GATES else {})
