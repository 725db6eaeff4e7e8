"""Work of a pass from an architecture's sizes, for all rows of a table of configurations at once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from shardwise.model import Architecture
from shardwise.serve.configuration_table import ConfigurationTable
from shardwise.serve.pass_work import UNIFORM_ROUTING, Column, PassCollective, PassTokens, PassWork, Products, Routing

# Launches of a layer by class, after what engines fuse: norms with what follows, rotary embedding with the cache's write.
ATTENTION_KERNELS, LATENT_KERNELS, INDEXER_KERNELS, MLP_KERNELS, EXPERT_KERNELS, RECURRENCE_KERNELS = 6, 10, 8, 4, 12, 8


def touched_share(architecture: Architecture, tokens: Column) -> Column:
    """Return the share of a layer's experts that `tokens` tokens take, each `experts_per_token` of them, at uniform routing."""
    chosen = architecture.experts_per_token / architecture.num_experts
    return 1.0 - (1.0 - chosen) ** np.asarray(tokens, dtype=np.float64)


def count_pass(
    architecture: Architecture, table: ConfigurationTable, tokens: PassTokens, routing: Routing = UNIFORM_ROUTING
) -> PassWork:
    """Return the work of a pass of each row."""
    work = _Work(architecture, table, tokens, routing)
    for unit, count in architecture.layer_counts.items():
        work.add_layer(architecture.unit_architecture(unit), count)
    work.add_products("vocabulary", architecture.d_model * architecture.vocab_size / table.tp, work.logits)
    return work.result()


class _Work:
    """Sums over layers."""

    def __init__(
        self, architecture: Architecture, table: ConfigurationTable, tokens: PassTokens, routing: Routing
    ) -> None:
        self.table, self.tokens, self.routing = table, tokens, routing
        self.new_tokens = tokens.new_tokens
        self.all_tokens = self.new_tokens * table.attention_dp
        self.decoding = tokens.decode_sequences * tokens.tokens_per_sequence
        self.logits = np.maximum(self.decoding, 1.0)
        self.width = table.tp * table.attention_dp
        self.elements: dict[str, Column] = defaultdict(float)
        self.flops: dict[str, Column] = defaultdict(float)
        self.kernels: dict[str, Column] = defaultdict(float)
        self.cache: Column = 0.0
        self.decode_flops: Column = 0.0
        self.prompt_flops: Column = 0.0
        self.state: Column = 0.0
        self.reduced_layers = self.exchanged_layers = 0
        self.d_model = architecture.d_model

    def add_products(self, group: str, elements: Column, rows: Column, read_share: Column = 1.0) -> None:
        self.elements[group] = self.elements[group] + elements * read_share
        self.flops[group] = self.flops[group] + 2.0 * elements * rows

    def add_layer(self, layer: Architecture, count: int) -> None:
        if layer.mixer == "attention":
            self._add_latent_attention(layer, count) if layer.kv_lora_rank else self._add_attention(layer, count)
        if layer.recurrence is not None:
            self._add_recurrence(layer, count)
        if layer.num_experts:
            self._add_experts(layer, count)
        elif layer.feed_forward != "none":
            self._add_mlp(layer, count)
        self.reduced_layers += count * (
            int(layer.has_mixer) + int(layer.feed_forward != "none" and not layer.num_experts)
        )

    def _add_attention(self, layer: Architecture, count: int) -> None:
        tp, head_dim = self.table.tp, layer.head_dim
        kv_heads = np.maximum(layer.num_kv_heads / tp, 1.0)
        queries = layer.num_heads * head_dim / tp
        gate = queries if layer.attention_gate != "none" else 0.0
        elements = layer.d_model * (queries + gate + 2 * kv_heads * head_dim) + queries * layer.d_model
        self.add_products("attention", count * elements, self.new_tokens)
        context = _windowed(layer, self.tokens.decode_context)
        cached = self.tokens.decode_sequences * context * 2 * kv_heads * head_dim
        self.cache = self.cache + count * cached
        self.decode_flops = self.decode_flops + count * self.decoding * context * queries * 4
        prompt_context = _windowed(layer, self.tokens.prompt_context)
        self.prompt_flops = self.prompt_flops + count * self.tokens.prompt_tokens * prompt_context * queries * 4
        self.kernels["attention"] += count * ATTENTION_KERNELS

    def _add_latent_attention(self, layer: Architecture, count: int) -> None:
        tp, tokens, latent, rope = self.table.tp, self.tokens, layer.kv_lora_rank, layer.rope_head_dim
        heads, key_dim = layer.num_heads / tp, layer.head_dim - layer.rope_head_dim
        value_dim = layer.v_head_dim or layer.head_dim
        query_rank = layer.q_lora_rank or layer.d_model
        elements = layer.d_model * (layer.q_lora_rank + latent + rope) + query_rank * heads * layer.head_dim
        elements = elements + latent * heads * (key_dim + value_dim) + heads * value_dim * layer.d_model
        if layer.index_topk:
            elements = (
                elements + query_rank * layer.index_heads * layer.index_head_dim + layer.d_model * layer.index_head_dim
            )
            self.kernels["indexer"] += count * INDEXER_KERNELS
        self.add_products("attention", count * elements, self.new_tokens)
        context, prompt_context = tokens.decode_context, tokens.prompt_context
        selected, prompt_selected = context, prompt_context
        indexed: Column = 0.0
        if layer.index_topk:
            selected, prompt_selected = (
                np.minimum(context, layer.index_topk),
                np.minimum(prompt_context, layer.index_topk),
            )
            indexed = tokens.decode_sequences * context * layer.index_head_dim
            index_flops = 2 * layer.index_heads * layer.index_head_dim
            self.prompt_flops = self.prompt_flops + count * tokens.prompt_tokens * prompt_context * index_flops
        self.cache = self.cache + count * (tokens.decode_sequences * selected * (latent + rope) + indexed)
        decode_flops = self.decoding * selected * heads * 2 * (2 * latent + rope)
        self.decode_flops = self.decode_flops + count * decode_flops
        prompt_flops = tokens.prompt_tokens * prompt_selected * heads * 2 * (layer.head_dim + value_dim)
        self.prompt_flops = self.prompt_flops + count * prompt_flops
        self.kernels["latent"] += count * LATENT_KERNELS

    def _add_recurrence(self, layer: Architecture, count: int) -> None:
        mixer = layer.recurrence
        assert mixer is not None
        keys, values = mixer.num_groups * mixer.key_dim, mixer.num_heads * mixer.head_dim
        elements = (layer.d_model * (2 * keys + 2 * values) + values * layer.d_model) / self.table.tp
        self.add_products("recurrence", count * elements, self.new_tokens)
        state = mixer.num_heads * mixer.key_dim * mixer.head_dim / self.table.tp
        self.state = self.state + count * 2 * self.tokens.decode_sequences * state
        self.kernels["recurrence"] += count * RECURRENCE_KERNELS

    def _add_mlp(self, layer: Architecture, count: int) -> None:
        matrices = 3 if layer.structure.has_gated_mlp else 2
        width = layer.d_ff / self.table.tp
        self.add_products("mlp", count * matrices * layer.d_model * width, self.new_tokens)
        self.kernels["mlp"] += count * MLP_KERNELS

    def _add_experts(self, layer: Architecture, count: int) -> None:
        expert = 3 * (layer.expert_latent_dim or layer.d_model) * layer.d_ff
        elements = count * expert * layer.num_experts / self.width
        share = touched_share(layer, self.all_tokens * self.routing.skew)
        self.elements["experts"] = self.elements["experts"] + elements * share
        imbalance = np.where(self.table.ep > 1, self.routing.imbalance, 1.0)
        chosen = imbalance * (count * expert * layer.experts_per_token / self.width)
        self.flops["experts"] = self.flops["experts"] + 2.0 * chosen * self.all_tokens
        self.add_products("router", count * layer.d_model * layer.num_experts, self.new_tokens)
        shared = 3 * layer.d_model * layer.shared_expert_width / self.width
        self.add_products("mlp", count * shared, self.all_tokens)
        if layer.feed_forward == "mlp_and_experts":
            self.add_products("mlp", count * 3 * layer.d_model * layer.dense_d_ff / self.width, self.all_tokens)
        self.kernels["experts"] += count * EXPERT_KERNELS
        self.exchanged_layers += count

    def result(self) -> PassWork:
        tp, width, hidden = self.table.tp, self.width, self.d_model
        ring = 2 * (tp - 1) / tp
        has_copies = self.table.attention_dp > 1
        layers = self.reduced_layers + np.where(has_copies, 0, self.exchanged_layers)
        reduced = np.where(tp > 1, layers, 0)
        exchanges = np.where(has_copies, 2 * self.exchanged_layers, 0)
        collectives = (
            PassCollective("all_reduce", tp, reduced, reduced * ring * self.new_tokens * hidden),
            PassCollective("exchange", width, exchanges, exchanges * (width - 1) / width * self.all_tokens * hidden),
        )
        products = {group: Products(self.elements[group], self.flops[group]) for group in self.elements}
        return PassWork(
            products=products, cache_elements=self.cache, decode_flops=self.decode_flops, prompt_flops=self.prompt_flops,
            state_elements=self.state, kernels=dict(self.kernels), collectives=collectives,
        )  # fmt: skip


def _windowed(layer: Architecture, context: Column) -> Column:
    return context if layer.sliding_window is None else np.minimum(context, layer.sliding_window)


def count_weights(architecture: Architecture, table: ConfigurationTable) -> dict[str, Column]:
    """Return the elements of weights that rest on a device by group, over all layers."""
    everything = PassTokens(decode_sequences=1.0)
    work = _Work(architecture, table, everything, UNIFORM_ROUTING)
    for unit, count in architecture.layer_counts.items():
        work.add_layer(architecture.unit_architecture(unit), count)
    sizes: dict[str, Column] = dict(work.elements)
    if architecture.num_experts:
        layers = architecture.layer_architectures
        sizes["experts"] = sum(
            count * 3 * (layers[unit].expert_latent_dim or architecture.d_model) * layers[unit].d_ff * layers[unit].num_experts
            for unit, count in architecture.layer_counts.items() if layers[unit].num_experts
        ) / work.width  # fmt: skip
    copies = 1 if architecture.tied_embeddings else 2
    sizes["vocabulary"] = copies * architecture.d_model * architecture.vocab_size / table.tp
    return sizes


def request_cache_elements(architecture: Architecture, table: ConfigurationTable, tokens: float) -> Column:
    """Return the elements that a request of so many tokens keeps on a device: keys and values of each layer that its window
    reaches, and recurrent states in fp32 (as two elements of 16 bits)."""
    total: Column = np.zeros(len(table))
    for unit, count in architecture.layer_counts.items():
        layer = architecture.unit_architecture(unit)
        if layer.mixer == "attention":
            tokens_in_window = tokens if layer.sliding_window is None else min(tokens, layer.sliding_window)
            if layer.kv_lora_rank:
                width: Column = (
                    layer.kv_lora_rank + layer.rope_head_dim + (layer.index_head_dim if layer.index_topk else 0)
                )
            else:
                width = 2 * np.maximum(layer.num_kv_heads / table.tp, 1.0) * layer.head_dim
            total = total + count * tokens_in_window * width
        if layer.recurrence is not None:
            mixer = layer.recurrence
            total = total + count * 2 * mixer.num_heads * mixer.key_dim * mixer.head_dim / table.tp
    return total
