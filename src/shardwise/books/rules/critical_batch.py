"""The critical batch size: how many steps and tokens it takes to the same loss with another batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTradeoff:
    """Steps and tokens to a loss, as a batch of B tokens takes them: at the critical batch twice the least of each.

    `min_steps`: with batches without noise; `noise_tokens`: the gradient's noise scale, taken to stay as it is. Source:
    McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equations 2.11 and 2.12; the note, E.2 (20 to 23).

    >>> found = BatchTradeoff(min_steps=1000.0, noise_tokens=1e6)
    >>> found.steps(1e6), found.tokens(1e6), found.critical_batch_tokens
    (2000.0, 2000000000.0, 1000000.0)
    """

    min_steps: float
    noise_tokens: float

    @property
    def min_tokens(self) -> float:
        """The fewest tokens, with ever smaller batches: E_min = B_noise · S_min."""
        return self.noise_tokens * self.min_steps

    @property
    def critical_batch_tokens(self) -> float:
        """Tokens of the balanced batch: E_min / S_min."""
        return self.min_tokens / self.min_steps

    def steps(self, batch_tokens: float) -> float:
        """Steps with batches of so many tokens: S(B) = S_min · (1 + B_noise / B)."""
        return self.min_steps * (1.0 + self.noise_tokens / batch_tokens)

    def tokens(self, batch_tokens: float) -> float:
        """Tokens of these steps: E(B) = S_min · (B + B_noise)."""
        return self.min_steps * (batch_tokens + self.noise_tokens)


def critical_batch_of_loss(loss: float) -> float:
    """Tokens of the critical batch at a loss in nats for each token.

    Formula: 2e8 / L^(1 / 0.21). Unit: tokens. Assumes: Transformers on WebText2 with Adam.
    Source: Kaplan et al., Scaling Laws for Neural Language Models, 2020, equation 5.3.
    """
    return float(2e8 / loss ** (1.0 / 0.21))


def tokens_per_param_optimal() -> float:
    """Tokens for each parameter that spend a compute budget best.

    Formula: about 20. Unit: tokens/parameter. Source: Hoffmann et al. 2022, table 3.
    """
    return 20.0
