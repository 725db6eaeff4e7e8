"""Elementwise functions of recurrent mixers in NumPy, with gradients; arrays come aligned, as in `kernels`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

L2_EPSILON = 1e-6  # of queries and keys of the delta rule. Source: flash-linear-attention, modules/l2norm.py
GATE_CAP = 15.0  # of the logits of gates. Source: gate_soft_cap of xLSTM-7B's config
DECAY_BOUND = -5.0  # of the logarithm of a bounded decay. Source: kda_lower_bound of Ling 3.0's config
LRU_RATE = 8.0  # the constant c in the decays of RG-LRU. Source: De et al. 2024 (Griffin), 2.4


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def sigmoid_slope(x: Array) -> Array:
    return sigmoid(x) * sigmoid(-x)


def _write_scale(decay: Array, positions: Array) -> Array:
    """Return the factor that keeps the variance of a state, of the logarithms of its decays; the first token writes all."""
    return np.where(positions > 0, np.sqrt(-np.expm1(2.0 * decay)), 1.0)


RECURRENCE_MAPS: Mapping[str, Callable[..., Array]] = {
    "l2_norm": lambda x, squares, width: x / np.sqrt(squares + L2_EPSILON),
    "l2_norm_dx": lambda dy, squares, width: dy / np.sqrt(squares + L2_EPSILON),
    "l2_norm_dsquares": lambda dy, x, squares, width: -0.5 * dy * x * (squares + L2_EPSILON) ** -1.5,
    "softplus": lambda x, width: np.logaddexp(0.0, x),
    "softplus_dx": lambda dy, x, width: dy * sigmoid(x),
    "log_decay": lambda step, rate, width: -np.exp(rate) * step,
    "log_decay_dstep": lambda dy, rate, width: -np.exp(rate) * dy,
    "log_decay_drate": lambda dy, step, rate, width: -np.exp(rate) * step * dy,
    "capped_exp": lambda x, width: np.exp(GATE_CAP * np.tanh(x / GATE_CAP)),
    "capped_exp_dx": lambda dy, x, width: (
        dy * np.exp(GATE_CAP * np.tanh(x / GATE_CAP)) * (1.0 - np.tanh(x / GATE_CAP) ** 2)
    ),
    "capped_log_sigmoid": lambda x, width: -np.logaddexp(0.0, -GATE_CAP * np.tanh(x / GATE_CAP)),
    "capped_log_sigmoid_dx": lambda dy, x, width: (
        dy * sigmoid(-GATE_CAP * np.tanh(x / GATE_CAP)) * (1.0 - np.tanh(x / GATE_CAP) ** 2)
    ),
    "bounded_divide": lambda x, total, width: x / np.maximum(np.abs(total), 1.0),
    "bounded_divide_dx": lambda dy, total, width: dy / np.maximum(np.abs(total), 1.0),
    "bounded_divide_dtotal": lambda dy, x, total, width: -dy * x * np.sign(total) * (np.abs(total) > 1.0) / total**2,
    "bounded_decay": lambda x, rate, width: DECAY_BOUND * sigmoid(np.exp(rate) * x),
    "bounded_decay_dx": lambda dy, x, rate, width: dy * DECAY_BOUND * sigmoid_slope(np.exp(rate) * x) * np.exp(rate),
    "bounded_decay_drate": lambda dy, x, rate, width: (
        dy * DECAY_BOUND * sigmoid_slope(np.exp(rate) * x) * np.exp(rate) * x
    ),
    "gated_decay": lambda x, rate, width: -LRU_RATE * sigmoid(x) * np.logaddexp(0.0, rate),
    "gated_decay_dx": lambda dy, x, rate, width: -dy * LRU_RATE * sigmoid_slope(x) * np.logaddexp(0.0, rate),
    "gated_decay_drate": lambda dy, x, rate, width: -dy * LRU_RATE * sigmoid(x) * sigmoid(rate),
    "normalised_write": lambda x, decay, positions, width: x * _write_scale(decay, positions),
    "normalised_write_dx": lambda dy, decay, positions, width: dy * _write_scale(decay, positions),
    "normalised_write_ddecay": lambda dy, x, decay, positions, width: (
        -dy * x * (positions > 0) * np.exp(2.0 * decay) / _write_scale(decay, positions)
    ),
}
