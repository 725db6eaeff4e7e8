"""Embeddings for each layer, and keys and values that layers share: what units keep, and which layers have a cache."""

from __future__ import annotations

from schemes import scheme_of

from shardwise.book_formulas.kv_cache import KvCache
from shardwise.derive.sharded_unit import derive_units

from .linked_layers import PROMPT_TOKENS, SHARED_KEYS


def test_carried_tensors_are_kept_by_the_unit_that_computes_them() -> None:
    """With full recomputation a layer keeps its input, and one whose keys and values are reused keeps these too."""
    units = derive_units(scheme_of(SHARED_KEYS.architecture().structure, recompute="full"))
    kept = {name: {*units[name].saved_by_this_unit_only} for name in ("embedding", "store", "reuse")}
    assert "layer_inputs" in kept["embedding"]
    assert kept["store"] == {"x", "k", "v"}
    assert kept["reuse"] == {"x"}
    assert {"layer_input", "reused_k", "reused_v"} <= {*units["reuse"].saved}


def test_layers_that_reuse_keys_have_no_cache() -> None:
    _, served = SHARED_KEYS.serve_prompt((PROMPT_TOKENS,), 1)
    cached = {path: len(caches) for path, caches in served.caches.items() if path.startswith("layers")}
    assert cached == {"layers.0": 2, "layers.1": 2, "layers.2": 0, "layers.3": 0}
    single_layer = SHARED_KEYS.architecture(num_layers=1, layer_kinds={}, layer_pattern=())
    assert (
        KvCache(architecture=SHARED_KEYS.architecture()).bytes_per_token
        == 2 * KvCache(architecture=single_layer).bytes_per_token
    )
