"""The noise scale of a quadratic loss, exactly: what estimates of a gradient's noise are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class QuadraticStep:
    """One step of gradient descent on a quadratic loss from a noisy gradient: its noise scales, and the best learning rate.

    The unit of both noise scales is that of the batch. `max_improvement` and `max_learning_rate` are those of the true gradient.
    """

    noise_scale: float
    simple_noise_scale: float
    max_learning_rate: float
    max_improvement: float

    def learning_rate(self, batch: float) -> float:
        """The best learning rate with a batch: eta_max / (1 + B_noise / B)."""
        return self.max_learning_rate / (1.0 + self.noise_scale / batch)

    def improvement(self, batch: float) -> float:
        """The expected decrease of the loss at that learning rate: dJ_max / (1 + B_noise / B)."""
        return self.max_improvement / (1.0 + self.noise_scale / batch)


def quadratic_step(gradient: ArrayLike, hessian: ArrayLike, covariance: ArrayLike) -> QuadraticStep:
    """The noise scales of a quadratic loss with gradient g (n), Hessian H and covariance Sigma of one example's gradient (n × n).

    Of a diagonal matrix the diagonal (n) may be given. B_noise = tr(H·Sigma) / g'Hg, B_simple = tr(Sigma) / |g|², eta_max =
    |g|² / g'Hg, dJ_max = |g|⁴ / (2·g'Hg). Source: McCandlish et al. 2018, equations 2.6 to 2.9; the note, E.1 (17 to 19). Raises
    `InputError` for shapes that do not agree, and where g'Hg is not above 0: along g there is no minimum.

    >>> found = quadratic_step([1, 2], [1, 4], [10, 5])
    >>> round(found.noise_scale, 4), found.simple_noise_scale, found.improvement(10), found.learning_rate(10)
    (1.7647, 3.0, 0.625, 0.25)
    """
    g = np.asarray(gradient, dtype=np.float64)
    h, sigma = _matrix("hessian", hessian, g), _matrix("covariance", covariance, g)
    square, curvature = float(g @ g), float(g @ h @ g)
    if curvature <= 0:
        raise InputError(f"hessian: found g'Hg = {curvature:g}; a curvature above 0 along the gradient is required")
    return QuadraticStep(
        noise_scale=float(np.trace(h @ sigma)) / curvature, simple_noise_scale=float(np.trace(sigma)) / square,
        max_learning_rate=square / curvature, max_improvement=square**2 / (2.0 * curvature),
    )  # fmt: skip


def _matrix(name: str, values: ArrayLike, gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    found = np.asarray(values, dtype=np.float64)
    found = np.diag(found) if found.ndim == 1 else found
    if found.shape != (gradient.size, gradient.size):
        raise InputError(
            f"{name}: found shape {found.shape} for a gradient of {gradient.size}; n × n, or n, is required"
        )
    return found
