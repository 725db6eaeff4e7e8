"""Operations of inference: attention over a cache, the rows that join it, and states that recurrences leave between passes.

A pass computes new tokens: B rows of T tokens. A cache has Z slots in each row, in which the keys and values of earlier tokens
rest. A row is a sequence, or a pool that several sequences share: tokens name their sequence and their position, slots those of
the token that they hold, and a query sees the slots of its own sequence up to its own position, at most a window back. So the
same operations serve the prefill of a chunk, the decode of a batch, and a batch of both in one row. The table that maps blocks of
a paged cache to sequences is these two constants.

Sources: Kwon et al. 2023 (PagedAttention); DeepSeek-AI 2024 (DeepSeek-V2, 2.1.2: queries against the latent); Dao et al. 2023
(Flash-Decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, Operation, OperationKind, OperationSharding
from shardwise.model.operations.key_selection import Selection
from shardwise.model.operations.recurrences import FORWARD_PRODUCTS, SequenceRecurrence
from shardwise.sharding import Axes, Spec
from shardwise.values import ZERO, LocalDim, Polynomial, multiply_symbols, sum_polynomials
from shardwise.values.symbolic import Symbol

SLOTS = "Z"  # slots of the cache in each row
SPAN = "span"  # the share of a row's slots that a new token sees, on average
NUM_MASK_INPUTS = 6  # positions and sequences of tokens, those of slots, the window, and the size of a chunk


@dataclass(frozen=True, slots=True)
class AppendToCache(Operation):
    """The caches with the rows of the new tokens in their slots, changed in place.

    Inputs: caches [B, Z, ...], as many tensors of new rows [B, T, ...], and the slot of each token [B, T]; a token with a slot
    below zero is not written. Outputs: the caches. A cache does not move: rows come to where it rests.
    """

    kind: ClassVar[OperationKind] = "append"
    sequence: str = "T"

    @property
    def num_caches(self) -> int:
        return len(self.outputs)

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        caches, rows, slots = specs[: self.num_caches], specs[self.num_caches : -1], specs[-1]
        pairs = zip(caches, rows, strict=True)
        moved = (Spec.of(row.dims, {dim: cache.axes_of(dim) for dim in row.dims}) for cache, row in pairs)
        slots = Spec.of(slots.dims, {slots.dims[0]: caches[0].axes_of(slots.dims[0])})
        reasons = (*("" for _ in caches), *("new rows join the cache where it rests" for _ in rows), "")
        return OperationSharding((*caches, *moved, slots), tuple(caches), reasons)

    def read_elements(self, sharding: OperationSharding) -> tuple[Polynomial, ...]:
        """Return the elements of the new rows and their slots; what rests in the caches is not read."""
        elements = [spec.local_elements() for spec in sharding.inputs]
        return (*(ZERO for _ in self.outputs), *elements[self.num_caches :])

    def written_elements(self, sharding: OperationSharding) -> tuple[Polynomial, ...]:
        """Return the elements of the new rows."""
        return tuple(spec.local_elements() for spec in sharding.inputs[self.num_caches : -1])


@dataclass(frozen=True, slots=True)
class CachedAttention(Operation):
    """Softmax attention of new tokens over a cache.

    Inputs: q [B, T, K, G, H], keys [B, Z, K, H] and values [B, Z, K, U]; positions and sequences of the tokens [B, T] and of
    the slots [B, Z] (a sequence below zero: an empty slot), the window [] and the size of a chunk []; then sinks [K, G], if any,
    and with `is_sparse` the slots that each query sees [B, T, s], or the numbers of blocks of slots of the size `selected_block`
    (`SelectSlots`). Outputs: attended values [B, T, K, G, U] and log-sum-exp [B, T, K, G].
    The cache does not move: queries come to its sequences and heads. Slots are required unsharded.
    """

    kind: ClassVar[OperationKind] = "cached_attention"
    is_sparse: bool = False
    selected_block: str = ""
    num_queries: ClassVar[int] = 1
    num_cached: ClassVar[int] = 2

    @property
    def sinks(self) -> tuple[str, ...]:
        """Names of the logits that no value goes with: one tensor, or none."""
        first = self.num_queries + self.num_cached + NUM_MASK_INPUTS
        return self.inputs[first : len(self.inputs) - self.is_sparse]

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        queries, cached = specs[: self.num_queries], specs[self.num_queries :][: self.num_cached]
        caches = [spec.with_partial(()) for spec in cached]
        rows = self._query_rows(queries[0], caches[0])
        moved = [Spec.of(q.dims, {dim: rows[dim] for dim in q.dims[:-1]}) for q in queries]
        mask, extras = specs[self.num_queries + self.num_cached :][:NUM_MASK_INPUTS], specs[self._first_extra :]
        by_row = [Spec.of(spec.dims, {dim: rows.get(dim, ()) for dim in spec.dims}) for spec in (*mask, *extras)]
        tokens = {dim: rows[dim] for dim in queries[0].dims[:-1]}
        attended, lse = (dims[name] for name in self.outputs)
        outputs = Spec.of(attended, tokens), Spec.of(lse, tokens)
        reasons = (*("queries come to the cache" for _ in moved), *("" for _ in (*caches, *by_row)))
        return OperationSharding((*moved, *caches, *by_row), outputs, reasons)

    @property
    def _first_extra(self) -> int:
        return self.num_queries + self.num_cached + NUM_MASK_INPUTS

    def _query_rows(self, q: Spec, cache: Spec) -> dict[str, Axes]:
        """Return the axes of the dims of queries: those of the cache where it has the dim, and else what these leave."""
        rows = {dim: cache.axes_of(dim) for dim in q.dims[:-1] if dim in cache.dims}
        cache_axes = cache.sharded_axes
        remaining = (dim for dim in q.dims[:-1] if dim not in cache.dims)
        return rows | {dim: tuple(axis for axis in q.axes_of(dim) if axis not in cache_axes) for dim in remaining}

    def score_symbols(self, sharding: OperationSharding) -> list[Symbol]:
        """Return the symbols whose product is the number of scores on one device."""
        q = sharding.inputs[0]
        rows: list[Symbol] = [LocalDim(dim, q.axes_of(dim)) for dim in q.dims[:-1]]
        return [*rows, *(self.selected_symbols if self.is_sparse else (LocalDim(SLOTS, ()), SPAN))]

    @property
    def selected_symbols(self) -> tuple[Symbol, ...]:
        """Symbols whose product is the number of slots that a query of sparse attention sees."""
        return tuple(LocalDim(dim, ()) for dim in ("s", self.selected_block) if dim)

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 FLOPs per score and element of a key's and a value's width, of the slots that a query sees."""
        keys, values = sharding.inputs[1:3]
        scores = self.score_symbols(sharding)
        widths = (keys.dims[-1], values.dims[-1])
        return sum_polynomials(multiply_symbols([*scores, LocalDim(width, ())], 2.0) for width in widths)

    def read_elements(self, sharding: OperationSharding) -> tuple[Polynomial, ...]:
        """Return all elements of the operands; of a sparse attention's cache the slots that its queries select."""
        elements = [spec.local_elements() for spec in sharding.inputs]
        for index in range(self.num_queries, self.num_queries + self.num_cached) if self.is_sparse else ():
            spec, tokens = sharding.inputs[index], sharding.inputs[0]
            rows = [LocalDim(dim, tokens.axes_of(dim)) for dim in tokens.dims[:2]]
            inner = [LocalDim(dim, spec.axes_of(dim)) for dim in spec.dims[2:]]
            elements[index] = multiply_symbols([*rows, *self.selected_symbols, *inner])
        return tuple(elements)


@dataclass(frozen=True, slots=True)
class LatentAttention(CachedAttention):
    """Attention of queries in the space of the latent that keys and values are made of, over a cache of latents.

    Inputs: the queries' plain part, multiplied by the weights that make keys of a latent, [B, T, K, G, C], and their rotary part
    [B, T, K, G, R]; latents [B, Z, C] and the keys' rotary part [B, Z, R], which all heads share; then as `CachedAttention`.
    Outputs: attended latents [B, T, K, G, C] and log-sum-exp. Scores are divided by the root of `scale_dim`, the width of a head
    before. Source: DeepSeek-AI 2024 (DeepSeek-V2), 2.1.2.
    """

    scale_dim: str = "H"
    num_queries: ClassVar[int] = 2
    num_cached: ClassVar[int] = 2

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 FLOPs per score and element: of latents twice, as keys and as values, and of the rotary part."""
        latent, rotary = sharding.inputs[2:4]
        scores = self.score_symbols(sharding)
        widths = ((latent.dims[-1], 4.0), (rotary.dims[-1], 2.0))
        return sum_polynomials(multiply_symbols([*scores, LocalDim(width, ())], count) for width, count in widths)


@dataclass(frozen=True, slots=True)
class SelectSlots(Selection):
    """Slots [B, T, s] of the cache that each new token attends to: those with the s largest scores among the slots that it sees.

    Inputs: an indexer's queries [B, T, A, Y], cached keys [B, Z, Y] and weights [B, T, A], and a mask as that of
    `CachedAttention`. With a `block`, the letter of its size, there are no weights, and queries [B, T, K, Y] choose numbers of
    blocks of slots for each key-value head [B, T, K, s] (`SelectBlocks`). Where a query sees fewer, the others are -1. Rows lie
    where the cache rests. Source:
    DeepSeek-AI 2025 (DeepSeek-V3.2, 2.1).
    """

    block: str = ""

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        queries, keys = specs[:2]
        cache = keys.with_partial(())
        result = dims[self.outputs[0]]  # heads that it lacks are added up
        cache_axes = cache.sharded_axes
        rows = {dim: cache.axes_of(dim) for dim in cache.dims if dim in result}
        remaining = (dim for dim in queries.dims[:-1] if dim in result and dim not in cache.dims)
        rows |= {dim: tuple(axis for axis in queries.axes_of(dim) if axis not in cache_axes) for dim in remaining}
        operands = [Spec.of(spec.dims, {dim: rows.get(dim, ()) for dim in spec.dims}) for spec in (queries, *specs[2:])]
        return OperationSharding((operands[0], cache, *operands[1:]), (Spec.of(result, rows),))

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 FLOPs per element of the products over the slots that a query sees: queries by keys, and weights, if there
        are any, by these."""
        queries = sharding.inputs[0]
        heads: list[Symbol] = [LocalDim(dim, queries.axes_of(dim)) for dim in queries.dims[:-1]]
        scores = multiply_symbols([*heads, LocalDim(SLOTS, ()), SPAN], 2.0)
        by_key = scores * multiply_symbols([LocalDim(queries.dims[-1], ())])
        return by_key if self.block else by_key + scores


@dataclass(frozen=True, slots=True)
class CachedRecurrence(SequenceRecurrence):
    """Outputs [B, T, *heads, X] of a recurrence over the new tokens of each sequence, and the state that they leave.

    Inputs: those of `Recurrence` without the segments, and the state [B, *heads, N, X] that rests between passes (without keys
    as the values). A row is one
    sequence, and its tokens are required unsharded.
    """

    scales_queries: bool = False

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        *tokens, state = specs
        values = tokens[self.value_position].with_axes(self.sequence, ())
        for dim in (values.dims[0], *self.heads(values)):
            values = values.with_axes(dim, state.axes_of(dim))
        operands = tuple(self.sharding_of(values, spec.dims) for spec in tokens)
        return OperationSharding((*operands, state), (self.sharding_of(values, values.dims), state))

    def flops(self, sharding: OperationSharding) -> Polynomial:
        return self.products(sharding.inputs[self.value_position], sharding.inputs[1], FORWARD_PRODUCTS[self.rule])


@dataclass(frozen=True, slots=True)
class CachedConvolution(Operation):
    """A short convolution over the new tokens of each sequence, and the last rows that the next pass reads.

    Inputs: x [B, T, *channels], the filters [W, *channels], and the rows before [B, w, *channels], which rest between passes.
    Outputs: rows as x, and the last w of old and new rows.
    """

    kind: ClassVar[OperationKind] = "map"
    sequence: str = "T"
    taps: str = "W"

    @property
    def missing_kernel(self) -> str:
        return "a short convolution"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        x, weight, rows = specs
        split = {dim: rows.axes_of(dim) for dim in x.dims if dim != self.sequence}
        moved = Spec.of(x.dims, split)
        filters = Spec.of(weight.dims, {dim: split.get(dim, ()) for dim in weight.dims})
        return OperationSharding((moved, filters, rows), (moved, rows))

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return 2 FLOPs for each output and tap."""
        return sharding.inputs[0].local_elements() * multiply_symbols([LocalDim(self.taps, ())], 2.0)


@dataclass(frozen=True, slots=True)
class PickTokens(Operation):
    """The rows [B, j, ...] of x [B, T, ...] at some tokens [B, j]: those whose next token is wanted.

    Where tokens are split, each device gives those that it has and zero for the others: a partial sum.
    """

    kind: ClassVar[OperationKind] = "lookup"
    sequence: str = "T"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        x, tokens = specs[0].with_partial(()), specs[1]
        rows = {dim: x.axes_of(dim) for dim in x.dims if dim != self.sequence}
        tokens = Spec.of(tokens.dims, {dim: rows.get(dim, ()) for dim in tokens.dims})
        return OperationSharding((x, tokens), (Spec.of(dims[self.outputs[0]], rows, x.axes_of(self.sequence)),))

    def read_elements(self, sharding: OperationSharding) -> tuple[Polynomial, ...]:
        """Return the elements of the indices and of the rows that are picked."""
        return sharding.outputs[0].local_elements(), sharding.inputs[1].local_elements()


@dataclass(frozen=True, slots=True)
class AddVectorOnce(Operation):
    """`x` plus a vector along some of its dims. Where x is a partial sum, each device adds its share of the vector, so that the
    sum need not be reduced before."""

    kind: ClassVar[OperationKind] = "map"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        x, vector = specs
        return OperationSharding((x, Spec.of(vector.dims, {dim: x.axes_of(dim) for dim in vector.dims})), (x,))


CACHED_ATTENTION_OPERATIONS = (CachedAttention, LatentAttention)
# Operations on cached tokens, but for recurrences.
CACHED_TOKEN_OPERATIONS = (
    AppendToCache, CachedAttention, LatentAttention, SelectSlots, CachedConvolution, PickTokens, AddVectorOnce
)  # fmt: skip
