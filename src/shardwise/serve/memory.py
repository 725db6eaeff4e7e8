"""Memory of serving: weights, activations of the largest pass and the cache, by each engine's rule, as columns of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.model import Architecture
from shardwise.serve.configuration_table import ConfigurationTable, Floats
from shardwise.serve.engines import MemoryRule, ServingEngine
from shardwise.serve.formats import WeightFormat
from shardwise.serve.kernel_seconds import ServingRates
from shardwise.serve.resting_elements import request_elements, weight_elements
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
# Kernels of mxfp4 experts take multiples of this width. In the same reports an expert of gpt-oss weighs 14.064 MB (the difference
# of 120b and 20b over that of their experts): values padded to it, scales and biases not, make 14.066 MB.
PADDED_WIDTHS: Mapping[str, int] = {"mxfp4": 256}
BIAS_BYTES = 2.0  # biases of experts rest in 16 bits
TOWER_ELEMENT_BYTES = 2.0  # towers of images and sound rest in 16 bits, whole on each device
RULES: Mapping[str, str] = {
    "of total": "{fraction:g} of the device's memory, less weights, the largest pass and the context",
    "of free": "{fraction:g} of what weights, the largest pass and the context leave",
    "static": "{fraction:g} of the device's memory, less weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of the fullest device of each row that no fraction changes. `request_bytes` are those of a request of the workload in
    the cache, on average over its output; `token_bytes` those of one token at its end."""

    capacity_bytes: Floats
    weight_bytes: Floats
    activation_bytes: Floats
    runtime_bytes: Floats
    request_bytes: Floats
    token_bytes: Floats

    @property
    def fixed_bytes(self) -> Floats:
        """Bytes of all but the cache."""
        return self.weight_bytes + self.activation_bytes + self.runtime_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryColumns:
    """Parts of memory, what the engine's rule lets the cache have, and what that holds; `ServingMemory` says what each is."""

    parts: MemoryParts
    usable_bytes: Floats
    spare_bytes: Floats  # for the cache; below zero: lacking
    rule: str

    @property
    def cache_bytes(self) -> Floats:
        """Bytes of the cache."""
        return np.maximum(self.spare_bytes, 0.0)

    @property
    def cache_tokens(self) -> Floats:
        """Tokens that the cache of one copy of attention holds."""
        return np.floor(self.cache_bytes / self.parts.token_bytes)

    @property
    def largest_batch(self) -> Floats:
        """Requests of the workload that the cache of one copy of attention holds."""
        return self.cache_bytes / self.parts.request_bytes


def size_memory(
    problem: ServingProblem, engine: ServingEngine, rates: ServingRates, table: ConfigurationTable, limits: BatchLimits
) -> MemoryColumns:
    """Return the memory of each row: what an engine's rule leaves for the cache, and the requests of the workload in it."""
    fraction = limits.memory_fraction or engine.memory_fraction
    parts = size_parts(problem, engine, rates, table, limits)
    spare = spare_bytes(engine.memory_rule, fraction, parts)
    usable = fraction * parts.capacity_bytes
    if engine.memory_rule == "of free":
        usable = np.maximum(spare, 0.0) + parts.fixed_bytes
    rule = f"{engine.title}: {RULES[engine.memory_rule].format(fraction=fraction)}"
    return MemoryColumns(parts=parts, usable_bytes=usable, spare_bytes=spare, rule=rule)


def size_parts(
    problem: ServingProblem, engine: ServingEngine, rates: ServingRates, table: ConfigurationTable, limits: BatchLimits
) -> MemoryParts:
    """Return the parts of memory of each row."""
    architecture, workload = problem.architecture, problem.workload
    zeros = np.zeros(len(table))
    runtime = CONTEXT_BYTES + np.where(table.devices_per_replica > 1, COMMUNICATOR_BYTES, 0.0)
    if engine.memory_rule != "of total":
        runtime = runtime + GRAPH_AND_WORKSPACE_BYTES
    cached = rates.cache_bytes / table.pp
    return MemoryParts(
        capacity_bytes=problem.cluster.chip.capacity_bytes + zeros,
        weight_bytes=weight_bytes(architecture, rates, table, problem.formats.expert_format),
        activation_bytes=activation_bytes(architecture, engine, limits) + zeros, runtime_bytes=runtime,
        # Requests are at every stage of their output, so that half of it is in the cache on average, unless all is reserved.
        request_bytes=request_elements(
            architecture, table, workload.total_tokens if engine.reserves_output else workload.mean_context
        )
        * cached,
        token_bytes=request_elements(architecture, table, workload.total_tokens) * cached / workload.total_tokens,
    )  # fmt: skip


def cache_bytes(memory_rule: MemoryRule, fraction: float, parts: MemoryParts) -> Floats:
    """Return the bytes of the cache by an engine's rule."""
    return np.maximum(spare_bytes(memory_rule, fraction, parts), 0.0)


def spare_bytes(memory_rule: MemoryRule, fraction: float, parts: MemoryParts) -> Floats:
    """Return the bytes that an engine's rule leaves for the cache, below zero where the rest takes more."""
    if memory_rule == "of total":
        return fraction * parts.capacity_bytes - parts.fixed_bytes
    if memory_rule == "of free":
        return fraction * (parts.capacity_bytes - parts.fixed_bytes)
    # Activations and graphs have what the static fraction leaves.
    spare: Floats = np.minimum(
        fraction * parts.capacity_bytes - parts.weight_bytes, parts.capacity_bytes - parts.fixed_bytes
    )
    return spare


def weight_bytes(
    architecture: Architecture, rates: ServingRates, table: ConfigurationTable, expert_format: WeightFormat
) -> Floats:
    """Return the bytes of weights on a device: of its share of the layers, and of towers that only multimodal inputs need."""
    sizes = {
        group: elements * rates.groups[group].element_bytes
        for group, elements in weight_elements(architecture, table).items()
    }
    if architecture.num_experts:
        sizes["experts"] = sizes["experts"] + _expert_overhead_bytes(architecture, table, expert_format)
    towers = TOWER_ELEMENT_BYTES * sum(part.num_params or 0 for part in architecture.omitted_parts)
    layers: Floats = sum(sizes.values(), start=np.zeros(len(table))) / table.pp
    return layers + towers


def _expert_overhead_bytes(
    architecture: Architecture, table: ConfigurationTable, expert_format: WeightFormat
) -> Floats | float:
    """Return the bytes of all layers' experts on a device beyond their elements in their format: padding, and biases."""
    width = architecture.d_ff / table.expert_tp
    num_experts = (architecture.num_experts + table.redundant_experts) / table.ep * architecture.num_layers
    extra: Floats | float = 0.0
    if "experts" in architecture.bias:  # of gate and up, and of down; all layers of such models have experts
        biases = num_experts * (2 * width + architecture.d_model)
        extra = biases * (BIAS_BYTES - expert_format.bytes_per_element)
    if block := PADDED_WIDTHS.get(expert_format.name):
        padding = np.ceil(width / block) * block / width - 1.0
        extra = extra + num_experts * 3 * architecture.d_model * width * padding * expert_format.element_bytes
    return extra


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
