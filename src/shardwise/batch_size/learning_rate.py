"""The learning rate of another batch.

Letters: eta the learning rate; B the batch that it is for, in any unit (new_batch); B_0 the batch that is known (batch); eta_0
its learning rate (learning_rate); eta_max the learning rate of batches without noise (max_learning_rate); B_noise the noise
scale in the unit of B; r B / B_noise (batch_over_noise).
"""

from __future__ import annotations

import math


def optimal_learning_rate(batch: float, noise_scale: float, max_learning_rate: float, exponent: float = 1.0) -> float:
    """The learning rate that lowers the loss most in a step, as a part of that of batches without noise.

    Formula: eta(B) = eta_max / (1 + B_noise / B)^exponent. Assumes: a loss that is quadratic over the step, and SGD: a law of
    how it grows with B, not a value to set. Differs: of Adam and RMSProp the same paper finds exponents of 0.5 to 1.
    Source: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, equation 2.6; the note, E.1.1 (19).

    >>> optimal_learning_rate(1e6, noise_scale=1e6, max_learning_rate=6e-4)
    0.0003
    """
    return float(max_learning_rate / (1.0 + noise_scale / batch) ** exponent)


def linear_learning_rate(learning_rate: float, batch: float, new_batch: float) -> float:
    """The learning rate that goes as far in a pass over the data: doubled with the batch.

    Formula: eta = eta_0 · B / B_0. Assumes: SGD, and batches far below the noise scale, or a loss that is linear over the steps
    that one replaces. Source: Goyal et al., Accurate, Large Minibatch SGD, 2017 (arXiv 1706.02677), section 2.1; the note, E.1.1.

    >>> round(linear_learning_rate(3e-4, 256, 4096), 6)
    0.0048
    """
    return learning_rate * new_batch / batch


def square_root_learning_rate(learning_rate: float, batch: float, new_batch: float) -> float:
    """The learning rate that leaves the covariance of an update as it is.

    Formula: eta = eta_0 · sqrt(B / B_0). Assumes: an update whose covariance is that of one example over B (SGD), or an update
    divided by the size of its own noise (Adam, RMSProp, with their betas scaled too), far below the noise scale.
    Source: the note, E.1.1; Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, 2022 (arXiv
    2205.10287), definitions 4.3 and 5.1.

    >>> square_root_learning_rate(3e-4, 256, 4096)
    0.0012
    """
    return learning_rate * math.sqrt(new_batch / batch)


def sign_learning_rate(batch: float, noise_scale: float, max_learning_rate: float) -> float:
    """The best learning rate of an optimizer that follows the sign of the gradient, as Adam about does: largest at B_noise.

    Formula: eta(B) = 2 · eta_max / (sqrt(B_noise / B) + sqrt(B / B_noise)). Assumes: Gaussian noise, and batches that are not far
    above the noise scale: it goes with the square root of B below it, and falls above it.
    Source: Li et al., Surge Phenomenon in Optimal Learning Rate and Batch Size Scaling, 2024 (arXiv 2405.14578).

    >>> [round(sign_learning_rate(batch, 1e6, 6e-4), 6) for batch in (0.25e6, 1e6, 4e6)]
    [0.00048, 0.0006, 0.00048]
    """
    ratio = math.sqrt(batch / noise_scale)
    return 2.0 * max_learning_rate / (1.0 / ratio + ratio)
