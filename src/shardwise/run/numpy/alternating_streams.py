"""Elementwise functions of streams that layers predict, of learned residuals and of the largest gates in NumPy, with gradients;
arrays come aligned, as in `kernels`: streams are their last dim but one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

SMALLEST = 1e-300  # of a divisor: sums of squares of zeros, whose quotients are zero
LEAST_SQUARE = 1e-5  # of the mean square of a projected stream. Source: Gemma3nTextModel of transformers 5.23
# Share of the gates that are set to zero. Source: activation_sparsity_pattern in the config.json of Gemma 3n
SPARSITY = 0.95
QUANTILE = NormalDist().inv_cdf(SPARSITY)


def _magnitude_ratio(squares: Array, goal: Array, width: int) -> Array:
    """Return the root mean square of a goal over that of a projection, from their sums of squares."""
    return np.array(np.sqrt(goal / width / np.maximum(squares / width, LEAST_SQUARE)))


def _without_first(x: Array) -> Array:
    """Return streams with zeros in place of the first."""
    result = np.array(x)
    result[..., :1, :] = 0.0
    return result


def _deviation(total: Array, squares: Array, width: int) -> Array:
    return np.array(np.sqrt(np.maximum(squares / width - (total / width) ** 2, SMALLEST)))


def _above_cutoff(x: Array, total: Array, squares: Array, width: int) -> Array:
    return np.array(x - total / width - QUANTILE * _deviation(total, squares, width))


def _is_kept(x: Array, total: Array, squares: Array, width: int) -> Array:
    return _above_cutoff(x, total, squares, width) > 0


def _gaussian_top_k_dsum(dy: Array, x: Array, total: Array, squares: Array, width: int) -> Array:
    slope = -1.0 + QUANTILE * (total / width) / _deviation(total, squares, width)
    return np.array(dy * _is_kept(x, total, squares, width) * slope / width)


def _gaussian_top_k_dsquares(dy: Array, x: Array, total: Array, squares: Array, width: int) -> Array:
    slope = -0.5 * QUANTILE / _deviation(total, squares, width)
    return np.array(dy * _is_kept(x, total, squares, width) * slope / width)


ALTERNATING_STREAM_MAPS: Mapping[str, Callable[..., Array]] = {
    "match_magnitude": lambda x, squares, goal, width: x * _magnitude_ratio(squares, goal, width),
    "match_magnitude_dx": lambda dy, squares, goal, width: dy * _magnitude_ratio(squares, goal, width),
    "match_magnitude_dsquares": lambda dy, x, squares, goal, width: (
        -0.5
        * dy
        * x
        * _magnitude_ratio(squares, goal, width)
        / np.maximum(squares, SMALLEST)
        * (squares / width > LEAST_SQUARE)
    ),
    "match_magnitude_dgoal": lambda dy, x, squares, goal, width: (
        0.5 * dy * x * _magnitude_ratio(squares, goal, width) / np.maximum(goal, SMALLEST)
    ),
    "stream_mean": lambda first, later, width: (first + later) / width,
    "divide_by_width": lambda dy, width: dy / width,
    "correct_streams": lambda predicted, active, computed, coefficient, width: (
        predicted + (computed - active) * (coefficient + 1.0)
    ),
    "correct_streams_dactive": lambda dy, coefficient, width: -dy * (coefficient + 1.0),
    "correct_streams_dcomputed": lambda dy, coefficient, width: dy * (coefficient + 1.0),
    "correct_streams_dcoefficient": lambda dy, active, computed, width: dy * (computed - active),
    "add_to_predicted": lambda x, y, width: x + _without_first(np.broadcast_to(y, x.shape)),
    "sum_predicted": lambda dy, width: _without_first(dy),
    "tanh": lambda x, width: np.tanh(x),
    "tanh_dx": lambda dy, x, width: dy * (1.0 - np.tanh(x) ** 2),
    "scaled_add": lambda x, y, width: (x + y) * np.sqrt(0.5),
    "divide_by_root_two": lambda dy, width: dy * np.sqrt(0.5),
    "gaussian_top_k": lambda x, total, squares, width: np.maximum(_above_cutoff(x, total, squares, width), 0.0),
    "gaussian_top_k_dx": lambda dy, x, total, squares, width: dy * _is_kept(x, total, squares, width),
    "gaussian_top_k_dsum": _gaussian_top_k_dsum,
    "gaussian_top_k_dsquares": _gaussian_top_k_dsquares,
}
