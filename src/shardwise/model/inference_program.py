"""The programs of inference: the same blocks as in training, with a cache that rests between passes.

A pass computes B rows of T new tokens. Attention reads the Z slots of a cache in each row, which the new keys and values join
first; recurrences read and leave a state, convolutions the last rows; the head gives logits of j tokens of each row. There is no
loss. Tokens of a row may belong to several sequences (`operations.cached_tokens`).

Latent attention rests in its latents. A decoding token multiplies its queries by the weights that make keys, and what it attends
to by those that make values (`absorbs_latent`): it reads latents alone. In prefill keys and values are made of the latents of all
slots, which takes fewer FLOPs where there are many new tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from shardwise.model.architecture import Architecture
from shardwise.model.block_parts import HIDDEN, TOKENS, add_norm
from shardwise.model.carried_tensors import SHARED_KEYS, SHARED_VALUES
from shardwise.model.decoder import MTP_BLOCK_PREFIX, add_embedding, add_embeddings, add_logits, carry_program
from shardwise.model.decoder_block import BlockBuilder
from shardwise.model.indexer import BlockIndexerBuilder, IndexerBuilder
from shardwise.model.layer_pattern import EMBEDDING, HEAD
from shardwise.model.mixer_builder import MixerBuilder, state_dims
from shardwise.model.operations import (
    SLOTS,
    AddVectorOnce,
    AppendToCache,
    CachedAttention,
    CachedConvolution,
    CachedRecurrence,
    Concatenate,
    Dims,
    LatentAttention,
    PickTokens,
    SelectSlots,
)
from shardwise.model.operations.recurrences import UpdateRule
from shardwise.model.placeholder_sizes import placeholder_architecture
from shardwise.model.program import ModelPart, Program, ProgramBuilder, Role
from shardwise.model.recurrent_mixers import RecurrentStructure
from shardwise.model.residual_streams import residual_dims
from shardwise.model.structure import ModelStructure

CACHE_ROWS = ("B", SLOTS)
PICKED = ("B", "j")  # tokens whose next token is wanted
NEXT = "'"  # ends the name of a cache after the pass
# Tokens where their experts are reached, what their router reads if that is another tensor, and results back.
EXPERT_TOKENS, ROUTER_TOKENS, EXPERT_RESULTS = "expert_tokens", "router_tokens", "expert_results"
MASK_INPUTS = (  # names and dims of the constants that say which slots a token sees
    ("positions", TOKENS), ("sequences", TOKENS), ("slot_positions", CACHE_ROWS), ("slot_sequences", CACHE_ROWS),
    ("window", ()), ("chunk", ()),
)  # fmt: skip
TOKEN_SLOTS = "slots"  # the slot of each new token


def cache_names(program: Program) -> tuple[str, ...]:
    """Return the names of the tensors that rest between passes, as a pass reads them."""
    tensors = (program.tensors[name] for name in program.inputs)
    return tuple(tensor.name for tensor in tensors if tensor.role in (Role.CACHE, Role.RECURRENT_STATE))


class CacheWriter:
    """Defines the caches of a program, and the operations that write them; `results` are the caches after the pass."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self.builder = builder
        self.results: list[str] = []

    def rest(self, name: str, dims: Iterable[str], role: Role = Role.CACHE) -> tuple[str, str]:
        """Return the names of a tensor that rests between passes, before and after the pass."""
        after = self.builder.tensor(f"{name}{NEXT}", dims, role)
        self.results.append(after)
        return self.builder.input(name, dims, role), after

    def append(self, rows: dict[str, str]) -> tuple[str, ...]:
        """Add one operation that appends new rows [B, T, ...] to caches, by the names of the caches; return these after it."""
        pairs = [self.rest(name, (*CACHE_ROWS, *self.builder.tensors[row].dims[2:])) for name, row in rows.items()]
        slots = self.builder.input(TOKEN_SLOTS, TOKENS, Role.CONSTANT)
        outputs = tuple(after for _, after in pairs)
        self.builder.add(AppendToCache((*(before for before, _ in pairs), *rows.values(), slots), outputs))
        return outputs

    def mask(self) -> tuple[str, ...]:
        """Return the names of the constants that say which slots a token sees."""
        return tuple(self.builder.input(name, dims, Role.CONSTANT) for name, dims in MASK_INPUTS)

    def select(self, prefix: str, scored: tuple[str, ...], selected: str, block: str = "") -> str:
        """Add the choice of slots, or of blocks of them, by an indexer's queries, keys and weights; its keys are cached too."""
        queries, keys, *weights = scored
        (cached,) = self.append({f"{prefix}index_k_cache": keys})
        return self.builder.add(SelectSlots((queries, cached, *weights, *self.mask()), (selected,), block=block))


class InferenceBlockBuilder(BlockBuilder):
    """Writes one block's operations for a pass of inference."""

    def __init__(
        self, builder: ProgramBuilder, architecture: Architecture, prefix: str, *, absorbs_latent: bool
    ) -> None:
        super().__init__(builder, architecture, prefix)
        self.caches, self.absorbs_latent = CacheWriter(builder), absorbs_latent

    def attend(self, y: str) -> str:
        """Add queries, the rows that join the cache, and attention over it."""
        if self.architecture.structure.latent:
            return self.attend_to_latents(y)
        if self.architecture.differential:
            return self.differential_values(y)
        q, k, v, *selected = self.queries_and_keys(y)
        if self.architecture.key_sharing == "reuse":
            return self.attend_to_cache(q, k, v)
        keys, values = self.caches.append({f"{self.prefix}k_cache": k, f"{self.prefix}v_cache": v})
        return self.attend_to_cache(q, keys, values, *selected)

    def reused_heads(self) -> tuple[str, str]:
        """Return the names of the cached keys and values of the layer whose cache this one reads; it has none of its own."""
        keys = self.read_carried(SHARED_KEYS, (*CACHE_ROWS, "K", "H"))
        return keys, self.read_carried(SHARED_VALUES, (*CACHE_ROWS, "K", self.value_width))

    def hand_on(self, *names: str) -> None:
        """Leave keys and values as they are: later layers read the caches, which are results of the pass."""

    def attend_twice(self, pairs: list[tuple[str, str]], values: str) -> list[str]:
        rows = {f"{self.prefix}k{number}_cache": k for number, (_, k) in zip("12", pairs, strict=True)}
        *keys, cached = self.caches.append({**rows, f"{self.prefix}v_cache": values})
        return [
            self.attend_to_cache(q, key, cached, number=number)
            for number, (q, _), key in zip("12", pairs, keys, strict=True)
        ]

    def attend_to_cache(self, q: str, keys: str, values: str, *selected: str, number: str = "") -> str:
        """Add attention over keys and values of all slots, or over those that an indexer selects."""
        outputs = self.attention_results("attended", self.value_dims, number)
        operands = (q, keys, values, *self.caches.mask(), *self.sinks(), *selected)
        return self.builder.add(
            CachedAttention(operands, outputs, is_sparse=bool(selected), selected_block=self.selected_block)
        )

    def indexer(self) -> IndexerBuilder:
        builder = _SlotBlockSelector if self.architecture.structure.block_indexer else _SlotSelector
        return builder(self.builder, self.prefix, self.caches)

    def attend_to_latents(self, y: str) -> str:
        """Add attention over a cache of latents, which keys and values are made of, or queries are brought to."""
        source, width = self.query_source(y)
        plain, rotary = self.query_parts(source, width)
        latent, flat = self.key_latent(y)
        rotated = self.rotary(flat, "k_rotary", (*TOKENS, "R"))
        caches = {f"{self.prefix}latent_cache": latent, f"{self.prefix}k_rotary_cache": rotated}
        latents, key_rotary = self.caches.append(caches)
        if self.architecture.structure.indexer:
            selected = self.indexer().build(y, source)
            return self.absorbed_attention((plain, rotary), (latents, key_rotary), (selected,))
        if self.absorbs_latent:
            return self.absorbed_attention((plain, rotary), (latents, key_rotary), ())
        dims = (*CACHE_ROWS, "K")
        key_plain = self.contract(latents, "w_k_up", ("K", "I", "C"), "k_plain", (*dims, "I"))
        keys = self.concatenate((key_plain, key_rotary), "k", (*dims, "H"))
        values = self.contract(latents, "w_v_up", ("K", "U", "C"), "v_cached", (*dims, "U"))
        q = self.concatenate((plain, rotary), "q", (*TOKENS, "K", "G", "H"))
        return self.attend_to_cache(q, keys, values)

    def absorbed_attention(self, queries: tuple[str, str], cached: tuple[str, str], selected: tuple[str, ...]) -> str:
        """Add attention of queries that are multiplied by the weights of keys, and the weights of values after it."""
        plain, rotary = queries
        absorbed = self.contract(plain, "w_k_up", ("K", "I", "C"), "q_absorbed", (*TOKENS, "K", "G", "C"))
        outputs = self.attention_results("attended_latent", ("K", "G", "C"))
        operands = (absorbed, rotary, *cached, *self.caches.mask(), *self.sinks(), *selected)
        attended = self.builder.add(LatentAttention(operands, outputs, is_sparse=bool(selected)))
        return self.contract(attended, "w_v_up", ("K", "U", "C"), "attended", (*TOKENS, *self.value_dims))

    def recurrent_mixer(self, recurrence: RecurrentStructure, y: str) -> str:
        return _CachedMixerBuilder(self.builder, recurrence, f"{self.prefix}mixer.", self.caches).build(y)

    def experts(self, y: str, router_input: str | None = None) -> str:
        """Add experts between two handovers: of the tokens to where the experts are reached, and of the results back."""
        tokens = self.elementwise("handover", [y], EXPERT_TOKENS, HIDDEN)
        if router_input:
            router_input = self.elementwise("handover", [router_input], ROUTER_TOKENS, HIDDEN)
        return self.elementwise("handover", [super().experts(tokens, router_input)], EXPERT_RESULTS, HIDDEN)

    def add_bias(
        self, x: str, projection: str, name: str, bias: Iterable[str], dims: tuple[str, ...], role: Role = Role.ACTIVATION
    ) -> str:  # fmt: skip
        """Return `x` plus its bias, where the structure has one; partial sums of experts stay partial."""
        if projection != "experts" or projection not in self.architecture.bias:
            return super().add_bias(x, projection, name, bias, dims, role)
        vector = self.builder.weight(f"{self.prefix}{name}.bias", bias)
        return self.builder.add(
            AddVectorOnce((x, vector), (self.builder.tensor(f"{self.prefix}{name}_biased", dims, role),))
        )


class _SlotSelector(IndexerBuilder):
    """Writes an indexer that chooses among the slots of a cache of its keys."""

    def __init__(self, builder: ProgramBuilder, prefix: str, caches: CacheWriter) -> None:
        super().__init__(builder, prefix)
        self.caches = caches

    def select(self, scored: tuple[str, ...], selected: str) -> str:
        return self.caches.select(self.prefix, scored, selected)


class _SlotBlockSelector(BlockIndexerBuilder):
    """Writes an indexer that chooses among blocks of the slots of a cache of its keys."""

    def __init__(self, builder: ProgramBuilder, prefix: str, caches: CacheWriter) -> None:
        super().__init__(builder, prefix)
        self.caches = caches

    def select(self, scored: tuple[str, ...], selected: str) -> str:
        return self.caches.select(self.prefix, scored, selected, block="z")


class _CachedMixerBuilder(MixerBuilder):
    """Writes a recurrent mixer whose state and last rows rest between passes."""

    def __init__(
        self, builder: ProgramBuilder, structure: RecurrentStructure, prefix: str, caches: CacheWriter
    ) -> None:
        super().__init__(builder, structure, prefix)
        self.caches = caches

    def recurrence(
        self, rule: UpdateRule, operands: tuple[str, ...], values: Dims, *, rates: str | None = None, name: str = "",
        scales_queries: bool = False,
    ) -> str:  # fmt: skip
        dims = ("B", *state_dims(rule, values))
        before, after = self.caches.rest(f"{self.prefix}{name}state", dims, Role.RECURRENT_STATE)
        out = self.tensor(f"{name}scanned", (*TOKENS, *values))
        operands = (*operands, *([rates] if rates else []), before)
        return self.builder.add(
            CachedRecurrence(
                operands, (out, after), rule, has_rates=bool(rates), scales_queries=scales_queries or rule == "delta"
            )
        )

    def convolve_all(
        self, streams: Iterable[str], names: tuple[str, ...], channels: tuple[Dims, ...], *, activation: bool = True
    ) -> tuple[str, ...]:
        inputs = zip(tuple(streams), names, channels, strict=True)
        return tuple(self.convolve(x, "", name, dims, activation=activation) for x, name, dims in inputs)

    def convolution(self, x: str, filters: str, edge: str, name: str) -> str:
        dims = self.builder.tensors[x].dims
        before, after = self.caches.rest(f"{self.prefix}{name}_rows", ("B", "w", *dims[2:]))
        out = self.tensor(f"{name}_convolved", dims)
        return self.builder.add(CachedConvolution((x, filters, before), (out, after)))


@lru_cache(maxsize=1024)
def inference_unit_program(structure: ModelStructure, unit: str, *, absorbs_latent: bool) -> Program:
    """Return the program of a unit for a pass of inference: "embedding", a kind of layer, "head", "predict" or "carry".

    A layer gives the hidden state and its caches after the pass, the head logits [B, j, V]. A module of multi-token prediction
    ("predict") gives both a hidden state and logits, and its caches.
    """
    architecture = placeholder_architecture(structure.unit_structure(unit))
    if unit == "carry":
        return carry_program(architecture)
    builder = ProgramBuilder(position_dims=TOKENS)
    if unit == "embedding":
        return builder.build(add_embeddings(builder, architecture, ""))
    x = builder.input("x", residual_dims(structure.unit_structure(unit).streams), Role.RESIDUAL)
    if unit == "head":
        return builder.build([_add_picked_logits(builder, architecture, x)])
    prefix = MTP_BLOCK_PREFIX if unit == "predict" else ""
    block = InferenceBlockBuilder(builder, architecture, prefix, absorbs_latent=absorbs_latent)
    if unit != "predict":
        return builder.build([block.build(x), *block.caches.results])
    y = block.build(_add_pair(builder, architecture, x))
    return builder.build([y, _add_picked_logits(builder, architecture, y, lender=HEAD), *block.caches.results])


def _add_picked_logits(builder: ProgramBuilder, architecture: Architecture, x: str, lender: str = "") -> str:
    tokens = builder.input("picked_tokens", PICKED, Role.CONSTANT)
    dims = (*PICKED, *builder.tensors[x].dims[2:])
    picked = builder.add(PickTokens((x, tokens), (builder.tensor("picked", dims, Role.ACTIVATION),)))
    return add_logits(builder, architecture, picked, "", tied=architecture.tied_embeddings, lender=lender)


def _add_pair(builder: ProgramBuilder, architecture: Architecture, x: str) -> str:
    """Add the projection of a hidden state and the embedding of the token after it (`decoder.mtp_program`)."""
    hidden = add_norm(builder, architecture, x, "hidden_norm")
    with builder.borrowing(EMBEDDING):
        rows = add_embedding(builder, architecture, "")
    embedded = add_norm(builder, architecture, rows, "embedding_norm")
    pair = builder.add(
        Concatenate((embedded, hidden), (builder.tensor("pair", (*TOKENS, "J"), Role.ACTIVATION),), ("D", "D"))
    )
    projection = builder.weight("pair_projection", ("D", "J"), part=ModelPart.PREDICTION)
    return builder.contract(pair, projection, "projected", HIDDEN, Role.RESIDUAL)
