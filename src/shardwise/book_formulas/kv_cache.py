"""Keys and values that a model keeps of what it has read: bytes of a token, of a sequence, of a batch; how many fit."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.book_formulas.rules import kv_cache_bytes_per_token
from shardwise.hardware.cluster import Cluster
from shardwise.model.architecture import Architecture
from shardwise.model.parameters_and_flops import num_params
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.errors import InputError

SCHEMA = "shardwise.kv-cache/2"


class CacheFitPayload(TypedDict):
    """What of a cluster's memory is free for caches, and how many sequences fit."""

    name: str
    num_devices: int
    memory_bytes: float
    runtime_bytes: float
    weights: str
    weight_bytes: float
    free_bytes: float
    num_seqs: int


class CachePayload(TypedDict):
    """The key-value cache of a model, in bytes; `cluster` is null where none was asked for."""

    schema: Literal["shardwise.kv-cache/2"]
    model: ModelPayload
    dtype: str
    context: int
    batch: int
    num_windowed_layers: int
    bytes_per_token: float
    sequence_bytes: float
    batch_bytes: float
    without_windows_bytes: float
    cluster: CacheFitPayload | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """The cache of one model in one format: 2·K·H elements for each token and layer; layers with a window keep it alone.

    Latent attention keeps the latent and the rotary part of the keys instead, once for all heads.
    Source: the book, "Transformers", KV caching; for latents DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.
    Differs: the book has neither windows nor latents.
    """

    architecture: Architecture
    dtype: str = "bf16"

    @property
    def layer_bytes_per_token(self) -> float:
        """What one layer keeps of one token."""
        a, element = self.architecture, bytes_per_element(self.dtype)
        if a.kv_lora_rank:
            return (a.kv_lora_rank + a.rope_head_dim) * element
        return kv_cache_bytes_per_token(1, a.num_kv_heads * a.head_dim, element)

    @property
    def bytes_per_token(self) -> float:
        """What every layer together keeps of one token."""
        return self.architecture.num_layers * self.layer_bytes_per_token

    def kept_tokens(self, context: int) -> int:
        """Tokens kept of a sequence, all layers together."""
        a = self.architecture
        window = min(context, a.sliding_window or context)
        return (a.num_layers - a.num_windowed_layers) * context + a.num_windowed_layers * window

    def sequence_bytes(self, context: int) -> float:
        """Cache of one sequence of `context` tokens."""
        return self.kept_tokens(context) * self.layer_bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFit:
    """Memory of a cluster shared by weights and caches; both are split evenly over its devices.

    Assumes: nothing else but the runtime takes memory; with `runtime_bytes` 0 nothing at all, as the books count.
    Even splits need sequences or heads enough: more devices than key-value heads hold different sequences.
    """

    memory_bytes: float
    runtime_bytes: float
    weight_bytes: float
    sequence_bytes: float

    @property
    def free_bytes(self) -> float:
        """What weights and runtime leave; negative where they do not fit."""
        return self.memory_bytes - self.runtime_bytes - self.weight_bytes

    @property
    def num_seqs(self) -> int:
        """Whole sequences that fit beside the weights."""
        return max(0, math.floor(self.free_bytes / self.sequence_bytes))


def cache_fit(
    cache: KvCache, cluster: Cluster, context: int, weights: str = "bf16", *, runtime: bool = True
) -> CacheFit:
    """How many sequences of `context` tokens fit on a cluster beside one copy of the weights.

    `runtime`: what the runtime takes of each device is not for caches; False: all of it is, as the books count.
    Raises `InputError` for an unknown format, or a context of no token.
    """
    if context < 1:
        raise InputError(f"context: found {context}; at least 1 token is required")
    return CacheFit(
        memory_bytes=cluster.num_devices * cluster.chip.memory_bytes,
        runtime_bytes=cluster.num_devices * cluster.chip.runtime_bytes if runtime else 0.0,
        weight_bytes=num_params(cache.architecture) * bytes_per_element(weights),
        sequence_bytes=cache.sequence_bytes(context),
    )


def cache_payload(
    cache: KvCache, context: int, batch: int, cluster: Cluster | None, weights: str, *, runtime: bool = True
) -> dict[str, Any]:
    """What `shardwise kv-cache --json` prints, in bytes; `cluster` is null where none was asked for."""
    each = cache.sequence_bytes(context)
    return {
        "schema": SCHEMA, "model": model_payload(cache.architecture), "dtype": cache.dtype, "context": context, "batch": batch,
        "num_windowed_layers": cache.architecture.num_windowed_layers,
        "bytes_per_token": cache.bytes_per_token, "sequence_bytes": each, "batch_bytes": batch * each,
        "without_windows_bytes": cache.bytes_per_token * context,
        "cluster": _fit_payload(cache, context, cluster, weights, runtime) if cluster else None,
    }  # fmt: skip


def _fit_payload(cache: KvCache, context: int, cluster: Cluster, weights: str, runtime: bool) -> dict[str, Any]:
    fit = cache_fit(cache, cluster, context, weights, runtime=runtime)
    return {
        "name": cluster.name, "num_devices": cluster.num_devices, "memory_bytes": fit.memory_bytes,
        "runtime_bytes": fit.runtime_bytes, "weights": weights, "weight_bytes": fit.weight_bytes,
        "free_bytes": fit.free_bytes, "num_seqs": fit.num_seqs,
    }  # fmt: skip
