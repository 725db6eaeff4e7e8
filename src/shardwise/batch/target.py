"""What it takes to reach a loss, with any batch: a noise scale, and the tokens that one batch takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.batch.noise_scale import NoiseScale
from shardwise.batch.tradeoff import BatchTradeoff
from shardwise.errors import InputError

UNIT_TOKENS = 1e9  # E_min where it is not known: times are then of a billion of the fewest tokens
Side = Literal["below", "at", "above"]
AT = 2.0**0.25  # a batch within this factor of the critical one is at it: half a doubling wide


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTarget:
    """A loss as a target: the noise scale on the way to it, and the `tokens` that it takes with batches of `batch_tokens`.

    `batch_tokens` is None where `tokens` are the fewest, E_min; `tokens` is None where they are not known, and what is of a run
    is then of a billion of the fewest tokens. `loss` is in nats per token, None where it was not given. Assumes a noise scale
    that stays as it is during the run and a learning rate tuned for each batch, as `BatchTradeoff` does.

    >>> found = LossTarget(noise=NoiseScale(tokens=1e6), tokens=3e9, batch_tokens=2e6)
    >>> found.tradeoff.min_tokens, found.tokens_to_loss(1e6), found.side(4e6)
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
        """The tokens that are given, or those that stand for them."""
        return UNIT_TOKENS if self.tokens is None else self.tokens

    @property
    def tradeoff(self) -> BatchTradeoff:
        """Steps and tokens to the loss by the size of the batch."""
        batch = 0.0 if self.tokens is None or self.batch_tokens is None else self.batch_tokens
        return BatchTradeoff(
            min_steps=self.reference_tokens / (batch + self.noise.tokens), noise_tokens=self.noise.tokens
        )

    def tokens_to_loss(self, batch_tokens: float) -> float:
        """Tokens to the loss with batches of so many tokens, E(B)."""
        return self.tradeoff.tokens(batch_tokens)

    def side(self, batch_tokens: float) -> Side:
        """On which side of the critical batch a batch lies; within half a doubling it is at it."""
        ratio = batch_tokens / self.noise.tokens
        return "below" if ratio < 1.0 / AT else "above" if ratio > AT else "at"

    def with_noise(self, times: float) -> LossTarget:
        """The same tokens with so many times the noise scale."""
        return replace(self, noise=NoiseScale(tokens=times * self.noise.tokens, source=self.noise.source))
