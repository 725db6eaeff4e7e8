"""The shape of a decoder-only transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.errors import InputError, require

MlpKind = Literal["swiglu", "geglu", "gelu", "relu"]
NormKind = Literal["rms", "layer"]
PositionKind = Literal["rotary", "learned", "none"]
GATED = ("swiglu", "geglu")
MOST = 10**9  # of any size: far above any model, and products of sizes stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What a decoder block is made of, without its sizes: all that a derivation reads of an architecture.

    `bias` sets: which projections have one ("qkv", "attention_out", "mlp"). `qk_norm` normalises each query and key head,
    `post_norms` normalise what attention and MLP add to the residual stream, `parallel` blocks feed both from one norm.
    """

    mlp: MlpKind = "swiglu"
    norm: NormKind = "rms"
    norm_bias: bool = False
    positions: PositionKind = "rotary"
    bias: frozenset[str] = frozenset()
    qk_norm: bool = False
    post_norms: bool = False
    parallel: bool = False
    experts: bool = False
    shared_experts: bool = False

    def __post_init__(self) -> None:
        allowed = {"mlp": get_args(MlpKind), "norm": get_args(NormKind), "positions": get_args(PositionKind)}
        problems = [
            f"model: {name} is {getattr(self, name)!r}; one of {', '.join(values)} is required"
            for name, values in allowed.items()
            if getattr(self, name) not in values
        ]
        unknown = sorted(set(self.bias) - {"qkv", "attention_out", "mlp"})
        problems += [f"model: bias names {name!r}; qkv, attention_out or mlp is required" for name in unknown]
        require(problems)

    @property
    def gated(self) -> bool:
        return self.mlp in GATED

    def sizeless(self) -> Architecture:
        """An architecture of this structure whose sizes do not count: derivations do not read them."""
        return Architecture(
            name="sizeless", num_layers=1, d_model=1, d_ff=1, num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=1,
            mlp=self.mlp, norm=self.norm, norm_bias=self.norm_bias, positions=self.positions, bias=tuple(sorted(self.bias)),
            qk_norm=self.qk_norm, post_norms=self.post_norms, parallel=self.parallel, max_positions=1,
            num_experts=1 if self.experts else 0, experts_per_token=1 if self.experts else 0,
            shared_expert_width=1 if self.shared_experts else 0,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Sizes of a decoder, in the books' letters: L, D, F, N query heads, K key-value heads, H, V; and its structure.

    `max_positions` are the rows of a learned table of positions. `sliding_window` limits how far back a token sees, on all
    layers but every `global_every`-th (0: on all). With `num_experts` every block's MLP is that many experts of width
    `d_ff`, of which each token takes `experts_per_token`, beside a shared one of `shared_expert_width` (0: none).
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
    norm_bias: bool = False
    positions: PositionKind = "rotary"
    bias: tuple[str, ...] = ()
    qk_norm: bool = False
    post_norms: bool = False
    parallel: bool = False
    max_positions: int | None = None
    sliding_window: int | None = None
    global_every: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    shared_expert_width: int = 0
    tied_embeddings: bool = False
    nominal_num_params: float | None = None  # the round figure in the model's name, used by the books' rules
    source: str = ""

    def __post_init__(self) -> None:
        problems = [
            f"model {self.name}: {name} is {value!r}; a whole number of at least 1 is required"
            for name, value in self._counts().items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        ]
        if not problems:
            problems += [
                f"model {self.name}: {name} has {len(str(value))} digits; at most {MOST:,} is planned for"
                for name, value in self._counts().items()
                if isinstance(value, int) and value > MOST
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
        if self.positions == "learned" and self.max_positions is None:
            problems.append(f"model {self.name}: learned positions need max_positions, the rows of their table")
        try:
            self.structure.__post_init__()
        except InputError as error:
            problems += [problem.replace("model:", f"model {self.name}:", 1) for problem in error.problems]
        require(problems)

    def _counts(self) -> dict[str, object]:
        names = ["num_layers", "d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim", "vocab_size"]
        names += [name for name in ("max_positions", "sliding_window") if getattr(self, name) is not None]
        names += [
            name for name in ("num_experts", "experts_per_token", "shared_expert_width") if getattr(self, name) != 0
        ]
        names += ["experts_per_token"] if self.num_experts else []
        return {name: getattr(self, name) for name in names}

    @property
    def structure(self) -> Structure:
        """What derivations read."""
        return Structure(
            mlp=self.mlp, norm=self.norm, norm_bias=self.norm_bias, positions=self.positions, bias=frozenset(self.bias),
            qk_norm=self.qk_norm, post_norms=self.post_norms, parallel=self.parallel, experts=bool(self.num_experts),
            shared_experts=bool(self.shared_expert_width),
        )  # fmt: skip

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the named dims of the program that do not depend on the job."""
        return {
            "D": self.d_model,
            "F": self.d_ff,
            "K": self.num_kv_heads,
            "G": self.num_heads // self.num_kv_heads,
            "H": self.head_dim,
            "V": self.vocab_size,
            "P": self.max_positions or 1,
            "E": self.num_experts or 1,
            "k": self.experts_per_token or 1,
            "M": self.d_ff,
            "S": self.shared_expert_width or 1,
        }

    @property
    def num_windowed_layers(self) -> int:
        """Layers on which a token sees no further back than the window."""
        if self.sliding_window is None:
            return 0
        return self.num_layers - (self.num_layers // self.global_every if self.global_every else 0)

    def average_span(self, seq_len: int) -> float:
        """Share of the square of the scores that is computed, averaged over layers: 0.5 for causal attention."""
        return sum(share * layers for share, layers in self.attention_spans(seq_len)) / self.num_layers

    def attention_spans(self, seq_len: int) -> tuple[tuple[float, int], ...]:
        """Keys that a query sees on average over the sequence's length, over layers: (share of the square, layers).

        Causal attention sees half of the square; a window of w sees w T - w^2/2 of T^2.
        """
        full = 0.5
        if self.sliding_window is None or self.sliding_window >= seq_len:
            return ((full, self.num_layers),)
        share = self.sliding_window / seq_len
        windowed = self.num_windowed_layers
        return ((full, self.num_layers - windowed), (share - share**2 / 2, windowed))
