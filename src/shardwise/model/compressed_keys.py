"""Compressed keys beside those of tokens, and the indexer that selects some of them for each query.

Each stands for a window of m tokens, or for two windows that overlap those of its neighbours; tokens are weighted by a softmax of
logits of their own. An indexer compresses keys of its own width in the same way; its choice has no gradient, so its weights are
frozen. Source: DeepSeek-AI 2026 (DeepSeek-V4, section 2.3). Differs: the indexer's own loss is not planned.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.model.architecture import Architecture
from shardwise.model.block_parts import TOKENS
from shardwise.model.indexer import IndexerBuilder
from shardwise.model.operations import SEGMENTS, WINDOWS, CompressKeys, Dims, FirstOfWindow, LastWindow, SelectKeys
from shardwise.model.program import ModelPart, ProgramBuilder, Role


class CompressedParts(NamedTuple):
    """Names of compressed keys, of the positions of their first tokens, and of those that each query sees; empty without any."""

    keys: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    selected: tuple[str, ...] = ()


class CompressedKeys:
    """Writes the operations of compressed keys; names begin with `prefix`."""

    def __init__(self, builder: ProgramBuilder, architecture: Architecture, prefix: str) -> None:
        self.builder, self.structure, self.prefix = builder, architecture.structure, prefix

    def build(self, y: str, query_latent: str) -> CompressedParts:
        """Add compressed keys of the normalised hidden state `y` [B, T, D], and a choice of them by the queries' latent."""
        if not self.structure.compressed_keys:
            return CompressedParts()
        positions = self.builder.positions()
        first = self.builder.tensor(f"{self.prefix}window_positions", (WINDOWS,), Role.STATISTIC)
        self.builder.add(FirstOfWindow((positions,), (first,)))
        keys = self.compress(y, first, "compressed", "H")
        if not self.structure.indexer:
            return CompressedParts((keys,), (first,))
        return CompressedParts((keys,), (first,), (self.select(y, query_latent, first),))

    def select(self, y: str, query_latent: str, first: str) -> str:
        """Add an indexer of compressed keys, and return the name of the positions that it selects [B, T, s]."""
        indexer = IndexerBuilder(self.builder, self.prefix)
        positions = self.builder.positions()
        queries = indexer.contract(query_latent, "index_w_q", ("A", "Y", "Q"), "index_q_flat", ("A", "Y"))
        q = indexer.elementwise("rotary", [queries, positions], "index_q", ("A", "Y"))
        weights = indexer.contract(y, "index_w_heads", ("A", "D"), "index_weights", ("A",))
        keys = self.compress(y, first, "index_compressed", "Y", frozen=True)
        selected = self.builder.tensor(f"{self.prefix}selected", (*TOKENS, "s"), Role.STATISTIC)
        return self.builder.add(SelectKeys((q, keys, weights, positions, first), (selected,), window="m"))

    def compress(self, y: str, first: str, name: str, width: str, *, frozen: bool = False) -> str:
        """Add compressed keys of some width, their norm and their rotation by the positions `first` [T/m]."""
        series = [self.window(y, name, width, frozen=frozen)]
        if self.structure.overlapping_windows:
            series.append(self.window(y, f"{name}_before", width, frozen=frozen))
            edge = self.builder.tensor(f"{self.prefix}{name}_edge", ("B", SEGMENTS, "v", "m", width), Role.ACTIVATION)
            series.append((self.builder.add(LastWindow(series[1][:2], (edge,))),))
        flat = self.builder.tensor(f"{self.prefix}{name}_flat", ("B", WINDOWS, width), Role.ACTIVATION)
        operands = tuple(operand for part in series for operand in part)
        self.builder.add(CompressKeys(operands, (flat,), self.structure.overlapping_windows))
        rows = ("B", WINDOWS)
        squares = self.builder.elementwise("sum_square", [flat], f"{flat}.squares", rows, Role.STATISTIC)
        weight = self.builder.weight(f"{self.prefix}{name}_norm.weight", width, part=ModelPart.NORM, frozen=frozen)
        normed = self.builder.elementwise(
            "rms_norm", [flat, squares, weight], f"{self.prefix}{name}_norm.out", (*rows, width), over=(width,)
        )
        return self.builder.elementwise("rotary", [normed, first], f"{self.prefix}{name}", (*rows, width))

    def window(self, y: str, name: str, width: str, *, frozen: bool) -> tuple[str, ...]:
        """Add the projected tokens and logits of a window [B, T, width], and return their names and that of the logits' bias."""
        dims: Dims = (*TOKENS, width)
        results = []
        for kind in ("tokens", "logits"):
            weight = self.builder.weight(f"{self.prefix}{name}_{kind}", (width, "D"), frozen=frozen)
            results.append(self.builder.contract(y, weight, f"{self.prefix}{name}_{kind}_out", dims))
        return (*results, self.builder.weight(f"{self.prefix}{name}_bias", ("m", width), frozen=frozen))
