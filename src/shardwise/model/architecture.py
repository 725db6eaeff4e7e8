"""Sizes and structure of a decoder-only transformer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from shardwise.model.adapters import LORA_TARGETS, absent_modules, expand_lora_targets
from shardwise.model.numerics import DEFAULT_NUMERICS, Numerics
from shardwise.model.omitted_parts import OmittedPart
from shardwise.values import InputError, Value, argument_label, did_you_mean, maximum, raise_problems

MlpKind = Literal["swiglu", "geglu", "gelu", "relu", "relu2", "gated_relu2", "clamped_swiglu"]
NormKind = Literal["rms", "layer"]
PositionKind = Literal["rotary", "learned", "none"]
NormWidth = Literal["head", "each_head", "projection"]
IS_GATED: Mapping[str, bool] = {
    "swiglu": True, "geglu": True, "clamped_swiglu": True, "gated_relu2": True, "gelu": False, "relu": False,
    "relu2": False,
}  # fmt: skip
# How positions enter: by rotating queries and keys, by rows of a learned table, or not at all.
IS_ROTARY: Mapping[str, bool] = {"rotary": True, "learned": False, "none": False}
IS_LEARNED: Mapping[str, bool] = {"rotary": False, "learned": True, "none": False}
BIAS_PROJECTIONS = ("qkv", "attention_out", "mlp", "router", "experts", "head")  # projections that may have a bias
OPTIONAL_SIZES = (  # sizes that are 0 where a model lacks what they measure
    "num_experts", "experts_per_token", "shared_expert_width", "num_dense_layers", "dense_d_ff",
    "q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "num_predict_layers", "lora_rank",
)  # fmt: skip
MAX_SIZE = 10**9  # of any size: far above any model, and products of sizes stay finite
# Of sizes that count parts, each of which is planned, read or written by itself. Models have up to 200 layers and 1,000 experts.
MAX_PARTS: Mapping[str, int] = {"num_layers": 10_000, "num_predict_layers": 100, "num_experts": 100_000}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStructure:
    """Structure of a decoder block, without its sizes: all that a derivation reads of an architecture.

    `bias` sets: which projections have one (of `BIAS_PROJECTIONS`). Norms have a weight unless `norm_weight` is false. `qk_norm`
    normalises queries and keys: each head, with weights that heads share ("head") or not ("each_head"), or the whole projection;
    `sinks` are a learned logit for each query head that takes its share of the attention (OpenAI 2025). `pre_norms` normalise
    what attention and MLP read, `post_norms` what they add to the residual stream, `inner_norms` what their last products read
    (Wang et al. 2023, BitNet), `embedding_norm` what leaves the embedding. `parallel` blocks feed attention and MLP from one
    norm, or from one each (`separate_norms`). `shared_gate` weights the shared expert by a sigmoid of each token. `latent` keys
    and values are made from one latent of each token, `latent_queries` likewise from one of their own. `dense_layers` lead a
    stack of experts, `predict` layers follow it and predict further tokens. `lora_targets`: which modules
    (`model.adapters`) have low-rank adapters; where there are any, nothing else is trained.
    """

    mlp: MlpKind = "swiglu"
    norm: NormKind = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    positions: PositionKind = "rotary"
    bias: frozenset[str] = frozenset()
    qk_norm: bool = False
    qk_norm_over: NormWidth = "head"
    inner_norms: bool = False
    sinks: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    embedding_norm: bool = False
    parallel: bool = False
    separate_norms: bool = False
    shared_gate: bool = False
    experts: bool = False
    shared_experts: bool = False
    latent: bool = False
    latent_queries: bool = False
    dense_layers: bool = False
    predict: bool = False
    lora_targets: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        allowed = {"mlp": MlpKind, "norm": NormKind, "positions": PositionKind, "qk_norm_over": NormWidth}
        problems = [
            f"model: {name} is {value!r}{did_you_mean(value, get_args(kind))}; one of {', '.join(get_args(kind))} is required"
            for name, kind in allowed.items()
            if (value := getattr(self, name)) not in get_args(kind)
        ]
        unknown = sorted(set(self.bias) - set(BIAS_PROJECTIONS))
        problems += [
            f"model: bias names {name!r}; one of {', '.join(BIAS_PROJECTIONS)} is required" for name in unknown
        ]
        unknown = sorted(set(self.lora_targets) - set(LORA_TARGETS))
        problems += [
            f"model: lora_targets names {name!r}{did_you_mean(name, LORA_TARGETS)}; one of {', '.join(LORA_TARGETS)} is required"
            for name in unknown
        ]
        if self.shared_gate and not self.shared_experts:
            problems.append("model: shared_gate weights a shared expert, and there is none; give a shared_expert_width")
        if self.norm_bias and not self.norm_weight:
            problems.append(
                "model: norms with a bias have a weight as well; norm_weight = true or norm_bias = false is required"
            )
        raise_problems(problems)

    @property
    def has_gated_mlp(self) -> bool:
        """True if the MLP has two input matrices (gate and up)."""
        return IS_GATED[self.mlp]

    @property
    def has_rotary(self) -> bool:
        """True if queries and keys are rotated by their positions."""
        return IS_ROTARY[self.positions]

    @property
    def has_learned_positions(self) -> bool:
        """True if positions have a table of weights."""
        return IS_LEARNED[self.positions]

    def placeholder_architecture(self) -> Architecture:
        """Return an architecture of this structure with placeholder sizes, which derivations do not read."""
        return Architecture(
            name="sizeless", num_layers=2, d_model=1, d_ff=1, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=1,
            **_shared_fields(self), bias=tuple(sorted(self.bias)), max_positions=1,
            num_experts=1 if self.experts else 0, experts_per_token=1 if self.experts else 0,
            shared_expert_width=int(self.shared_experts), kv_lora_rank=int(self.latent), rope_head_dim=int(self.latent),
            v_head_dim=int(self.latent), q_lora_rank=int(self.latent_queries), num_dense_layers=int(self.dense_layers),
            dense_d_ff=int(self.dense_layers), num_predict_layers=int(self.predict),
            lora_rank=int(bool(self.lora_targets)), lora_targets=tuple(sorted(self.lora_targets)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a decoder, in the books' letters: L, D, F, N query heads, K key-value heads, H, V; and its structure.

    `max_positions` are the rows of a learned table of positions. `sliding_window` limits how far back a token sees, on all
    layers but every `global_every`-th (0: on all). With `num_experts` every block's MLP is that many experts of width
    `d_ff`, of which each token takes `experts_per_token`, and a shared one of `shared_expert_width` (0: none); the
    first `num_dense_layers` have a plain MLP of width `dense_d_ff` instead.
    Multi-head latent attention (DeepSeek-AI 2024) has a `kv_lora_rank`: keys and values come from a latent of that width;
    of a key's `head_dim`, `rope_head_dim` are rotary and the same for all heads; a value has `v_head_dim`; queries come
    from a latent of `q_lora_rank` (0: from the hidden state). `num_predict_layers` modules after the last layer predict
    one token further each (multi-token prediction, DeepSeek-AI 2025); they share embedding and head with the model.
    `numerics` are constants of the arithmetic (epsilons, angles, scales), which runs depend on and plans do not.
    `omitted_parts` are what a config has beside this decoder, `stored_format` is the one that its weights are quantised to in
    their files: neither is planned for.
    With a `lora_rank` the matrices `lora_targets` (`model.adapters`; those that the model lacks are skipped) have adapters of
    that rank, and only these are trained (LoRA, Hu et al. 2021): a product W x becomes W x + B A x. Raises `InputError` with
    every size that is wrong or does not go with the others.

    >>> model = Architecture(
    ...     name="tiny", num_layers=2, d_model=64, d_ff=256, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=512
    ... )
    >>> model.dims["G"], model.attention_window(0), model.mean_attended_share(1024)
    (2, None, 0.5)
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
    norm_weight: bool = True
    norm_bias: bool = False
    positions: PositionKind = "rotary"
    bias: tuple[str, ...] = ()
    qk_norm: bool = False
    qk_norm_over: NormWidth = "head"
    inner_norms: bool = False
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
    omitted_parts: tuple[OmittedPart, ...] = ()
    stored_format: str = ""

    def __post_init__(self) -> None:
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
        problems += [f"model {self.name}: {problem}" for problem in ([] if problems else self._combination_problems())]
        try:
            self.structure.__post_init__()
        except InputError as error:
            problems += [problem.replace("model:", f"model {self.name}:", 1) for problem in error.problems]
        raise_problems(problems)

    def _combination_problems(self) -> Iterator[str]:
        """Yield what is wrong with sizes that depend on one another."""
        if self.num_dense_layers and not (self.num_experts and self.dense_d_ff):
            yield "num_dense_layers lead a model with experts and have a width: num_experts and dense_d_ff are required"
        if self.num_dense_layers >= self.num_layers:
            yield f"num_dense_layers = {self.num_dense_layers} of num_layers = {self.num_layers}; fewer are required"
        latent = (self.kv_lora_rank, self.rope_head_dim, self.v_head_dim)
        if any((*latent, self.q_lora_rank)) and not all(latent):
            yield "latent attention has kv_lora_rank, rope_head_dim and v_head_dim; all three are required"
        elif self.kv_lora_rank and not (self.num_heads == self.num_kv_heads and self.rope_head_dim < self.head_dim):
            yield (
                f"latent attention makes a key for each of num_heads = {self.num_heads} heads, of which rope_head_dim = "
                f"{self.rope_head_dim} is a part; num_kv_heads = {self.num_heads} and a larger head_dim are required"
            )
        elif self.kv_lora_rank and self.qk_norm:
            yield "latent attention with qk_norm is not known here; qk_norm = false is required"
        if self.embedding_norm and self.num_predict_layers:
            yield "multi-token prediction behind a normalised embedding is not known here; num_predict_layers = 0 is required"
        if bool(self.lora_rank) != bool(self.lora_targets):
            yield (
                f"adapters have a rank and matrices, found lora_rank = {self.lora_rank} and lora_targets = "
                f"{', '.join(self.lora_targets) or 'none'}; both are required, of {', '.join(LORA_TARGETS)} one or more, "
                "or neither"
            )
        elif {*self.lora_targets} <= {*LORA_TARGETS} and self._lacks_lora_targets():
            yield f"found no matrix of lora_targets = {', '.join(self.lora_targets)}; all-linear is required, or others"

    def _lacks_lora_targets(self) -> bool:
        """Return whether there is no matrix that adapters are for. Leading dense layers have none of those for experts."""
        plain = [target for target in self.lora_targets if not target.startswith("experts")]
        return bool(plain) and not expand_lora_targets(plain, self._absent_modules())

    def _absent_modules(self) -> frozenset[str]:
        return absent_modules(
            latent=bool(self.kv_lora_rank), latent_queries=bool(self.q_lora_rank), gated=IS_GATED.get(self.mlp, True),
            experts=bool(self.num_experts),
        )  # fmt: skip

    def _counts(self) -> dict[str, object]:
        names = ["num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size"]
        names += [name for name in ("max_positions", "sliding_window") if getattr(self, name) is not None]
        names += [name for name in OPTIONAL_SIZES if getattr(self, name) != 0]
        names += ["experts_per_token"] if self.num_experts else []
        return {name: getattr(self, name) for name in names}

    @property
    def structure(self) -> ModelStructure:
        """The structure: all that derivations read of an architecture."""
        return ModelStructure(
            **_shared_fields(self), bias=frozenset(self.bias), experts=bool(self.num_experts),
            shared_experts=bool(self.shared_expert_width), latent=bool(self.kv_lora_rank),
            latent_queries=bool(self.q_lora_rank), dense_layers=bool(self.num_dense_layers),
            predict=bool(self.num_predict_layers),
            lora_targets=expand_lora_targets(self.lora_targets, self._absent_modules()),
        )  # fmt: skip

    def dense_layer_architecture(self) -> Architecture:
        """Return the same model with the MLP of its leading dense layers on all layers."""
        if not self.num_dense_layers:
            return self
        return replace(
            self, d_ff=self.dense_d_ff, num_experts=0, experts_per_token=0, shared_expert_width=0, num_dense_layers=0,
            dense_d_ff=0, shared_gate=False,
        )  # fmt: skip

    @property
    def config_notes(self) -> tuple[str, ...]:
        """Sentences on what the model's config has and no plan does: other parts, and the format of stored weights."""
        parts = " and ".join(part.describe() for part in self.omitted_parts)
        omitted = (
            f"the config's language model alone is planned: its {parts} {'are' if ' and ' in parts else 'is'} left out"
        )
        stored = (
            f"the config's weights are stored in {self.stored_format}: planned is the model in the job's precision, not in that "
            "format"
        )
        return tuple(note for note, is_true in ((omitted, self.omitted_parts), (stored, self.stored_format)) if is_true)

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
            "r": self.lora_rank or 1,
            "y": 2 * self.lora_rank or 1,
        }

    @property
    def num_routers(self) -> int:
        """Layers with experts, modules of multi-token prediction included."""
        return (self.num_layers - self.num_dense_layers + self.num_predict_layers) * bool(self.num_experts)

    @property
    def num_windowed_layers(self) -> int:
        """Layers with sliding-window attention."""
        if self.sliding_window is None:
            return 0
        return self.num_layers - (self.num_layers // self.global_every if self.global_every else 0)

    def attention_window(self, layer: int) -> int | None:
        """Return the number of tokens that a query sees on a layer, its own included; None: all before it."""
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

    def mean_attended_share(self, seq_len: int, *, last_of: Value = 1) -> Value:
        """Return the share of the square of scores that is computed, averaged over layers: 0.5 for causal attention. With
        `last_of` = n only the last n-th of the queries counts: 1 - 1/2n of their rows for causal attention."""
        shares = self.attended_shares(seq_len, last_of=last_of)
        return sum((share * layers for share, layers in shares), start=0.0) / self.num_layers

    def attended_shares(self, seq_len: int, *, last_of: Value = 1) -> tuple[tuple[Value, int], ...]:
        """Return (share, layers) pairs: the keys that a query sees on average, over the sequence's length, and how many layers
        have it. Causal attention sees half of the square; a window of w sees w T - w^2/2 of T^2."""
        full = _attended_share(1.0, last_of)
        if self.sliding_window is None or self.sliding_window >= seq_len:
            return ((full, self.num_layers),)
        windowed = self.num_windowed_layers
        return ((full, self.num_layers - windowed), (_attended_share(self.sliding_window / seq_len, last_of), windowed))


def _attended_share(window: float, last_of: Value) -> Value:
    """Return the mean over the last n-th of the rows of min(row, window), all as parts of the sequence."""
    start = 1.0 - 1.0 / last_of
    bend = maximum(start, window)
    return last_of * ((bend**2 - start**2) / 2 + (1.0 - bend) * window)


LABEL_FIELDS = (
    "name",
    "source",
    "nominal_num_params",
    "omitted_parts",
    "stored_format",
)  # what says nothing of the decoder
SHARED_FIELDS = tuple(
    {f.name for f in fields(ModelStructure)} & {f.name for f in fields(Architecture)} - {"bias", "lora_targets"}
)


def _shared_fields(source: ModelStructure | Architecture) -> dict[str, Any]:
    """Return the fields that a structure and an architecture have in common, but for those that are sets."""
    return {name: getattr(source, name) for name in SHARED_FIELDS}
