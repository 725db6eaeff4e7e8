"""Sizes of a decoder-only transformer, of all its layers or of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from shardwise.model.adapters import absent_modules, expand_lora_targets
from shardwise.model.alternating_streams import stream_sizes
from shardwise.model.attended_shares import attended_shares, mean_attended_share, scan_shares
from shardwise.model.carried_tensors import KeySharing, carried_dims
from shardwise.model.layer_pattern import (
    BASE_LAYER,
    DENSE_LAYER,
    EMBEDDING,
    NO_KINDS,
    FrozenFields,
    count_before,
    count_layers,
    list_layers,
)
from shardwise.model.numerics import DEFAULT_NUMERICS, Numerics
from shardwise.model.omitted_parts import OmittedPart, config_notes
from shardwise.model.recurrent_mixers import RecurrentMixer, parse_recurrence
from shardwise.model.shared_blocks import AdaptedParts
from shardwise.model.size_rules import combination_problems, kind_problems
from shardwise.model.structure import (
    ACTIVATION_WEIGHTS,
    IS_GATED,
    IS_LEARNED,
    AttentionGate,
    FeedForwardKind,
    GateFunction,
    GateModule,
    MixerKind,
    MlpKind,
    ModelStructure,
    NormedParts,
    NormKind,
    NormWidth,
    PositionKind,
    StreamNorms,
    WindowKind,
)
from shardwise.values import OMIT_DEFAULT, InputError, Value, argument_label, raise_problems

OPTIONAL_SIZES = (  # sizes that are 0 where a model lacks what they measure
    "num_experts", "experts_per_token", "shared_expert_width", "num_dense_layers", "dense_d_ff",
    "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "num_predict_layers", "lora_rank",
    "index_heads", "index_head_dim", "index_topk", "index_block", "expert_latent_dim", "embedding_rows", "norm_gate_rank",
    "num_streams", "output_rank", "compress_window", "layer_input_dim", "layer_input_rows", "laurel_rank",
    "adapter_rank",
)  # fmt: skip
MAX_SIZE = 10**9  # of any size: far above any model, and products of sizes stay finite
# Of sizes that count parts, each of which is planned, read or written by itself. Models have up to 200 layers and 1,000 experts.
MAX_PARTS: Mapping[str, int] = {"num_layers": 10_000, "num_predict_layers": 100, "num_experts": 100_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a decoder, in the books' letters: L, D, F, N query heads, K key-value heads, H, V; and its structure.

    `max_positions` are the rows of a learned table of positions, `max_context` the tokens of a sequence that the published model
    takes (None: not known): its config's max_position_embeddings, with the factor of scaled angles. `sliding_window` limits how
    far back a token sees, on all layers but every `global_every`-th (0: on all). With `num_experts` every block's MLP is that
    many experts of width `d_ff`, of which each token takes `experts_per_token`, and a shared one of `shared_expert_width` (0:
    none); the first `num_dense_layers` have a plain MLP of width `dense_d_ff` instead.
    Multi-head latent attention (DeepSeek-AI 2024) has a `kv_lora_rank`: keys and values come from a latent of that width;
    of a key's `head_dim`, `rope_head_dim` are rotary and the same for all heads; a value has `v_head_dim`; queries come
    from a latent of `q_lora_rank` (0: from the hidden state). Without latents `v_head_dim` is the width of a value (0: that of a
    key). `num_predict_layers` modules after the last layer predict
    one token further each (multi-token prediction, DeepSeek-AI 2025); they share embedding and head with the model.
    `numerics` are constants of the arithmetic (epsilons, angles, scales), which runs depend on and plans do not.
    `omitted_parts` are what a config has beside this decoder, `stored_format` is the one that its weights are quantised to in
    their files: neither is planned for.
    With `index_topk` each query attends to that many keys, which an indexer of `index_heads` heads of width `index_head_dim`
    selects (DeepSeek-AI 2025, DeepSeek-V3.2); with an `index_block`, that many blocks of so many keys, for each key-value head
    (MiniMax-M3). Experts with an `expert_latent_dim` read and write a latent of that width. A
    `recurrence` mixes the tokens beside the `mixer`, or in place of attention where that is "none".
    `embedding_rows` are those of the embedding where it has more than the head (0: as many). `norm_gate_rank` is the width of
    the MLP whose sigmoid gates a norm.
    With `num_streams` the residual stream is so many (hyper-connections), which layers mix unless `mixed_streams` is false, or
    of which layers compute one and predict the others (`alternating_streams`: `model.alternating_streams`). A `laurel_rank` is
    that of a learned residual beside attention's, and `sparse_activation` keeps the largest gates of an MLP (Gemma 3n).
    With `shared_keys` one head of keys, which are its values as well, serves all heads; `num_kv_heads` are then the groups of
    heads that have an output product each, to `output_rank`; compressed keys stand for `compress_window` tokens each (0:
    none), or for twice as many in `overlapping_windows`, of which the indexer selects some where there is one;
    `hashed_experts` are chosen by the token (DeepSeek-AI 2026, DeepSeek-V4). With a `layer_input_dim` each layer reads an
    embedding of that width, of `layer_input_rows` rows (0: as the vocabulary); layers with `key_sharing` store keys and values
    for later ones, or reuse them. With a `shared_block` the recurrence reads the residual stream and what a block of attention
    and an MLP, with the weights of the layer of the kind `weights_of` ("": its own), makes of it and of the embedding, which
    layers read with `carried_embedding`; its `adapted_parts` have adapters of `adapter_rank` in each layer (Zyphra 2024, Zamba2).
    A layer mixes tokens (`mixer`) and has an MLP or
    experts (`feed_forward`), or one of the two. "mlp_and_experts" are an MLP of width `dense_d_ff` beside experts, whose
    router has a norm of its own (Gemma 4). Layers that differ are kinds: `layer_kinds` gives by name the fields in which a
    kind differs from all the others here, those of the base layer, and `layer_pattern` says which kind each layer is, "block"
    for the base layer (`model.layer_pattern`); modules of multi-token prediction are base layers. If any layer has experts,
    the base layer has.
    With a `lora_rank` the matrices `lora_targets` (`model.adapters`; those that the model lacks are skipped) have adapters of
    that rank, and only these are trained (LoRA, Hu et al. 2021): a product W x becomes W x + B A x. Raises `InputError` with
    every size that is wrong or does not go with the others.

    >>> model = Architecture(
    ...     name="tiny", num_layers=2, d_model=64, d_ff=256, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512
    ... )
    >>> model.dims["G"], model.attention_window(0), model.mean_attended_share(1024)
    (2, None, 0.5)
    >>> kinds = {"window": {"sliding_window": 512, "num_kv_heads": 1}}
    >>> hybrid = replace(model, layer_kinds=kinds, layer_pattern=("window", "block"))
    >>> hybrid.layer_units, hybrid.unit_architecture("window").dims["K"], hybrid.attention_window(0)
    (('window', 'block'), 1, 512)
    """

    name: str
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    mlp: MlpKind = "swiglu"
    norm: NormKind = "rms"
    norm_weight: bool = field(default=True, metadata=OMIT_DEFAULT)
    norm_bias: bool = False
    positions: PositionKind = "rotary"
    bias: tuple[str, ...] = ()
    qk_norm: bool = False
    qk_norm_over: NormWidth = "head"
    inner_norms: bool = field(default=False, metadata=OMIT_DEFAULT)
    sinks: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    embedding_norm: bool = False
    parallel: bool = False
    separate_norms: bool = False
    shared_gate: bool = False
    max_positions: int | None = None
    sliding_window: int | None = None
    global_every: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    shared_expert_width: int = 0
    num_dense_layers: int = 0
    dense_d_ff: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    num_predict_layers: int = 0
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    tied_embeddings: bool = False
    numerics: Numerics = DEFAULT_NUMERICS
    nominal_num_params: float | None = None  # the round figure in the model's name, used by the books' rules
    source: str = ""
    omitted_parts: tuple[OmittedPart, ...] = field(default=(), metadata=OMIT_DEFAULT)
    stored_format: str = field(default="", metadata=OMIT_DEFAULT)
    mixer: MixerKind = field(default="attention", metadata=OMIT_DEFAULT)
    feed_forward: FeedForwardKind = field(default="mlp", metadata=OMIT_DEFAULT)
    attention_gate: AttentionGate = field(default="none", metadata=OMIT_DEFAULT)
    index_heads: int = field(default=0, metadata=OMIT_DEFAULT)
    index_head_dim: int = field(default=0, metadata=OMIT_DEFAULT)
    index_topk: int = field(default=0, metadata=OMIT_DEFAULT)
    index_block: int = field(default=0, metadata=OMIT_DEFAULT)
    value_norm: bool = field(default=False, metadata=OMIT_DEFAULT)
    values_from_keys: bool = field(default=False, metadata=OMIT_DEFAULT)
    expert_scales: bool = field(default=False, metadata=OMIT_DEFAULT)
    mixed_streams: bool = field(default=True, metadata=OMIT_DEFAULT)
    alternating_streams: bool = field(default=False, metadata=OMIT_DEFAULT)
    num_streams: int = field(default=0, metadata=OMIT_DEFAULT)
    laurel_rank: int = field(default=0, metadata=OMIT_DEFAULT)
    sparse_activation: bool = field(default=False, metadata=OMIT_DEFAULT)
    shared_keys: bool = field(default=False, metadata=OMIT_DEFAULT)
    output_rank: int = field(default=0, metadata=OMIT_DEFAULT)
    compress_window: int = field(default=0, metadata=OMIT_DEFAULT)
    overlapping_windows: bool = field(default=False, metadata=OMIT_DEFAULT)
    hashed_experts: bool = field(default=False, metadata=OMIT_DEFAULT)
    expert_latent_dim: int = field(default=0, metadata=OMIT_DEFAULT)
    attention_gate_function: GateFunction = field(default="sigmoid", metadata=OMIT_DEFAULT)
    attention_gate_module: GateModule = field(default="g_proj", metadata=OMIT_DEFAULT)
    pre_norms_over: NormedParts = field(default="both", metadata=OMIT_DEFAULT)
    post_norms_over: NormedParts = field(default="both", metadata=OMIT_DEFAULT)
    rotary_key_norm: bool = field(default=False, metadata=OMIT_DEFAULT)
    stream_norms: StreamNorms = field(default="none", metadata=OMIT_DEFAULT)
    window_kind: WindowKind = field(default="sliding", metadata=OMIT_DEFAULT)
    final_norm: bool = field(default=True, metadata=OMIT_DEFAULT)
    head_layer: bool = field(default=False, metadata=OMIT_DEFAULT)
    embedding_rows: int = field(default=0, metadata=OMIT_DEFAULT)
    differential: bool = field(default=False, metadata=OMIT_DEFAULT)
    raw_query_latent: bool = field(default=False, metadata=OMIT_DEFAULT)
    norm_gate_rank: int = field(default=0, metadata=OMIT_DEFAULT)
    norm_gates_over: NormedParts = field(default="both", metadata=OMIT_DEFAULT)
    choice_bias: bool = field(default=False, metadata=OMIT_DEFAULT)
    layer_input_dim: int = field(default=0, metadata=OMIT_DEFAULT)
    layer_input_rows: int = field(default=0, metadata=OMIT_DEFAULT)
    key_sharing: KeySharing = field(default="none", metadata=OMIT_DEFAULT)
    carried_embedding: bool = field(default=False, metadata=OMIT_DEFAULT)
    shared_block: bool = field(default=False, metadata=OMIT_DEFAULT)
    weights_of: str = field(default="", metadata=OMIT_DEFAULT)
    adapted_parts: AdaptedParts = field(default="none", metadata=OMIT_DEFAULT)
    adapter_rank: int = field(default=0, metadata=OMIT_DEFAULT)
    recurrence: RecurrentMixer | None = field(default=None, metadata=OMIT_DEFAULT)
    layer_kinds: Mapping[str, Mapping[str, Any]] = field(default=NO_KINDS, metadata=OMIT_DEFAULT)
    layer_pattern: tuple[str, ...] = field(default=(), metadata=OMIT_DEFAULT)
    max_context: int | None = field(
        default=None, metadata=OMIT_DEFAULT, compare=False, repr=False
    )  # nothing is counted by it

    def __post_init__(self) -> None:
        if not isinstance(self.layer_kinds, FrozenFields):
            object.__setattr__(self, "layer_kinds", FrozenFields(self.layer_kinds))
        if isinstance(self.recurrence, Mapping):  # as it is in kinds of layers and in files
            object.__setattr__(self, "recurrence", parse_recurrence(self.recurrence))
        problems = [
            f"model {self.name}: {name} is {value!r}; a whole number of at least 1 is required"
            for name, value in self._counts().items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if not problems:
            problems += [
                f"model {self.name}: {name} has {len(str(value))} digits; at most {MAX_SIZE:,} is planned for"
                for name, value in self._counts().items()
                if isinstance(value, int) and value > MAX_SIZE
            ]
            problems += [
                f"model {self.name}: {name} is {getattr(self, name):,}; at most {largest:,} is planned for"
                for name, largest in MAX_PARTS.items()
                if largest < getattr(self, name) <= MAX_SIZE
            ]
        if not problems and self.num_heads % self.num_kv_heads:
            problems.append(
                f"model {self.name}: num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if not problems and not 0 <= self.experts_per_token <= self.num_experts:
            problems.append(
                f"model {self.name}: experts_per_token = {self.experts_per_token} of num_experts = {self.num_experts}; "
                "at least 1 and at most all of them are required"
            )
        if IS_LEARNED.get(self.positions) and self.max_positions is None:
            problems.append(f"model {self.name}: learned positions need max_positions, the rows of their table")
        problems += [f"model {self.name}: {problem}" for problem in ([] if problems else combination_problems(self))]
        problems += [] if problems else kind_problems(self)
        try:
            self.structure.__post_init__() if not problems else self._base_structure().__post_init__()
        except InputError as error:
            problems += [problem.replace("model:", f"model {self.name}:", 1) for problem in error.problems]
        raise_problems(problems)

    @property
    def absent_modules(self) -> frozenset[str]:
        """Modules for adapters that the base layer lacks (`model.adapters`)."""
        return absent_modules(
            latent=bool(self.kv_lora_rank), latent_queries=bool(self.q_lora_rank), gated=bool(IS_GATED.get(self.mlp)),
            experts=bool(self.num_experts), values=not self.values_from_keys, keys=self.key_sharing != "reuse",
            recurrence=self.recurrence is not None or any(fields.get("recurrence") for fields in self.layer_kinds.values()),
            gate=self.attention_gate != "none" and self.attention_gate_module == "g_proj",
        )  # fmt: skip

    @property
    def _adapted_modules(self) -> frozenset[str]:
        """Modules that have adapters. Where the layer lacks all of them they stay: without any it would be trained."""
        present = expand_lora_targets(self.lora_targets, self.absent_modules)
        return present or expand_lora_targets(self.lora_targets, ())

    def _counts(self) -> dict[str, object]:
        names = ["num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size"]
        names += [
            name for name in ("max_positions", "sliding_window", "max_context") if getattr(self, name) is not None
        ]
        names += [name for name in OPTIONAL_SIZES if getattr(self, name) != 0]
        names += ["experts_per_token"] if self.num_experts else []
        return {name: getattr(self, name) for name in names}

    @property
    def structure(self) -> ModelStructure:
        """The structure: all that derivations read of an architecture."""
        structure = self._base_structure()
        if not (self.layer_pattern or self.num_dense_layers):
            return structure
        units = (unit for unit in self.layer_counts if unit != BASE_LAYER)
        # Targets that a kind lacks stay in its structure: without any it would be trained.
        targets = expand_lora_targets(self.lora_targets, ())
        layers = {unit: self.unit_architecture(unit)._base_structure() for unit in units}
        return replace(
            structure, kinds=tuple((unit, replace(layer, lora_targets=targets)) for unit, layer in layers.items())
        )

    def _base_structure(self) -> ModelStructure:
        """Return the structure of the base layer."""
        return ModelStructure(
            **shared_fields(self), bias=frozenset(self.bias), experts=bool(self.num_experts),
            shared_experts=bool(self.shared_expert_width), latent=bool(self.kv_lora_rank),
            latent_queries=bool(self.q_lora_rank), predict=bool(self.num_predict_layers), indexer=bool(self.index_topk),
            block_indexer=bool(self.index_block), streams=bool(self.num_streams), compressed_keys=bool(self.compress_window),
            latent_experts=bool(self.expert_latent_dim), laurel=bool(self.laurel_rank),
            separate_values=bool(self.v_head_dim and not self.kv_lora_rank), norm_gates=bool(self.norm_gate_rank),
            layer_inputs=bool(self.layer_input_dim),
            recurrence=None if self.recurrence is None else self.recurrence.structure,
            lora_targets=self._adapted_modules,
        )  # fmt: skip

    def base_architecture(self) -> Architecture:
        """Return the same model with base layers alone."""
        return replace(self, layer_kinds=NO_KINDS, layer_pattern=()) if self.layer_pattern else self

    @property
    def has_mixer(self) -> bool:
        """True if the base layer mixes tokens, by attention, a recurrence or both."""
        return self.mixer != "none" or self.recurrence is not None

    @property
    def layer_units(self) -> tuple[str, ...]:
        """The unit of each layer: the name of its kind, "block" for a base layer, "dense_block" for a leading dense one."""
        return list_layers(self.layer_pattern, self.num_layers, self.num_dense_layers)

    @property
    def layer_counts(self) -> Mapping[str, int]:
        """Layers by unit: kinds in the order in which the model first has them, then the base layer."""
        return count_layers(self.layer_units)

    def count_layers(self, begin: int, end: int) -> dict[str, int]:
        """Return how many of the layers from `begin` up to `end` each unit is, in the order of `layer_counts`.

        >>> from shardwise.model.load import load_model
        >>> load_model("deepseek-v3").count_layers(2, 8)
        {'dense_block': 1, 'block': 5}
        """
        before = count_before(self.layer_units)
        return {unit: before[end][unit] - before[begin][unit] for unit in before[-1]}

    def unit_architecture(self, unit: str) -> Architecture:
        """Return the model with all layers of a unit's kind; of a unit that is no kind of layer, or the base layer, the model
        with base layers alone. The unit of the embedding has a vocabulary of `embedding_rows`, where these are more."""
        if unit == EMBEDDING and self.embedding_rows:
            return _embedding_architecture(self)
        if self.layer_pattern or (unit == DENSE_LAYER and self.num_dense_layers):
            return _kind_architecture(self, unit)
        return self

    def layer_architecture(self, layer: int) -> Architecture:
        """Return the model with all layers of the kind of one layer; modules of multi-token prediction follow the last one."""
        units = self.layer_units
        return self.unit_architecture(units[layer] if layer < len(units) else BASE_LAYER)

    @property
    def layer_architectures(self) -> dict[str, Architecture]:
        """The model with all layers of one kind, for each kind of layer that it has."""
        return {unit: self.unit_architecture(unit) for unit in self.layer_counts}

    @property
    def config_notes(self) -> tuple[str, ...]:
        """Sentences on what the model's config has and no plan does: other parts, and the format of stored weights."""
        return config_notes(self.omitted_parts, self.stored_format)

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the program's named dims, but for those that the job decides (B, T); letters as in `model.decoder`."""
        return {
            "D": self.d_model,
            "F": self.dense_d_ff or self.d_ff,
            "K": self.num_kv_heads,
            "G": self.num_heads // self.num_kv_heads,
            "H": self.head_dim,
            "V": self.vocab_size,
            "P": self.max_positions or 1,
            "E": self.num_experts or 1,
            "k": self.experts_per_token or 1,
            "M": self.d_ff,
            "S": self.shared_expert_width or 1,
            "Q": self.q_lora_rank or 1,
            "C": self.kv_lora_rank or 1,
            "I": self.head_dim - self.rope_head_dim,
            "R": self.rope_head_dim or 1,
            "U": self.v_head_dim or self.head_dim,
            "J": 2 * self.d_model,
            "r": self.lora_rank or self.adapter_rank or 1,
            "y": 2 * self.lora_rank or 1,
            **({"d": self.d_model} if self.head_layer or self.carried_embedding else {}),
            **({"h": self.norm_gate_rank} if self.norm_gate_rank else {}),
            **({"b": 2 * self.q_lora_rank} if self.raw_query_latent else {}),
            **({"u": 1} if ACTIVATION_WEIGHTS.get(self.mlp) else {}),
            **({"e": self.expert_latent_dim} if self.expert_latent_dim else {}),
            **(
                {"A": self.index_heads, "Y": self.index_head_dim, "s": self.index_topk, "z": self.index_block or 1}
                if self.index_topk
                else {}
            ),
            **({"o": self.output_rank, "m": self.compress_window or 1, "v": 2} if self.shared_keys else {}),
            **stream_sizes(self),
            **carried_dims(self),
            **(self.recurrence.dims if self.recurrence else {}),
        }

    @property
    def num_routers(self) -> int:
        """Layers with experts, modules of multi-token prediction included."""
        layers = sum(count for unit, count in self.layer_counts.items() if self.unit_architecture(unit).num_experts)
        return layers + self.num_predict_layers * bool(self.num_experts)

    @property
    def num_windowed_layers(self) -> int:
        """Layers with sliding-window attention."""
        if self.layer_pattern:
            layers = self.layer_architectures
            return sum(n for unit, n in self.layer_counts.items() if layers[unit].num_windowed_layers)
        if self.sliding_window is None or self.mixer != "attention":
            return 0
        return self.num_layers - (self.num_layers // self.global_every if self.global_every else 0)

    def attention_window(self, layer: int) -> int | None:
        """Return the number of tokens that a query sees on a layer, its own included; None: all before it."""
        if self.layer_pattern:
            return self.layer_architecture(layer).sliding_window
        is_global = self.global_every and (layer + 1) % self.global_every == 0
        return None if is_global else self.sliding_window

    def require_positions(self, seq_len: int) -> None:
        """Raise `InputError` where a sequence is longer than a learned table of positions."""
        rows = self.max_positions
        if self.structure.has_learned_positions and rows is not None and seq_len > rows:
            raise InputError(
                f"model {self.name}: sequences of {seq_len:,} tokens, but its learned table of positions has {rows:,} rows; "
                f"{argument_label('seq_len', '--seq-len')} {rows} or less is required, or a longer table: "
                f"{argument_label('overrides', '--set')} model.max_positions={seq_len}"
            )

    def require_context(self, num_tokens: int, longer: str | None = None) -> None:
        """Raise `InputError` where a request of input and output tokens is longer than the model takes; `longer` is what takes it
        all the same (None: an override of `max_context`)."""
        rows = self.max_positions if self.structure.has_learned_positions else None
        if rows is not None and num_tokens > rows:
            raise InputError(
                f"model {self.name}: requests of {num_tokens:,} tokens (in and out), but its learned table of positions has "
                f"{rows:,} rows; at most that is required, or a longer table: {argument_label('overrides', '--set')} "
                f"model.max_positions={num_tokens}"
            )
        if self.max_context is not None and num_tokens > self.max_context:
            override = f"{argument_label('overrides', '--set')} model.max_context={num_tokens}"
            raise InputError(
                f"model {self.name}: requests of {num_tokens:,} tokens (in and out), but its context is {self.max_context:,}; at "
                f"most that is required, or {longer or override} for a checkpoint that takes more"
            )

    def context_warnings(self, seq_len: int) -> tuple[str, ...]:
        """Return what a training on longer sequences than the published model takes should know; nothing where they are not."""
        if self.max_context is None or seq_len <= self.max_context:
            return ()
        return (
            f"sequences of {seq_len:,} tokens are longer than the context of {self.name}, {self.max_context:,}: they extend it",
        )

    def mean_attended_share(self, seq_len: int, *, last_of: Value = 1) -> Value:
        """Return the share of the square of scores that is computed, averaged over layers (`model.attended_shares`)."""
        return mean_attended_share(self, seq_len, last_of)

    def scan_shares(self, seq_len: int, *, last_of: Value = 1) -> dict[str, Value]:
        """Return the shares of scores that attention computes by the symbols of its FLOPs (`model.attended_shares`)."""
        return scan_shares(self, seq_len, last_of)

    def attended_shares(self, seq_len: int, *, last_of: Value = 1) -> tuple[tuple[Value, int], ...]:
        """Return (share, layers) pairs: the keys that a query sees on average, over the sequence's length, and how many layers
        have it (`model.attended_shares`)."""
        return attended_shares(self, seq_len, last_of)


@lru_cache(maxsize=256)
def _embedding_architecture(architecture: Architecture) -> Architecture:
    return replace(architecture, vocab_size=architecture.embedding_rows, embedding_rows=0)


@lru_cache(maxsize=256)
def _kind_architecture(architecture: Architecture, unit: str) -> Architecture:
    if architecture.num_dense_layers:
        return replace(
            architecture, d_ff=architecture.dense_d_ff, num_experts=0, experts_per_token=0, shared_expert_width=0,
            num_dense_layers=0, dense_d_ff=0, shared_gate=False, choice_bias=False,
        )  # fmt: skip
    return replace(architecture.base_architecture(), **architecture.layer_kinds.get(unit, {}))


LABEL_FIELDS = (
    "name",
    "source",
    "nominal_num_params",
    "omitted_parts",
    "stored_format",
    "max_context",
)  # what says nothing of the decoder
SHARED_FIELDS = tuple(
    {f.name for f in fields(ModelStructure)}
    & {f.name for f in fields(Architecture)} - {"bias", "lora_targets", "recurrence"}
)


def shared_fields(source: ModelStructure | Architecture) -> dict[str, Any]:
    """Return the fields that a structure and an architecture have in common, but for those that each has in a form of its own."""
    return {name: getattr(source, name) for name in SHARED_FIELDS}
