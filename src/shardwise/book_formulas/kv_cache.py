"""Cache of a model: keys and values of each token, recurrent states of each sequence; how many sequences fit on a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.book_formulas.rules import kv_cache_bytes_per_token
from shardwise.hardware import Cluster
from shardwise.model import BASE_LAYER, Architecture, ModelFacts, num_params
from shardwise.model.decoder import build_unit_program
from shardwise.model.operations import SEGMENTS, SegmentEdge, SegmentState
from shardwise.values import InputError, Payload, SymbolValues, bytes_per_element, multiply_symbols

# Of recurrences, as the modelling code of Qwen3-Next, Mamba-2 and Kimi Linear in transformers 5.23 casts them.
STATE_DTYPE = "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Cache of one model in one format: 2·K·H elements for each token and layer; layers with a window keep only that.

    Latent attention keeps the latent and the rotary part of the keys instead, once for all heads. A recurrence keeps a state of
    each sequence in fp32, whatever its length, and the last rows that its short convolutions read. Source: the book,
    "Transformers", KV caching; for latents DeepSeek-AI 2024 (DeepSeek-V2), section 2.1. Differs: the book has neither windows
    nor latents nor recurrences."""

    architecture: Architecture
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if any(layer.shared_keys for layer, _ in self._kinds):
            raise InputError(
                f"model {self.architecture.name}: the cache of compressed keys is not known here; another model is required"
            )

    @property
    def layers(self) -> tuple[tuple[Architecture, int], ...]:
        """Layers that compute their own keys and values: the model with all layers of a kind, and the number of that kind."""
        return tuple(
            (layer, count)
            for layer, count in self._kinds
            if layer.mixer == "attention" and layer.key_sharing != "reuse"
        )

    @property
    def recurrent_layers(self) -> tuple[tuple[Architecture, int], ...]:
        """Layers with a recurrence or a short convolution, likewise."""
        return tuple((layer, count) for layer, count in self._kinds if layer.recurrence)

    @property
    def _kinds(self) -> tuple[tuple[Architecture, int], ...]:
        architecture = self.architecture
        if not architecture.layer_pattern:
            return ((architecture, architecture.num_layers),)
        kinds = architecture.layer_architectures
        return tuple((kinds[unit], count) for unit, count in architecture.layer_counts.items())

    @property
    def num_recurrent_layers(self) -> int:
        """Layers that keep a state of each sequence."""
        return sum(count for _, count in self.recurrent_layers)

    @property
    def recurrent_state_bytes(self) -> float:
        """Bytes of the states of one sequence, whatever its length."""
        return sum(count * self.layer_state_bytes(layer) for layer, count in self.recurrent_layers)

    def layer_state_bytes(self, layer: Architecture) -> float:
        """Return the bytes that the recurrence of one layer keeps of one sequence: the results of its program that have the
        segments of a sequence as a dim, but for what a segment multiplies states by."""
        program = build_unit_program(layer, BASE_LAYER)
        sizes, num_bytes = SymbolValues(layer.dims), 0.0
        for operation in program.operations:
            if isinstance(operation, (SegmentState, SegmentEdge)):
                dims = [dim for dim in program.dims(operation.outputs[0]) if dim not in ("B", SEGMENTS)]
                dtype = STATE_DTYPE if isinstance(operation, SegmentState) else self.dtype
                num_bytes += multiply_symbols(dims).evaluate(sizes) * bytes_per_element(dtype)
        return num_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes that all layers keep of one token."""
        return sum(count * self.layer_bytes_per_token(layer) for layer, count in self.layers)

    def layer_bytes_per_token(self, layer: Architecture) -> float:
        """Return the bytes that one layer of a model with all layers alike keeps of one token."""
        element_bytes = bytes_per_element(self.dtype)
        if layer.kv_lora_rank:
            return (layer.kv_lora_rank + layer.rope_head_dim) * element_bytes
        widths = layer.head_dim + (layer.v_head_dim or layer.head_dim)  # of a key and of a value
        return kv_cache_bytes_per_token(1, layer.num_kv_heads * widths / 2, element_bytes)

    def kept_tokens(self, context: int) -> int:
        """Return the tokens kept of a sequence, summed over layers."""
        return sum(_kept_tokens(layer, count, context) for layer, count in self.layers)

    def sequence_bytes(self, context: int) -> float:
        """Return the cache bytes of one sequence of `context` tokens."""
        keys_and_values = sum(
            _kept_tokens(layer, count, context) * self.layer_bytes_per_token(layer) for layer, count in self.layers
        )
        return keys_and_values + self.recurrent_state_bytes


def _kept_tokens(layer: Architecture, count: int, context: int) -> int:
    """Return the tokens that so many layers keep of a sequence; with a pattern a kind has a window on all its layers."""
    windowed = min(layer.num_windowed_layers, count)
    window = min(context, layer.sliding_window or context)
    return (count - windowed) * context + windowed * window


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFit:
    """Memory of a cluster shared by weights and caches; both are split evenly over its devices.

    Assumes that only the runtime takes other memory; with `runtime_bytes` 0 nothing does, as the books count. Even splits need
    enough sequences or heads: if there are more devices than key-value heads, they hold different sequences."""

    memory_bytes: float
    runtime_bytes: float
    weight_bytes: float
    sequence_bytes: float

    @property
    def free_bytes(self) -> float:
        """Bytes that weights and runtime leave; negative if they do not fit."""
        return self.memory_bytes - self.runtime_bytes - self.weight_bytes

    @property
    def num_seqs(self) -> int:
        """Whole sequences that fit beside the weights."""
        return max(0, math.floor(self.free_bytes / self.sequence_bytes))


def cache_fit(
    cache: KvCache, cluster: Cluster, context: int, weights: str = "bf16", *, runtime: bool = True
) -> CacheFit:
    """Return how many sequences of `context` tokens fit on a cluster beside one copy of the weights.

    `runtime`: the runtime's bytes of each device are not for caches; False: all memory is, as the books count. Raises
    `InputError` for an unknown format, or a context below one token."""
    if context < 1:
        raise InputError(f"context: found {context}; at least 1 token is required")
    return CacheFit(
        memory_bytes=cluster.num_devices * cluster.chip.memory_bytes,
        runtime_bytes=cluster.num_devices * cluster.chip.runtime_bytes if runtime else 0.0,
        weight_bytes=num_params(cache.architecture) * bytes_per_element(weights),
        sequence_bytes=cache.sequence_bytes(context),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSizes:
    """Bytes of the cache of a batch of sequences; `fit` says what fits on `cluster`, where one is named."""

    cache: KvCache
    context: int
    batch: int
    cluster: Cluster | None = None
    weights: str = "bf16"
    fit: CacheFit | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes that all layers keep of one token."""
        return self.cache.bytes_per_token

    @property
    def sequence_bytes(self) -> float:
        """Bytes of one sequence, its recurrent states among them."""
        return self.cache.sequence_bytes(self.context)


def size_kv_cache(
    cache: KvCache, context: int, batch: int, cluster: Cluster | None, weights: str = "bf16", *, runtime: bool = True
) -> KvCacheSizes:
    """Return the bytes of a batch of sequences, and what fits on a cluster; the arguments are those of `cache_fit`."""
    fit = cache_fit(cache, cluster, context, weights, runtime=runtime) if cluster else None
    return KvCacheSizes(cache=cache, context=context, batch=batch, cluster=cluster, weights=weights, fit=fit)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFitRecord(Payload):
    """Memory of a cluster that is free for caches, and the number of sequences that fit."""

    name: str
    num_devices: int
    memory_bytes: float
    runtime_bytes: float
    weights: str
    weight_bytes: float
    free_bytes: float
    num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheRecord(Payload):
    """Key-value cache and recurrent states of a model, in bytes; `cluster` is null where none was named."""

    SCHEMA = "shardwise.kv-cache/3"
    model: ModelFacts
    dtype: str
    context: int
    batch: int
    num_windowed_layers: int
    num_recurrent_layers: int
    recurrent_state_bytes: float
    bytes_per_token: float
    sequence_bytes: float
    batch_bytes: float
    without_windows_bytes: float
    cluster: CacheFitRecord | None

    @classmethod
    def of(cls, sizes: KvCacheSizes) -> KvCacheRecord:
        """Return the record of the sizes of a cache."""
        cache, cluster, fit = sizes.cache, sizes.cluster, sizes.fit
        return cls.from_attributes(
            sizes, cache, cache.architecture, model=ModelFacts.of(cache.architecture),
            batch_bytes=sizes.batch * sizes.sequence_bytes,
            without_windows_bytes=cache.bytes_per_token * sizes.context + cache.recurrent_state_bytes,
            cluster=CacheFitRecord.from_attributes(fit, cluster, weights=sizes.weights) if cluster and fit else None,
        )  # fmt: skip
