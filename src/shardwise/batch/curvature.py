"""The full noise scale B_noise = tr(H Sigma) / G'HG from gradients of single examples and products with the Hessian.

For small models: it takes a product with the Hessian for every example. Of a large one B_simple stands for it, which is the same
where the Hessian is a multiple of the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvedNoise:
    """Unbiased estimates of tr(H Sigma) and of G'HG; their quotient is B_noise, in examples."""

    trace: float
    curvature: float

    @property
    def noise_scale(self) -> float:
        """B_noise in examples; it means something where the curvature along the gradient is above 0."""
        return self.trace / self.curvature


def curved_noise(
    gradients: Array, hessian_product: Callable[[Array], Array], *, is_population: bool = False
) -> CurvedNoise:
    """tr(H Sigma) and G'HG from the gradients [examples, parameters] of single examples.

    `hessian_product(v)` is H v for a v [parameters]. Formula: tr(H Sigma) = sum of (g_i - G)'H(g_i - G) / (n - 1), and G'HG of
    the mean G less tr(H Sigma) / n, by which the noise of the mean raises it. `is_population`: the examples are all that there
    are, so that G is exact and Sigma their covariance, divided by n. Unit of B_noise: examples.
    Source: McCandlish et al. 2018 (arXiv 1812.06162), equation 2.8. Raises `InputError` for fewer than two examples.

    >>> found = curved_noise(np.array([[3.0, 0.0], [1.0, 2.0]]), lambda v: np.array([2.0, 1.0]) * v, is_population=True)
    >>> found.trace, found.curvature
    (3.0, 9.0)
    """
    if gradients.ndim != 2 or len(gradients) < 2:
        raise InputError(
            f"curved noise: found gradients of shape {gradients.shape}; a row for each of two examples at least is required"
        )
    mean, count = gradients.mean(axis=0), len(gradients)
    total = sum(float(off @ hessian_product(off)) for off in gradients - mean)
    trace = total / (count if is_population else count - 1)
    curvature = float(mean @ hessian_product(mean)) - (0.0 if is_population else trace / count)
    return CurvedNoise(trace=trace, curvature=curvature)
