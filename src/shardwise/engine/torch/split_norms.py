"""Norms whose sums are moved between their steps: one function for each step, with the sums as the program has them.

A sum over a split dim is made whole over the ranks, and a result that is cut needs a part of the sums. `width` is the size of the
dims that a norm is taken over. Operands come aligned, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shardwise.engine.torch.functions import Function, at_least_fp32

Statistic = Callable[..., Tensor]  # (*operands, width, epsilon)


def _inverse_rms(squares: Tensor, width: int, epsilon: float) -> Tensor:
    return torch.rsqrt(squares / width + epsilon)


def _inverse_deviation(total: Tensor, squares: Tensor, width: int, epsilon: float) -> Tensor:
    return torch.rsqrt(squares / width - (total / width).square() + epsilon)


def _layer_norm(x: Tensor, total: Tensor, squares: Tensor, weight: Tensor, width: int, epsilon: float) -> Tensor:
    return (x - total / width) * _inverse_deviation(total, squares, width, epsilon) * weight


def _layer_norm_dsum(
    dy: Tensor, x: Tensor, total: Tensor, squares: Tensor, weight: Tensor, width: int, epsilon: float
) -> Tensor:
    mean, inverse = total / width, _inverse_deviation(total, squares, width, epsilon)
    return dy * weight * ((x - mean) * mean * inverse**3 - inverse) / width


def _layer_norm_dsquares(
    dy: Tensor, x: Tensor, total: Tensor, squares: Tensor, weight: Tensor, width: int, epsilon: float
) -> Tensor:
    inverse = _inverse_deviation(total, squares, width, epsilon)
    return dy * weight * (x - total / width) * (-0.5 / width) * inverse**3


def _layer_norm_dweight(dy: Tensor, x: Tensor, total: Tensor, squares: Tensor, width: int, epsilon: float) -> Tensor:
    return dy * (x - total / width) * _inverse_deviation(total, squares, width, epsilon)


STEPS: Mapping[str, Statistic] = {
    "sum": lambda x, width, epsilon: x,
    "sum_square": lambda x, width, epsilon: x.square(),
    "sum_square_dx": lambda dy, x, width, epsilon: 2.0 * x * dy,
    "rms_norm": lambda x, squares, weight, width, epsilon: x * _inverse_rms(squares, width, epsilon) * weight,
    "rms_norm_dx": lambda dy, squares, weight, width, epsilon: dy * _inverse_rms(squares, width, epsilon) * weight,
    "rms_norm_dsquares": lambda dy, x, squares, weight, width, epsilon: (
        dy * x * weight * (-0.5 / width) * _inverse_rms(squares, width, epsilon) ** 3
    ),
    "rms_norm_dweight": lambda dy, x, squares, width, epsilon: dy * x * _inverse_rms(squares, width, epsilon),
    "layer_norm": _layer_norm,
    "layer_norm_dx": lambda dy, total, squares, weight, width, epsilon: (
        dy * weight * _inverse_deviation(total, squares, width, epsilon)
    ),
    "layer_norm_dsum": _layer_norm_dsum,
    "layer_norm_dsquares": _layer_norm_dsquares,
    "layer_norm_dweight": _layer_norm_dweight,
}
HAVE_WEIGHTS = ("norm", "norm_dx", "norm_dsum", "norm_dsquares")  # as their last operand


def norm_step(function: str, width: int, epsilon: float, offset: float) -> Function:
    """A step of a norm; `offset` is added to its weight."""
    step, weighs = STEPS[function], function.endswith(HAVE_WEIGHTS)

    def kernel(*operands: Tensor) -> Tensor:
        fine = [one.to(at_least_fp32(one.dtype)) for one in operands]
        if weighs and offset:
            fine[-1] = fine[-1] + offset
        return step(*fine, width=width, epsilon=epsilon)

    return kernel
