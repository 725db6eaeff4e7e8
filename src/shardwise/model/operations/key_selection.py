"""Choices of the keys that a query attends to, by the scores of an indexer: single keys, or blocks of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, Operation, OperationKind, OperationSharding
from shardwise.sharding import Spec
from shardwise.values import LocalDim, Polynomial, multiply_symbols

CAUSAL_SHARE = 0.5  # of the square of scores


@dataclass(frozen=True, slots=True)
class Selection(Operation):
    """Choice of `num_selected` keys, or blocks of them, for each query, by the scores of an indexer; base of all such choices.

    The first inputs are queries, whose last dim is that of the products, and keys. The last ones are positions of the queries and
    of the keys; what lies between belongs to queries. A device chooses for its own rows and heads: keys are needed unsharded
    along the sequence, and dims of queries that the choice lacks are summed over, so that they are needed whole. No gradient
    flows: a choice has none.
    """

    kind: ClassVar[OperationKind] = "select"
    num_selected: str = "s"
    sequence: str = "T"

    @property
    def missing_kernel(self) -> str:
        return "an indexer of keys"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        queries, keys, *of_queries, key_positions = specs
        result = dims[self.outputs[0]]
        rows = {dim: queries.axes_of(dim) for dim in queries.dims[:-1] if dim in result}

        def split(spec: Spec, *whole_dims: str) -> Spec:
            return Spec.of(
                spec.dims, {dim: axes for dim, axes in rows.items() if dim in spec.dims and dim not in whole_dims}
            )

        operands = split(queries), split(keys, self.sequence), *map(split, of_queries), Spec.of(key_positions.dims)
        return OperationSharding(operands, (Spec.of(result, rows),))


@dataclass(frozen=True, slots=True)
class SelectKeys(Selection):
    """Positions [B,T,s] of the keys that each query attends to: those with the s largest scores among it and the keys before.

    Inputs: queries [B,T,A,Y], keys [B,T,Y] and weights [B,T,A] of an indexer, and positions[T] of the queries and of the
    keys. A score is the sum over the indexer's heads A of weight * relu(query * key). Where a query has fewer keys, the others
    are those at its own position. With a `window`, the letter of its size, keys [B,T/m,Y] are compressed ones of so many tokens
    (`CompressKeys`), whose positions are those of their first tokens; a query sees them if it is not before their last one, and
    fewer than s are filled up with -1. Source: DeepSeek-AI 2025 (DeepSeek-V3.2, section 2.1).
    """

    window: str = ""

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 FLOPs per element of the products over the causal half of the scores: queries by keys, weights by these."""
        queries, keys = sharding.inputs[:2]
        scores = [LocalDim(d, queries.axes_of(d)) for d in queries.dims[:-1]]
        scores.append(LocalDim(keys.dims[1], keys.axes_of(keys.dims[1])))
        by_key = multiply_symbols([*scores, LocalDim(queries.dims[-1], ())], 2.0 * CAUSAL_SHARE)
        return by_key + multiply_symbols(scores, 2.0 * CAUSAL_SHARE)


@dataclass(frozen=True, slots=True)
class SelectBlocks(Selection):
    """Numbers [B,T,K,s] of the blocks of keys that each query attends to, -1 where there are fewer.

    These are a query's own block, and those in which a key has the largest scores among the query and the keys before.

    Inputs: queries [B,T,K,Y] of an indexer, a head for each key-value head, keys [B,T,Y], and positions[T] of the queries and of
    the keys. Heads are independent. `block` is the letter of the size of a block. Source: `MiniMaxM3VLIndexer` of transformers
    5.23.
    """

    block: str = "z"

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 FLOPs per element of the product of queries and keys over the causal half of the scores."""
        queries, keys = sharding.inputs[:2]
        scores = [LocalDim(dim, queries.axes_of(dim)) for dim in queries.dims]
        return multiply_symbols([*scores, LocalDim(self.sequence, keys.axes_of(self.sequence))], 2.0 * CAUSAL_SHARE)
