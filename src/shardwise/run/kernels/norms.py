"""RMS and layer norms over the last dims of a tensor, forward and backward.

`NORMS` has them as one kernel each. Instead of the sums that the program names, these keep, for each row, what the
backward pass needs: the inverse of the root mean square, or the mean and the inverse of the standard deviation.

`NORM_STEPS` has norms in steps, for sums that collectives reduce in between. `width` is the number of elements that a
norm is taken over. Operands of a step come aligned, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.run.kernels import device_dispatch
from shardwise.run.kernels.activation_casts import CastActivation, OutputCast
from shardwise.run.kernels.device_dispatch import at_least_fp32, has_triton
from shardwise.run.kernels.elementwise import ElementwiseFunction

aten = torch.ops.aten


NormForms = tuple[Tensor | CastActivation, ...]


@dataclass(frozen=True, slots=True)
class NormKernels:
    """Kernels of a norm.

    `forward(x, weight, epsilon)` returns the forms of y, one without a cast, and the statistics of each row;
    `backward(dy, x, *statistics, weight, needs_weight=...)` returns dx and, if needed, dweight. The last dims of x are those
    of the weight. On a GPU with Triton both, and those with the residual sum, are one pass each (with casts of columns, two).
    """

    is_layer: bool
    reference_forward: Callable[..., tuple[Tensor, ...]]
    reference_backward: Callable[..., tuple[Tensor, Tensor | None]]

    def forward(
        self, x: Tensor, weight: Tensor, epsilon: float, cast: OutputCast | None = None
    ) -> tuple[NormForms, tuple[Tensor, ...]]:
        """Return the norm of x in the forms of a `cast`, or as it is, and the statistics of each row."""
        if not runs_on_triton(weight, x):
            y, *statistics = self.reference_forward(x, weight, epsilon)
            return (y,) if cast is None else cast.of(y), tuple(statistics)
        return self._by_triton((x, None), weight, epsilon, cast)[1:]

    def forward_of_sum(
        self, terms: tuple[Tensor, Tensor], weight: Tensor, epsilon: float, cast: OutputCast | None = None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, NormForms, tuple[Tensor, ...]]:  # fmt: skip
        """Return the sum of two terms, its norm in the forms of a `cast`, or as it is, and the statistics of each row; the sum
        is written to `into`, if any, which may be a term."""
        first, second = terms
        if not runs_on_triton(weight, first, second):
            total = torch.add(first, second, out=into)
            return total, *self.forward(total, weight, epsilon, cast)
        return self._by_triton(terms, weight, epsilon, cast, into)

    def _by_triton(
        self, terms: tuple[Tensor, Tensor | None], weight: Tensor, epsilon: float, cast: OutputCast | None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, NormForms, tuple[Tensor, ...]]:  # fmt: skip
        from shardwise.run.triton_kernels import fused_casts
        from shardwise.run.triton_kernels.norms import norm_forward

        forms: NormForms
        if cast is None:
            total, y, mean, inverse = norm_forward(*terms, weight, epsilon, is_layer=self.is_layer, into=into)
            forms = (y,)
        else:
            total, written, mean, inverse = fused_casts.norm_forms(
                *terms, weight, epsilon, cast.options, is_layer=self.is_layer, into=into
            )
            forms = cast.of_kernel(total, written)
        return total, forms, (mean, inverse) if self.is_layer else (inverse,)

    def backward(
        self, dy: Tensor, x: Tensor, *saved: Tensor, needs_weight: bool, dtotal: Tensor | None = None,
        into: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Return dx and dweight from the statistics and the weight that forward passes read or returned (`saved`).

        Where x is a sum that goes on as the residual stream, `dtotal` is the gradient of the stream, which is added to
        dx; the result is written to `into`, if any, which may be `dtotal`.
        """
        *statistics, weight = saved
        if not runs_on_triton(weight, x, *(() if dtotal is None else (dtotal,))):
            dx, dweight = self.reference_backward(dy, x, *saved, needs_weight=needs_weight)
            if dtotal is None:
                return dx, dweight
            return (dx.add_(dtotal) if into is None else torch.add(dtotal, dx, out=into)), dweight
        from shardwise.run.triton_kernels.norms import norm_backward

        return norm_backward(
            dy.contiguous(), x, weight, (statistics[0], statistics[-1]), dtotal, is_layer=self.is_layer,
            needs_weight=needs_weight, into=into,
        )  # fmt: skip


def runs_on_triton(weight: Tensor, *operands: Tensor) -> bool:
    """Return whether Triton's kernels take a norm: one program has a whole row in registers."""
    if not has_triton(*operands, weight):
        return False
    from shardwise.run.triton_kernels.norms import MAX_WIDTH

    return weight.numel() <= MAX_WIDTH


def rms_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(mean of x² + epsilon) · weight, and the factor of each row [rows, 1]."""
    if device_dispatch.on_gpu(x):
        fused: tuple[Tensor, Tensor] = aten._fused_rms_norm(x, weight.shape, weight, epsilon)
        return fused
    width, sum_dtype = weight.numel(), at_least_fp32(x.dtype)
    rows = x.reshape(-1, width)
    squares = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=sum_dtype).square_()
    scale = squares.div_(width).add_(epsilon).rsqrt_()
    y: Tensor = (rows * scale).mul_(weight.flatten())
    return y.to(x.dtype).view(x.shape), scale


def rms_backward(
    dy: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dx and dweight. A meta tensor takes the GPU's branch, whose kernel allocates no other tensors."""
    if device_dispatch.on_gpu(x) or x.is_meta:
        dy_contiguous = dy.contiguous()
        factor = scale.view(*x.shape[: x.dim() - weight.dim()], *(1 for _ in weight.shape))
        fused: tuple[Tensor, Tensor | None] = aten._fused_rms_norm_backward(
            dy_contiguous, x, weight.shape, factor, weight, [True, needs_weight]
        )
        return fused
    width, sum_dtype = weight.numel(), scale.dtype
    rows = x.reshape(-1, width).to(sum_dtype)
    dy_rows = dy.reshape(-1, width).to(sum_dtype)
    factors = weight.flatten().to(sum_dtype)
    products = dy_rows * rows
    dweight = (scale.t() @ products).to(weight.dtype).view(weight.shape) if needs_weight else None
    shared = (products @ factors)[:, None] * scale.square().div_(width)
    dx = torch.mul(dy_rows, factors, out=products).addcmul_(rows, shared, value=-1.0).mul_(scale)
    return dx.to(x.dtype).view(x.shape), dweight


def layer_forward(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x - mean) / sqrt(variance + epsilon) · weight; the mean and the inverse deviation of each row."""
    outputs: tuple[Tensor, Tensor, Tensor] = torch.native_layer_norm(x, weight.shape, weight, None, epsilon)
    return outputs


def layer_backward(
    dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Return dx, and the gradient of the weight."""
    needs_gradient = [True, needs_weight, False]
    dx, dweight, _ = aten.native_layer_norm_backward(dy, x, weight.shape, mean, inverse, weight, None, needs_gradient)
    return dx, dweight


# By the norm's function in the program; a kernel saves as many numbers of each row as the function has sums, in that order.
NORMS: Mapping[str, NormKernels] = {
    "rms_norm": NormKernels(False, rms_forward, rms_backward),
    "layer_norm": NormKernels(True, layer_forward, layer_backward),
}


class NormSize(NamedTuple):
    """The number of elements that a norm is taken over, and its epsilon."""

    width: int
    epsilon: float


NormStep = Callable[..., Tensor]  # (*operands, size)


def _inverse_rms(squares: Tensor, size: NormSize) -> Tensor:
    return torch.rsqrt(squares / size.width + size.epsilon)


def _inverse_deviation(total: Tensor, squares: Tensor, size: NormSize) -> Tensor:
    return torch.rsqrt(squares / size.width - (total / size.width).square() + size.epsilon)


def _layer_norm(x: Tensor, total: Tensor, squares: Tensor, weight: Tensor, size: NormSize) -> Tensor:
    return (x - total / size.width) * _inverse_deviation(total, squares, size) * weight


def _layer_norm_dsum(dy: Tensor, x: Tensor, total: Tensor, squares: Tensor, weight: Tensor, size: NormSize) -> Tensor:
    mean, inverse = total / size.width, _inverse_deviation(total, squares, size)
    return dy * weight * ((x - mean) * mean * inverse**3 - inverse) / size.width


def _layer_norm_dsquares(
    dy: Tensor, x: Tensor, total: Tensor, squares: Tensor, weight: Tensor, size: NormSize
) -> Tensor:
    inverse = _inverse_deviation(total, squares, size)
    return dy * weight * (x - total / size.width) * (-0.5 / size.width) * inverse**3


NORM_STEPS: Mapping[str, NormStep] = {
    "sum": lambda x, size: x,
    "sum_square": lambda x, size: x.square(),
    "sum_square_dx": lambda dy, x, size: 2.0 * x * dy,
    "rms_norm": lambda x, squares, weight, size: x * _inverse_rms(squares, size) * weight,
    "rms_norm_dx": lambda dy, squares, weight, size: dy * _inverse_rms(squares, size) * weight,
    "rms_norm_dsquares": lambda dy, x, squares, weight, size: (
        dy * x * weight * (-0.5 / size.width) * _inverse_rms(squares, size) ** 3
    ),
    "rms_norm_dweight": lambda dy, x, squares, size: dy * x * _inverse_rms(squares, size),
    "layer_norm": _layer_norm,
    "layer_norm_dx": lambda dy, total, squares, weight, size: dy * weight * _inverse_deviation(total, squares, size),
    "layer_norm_dsum": _layer_norm_dsum,
    "layer_norm_dsquares": _layer_norm_dsquares,
    "layer_norm_dweight": lambda dy, x, total, squares, size: (
        dy * (x - total / size.width) * _inverse_deviation(total, squares, size)
    ),
}
STEPS_WITH_WEIGHT = ("norm", "norm_dx", "norm_dsum", "norm_dsquares")  # as their last operand


def norm_step(function: str, width: int, epsilon: float, offset: float) -> ElementwiseFunction:
    """Return the function of a step of a norm; `offset` is added to its weight."""
    step, has_weight, size = NORM_STEPS[function], function.endswith(STEPS_WITH_WEIGHT), NormSize(width, epsilon)

    def kernel(*operands: Tensor) -> Tensor:
        widened = [operand.to(at_least_fp32(operand.dtype)) for operand in operands]
        if has_weight and offset:
            widened[-1] = widened[-1] + offset
        return step(*widened, size=size)

    return kernel
