"""Elementwise functions and norms of a decoder by the names that its program has for them;
`model/operations/elementwise_functions.py` cites each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from plain.gradients import GatedActivation, RMSNorm, SwiGLU, applied
from shardwise.model.numerics import CLAMPED_SWIGLU_SLOPE, SWIGLU_CLAMP


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    low = gate.clamp(max=SWIGLU_CLAMP)
    return low * torch.sigmoid(CLAMPED_SWIGLU_SLOPE * low) * (up.clamp(-SWIGLU_CLAMP, SWIGLU_CLAMP) + 1.0)


GATED_ACTIVATIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "geglu": lambda gate, up: _gelu(gate) * up,
    "clamped_swiglu": _clamped_swiglu,
}
PLAIN_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"gelu": _gelu, "relu": F.relu}


def activate(kind: str, gate: Tensor | None, up: Tensor) -> Tensor:
    """The MLP's activation of what came up, and of its gate where the kind has one."""
    if gate is None:
        return PLAIN_ACTIVATIONS[kind](up)
    return (
        applied(SwiGLU, gate, up) if kind == "swiglu" else applied(GatedActivation, GATED_ACTIVATIONS[kind], gate, up)
    )


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
    """RMSNorm over the dims that `weight` has, the last ones of `x`. PyTorch has one kernel for it on a GPU alone."""
    scale = weight + offset if offset else weight
    return F.rms_norm(x, weight.shape, scale, epsilon) if x.is_cuda else applied(RMSNorm, x, scale, epsilon)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, offset: float) -> Tensor:
    """LayerNorm over the last dim."""
    return F.layer_norm(x, weight.shape, weight + offset if offset else weight, bias, epsilon)


def cap(x: Tensor, limit: float | None) -> Tensor:
    """c·tanh(x/c), or x where there is no cap."""
    return x if limit is None else limit * torch.tanh(x / limit)


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., D] by a weight [*out, D] to [..., *out]."""
    out = F.linear(x, weight.flatten(0, -2), None if bias is None else bias.flatten())
    return torch.unflatten(out, -1, weight.shape[:-1])


def collect(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [B, T, *in] by a weight [*in, D] to [B, T, D]."""
    out = x.flatten(2) @ weight.flatten(0, -2)
    return out if bias is None else out + bias


def spread(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., r] by a weight [r, *out] to [..., *out]."""
    return torch.unflatten(x @ weight.flatten(1), -1, weight.shape[1:])
