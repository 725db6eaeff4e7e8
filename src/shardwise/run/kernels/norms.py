"""RMS and layer norms over the last dims of a tensor, forward and backward.

`NORMS` has them as one kernel each. In the place of the sums that the program names, these keep what the backward pass
makes of them: the inverse of the root mean square, or the mean and the inverse of the deviation; a number for each
row.

`NORM_STEPS` has the steps of norms whose sums are moved between them, with the sums as the program has them: a sum over a
split dim is made whole over the ranks, and a result that is cut needs a part of the sums. `width` is the size of the
dims that a norm is taken over. Operands of a step come aligned, in float32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.kernels import device_dispatch
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.elementwise import ElementwiseFunction

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NormKernels:
    """`forward(x, weight, epsilon)` gives y and what is kept; `backward(dy, x, *kept, weight, needs_weight)` gives dx and, where
    it is needed, dweight. The last dims of x are those of the weight."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, Tensor | None]]


def rms_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean of x² + epsilon) · weight, and the factor of each row [rows, 1]."""
    if device_dispatch.on_gpu(x):
        fused: tuple[Tensor, Tensor] = aten._fused_rms_norm(x, weight.shape, weight, epsilon)
        return fused
    width, fine = weight.numel(), at_least_fp32(x.dtype)
    rows = x.reshape(-1, width)
    squares = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=fine).square_()
    scale = squares.div_(width).add_(epsilon).rsqrt_()
    y: Tensor = (rows * scale).mul_(weight.flatten())
    return y.to(x.dtype).view(x.shape), scale


def rms_backward(
    dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """dx, and the gradient of the weight. A tensor without data stands for one on a GPU, whose kernel has no tensors beside."""
    if device_dispatch.on_gpu(x) or x.is_meta:
        given, factor = dy.contiguous(), scale.view(*x.shape[: x.dim() - weight.dim()], *(1 for _ in weight.shape))
        fused: tuple[Tensor, Tensor | None] = aten._fused_rms_norm_backward(
            given, x, weight.shape, factor, weight, [True, needs_weight]
        )
        return fused
    width, fine = weight.numel(), scale.dtype
    rows, given, factors = x.reshape(-1, width).to(fine), dy.reshape(-1, width).to(fine), weight.flatten().to(fine)
    products = given * rows
    dweight = (scale.t() @ products).to(weight.dtype).view(weight.shape) if needs_weight else None
    shared = (products @ factors)[:, None] * scale.square().div_(width)
    dx = torch.mul(given, factors, out=products).addcmul_(rows, shared, value=-1.0).mul_(scale)
    return dx.to(x.dtype).view(x.shape), dweight


def layer_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + epsilon) · weight; the mean and the inverse deviation of each row."""
    found: tuple[Tensor, Tensor, Tensor] = torch.native_layer_norm(x, weight.shape, weight, None, epsilon)
    return found


def layer_backward(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """dx, and the gradient of the weight."""
    wanted = [True, needs_weight, False]
    dx, dweight, _ = aten.native_layer_norm_backward(dy, x, weight.shape, mean, inverse, weight, None, wanted)
    return dx, dweight


# By the function of the norm in the program; what it keeps, in the order of the sums among its operands.
NORMS: Mapping[str, NormKernels] = {
    "rms_norm": NormKernels(rms_forward, rms_backward),
    "layer_norm": NormKernels(layer_forward, layer_backward),
}

NormStep = Callable[..., Tensor]  # (*operands, width, epsilon)


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


NORM_STEPS: Mapping[str, NormStep] = {
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
STEPS_WITH_WEIGHT = ("norm", "norm_dx", "norm_dsum", "norm_dsquares")  # as their last operand


def norm_step(function: str, width: int, epsilon: float, offset: float) -> ElementwiseFunction:
    """A step of a norm; `offset` is added to its weight."""
    step, weighs = NORM_STEPS[function], function.endswith(STEPS_WITH_WEIGHT)

    def kernel(*operands: Tensor) -> Tensor:
        fine = [one.to(at_least_fp32(one.dtype)) for one in operands]
        if weighs and offset:
            fine[-1] = fine[-1] + offset
        return step(*fine, width=width, epsilon=epsilon)

    return kernel
