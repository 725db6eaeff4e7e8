"""Functions that keep for their backward pass what the derivation says it reads (`model/operations/elementwise_functions.py`),
where PyTorch's own
operations keep more: each of them keeps its operands, those of a gated activation, of a norm on a CPU and of the loss between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.run.data.batches import IGNORE_INDEX

Gated = Callable[[Tensor, Tensor], Tensor]
# The loss is made for a part of the rows at a time: at most so many parts, so that a GPU launches few kernels and what is in
# float32 is 1/16 byte for each logit, ...
MOST_PARTS = 128
# ... and of at least so many logits: 128 KiB in float32 stay in the second-level cache of a core.
LEAST_LOGITS = 2**15


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The format of statistics: float32, or float64 where the model is in it."""
    return torch.promote_types(dtype, torch.float32)


def applied(function: type[Function], *operands: Any) -> Tensor:
    """The result of one of these on its operands."""
    out: Tensor = function.apply(*operands)  # type: ignore[no-untyped-call]
    return out


class GatedActivation(Function):
    """A function of gate and up; keeps these two."""

    @staticmethod
    def forward(ctx: Any, function: Gated, gate: Tensor, up: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(gate, up)
        return function(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, Tensor]:
        with torch.enable_grad():
            gate, up = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            dgate, dup = torch.autograd.grad(ctx.function(gate, up), (gate, up), dy)
        return None, dgate, dup


class SwiGLU(Function):
    """silu(gate) · up; keeps these two."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate: Tensor = torch.ops.aten.silu_backward(dy * up, gate)
        return dgate, F.silu(gate).mul_(dy)


class RMSNorm(Function):
    """x / sqrt(mean of x² + epsilon) · weight over the last dims of x [..., *weight.shape]; keeps x and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        width, fine = weight.numel(), at_least_fp32(x.dtype)
        rows = x.reshape(-1, width)
        squares = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=fine).square_()
        scale = squares.div_(width).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        y: Tensor = (rows * scale).mul_(weight.flatten())
        return y.to(x.dtype).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width, fine = weight.numel(), scale.dtype
        rows, dy_rows, factors = (
            x.reshape(-1, width).to(fine),
            dy.reshape(-1, width).to(fine),
            weight.flatten().to(fine),
        )
        products = dy_rows * rows
        dweight = (scale.t() @ products).to(weight.dtype).view(weight.shape)
        shared = (products @ factors)[:, None] * scale.square().div_(width)
        dx = torch.mul(dy_rows, factors, out=products).addcmul_(rows, shared, value=-1.0).mul_(scale)
        return dx.to(x.dtype).view(x.shape), dweight, None


class Dispatch(Function):
    """Each of N tokens y [N, D] as often as it is sent, k times: rows [N·k, D] in an `order` of (token, choice) pairs.

    `places` is the inverse of `order`, so that a token's gradients are added up in one order on any device.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, places: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(places)
        ctx.chosen = chosen
        return y.index_select(0, order // chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return torch.unflatten(drows[places], 0, (-1, ctx.chosen)).sum(dim=1), None, None, None


class Reorder(Function):
    """Rows in another order; `back` is the inverse of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows[order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return drows[back], None, None


class HeadLoss(Function):
    """Cross-entropy added up over targets [N], of logits x [N, D] by weight [V, D].

    The logits are there once: in the forward pass their gradient is written over them, so that one value in the format of x
    is kept for each. Targets of `IGNORED` do not count; `limit` caps the logits, and `scale` multiplies the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, limit: float | None, scale: float | Tensor
    ) -> Tensor:
        logits = F.linear(x, weight)
        rows = max(-(-len(logits) // MOST_PARTS), LEAST_LOGITS // logits.shape[-1], 1)
        loss = torch.zeros((), dtype=at_least_fp32(x.dtype), device=x.device)
        for part, part_targets in zip(torch.split(logits, rows), torch.split(targets, rows), strict=True):
            loss += _loss_of(part, part_targets, limit, scale, replace=any(ctx.needs_input_grad))
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, logits)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, gradient = ctx.saved_tensors
        # the weight's first: the scaled copy of x is gone when the gradient of x comes
        dweight = gradient.t() @ (x * dloss.to(x.dtype)) if ctx.needs_input_grad[1] else None
        dx = (gradient @ weight).mul_(dloss) if ctx.needs_input_grad[0] else None
        return dx, dweight, None, None, None


def _loss_of(logits: Tensor, targets: Tensor, limit: float | None, scale: float | Tensor, *, replace: bool) -> Tensor:
    """The loss of some rows, scaled; with `replace` their logits become their gradient."""
    counted = (targets != IGNORE_INDEX)[:, None]
    places, fine = torch.where(counted, targets[:, None], 0), at_least_fp32(logits.dtype)
    values = logits if limit is None else torch.tanh(logits.to(fine) / limit)
    logs = torch.log_softmax(values if limit is None else values * limit, dim=-1, dtype=fine)
    loss = -torch.where(counted, logs.gather(-1, places), 0.0).sum()
    if replace:
        shares = logs.exp_().scatter_add_(-1, places, logs.new_full(places.shape, -1.0)).mul_(counted)
        # scaled here, where they are fine: a factor in the format of x would be rounded, once for the whole gradient
        logits.copy_((shares if limit is None else shares.mul_(1.0 - values.square())).mul_(scale))
    return loss * scale
