"""The noise scale from norms of gradients.

Letters: g the true gradient; Sigma the covariance of one example's gradient; G the mean gradient of a batch of examples, or of
tokens; b the smaller batch (small_batch); B the larger one (large_batch).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNoise:
    """Estimates of tr(Sigma) and of |g|² from two batches, each without bias; their quotient is B_simple, in the batches' unit.

    A single estimate of |g|² may be negative: averages of both over many steps are divided, not their quotients averaged.
    """

    covariance_trace: float
    squared_gradient: float

    @property
    def simple_noise_scale(self) -> float:
        """B_simple = tr(Sigma) / |g|²."""
        return self.covariance_trace / self.squared_gradient


def gradient_noise(
    small_batch: float, small_squared_norm: float, large_batch: float, large_squared_norm: float
) -> GradientNoise:
    """tr(Sigma), |g|² and the noise scale from squared norms of the gradients of a small and of a large batch.

    Formula: tr(Sigma) = (|G(b)|² - |G(B)|²) / (1/b - 1/B); |g|² = (B·|G(B)|² - b·|G(b)|²) / (B - b); B_simple is their quotient.
    Assumes: independent examples; of data-parallel ranks b is the batch of one and B that of all, before and after the mean.
    B_simple is B_noise where the Hessian is a multiple of the identity. Unit of B_simple: that of the batches.
    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1; the note, E.3.

    >>> found = gradient_noise(10, 104.0, 100, 14.0)
    >>> round(found.covariance_trace), found.squared_gradient, round(found.simple_noise_scale)
    (1000, 4.0, 250)
    """
    if not 0 < small_batch < large_batch:
        raise InputError(
            f"small_batch, large_batch: found {small_batch:g} and {large_batch:g}; two batches above 0, the smaller first, are "
            "required"
        )
    trace = (small_squared_norm - large_squared_norm) / (1.0 / small_batch - 1.0 / large_batch)
    square = (large_batch * large_squared_norm - small_batch * small_squared_norm) / (large_batch - small_batch)
    return GradientNoise(covariance_trace=trace, squared_gradient=square)
