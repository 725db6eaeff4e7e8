"""Readers of the fields and lists of families in `families/block_variants.toml`, by the name that their table gives.

Sources: the configuration and modelling code of each family in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.model.huggingface.field_readers import FieldReader, TrackedConfig, read_first
from shardwise.model.huggingface.layer_lists import DENSE, FULL, SLIDING, SPARSE, ListReader


def _read_laguna_gate(config: TrackedConfig) -> str:
    """Return what Laguna's gates are for: a head, or each of its elements."""
    gating = config.first("gating")
    return "head" if gating is None or gating is True or gating == "per-head" else "element"


def _read_doubled_kv_heads(config: TrackedConfig) -> Any:
    return 2 * read_first("num_key_value_heads")(config)


VARIANT_READERS: Mapping[str, FieldReader] = {
    "laguna_gate": _read_laguna_gate, "doubled_kv_heads": _read_doubled_kv_heads,
}  # fmt: skip


def _ernie_experts(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers have experts: every n-th between two layers."""
    first, step = read_first("moe_layer_start_index")(config), read_first("moe_layer_interval")(config)
    last = read_first("moe_layer_end_index")(config)
    last = num_layers - 1 if last == -1 else last
    return [SPARSE if first <= layer <= last and (layer + 1) % step == 0 else DENSE for layer in range(num_layers)]


def _first_dense(config: TrackedConfig, num_layers: int) -> list[str]:
    return [DENSE] + [SPARSE] * (num_layers - 1)


def _three_dense(config: TrackedConfig, num_layers: int) -> list[str]:
    return [DENSE if layer < 3 else SPARSE for layer in range(num_layers)]


def _first_and_every_sixth(config: TrackedConfig, num_layers: int) -> list[str]:
    return [FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING for layer in range(num_layers)]


VARIANT_LISTS: Mapping[str, ListReader] = {
    "ernie_experts": _ernie_experts, "first_dense": _first_dense, "three_dense": _three_dense,
    "first_and_every_sixth": _first_and_every_sixth,
}  # fmt: skip
