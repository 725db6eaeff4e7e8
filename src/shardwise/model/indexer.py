"""Indexers of sparse attention, which choose the keys that each query attends to, one by one or in blocks.

Its heads A of width Y score keys of one head for all; queries come from the latent of attention's queries. Of the scores the s
largest of each query are kept. Nothing here is split over tensor parallelism: queries are independent, so that they may be split
over all axes that split the sequence. A choice has no gradient, so the loss of the tokens does not train an indexer: its weights
are frozen. Source: DeepSeek-AI 2025 (DeepSeek-V3.2, section 2.1). Differs: the indexer's own loss is not planned.

An indexer of blocks has a head for each key-value head, K, which is split as these are; its queries come from the hidden state.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.model.operations import Dims, SelectBlocks, SelectKeys
from shardwise.model.program import ModelPart, ProgramBuilder, Role

TOKENS = ("B", "T")


class IndexerBuilder:
    """Writes one indexer's operations; names begin with `prefix`."""

    def __init__(self, builder: ProgramBuilder, prefix: str) -> None:
        self.builder, self.prefix = builder, prefix

    def build(self, y: str, query_latent: str) -> str:
        """Add an indexer of the normalised hidden state `y` [B, T, D] and the queries' latent [B, T, Q], and return the name of
        the positions that it selects [B, T, s]."""
        positions = self.builder.positions()
        queries = self.contract(query_latent, "index_w_q", ("A", "Y", "Q"), "index_q_flat", ("A", "Y"))
        keys = self.normed_keys(self.contract(y, "index_w_k", ("Y", "D"), "index_k_flat", ("Y",)))
        weights = self.contract(y, "index_w_heads", ("A", "D"), "index_weights", ("A",))
        q = self.elementwise("rotary", [queries, positions], "index_q", ("A", "Y"))
        k = self.elementwise("rotary", [keys, positions], "index_k", ("Y",))
        selected = self.builder.tensor(f"{self.prefix}selected", (*TOKENS, "s"), Role.STATISTIC)
        return self.select((q, k, weights), selected)

    def select(self, scored: tuple[str, ...], selected: str) -> str:
        """Add the choice of the keys with the largest scores, by queries, keys and weights of heads, if any."""
        positions = self.builder.positions()
        return self.builder.add(SelectKeys((*scored, positions, positions), (selected,)))

    def normed_keys(self, x: str) -> str:
        """Add LayerNorm of the keys over their width."""
        total = self.elementwise("sum", [x], "index_norm.sum", (), Role.STATISTIC)
        squares = self.elementwise("sum_square", [x], "index_norm.squares", (), Role.STATISTIC)
        weight, bias = (
            self.builder.weight(f"{self.prefix}index_norm.{name}", "Y", part=ModelPart.NORM, frozen=True)
            for name in ("weight", "bias")
        )
        scaled = self.elementwise("layer_norm", [x, total, squares, weight], "index_norm.scaled", ("Y",), over=("Y",))
        return self.elementwise("add_vector", [scaled, bias], "index_norm.out", ("Y",))

    def contract(self, x: str, weight: str, weight_dims: Dims, name: str, dims: Dims) -> str:
        matrix = self.builder.weight(f"{self.prefix}{weight}", weight_dims, frozen=True)
        return self.builder.contract(x, matrix, f"{self.prefix}{name}", (*TOKENS, *dims))

    def elementwise(
        self, function: str, inputs: Iterable[str], name: str, dims: Dims, role: Role = Role.ACTIVATION, over: Dims = ("D",)
    ) -> str:  # fmt: skip
        return self.builder.elementwise(function, inputs, f"{self.prefix}{name}", (*TOKENS, *dims), role, over)


class BlockIndexerBuilder(IndexerBuilder):
    """Writes the operations of an indexer of blocks of keys."""

    def build(self, y: str, query_latent: str = "") -> str:
        """Add an indexer of the normalised hidden state `y` [B, T, D], and return the name of the numbers of the blocks that it
        selects for each key-value head [B, T, K, s]."""
        positions = self.builder.positions()
        flat = self.contract(y, "index_w_q", ("K", "Y", "D"), "index_q_flat", ("K", "Y"))
        queries = self.rms_norm(flat, "index_q_norm", ("K",))
        keys = self.rms_norm(self.contract(y, "index_w_k", ("Y", "D"), "index_k_flat", ("Y",)), "index_k_norm", ())
        q = self.elementwise("rotary", [queries, positions], "index_q", ("K", "Y"))
        k = self.elementwise("rotary", [keys, positions], "index_k", ("Y",))
        selected = self.builder.tensor(f"{self.prefix}selected", (*TOKENS, "K", "s"), Role.STATISTIC)
        return self.select((q, k), selected)

    def select(self, scored: tuple[str, ...], selected: str) -> str:
        positions = self.builder.positions()
        return self.builder.add(SelectBlocks((*scored, positions, positions), (selected,)))

    def rms_norm(self, x: str, name: str, heads: Dims) -> str:
        """Add RMSNorm of each head over its width."""
        squares = self.elementwise("sum_square", [x], f"{name}.squares", heads, Role.STATISTIC)
        weight = self.builder.weight(f"{self.prefix}{name}.weight", "Y", part=ModelPart.NORM, frozen=True)
        return self.elementwise("rms_norm", [x, squares, weight], f"{name}.out", (*heads, "Y"), over=("Y",))
