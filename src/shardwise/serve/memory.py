"""Memory of serving: weights, activations of the largest pass and the cache, by each engine's rule, as columns of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.model import Architecture
from shardwise.serve.configuration_table import ConfigurationTable, Floats
from shardwise.serve.engines import ServingEngine
from shardwise.serve.kernel_seconds import ServingRates
from shardwise.serve.pass_counts import count_weights, request_cache_elements
from shardwise.serve.serving_problem import BatchLimits, ServingProblem

GIB = 2.0**30
# vLLM profiles a pass before it sizes the cache: sampling over `max_num_seqs` rows of logits, sorted in fp32 with their indices,
# and the hidden states of a full batch. Fitted to seven start-up reports of vLLM 0.11 (llm-d-planner, docs/
# empirical-vllm-memory-results.md at e50305a): 4.76 to 7.38 GiB, which follow the vocabulary within 1%.
SAMPLER_BYTES_PER_LOGIT = 38.2
PROFILE_BYTES_PER_HIDDEN = 2.6  # bytes per element of a batch's hidden states, same source
NO_SAMPLER_BYTES = 2.12 * GIB  # of models with a vision tower, whose profile leaves sampling out; same source
CONTEXT_BYTES = 0.13 * GIB  # of what is not torch's, on one device; same source
COMMUNICATOR_BYTES = 0.42 * GIB  # beside it with tp, same source
# Captured graphs and workspaces of TensorRT-LLM and SGLang: assumed, since nothing published says.
GRAPH_AND_WORKSPACE_BYTES = 3e9
# Kernels of mxfp4 experts take multiples of this width: gpt-oss weighs 1.05 to 1.06 of what is stored in the same reports.
PADDED_WIDTHS: Mapping[str, int] = {"mxfp4": 256}
TOWER_ELEMENT_BYTES = 2.0  # towers of images and sound rest in 16 bits, whole on each device
RULES: Mapping[str, str] = {
    "of total": "{fraction:g} of the device's memory, less weights, the largest pass and the context",
    "of free": "{fraction:g} of what weights, the largest pass and the context leave",
    "static": "{fraction:g} of the device's memory, less weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """Bytes of the fullest device of each row, and what its cache holds; `ServingMemory` says what each is."""

    capacity_bytes: float
    usable_bytes: Floats
    weight_bytes: Floats
    activation_bytes: Floats
    runtime_bytes: Floats
    cache_bytes: Floats
    cache_bytes_per_token: Floats
    cache_tokens: Floats
    largest_batch: Floats
    fraction: float
    rule: str


def size_memory(
    problem: ServingProblem, engine: ServingEngine, rates: ServingRates, table: ConfigurationTable, limits: BatchLimits
) -> MemoryColumns:
    """Return the memory of each row: what an engine's rule leaves for the cache, and the requests of the workload in it."""
    architecture, workload = problem.architecture, problem.workload
    capacity, fraction = problem.cluster.chip.capacity_bytes, limits.memory_fraction or engine.memory_fraction
    weights = weight_bytes(architecture, rates, table)
    activations = activation_bytes(architecture, engine, limits) + np.zeros(len(table))
    runtime = CONTEXT_BYTES + np.where(table.devices_per_replica > 1, COMMUNICATOR_BYTES, 0.0)
    if engine.memory_rule == "of total":
        usable = fraction * capacity + np.zeros(len(table))
        cache = usable - weights - activations - runtime
    elif engine.memory_rule == "of free":
        runtime = runtime + GRAPH_AND_WORKSPACE_BYTES
        cache = fraction * (capacity - weights - activations - runtime)
        usable = cache + weights + activations + runtime
    else:
        runtime = runtime + GRAPH_AND_WORKSPACE_BYTES
        usable = fraction * capacity + np.zeros(len(table))
        cache = np.minimum(usable, capacity - activations - runtime) - weights
    cache = np.maximum(cache, 0.0)
    request_bytes = request_cache_elements(architecture, table, workload.total_tokens) * rates.cache_bytes / table.pp
    per_token = request_bytes / workload.total_tokens
    # Requests are at every stage of their output: on average half of it is in the cache.
    mean_bytes = request_cache_elements(architecture, table, workload.mean_context) * rates.cache_bytes / table.pp
    return MemoryColumns(
        capacity_bytes=capacity, usable_bytes=usable, weight_bytes=weights, activation_bytes=activations, runtime_bytes=runtime,
        cache_bytes=cache, cache_bytes_per_token=per_token, cache_tokens=np.floor(cache / per_token),
        largest_batch=cache / mean_bytes, fraction=fraction,
        rule=f"{engine.title}: {RULES[engine.memory_rule].format(fraction=fraction)}",
    )  # fmt: skip


def weight_bytes(architecture: Architecture, rates: ServingRates, table: ConfigurationTable) -> Floats:
    """Return the bytes of weights on a device: of its share of the layers, and of towers that only multimodal inputs need."""
    sizes = {
        group: elements * rates.formats[group].bytes_per_element
        for group, elements in count_weights(architecture, table).items()
    }
    block = PADDED_WIDTHS.get(rates.formats["experts"].name)
    if architecture.num_experts and block:
        width = architecture.d_ff / table.expert_tp
        sizes["experts"] = sizes["experts"] * (np.ceil(width / block) * block / width)
    towers = TOWER_ELEMENT_BYTES * sum(part.num_params or 0 for part in architecture.omitted_parts)
    layers: Floats = sum(sizes.values(), start=np.zeros(len(table))) / table.pp
    return layers + towers


def activation_bytes(architecture: Architecture, engine: ServingEngine, limits: BatchLimits) -> float:
    """Return the bytes of the largest pass: logits of all sequences while one is sampled from each, and hidden states."""
    sequences, tokens = (
        limits.max_num_seqs or engine.max_num_seqs,
        limits.max_batched_tokens or engine.max_batched_tokens,
    )
    hidden = PROFILE_BYTES_PER_HIDDEN * tokens * architecture.d_model
    if any("vision" in part.name for part in architecture.omitted_parts):
        return NO_SAMPLER_BYTES
    return SAMPLER_BYTES_PER_LOGIT * sequences * architecture.vocab_size + hidden
