"""Properties that change the values of a decoder but neither its weights nor its operations. The planner carries them unread."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardwise.values import raise_problems, short_repr

MAX_CONSTANT = 1e30  # of any constant: what is computed with it stays finite
NORM_EPSILON = 1e-5
ROTARY_BASE = 10_000.0
# Of gpt-oss's activation: swiglu_limit and the sigmoid's slope in its config.json and code
SWIGLU_CLAMP, CLAMPED_SWIGLU_SLOPE = 7.0, 1.702
SWIGLU_LIMIT = 10.0  # swiglu_limit in the config.json of DeepSeek-V4
YARN_MSCALE = 0.1  # of the logarithm of the factor (Peng et al. 2023, equation 22)
RAMP_OVER_FREQUENCY, RAMP_OVER_INDEX = "frequency", "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """Angles of rotary embeddings: position · base^(-2i/H) for pair i of a head of width H (Su et al. 2021).

    All frequencies are divided by `factor` (Chen et al. 2023); with `original_positions` only those that turn fewer than
    `low` times over that many positions are, and those that turn more than `high` times are kept. Between the two, the share
    that is kept grows linearly with the frequency (Llama 3.1; rope_type llama3 of `transformers`) or falls linearly with the
    pair's `index` (YaRN, Peng et al. 2023, 3.2; rope_type yarn), between indices that are rounded outwards where `rounded`.
    Cosines and sines are multiplied by `amplitude` (YaRN 3.4; the `attention_factor` of `transformers`). Of a head only the first
    dims turn, a `part` of its width, in place of H above (Black et al. 2022, GPT-NeoX-20B, 2.1); the others stay as they are.
    """

    base: float = ROTARY_BASE
    factor: float = 1.0
    original_positions: int = 0
    low: float = 1.0
    high: float = 4.0
    ramp: str = RAMP_OVER_FREQUENCY
    rounded: bool = True
    amplitude: float = 1.0
    part: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, "base", "factor", "amplitude")

    def width(self, head_dim: int) -> int:
        """Return how many dims of a head turn, rounded down as `transformers` does.

        >>> Rotary(part=0.5).width(128)
        64
        """
        return int(head_dim * self.part)

    def problem(self, head_dim: int) -> str | None:
        """Return what is wrong with these angles for heads of this width; None if nothing is."""
        if not 0.0 < self.part <= 1.0 or not self.width(head_dim) or self.width(head_dim) % 2:
            return f"rotary angles on a part = {self.part:g} of a width of {head_dim}; an even number of its dims is required"
        return None


SOFTMAX, SIGMOID = "softmax", "sigmoid"
STORED_FORMAT_KEY = "quantization_config"  # of a config: the format of its files, which says nothing of the arithmetic
SQRT_SOFTPLUS = "sqrt_softplus"  # of DeepSeek-V4, which plans carry and the engine does not run


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on cosines and sines for `factor` times as many positions."""
    return YARN_MSCALE * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gating:
    """Scores of a router and the experts that a token may take; gates are multiplied by `scale`.

    Of `groups` of consecutive experts only those of the `chosen_groups` best: by the sum of each group's `votes` largest
    scores. Groups are the experts of a node, so that a token goes to few of these (DeepSeek-AI 2024, DeepSeek-V2, 2.1.2, and
    DeepSeek-V3, 2.1.2 and 3.2.2).
    """

    scores: str = SOFTMAX
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    votes: int = 1

    def problem(self, num_experts: int, num_chosen: int) -> str | None:
        """Return what is wrong with this router for a model with so many experts, of which a token takes `num_chosen`; None if
        nothing is."""
        if self.scores not in (SOFTMAX, SIGMOID):
            return f"scores are {self.scores!r}; {SOFTMAX} or {SIGMOID} is required"
        counts = {"groups": self.groups, "chosen_groups": self.chosen_groups, "votes": self.votes}
        for name, count in counts.items():
            if not isinstance(count, int) or isinstance(count, bool):
                return f"{name} = {count!r}; a whole number is required"
        if self.groups < 1 or num_experts % self.groups:
            return f"groups = {self.groups} of {num_experts} experts; a divisor of these is required"
        size = max(num_experts // self.groups, 1)
        if not 1 <= self.chosen_groups <= self.groups or self.chosen_groups * size < num_chosen:
            return (
                f"chosen_groups = {self.chosen_groups} of groups = {self.groups}, of {size} experts each; at least 1, at most "
                f"all and as many as have {num_chosen} experts are required"
            )
        return None if 1 <= self.votes <= size else f"votes = {self.votes}; 1 to {size} are required"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Constants of a decoder's arithmetic; the defaults are those of the NumPy kernels, which take those of routers alone.

    `norm_offset` is added to every norm's weight and `embedding_scale` multiplies what leaves the embedding (Gemma);
    `local_rotary` serves the layers with a sliding window (Gemma 3; None: `rotary` does). Scores are multiplied by
    `attention_scale` (None: 1/√H). A cap c bends a value x to c·tanh(x/c) (Gemma 2): scores and logits.
    Gates are the chosen experts' scores (`gating`); with `normalised_gates` they are divided by their sum. `unread` names what
    the model's config sets and this arithmetic lacks: with any of it, values differ from the config's own.
    """

    norm_epsilon: float = NORM_EPSILON
    norm_offset: float = 0.0
    rotary: Rotary = field(default_factory=Rotary)
    local_rotary: Rotary | None = None
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    normalised_gates: bool = True
    gating: Gating = field(default_factory=Gating)
    unread: tuple[str, ...] = ()

    @property
    def missing_arithmetic(self) -> tuple[str, ...]:
        """Settings of `unread` that change what the model computes, and not only how its weights are stored."""
        return tuple(setting for setting in self.unread if not setting.startswith(STORED_FORMAT_KEY))

    def __post_init__(self) -> None:
        _require_positive(self, "norm_epsilon", "embedding_scale", "attention_scale", "attention_cap", "logit_cap")


def _require_positive(constants: object, *names: str) -> None:
    """Raise `InputError` for constants that are neither None nor a finite number above 0."""
    values = {name: getattr(constants, name) for name in names}
    raise_problems(
        [
            f"model: {name} is {short_repr(value)}; a finite number above 0 is required"
            for name, value in values.items()
            if value is not None and not (isinstance(value, (int, float)) and 0 < value < MAX_CONSTANT)
        ]
    )


DEFAULT_NUMERICS = Numerics()
