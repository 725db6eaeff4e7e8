"""The full noise scale B_noise = tr(H Sigma) / G'HG: from products with the Hessian, and exactly for a quadratic loss.

The estimate is for small models, as it takes a product with the Hessian for every example. For a large one B_simple replaces
it, which is the same where the Hessian is a multiple of the identity. Tests compare estimates with the quadratic loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.values import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HessianNoise:
    """Unbiased estimates of tr(H Sigma) and of G'HG; their quotient is B_noise, in examples."""

    trace: float
    curvature: float

    @property
    def noise_scale(self) -> float:
        """B_noise in examples; meaningful only where the curvature along the gradient is above 0."""
        return self.trace / self.curvature


def estimate_hessian_noise(
    gradients: Array, hessian_product: Callable[[Array], Array], *, is_population: bool = False
) -> HessianNoise:
    """Return tr(H Sigma) and G'HG from the gradients [examples, parameters] of single examples.

    `hessian_product(v)` is H v for a v [parameters]. Formula: tr(H Sigma) = sum of (g_i - G)'H(g_i - G) / (n - 1), and G'HG of
    the mean G less tr(H Sigma) / n, by which the noise of the mean raises it. `is_population`: the examples are all that there
    are, so that G is exact and Sigma their covariance, divided by n. Unit of B_noise: examples. Source: McCandlish et al. 2018
    (arXiv 1812.06162), equation 2.8. Raises `InputError` for fewer than two examples.

    >>> noise = estimate_hessian_noise(np.array([[3.0, 0.0], [1.0, 2.0]]), lambda v: np.array([2.0, 1.0]) * v, is_population=True)
    >>> noise.trace, noise.curvature
    (3.0, 9.0)
    """
    if gradients.ndim != 2 or len(gradients) < 2:
        raise InputError(
            f"curved noise: found gradients of shape {gradients.shape}; a row for each of two examples at least is required"
        )
    mean, count = gradients.mean(axis=0), len(gradients)
    total = sum(float(deviation @ hessian_product(deviation)) for deviation in gradients - mean)
    trace = total / (count if is_population else count - 1)
    curvature = float(mean @ hessian_product(mean)) - (0.0 if is_population else trace / count)
    return HessianNoise(trace=trace, curvature=curvature)


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
        """Return the best learning rate with a batch: eta_max / (1 + B_noise / B)."""
        return self.max_learning_rate / (1.0 + self.noise_scale / batch)

    def improvement(self, batch: float) -> float:
        """Return the expected decrease of the loss at that learning rate: dJ_max / (1 + B_noise / B)."""
        return self.max_improvement / (1.0 + self.noise_scale / batch)


def quadratic_step(gradient: ArrayLike, hessian: ArrayLike, covariance: ArrayLike) -> QuadraticStep:
    """Return the noise scales of a quadratic loss with gradient g (n), Hessian H and covariance Sigma of one example's
    gradient (n × n).

    A diagonal matrix may be given as its diagonal (n). B_noise = tr(H·Sigma) / g'Hg, B_simple = tr(Sigma) / |g|², eta_max =
    |g|² / g'Hg, dJ_max = |g|⁴ / (2·g'Hg). Source: McCandlish et al. 2018, equations 2.6 to 2.9; the note, E.1 (17 to 19).
    Raises `InputError` for shapes that do not agree, and where g'Hg is not above 0: along g there is no minimum.

    >>> step = quadratic_step([1, 2], [1, 4], [10, 5])
    >>> round(step.noise_scale, 4), step.simple_noise_scale, step.improvement(10), step.learning_rate(10)
    (1.7647, 3.0, 0.625, 0.25)
    """
    g = np.asarray(gradient, dtype=np.float64)
    h, sigma = _square_matrix("hessian", hessian, g), _square_matrix("covariance", covariance, g)
    square, curvature = float(g @ g), float(g @ h @ g)
    if curvature <= 0:
        raise InputError(f"hessian: found g'Hg = {curvature:g}; a curvature above 0 along the gradient is required")
    return QuadraticStep(
        noise_scale=float(np.trace(h @ sigma)) / curvature, simple_noise_scale=float(np.trace(sigma)) / square,
        max_learning_rate=square / curvature, max_improvement=square**2 / (2.0 * curvature),
    )  # fmt: skip


def _square_matrix(name: str, matrix_or_diagonal: ArrayLike, gradient: NDArray[np.float64]) -> NDArray[np.float64]:
    matrix = np.asarray(matrix_or_diagonal, dtype=np.float64)
    matrix = np.diag(matrix) if matrix.ndim == 1 else matrix
    if matrix.shape != (gradient.size, gradient.size):
        raise InputError(
            f"{name}: found shape {matrix.shape} for a gradient of {gradient.size}; n × n, or n, is required"
        )
    return matrix
