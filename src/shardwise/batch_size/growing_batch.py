"""Batches that follow the noise scale during a run, and what they save against a constant batch.

Letters: s the progress of a run, in steps of batches without noise; B tokens of a batch; B_noise the noise scale there, in tokens
(noise_tokens, noise_scale); lambda tokens that a step less is worth (exchange_tokens).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.values import InputError, raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleCost:
    """Batches in tokens for the parts of a run, and the steps and tokens that they take to the loss."""

    batch_tokens: tuple[float, ...]
    steps: float
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseProfile:
    """The course of the noise scale in a run: parts, each of so many steps of batches without noise, with a noise scale in
    tokens.

    Steps and tokens are the integrals of equation 25 of the note, E.3: S = sum of s·(1 + B_noise/B), E = sum of s·(B +
    B_noise). Raises `InputError` for parts without a noise scale of their own, and for values that are not above 0.

    >>> profile = NoiseProfile(min_steps=(500, 500), noise_tokens=(1e6, 4e6))
    >>> profile.total_min_steps, profile.total_min_tokens
    (1000, 2500000000.0)
    """

    min_steps: tuple[float, ...]
    noise_tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.min_steps or len(self.min_steps) != len(self.noise_tokens):
            raise InputError(
                f"noise of a run: found {len(self.min_steps)} parts and {len(self.noise_tokens)} noise scales; one for each "
                "part, and at least one part, are required"
            )
        wrong = [number for number in (*self.min_steps, *self.noise_tokens) if not number > 0]
        raise_problems([f"noise of a run: found {number:g}; numbers above 0 are required" for number in wrong])

    @property
    def total_min_steps(self) -> float:
        """S_min: the steps of batches without noise."""
        return sum(self.min_steps)

    @property
    def total_min_tokens(self) -> float:
        """E_min: the tokens of ever smaller batches."""
        return sum(steps * noise for steps, noise in zip(self.min_steps, self.noise_tokens, strict=True))

    @property
    def saved_fraction(self) -> float:
        """Share of the tokens beyond E_min that following the noise scale saves against a constant batch of as many steps.

        1 - (mean of sqrt(B_noise))² / mean of B_noise: 0 where the noise scale stays as it is.
        """
        return 1.0 - self._root**2 / (self.total_min_steps * self.total_min_tokens)

    @property
    def _root(self) -> float:
        return sum(steps * math.sqrt(noise) for steps, noise in zip(self.min_steps, self.noise_tokens, strict=True))

    def schedule(self, batch_tokens: Sequence[float]) -> ScheduleCost:
        """Return the steps and tokens of given batches, one for each part, or one for all of them."""
        batches = tuple(batch_tokens) if len(batch_tokens) > 1 else tuple(batch_tokens) * len(self.min_steps)
        parts = list(zip(self.min_steps, self.noise_tokens, batches, strict=True))
        return ScheduleCost(
            batch_tokens=batches,
            steps=sum(steps * (1.0 + noise / batch) for steps, noise, batch in parts),
            tokens=sum(steps * (batch + noise) for steps, noise, batch in parts),
        )

    def follow_noise(self, exchange_tokens: float) -> ScheduleCost:
        """Return the batches of the fewest tokens for their steps, B = sqrt(lambda · B_noise), at an exchange rate lambda.

        >>> NoiseProfile(min_steps=(1000,), noise_tokens=(2e6,)).follow_noise(2e6).batch_tokens
        (2000000.0,)
        """
        return self.schedule([dynamic_batch_tokens(noise, exchange_tokens) for noise in self.noise_tokens])

    def schedule_for_steps(self, steps: float) -> ScheduleCost:
        """Return the batches of the fewest tokens that reach the loss in so many steps."""
        return self.follow_noise(self.exchange_tokens(steps))

    def exchange_tokens(self, steps: float) -> float:
        """Return lambda of a budget of steps: (sum of s·sqrt(B_noise) / (S - S_min))². Raises `InputError` for S_min or fewer."""
        self._require_more(steps)
        return (self._root / (steps - self.total_min_steps)) ** 2

    def constant_for_steps(self, steps: float) -> ScheduleCost:
        """Return the one batch for so many steps to the loss: E_min / (S - S_min). Raises `InputError` for S_min or fewer."""
        self._require_more(steps)
        return self.schedule([self.total_min_tokens / (steps - self.total_min_steps)])

    def _require_more(self, steps: float) -> None:
        if not steps > self.total_min_steps:
            raise InputError(
                f"steps: found {steps:g}; more than the {self.total_min_steps:g} steps of batches without noise are required"
            )


def dynamic_batch_tokens(noise_tokens: float, exchange_tokens: float) -> float:
    """The batch that follows the noise scale: of all batches with as many steps, those that take the fewest tokens.

    Formula: B = sqrt(lambda · B_noise). Unit: tokens. Assumes: the noise scale of the moment, measured once in a while, and one
    lambda for the run: how many more tokens a step less is worth. With lambda = B_noise it is the critical batch.
    Source: the note, E.3 (26), after McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix D.

    >>> dynamic_batch_tokens(2e6, exchange_tokens=2e6)
    2000000.0
    """
    return math.sqrt(exchange_tokens * noise_tokens)
