"""Attention of a decoder block as operations on named tensors; its dims are those of `decoder.py`."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.model.block_parts import TOKENS, BlockPartBuilder, NormDims
from shardwise.model.carried_tensors import SHARED_KEYS, SHARED_VALUES
from shardwise.model.compressed_keys import CompressedKeys
from shardwise.model.indexer import BlockIndexerBuilder, IndexerBuilder
from shardwise.model.operations import Concatenate, Scan, SharedKeyScan
from shardwise.model.program import ModelPart, Role

GATE_FUNCTIONS: Mapping[str, str] = {"sigmoid": "sigmoid_gate", "softplus": "softplus_gate"}


class AttentionBuilder(BlockPartBuilder):
    """Writes the operations of attention: heads from the hidden state or from latents, scores, gates, the product back to D."""

    def attention(self, y: str) -> str:
        with self.builder.in_part(ModelPart.ATTENTION):
            if self.architecture.shared_keys:
                return self.shared_key_attention(y)
            return self.project_out(self.attended_values(y), "wo", (*self.value_dims, "D"), "attention_out")

    @property
    def value_dims(self) -> tuple[str, ...]:
        """Dims of a token's attended values."""
        return ("K", "G", self.value_width)

    @property
    def value_width(self) -> str:
        """Dim of a value's width: that of a key, unless values have another."""
        structure = self.architecture.structure
        return "U" if structure.latent or structure.separate_values else "H"

    def attended_values(self, y: str) -> str:
        """Add attention up to what its last product reads."""
        attended = self.attend(y)
        query_dims = self.builder.tensors[attended].dims
        return self.inner_norm(self.gate_attention(attended, y), "attention_inner_norm", query_dims)

    def attend(self, y: str) -> str:
        """Add queries, keys and values, and attention of these."""
        if self.architecture.differential:
            return self.differential_values(y)
        q, k, v, *selected = self.latent_heads(y) if self.architecture.structure.latent else self.queries_and_keys(y)
        if self.architecture.key_sharing != "none":
            # A gradient of its own for each reader: it is summed over ranks where it is computed, as ring attention does
            k, v = (
                self.elementwise("handover", [x], f"{name}_read", self.builder.tensors[x].dims)
                for x, name in ((k, "k"), (v, "v"))
            )
        positions = self.builder.positions()
        outputs = self.attention_results("attended", self.value_dims)
        operands = (q, k, v, positions, positions, *self.sinks(), *selected)
        return self.builder.add(Scan(operands, outputs, is_sparse=bool(selected), selected_block=self.selected_block))

    @property
    def selected_block(self) -> str:
        """Dim of the size of a block of keys, where an indexer selects blocks."""
        return "z" if self.architecture.structure.block_indexer else ""

    def attention_results(self, name: str, value_dims: tuple[str, ...], number: str = "") -> tuple[str, str]:
        """Define what attention gives, values of each head and log-sum-exp, and return the names."""
        query_dims = (*TOKENS, *value_dims)
        return (
            self.builder.tensor(f"{self.prefix}{name}{number}", query_dims, Role.ACTIVATION),
            self.builder.tensor(f"{self.prefix}lse{number}", query_dims[:-1], Role.STATISTIC),
        )

    def indexer(self) -> IndexerBuilder:
        """Return the builder of the indexer of the structure: of keys, or of blocks of keys."""
        builder = BlockIndexerBuilder if self.architecture.structure.block_indexer else IndexerBuilder
        return builder(self.builder, self.prefix)

    def differential_values(self, y: str) -> str:
        """Add the difference of two attentions to the same values, the second times a trained factor, and its norm over each head
        (Ye et al. 2024)."""
        values = self.project_heads(y, "v", (*TOKENS, "K", "U"))
        pairs = [
            (self.heads(y, f"q{number}", ("K", "G", "H")), self.heads(y, f"k{number}", ("K", "H"))) for number in "12"
        ]
        attended = self.attend_twice(pairs, values)
        factors = []
        for number in "12":
            vectors = [self.builder.weight(f"{self.prefix}lambda_{name}{number}", "H") for name in "qk"]
            factors.append(self.builder.elementwise("dot", vectors, f"{self.prefix}lambda{number}", (), Role.STATISTIC))
        dims = (*TOKENS, "K", "G", "U")
        difference = self.elementwise("differential", [*attended, *factors], "difference", dims)
        squares = self.elementwise("sum_square", [difference], "difference.squares", dims[:-1], Role.STATISTIC)
        normed = self.elementwise("unit_rms_norm", [difference, squares], "difference.out", dims, over=("U",))
        return self.elementwise("differential_scale", [normed], "attended", dims)

    def heads(self, y: str, name: str, heads: tuple[str, ...]) -> str:
        """Add queries or keys from the hidden state, normalised and rotated where the structure says so."""
        dims = (*TOKENS, *heads)
        return self.rotary(self.qk_norm(self.project_heads(y, name, dims), name, dims), name, dims)

    def attend_twice(self, pairs: list[tuple[str, str]], values: str) -> list[str]:
        """Add two attentions, each with queries and keys of its own, to the same values."""
        positions = self.builder.positions()
        return [
            self.builder.add(Scan(
                (q, k, values, positions, positions), self.attention_results("attended", ("K", "G", "U"), number)
            ))
            for number, (q, k) in zip("12", pairs, strict=True)
        ]  # fmt: skip

    def shared_key_attention(self, y: str) -> str:
        """Add attention of all heads to one head of keys, which are its values as well, and to compressed keys beside them.

        Queries come from a latent and have norms without weights. Since values are rotated as keys are, results are rotated back
        by the queries' positions. Each group of heads K has an output product of its own, and one joins them (DeepSeek-V4, 2.3).
        """
        query_dims = (*TOKENS, "K", "G", "H")
        latent = self.contract(y, "w_q_down", ("Q", "D"), "q_latent", (*TOKENS, "Q"))
        latent = self.latent_norm(latent, "q_latent_norm", "Q")
        flat = self.contract(latent, "wq", ("K", "G", "H", "Q"), "q_flat", query_dims)
        q = self.rotary(self.sub_layer_norm(flat, "q_norm", NormDims(query_dims, ("H",), None)), "q", query_dims)
        keys = self.latent_norm(self.contract(y, "wk", ("H", "D"), "k_flat", (*TOKENS, "H")), "k_norm", "H")
        k = self.rotary(keys, "k", (*TOKENS, "H"))
        compressed = CompressedKeys(self.builder, self.architecture, self.prefix).build(y, latent)
        positions = self.builder.positions()
        outputs = self.attention_results("attended", query_dims[2:])
        by_query = (*self.sinks(), *compressed.selected)
        operands = (q, k, *compressed.keys, positions, positions, *compressed.positions, *by_query)
        kinds = bool(compressed.keys), self.architecture.sinks, bool(compressed.selected)
        attended = self.builder.add(SharedKeyScan(operands, outputs, *kinds))
        turned = self.elementwise("rotary_back", [attended, positions], "attended_back", query_dims)
        groups = self.contract(turned, "wo_group", ("K", "o", "G", "H"), "attention_groups", (*TOKENS, "K", "o"))
        return self.project_out(groups, "wo", ("K", "o", "D"), "attention_out")

    def gate_attention(self, attended: str, y: str) -> str:
        """Add the gate of each head or element of what attention gives, where there is one (Qiu et al. 2025)."""
        kind = self.architecture.attention_gate
        if kind == "none":
            return attended
        dims = self.value_dims if kind == "element" else self.value_dims[:-1]
        source, width = self.gate_source or (y, "D")
        logits = self.contract(source, "w_attention_gate", (*dims, width), "attention_gate", (*TOKENS, *dims))
        logits = self.add_bias(logits, "attention_gate", "attention_gate", self.value_dims[:-1], (*TOKENS, *dims))
        function = GATE_FUNCTIONS[self.architecture.attention_gate_function]
        return self.elementwise(function, [attended, logits], "attended_gated", (*TOKENS, *self.value_dims))

    def sinks(self) -> tuple[str, ...]:
        return (self.builder.weight(f"{self.prefix}sinks", ("K", "G")),) if self.architecture.sinks else ()

    def queries_and_keys(self, y: str) -> tuple[str, ...]:
        """Add queries, keys and values, each from the hidden state, and the blocks that an indexer selects, if there is one."""
        query_dims, key_dims = (*TOKENS, "K", "G", "H"), (*TOKENS, "K", "H")
        q = self.rotary(self.qk_norm(self.project_heads(y, "q", query_dims), "q", query_dims), "q", query_dims)
        if self.architecture.key_sharing == "reuse":
            return q, *self.reused_heads()
        flat = self.project_heads(y, "k", key_dims)
        k = self.rotary(self.qk_norm(flat, "k", key_dims), "k", key_dims)
        value_dims = (*TOKENS, "K", self.value_width)
        v = flat if self.architecture.values_from_keys else self.project_heads(y, "v", value_dims)
        if self.architecture.value_norm:
            v = self.sub_layer_norm(v, "v_norm", NormDims(value_dims, value_dims[-1:], None))
        if self.architecture.structure.block_indexer:
            return q, k, v, self.indexer().build(y, y)
        if self.architecture.key_sharing == "store":
            self.hand_on(k, v)
        return q, k, v

    def reused_heads(self) -> tuple[str, str]:
        """Return the names of keys and values of the layer whose heads this one reuses."""
        keys = self.read_carried(SHARED_KEYS, (*TOKENS, "K", "H"))
        return keys, self.read_carried(SHARED_VALUES, (*TOKENS, "K", self.value_width))

    def hand_on(self, *names: str) -> None:
        """Make keys and values results of the layer, which later layers read."""
        for name in names:
            self.builder.set_role(name, Role.CARRIED)
        self.handed_on += names

    def project_heads(self, y: str, name: str, dims: tuple[str, ...]) -> str:
        """Add queries, keys or values as flat heads, before norms and rotation."""
        heads, width = dims[2:], self.builder.tensors[y].dims[-1]
        target = f"{name}_flat" if name != "v" else name
        flat = self.contract(y, f"w{name}", (*heads, width), target, dims)
        return self.add_bias(flat, "qkv", target, heads, dims)

    def latent_heads(self, y: str) -> tuple[str, ...]:
        """Add queries, keys and values of latent attention, and the positions that an indexer selects, where there is one."""
        source, width = self.query_source(y)
        heads = (self.latent_queries(source, width), *self.latent_keys(y))
        has_indexer = self.architecture.structure.indexer
        return (*heads, self.indexer().build(y, source)) if has_indexer else heads

    def query_source(self, y: str) -> tuple[str, str]:
        """Add the latent of the queries, where there is one; return what queries are made of, and the dim of its width."""
        if not self.architecture.structure.latent_queries:
            return y, "D"
        down = self.contract(y, "w_q_down", ("Q", "D"), "q_latent", (*TOKENS, "Q"))
        latent = self.latent_norm(down, "q_latent_norm", "Q")
        if self.architecture.raw_query_latent:
            self.gate_source = self.with_raw_latent(latent, down)
        return latent, "Q"

    def with_raw_latent(self, latent: str, raw: str) -> tuple[str, str]:
        """Concatenate a latent and what it is before its norm, and return the result with its dim."""
        latents = self.builder.tensor(f"{self.prefix}q_latents", (*TOKENS, "b"), Role.ACTIVATION)
        return self.builder.add(Concatenate((latent, raw), (latents,), ("Q", "Q"))), "b"

    def latent_queries(self, source: str, width: str) -> str:
        """Add queries of latent attention."""
        return self.concatenate(self.query_parts(source, width), "q", (*TOKENS, "K", "G", "H"))

    def query_parts(self, source: str, width: str) -> tuple[str, str]:
        """Add the non-rotary and the rotary part of the queries of each head."""
        head_dims = (*TOKENS, "K", "G")
        source, width = self.gate_source or (source, width)
        plain = self.contract(source, "w_q_plain", ("K", "G", "I", width), "q_plain", (*head_dims, "I"))
        rotary = self.contract(source, "w_q_rotary", ("K", "G", "R", width), "q_rotary_flat", (*head_dims, "R"))
        return plain, self.rotary(rotary, "q_rotary", (*head_dims, "R"))

    def key_latent(self, y: str) -> tuple[str, str]:
        """Add the latent of keys and values, and the keys' rotary part before it is rotated, which all heads share."""
        down = self.contract(y, "w_kv_down", ("C", "D"), "kv_latent", (*TOKENS, "C"))
        latent = self.latent_norm(down, "kv_latent_norm", "C")
        flat = self.contract(y, "w_k_rotary", ("R", "D"), "k_rotary_flat", (*TOKENS, "R"))
        return latent, self.latent_norm(flat, "k_rotary_norm", "R") if self.architecture.rotary_key_norm else flat

    def latent_keys(self, y: str) -> tuple[str, str]:
        """Add keys and values from one latent of each token."""
        latent, flat = self.key_latent(y)
        plain = self.contract(latent, "w_k_up", ("K", "I", "C"), "k_plain", (*TOKENS, "K", "I"))
        k = self.concatenate((plain, self.rotary(flat, "k_rotary", (*TOKENS, "R"))), "k", (*TOKENS, "K", "H"))
        return k, self.contract(latent, "w_v_up", ("K", "U", "C"), "v", (*TOKENS, "K", "U"))

    def latent_norm(self, x: str, name: str, width: str) -> str:
        return self.sub_layer_norm(x, name, NormDims((*TOKENS, width), (width,), (width,)))

    def concatenate(self, parts: tuple[str, str], name: str, dims: tuple[str, ...]) -> str:
        """Concatenate the non-rotary and the rotary part of heads."""
        return self.builder.add(
            Concatenate(parts, (self.builder.tensor(f"{self.prefix}{name}", dims, Role.ACTIVATION),), ("I", "R"))
        )
