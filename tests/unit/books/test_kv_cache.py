"""Sizes of key-value caches equal the books'; windows keep only their tokens; `cache_fit` is the largest that fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.book_formulas.kv_cache import KvCache, cache_fit
from shardwise.values.errors import InputError


def test_bytes_per_token_of_a_multi_head_model_equal_the_books() -> None:
    """S0, part 3, question 1: 64 layers of width 4096 in int8 are 512 KiB."""
    model = replace(sw.load_model("llama-2-7b"), num_layers=64)
    assert KvCache(architecture=model, dtype="int8").bytes_per_token == 512 * 2**10


def test_bytes_per_sequence_of_a_moderate_model_equal_the_books() -> None:
    """S0, part 3, KV caching: 8 Ki tokens, 64 layers, width 8192 in int8 are 8 GiB."""
    model = replace(sw.load_model("llama-2-70b"), num_layers=64, num_kv_heads=64)
    assert KvCache(architecture=model, dtype="int8").sequence_bytes(8192) == 8 * 2**30


def test_shared_heads_divide_the_cache() -> None:
    model = sw.load_model("llama-3-70b")
    grouped, multi_head = (KvCache(architecture=replace(model, num_kv_heads=heads)) for heads in (8, 64))
    assert multi_head.bytes_per_token == 8 * grouped.bytes_per_token == 2 * 2 * 80 * 64 * 128


def test_latent_attention_keeps_its_latent_and_the_rotary_part_once() -> None:
    """DeepSeek-V3: 512 + 64 elements for each of 61 layers, 70,272 bytes a token in bf16."""
    model = sw.load_model("deepseek-v3")
    assert KvCache(architecture=model).bytes_per_token == (512 + 64) * 61 * 2 == 70_272
    assert KvCache(architecture=model, dtype="fp8").bytes_per_token == 70_272 / 2


@pytest.mark.parametrize(
    ("name", "context", "tokens"),
    [
        ("gemma-2-9b", 1024, 42 * 1024),
        ("gemma-2-9b", 8192, 21 * 8192 + 21 * 4096),
        ("gemma-3-27b", 2**17, 10 * 2**17 + 52 * 1024),
        ("mistral-7b", 2**15, 32 * 4096),
        ("llama-3-8b", 2**15, 32 * 2**15),
    ],
)
def test_windows_keep_only_their_tokens(name: str, context: int, tokens: int) -> None:
    cache = KvCache(architecture=sw.load_model(name))
    assert cache.kept_tokens(context) == tokens
    assert cache.sequence_bytes(context) <= cache.bytes_per_token * context


def test_cache_fit_gives_the_largest_number_of_sequences() -> None:
    cache, cluster = KvCache(architecture=sw.load_model("llama-3-70b")), sw.load_cluster("h100:8")
    fit = cache_fit(cache, cluster, 8192)
    used_bytes = sw.num_params(cache.architecture) * 2 + 8 * 1.5e9
    assert fit.num_seqs * cache.sequence_bytes(8192) + used_bytes <= 8 * 80e9
    assert (fit.num_seqs + 1) * cache.sequence_bytes(8192) + used_bytes > 8 * 80e9
    assert cache_fit(cache, sw.load_cluster("h100:1"), 8192).num_seqs == 0
    assert cache_fit(cache, sw.load_cluster("h100:1"), 8192).free_bytes < 0
    assert cache_fit(cache, sw.load_cluster("h100:1"), 8192, "int4").num_seqs > 0


def test_invalid_caches_are_refused() -> None:
    cache = KvCache(architecture=sw.load_model("llama-3-8b"))
    with pytest.raises(InputError, match="at least 1 token"):
        cache_fit(cache, sw.load_cluster("h100:1"), 0)
    with pytest.raises(InputError, match="'bf17'"):
        cache_fit(cache, sw.load_cluster("h100:1"), 8, "bf17")


def test_each_kind_of_layer_has_its_own_bytes_per_token() -> None:
    """8 layers in a period of 4: a window with fewer heads, attention without an MLP, and an MLP without attention (no cache)."""
    kinds = {
        "window": {"sliding_window": 100, "num_kv_heads": 4}, "attention": {"feed_forward": "none"}, "mlp": {"mixer": "none"},
    }  # fmt: skip
    pattern = ("window", "attention", "mlp", "block")
    model = replace(sw.load_model("llama-3-8b"), num_layers=8, layer_kinds=kinds, layer_pattern=pattern)
    cache = KvCache(architecture=model)
    full_bytes, window_bytes = 2 * 8 * 128 * 2, 2 * 4 * 128 * 2
    assert cache.bytes_per_token == 2 * (window_bytes + 2 * full_bytes)
    assert cache.kept_tokens(1000) == 2 * (100 + 1000 + 1000)
    assert cache.sequence_bytes(1000) == 2 * (100 * window_bytes + 2 * 1000 * full_bytes)
    assert cache.sequence_bytes(50) == 50 * cache.bytes_per_token
