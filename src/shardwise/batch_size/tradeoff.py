"""Steps and tokens to a loss, by the size of the batch.

Letters: B tokens of a batch (batch_tokens); B_noise the noise scale of the gradient in tokens (noise_tokens); S steps to a loss
(steps); E tokens to it; S_min the fewest steps (min_steps); E_min the fewest tokens; r B / B_noise (batch_over_noise).

`LossTarget` says what it takes to reach a loss with any batch: a noise scale, and the tokens that one batch takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.batch_size.noise_scale import NoiseScale
from shardwise.values import InputError, format_quantity, raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTradeoff:
    """Steps and tokens to a loss by the size of the batch: at the critical batch twice the fewest of each.

    `min_steps` is S_min, the steps of batches without noise; `noise_tokens` is B_noise. Assumes that the noise scale stays as it
    is during the run, and that the learning rate is tuned for each batch. Source: McCandlish et al. 2018, equations 2.11 and
    2.12; the note, E.2 (20 to 23). Raises `InputError` for values that are not above 0.

    >>> tradeoff = BatchTradeoff(min_steps=1000.0, noise_tokens=1e6)
    >>> tradeoff.steps(1e6), tradeoff.tokens(1e6), tradeoff.critical_batch_tokens
    (2000.0, 2000000000.0, 1000000.0)
    """

    min_steps: float
    noise_tokens: float

    def __post_init__(self) -> None:
        numbers = {"min_steps": self.min_steps, "noise_tokens": self.noise_tokens}
        wrong = {name: value for name, value in numbers.items() if not value > 0}
        raise_problems([f"{name}: found {value:g}; a number above 0 is required" for name, value in wrong.items()])

    @property
    def min_tokens(self) -> float:
        """The fewest tokens, with ever smaller batches: E_min = B_noise · S_min."""
        return self.noise_tokens * self.min_steps

    @property
    def critical_batch_tokens(self) -> float:
        """Tokens of the balanced batch, at the knee of the curve: E_min / S_min."""
        return self.min_tokens / self.min_steps

    def steps(self, batch_tokens: float) -> float:
        """Return steps with batches of so many tokens: S(B) = S_min · (1 + B_noise / B)."""
        return self.min_steps * (1.0 + self.noise_tokens / batch_tokens)

    def tokens(self, batch_tokens: float) -> float:
        """Return tokens of these steps: E(B) = S_min · (B + B_noise)."""
        return self.min_steps * (batch_tokens + self.noise_tokens)

    def batch_tokens(self, steps: float) -> float:
        """Return the batch that takes so many steps: E_min / (S - S_min). Raises `InputError` for no more than the fewest steps.

        >>> BatchTradeoff(min_steps=1000.0, noise_tokens=1e6).batch_tokens(1500.0)
        2000000.0
        """
        if not steps > self.min_steps:
            raise InputError(f"steps: found {steps:g}; more than the fewest steps, {self.min_steps:g}, are required")
        return self.min_tokens / (steps - self.min_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAndTokens:
    """Steps and tokens to a loss with one batch; the ratios are to the fewest of each."""

    steps: float
    tokens: float
    steps_ratio: float
    tokens_ratio: float

    @property
    def pareto_ratio(self) -> float:
        """(S / S_min - 1) · (E / E_min - 1): 1 for every batch."""
        return (self.steps_ratio - 1.0) * (self.tokens_ratio - 1.0)


def steps_and_tokens(batch_tokens: float, noise_tokens: float, min_steps: float) -> StepsAndTokens:
    """Steps and tokens to a loss with batches of so many tokens.

    Formula: S(B) = S_min · (1 + B_noise / B), E(B) = S_min · (B + B_noise); (S/S_min - 1) · (E/E_min - 1) = 1.
    Assumes: a noise scale that stays as it is during the run, and a learning rate tuned for each batch.
    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equations 2.11 and 2.12; the note, E.2.

    >>> cost = steps_and_tokens(8e6, noise_tokens=2e6, min_steps=50_000)
    >>> cost.steps, cost.tokens, cost.pareto_ratio
    (62500.0, 500000000000.0, 1.0)
    """
    tradeoff = BatchTradeoff(min_steps=min_steps, noise_tokens=noise_tokens)
    steps, tokens = tradeoff.steps(batch_tokens), tradeoff.tokens(batch_tokens)
    return StepsAndTokens(
        steps=steps, tokens=tokens, steps_ratio=steps / tradeoff.min_steps, tokens_ratio=tokens / tradeoff.min_tokens
    )


def tradeoff_of_two_runs(steps: float, tokens: float, other_steps: float, other_tokens: float) -> BatchTradeoff:
    """The trade-off on which two runs to the same loss with different batches lie.

    Formula: S = S_min + E_min / B through both points, with B = E / S; B_noise = E_min / S_min.
    Assumes: a noise scale that stays as it is during the run, and no noise in the two runs; of more runs see `batch fit`.
    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equation 2.11; the note, E.2 (21).

    >>> tradeoff = tradeoff_of_two_runs(250_000, 1.25e11, 62_500, 5e11)
    >>> round(tradeoff.min_steps), round(tradeoff.min_tokens), round(tradeoff.critical_batch_tokens)
    (50000, 100000000000, 2000000)
    """
    inverse, other_inverse = steps / tokens, other_steps / other_tokens
    if inverse == other_inverse:
        batch = format_quantity(1.0 / inverse)
        raise InputError(
            f"tokens / steps: found a batch of {batch} twice; runs with two different batches are required"
        )
    min_tokens = (steps - other_steps) / (inverse - other_inverse)
    min_steps = steps - min_tokens * inverse
    if min(min_tokens, min_steps) <= 0:
        raise InputError(
            f"steps: found {steps:g} and {other_steps:g} with {tokens:g} and {other_tokens:g} tokens; the run with the larger "
            "batch must take fewer steps and more tokens"
        )
    return BatchTradeoff(min_steps=min_steps, noise_tokens=min_tokens / min_steps)


def improvement_fraction(batch_over_noise: float) -> float:
    """How much of the largest decrease of the loss in one step a batch reaches.

    Formula: 1 / (1 + 1/r) = B / (B + B_noise). Assumes: the loss is quadratic over the step, which has the best learning rate.
    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equation 2.7; the note, E.1 (18).

    >>> improvement_fraction(1.0)
    0.5
    """
    return batch_over_noise / (1.0 + batch_over_noise)


def doubling_speedup_ratio(batch_over_noise: float) -> float:
    """Time to the loss before over after doubling batch and devices, where the time of a step stays as it is.

    Formula: S(B) / S(2B) = (1 + 1/r) / (1 + 1/(2r)): 2 far below the critical batch, 4/3 at it, 1 far above.
    Assumes: the time of a step stays; a noise scale that stays as it is. Source: the note, 2.2.1, with McCandlish et al.,
    An Empirical Model of Large-Batch Training, 2018, equation 2.11.

    >>> [round(doubling_speedup_ratio(r), 4) for r in (1 / 8, 1, 8)]
    [1.8, 1.3333, 1.0588]
    """
    return (1.0 + 1.0 / batch_over_noise) / (1.0 + 0.5 / batch_over_noise)


UNIT_TOKENS = 1e9  # E_min where it is not known: times are then of a billion of the fewest tokens
CriticalBatchSide = Literal["below", "at", "above"]
SAME_BATCH_FACTOR = 2.0**0.25  # a batch within this factor of the critical one is at it: half a doubling wide


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTarget:
    """A loss as a target: the noise scale on the path to it, and the `tokens` that it takes with batches of `batch_tokens`.

    `batch_tokens` is None where `tokens` are the fewest, E_min. `tokens` is None where they are not known; tokens and times of
    a run are then for `UNIT_TOKENS`, a billion of the fewest. `loss` is in nats per token, None where it was not given.
    Assumes a noise scale that stays as it is during the run and a learning rate tuned for each batch, as `BatchTradeoff` does.

    >>> target = LossTarget(noise=NoiseScale(tokens=1e6), tokens=3e9, batch_tokens=2e6)
    >>> target.tradeoff.min_tokens, target.tokens_to_loss(1e6), target.side(4e6)
    (1000000000.0, 2000000000.0, 'above')
    """

    noise: NoiseScale
    tokens: float | None = None
    batch_tokens: float | None = None
    loss: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("batch_tokens", self.batch_tokens), ("loss", self.loss)):
            if value is not None and not value > 0:
                raise InputError(f"target: {name} is {value!r}; a number above 0 is required")

    @property
    def reference_tokens(self) -> float:
        """The tokens that are given, or `UNIT_TOKENS` in their place."""
        return UNIT_TOKENS if self.tokens is None else self.tokens

    @property
    def tradeoff(self) -> BatchTradeoff:
        """Steps and tokens to the loss by the size of the batch."""
        batch = 0.0 if self.tokens is None or self.batch_tokens is None else self.batch_tokens
        return BatchTradeoff(
            min_steps=self.reference_tokens / (batch + self.noise.tokens), noise_tokens=self.noise.tokens
        )

    def tokens_to_loss(self, batch_tokens: float) -> float:
        """Return tokens to the loss with batches of so many tokens, E(B)."""
        return self.tradeoff.tokens(batch_tokens)

    def side(self, batch_tokens: float) -> CriticalBatchSide:
        """Return on which side of the critical batch a batch lies: "at" it within half a doubling."""
        ratio = batch_tokens / self.noise.tokens
        return "below" if ratio < 1.0 / SAME_BATCH_FACTOR else "above" if ratio > SAME_BATCH_FACTOR else "at"

    def with_noise(self, factor: float) -> LossTarget:
        """Return the same target with `factor` times the noise scale."""
        return replace(self, noise=NoiseScale(tokens=factor * self.noise.tokens, source=self.noise.source))
