"""Norms over the last dims of a tensor, forward and backward.

In the place of the sums that the program names, each keeps what its backward pass makes of them: the inverse of the root mean
square, or the mean and the inverse of the deviation; a number for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.engine.torch import devices
from shardwise.engine.torch.functions import at_least_fp32

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Norm:
    """`forward(x, weight, epsilon)` gives y and what is kept; `backward(dy, x, *kept, weight, needs_weight)` gives dx and, where
    it is needed, dweight. The last dims of x are those of the weight."""

    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, Tensor | None]]


def rms_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean of x² + epsilon) · weight, and the factor of each row [rows, 1]."""
    if devices.on_gpu(x):
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
    if devices.on_gpu(x) or x.is_meta:
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
NORMS: Mapping[str, Norm] = {
    "rms_norm": Norm(rms_forward, rms_backward),
    "layer_norm": Norm(layer_forward, layer_backward),
}
