"""Elementwise functions of a decoder by the names that its program has for them; `model/functions.py` cites each.

Operands come aligned, so that they broadcast. What may be written over is said where a function is called, never here: each makes
its result again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.numerics import CLAMP, CLAMPED_SLOPE

Function = Callable[..., Tensor]
aten = torch.ops.aten


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The format of statistics: float32, or float64 where the model is in it."""
    return torch.promote_types(dtype, torch.float32)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_dx(dy: Tensor, x: Tensor) -> Tensor:
    found: Tensor = aten.gelu_backward(dy, x, approximate="tanh")
    return found


def _silu_dx(dy: Tensor, x: Tensor) -> Tensor:
    found: Tensor = aten.silu_backward(dy, x)
    return found


def _clamped_gate(gate: Tensor) -> Tensor:
    low = gate.clamp(max=CLAMP)
    return low * torch.sigmoid(CLAMPED_SLOPE * low)


def _clamped_swiglu_dgate(dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    low = gate.clamp(max=CLAMP)
    share = torch.sigmoid(CLAMPED_SLOPE * low)
    slope = share * (1.0 + CLAMPED_SLOPE * low * (1.0 - share))
    return dy * (up.clamp(-CLAMP, CLAMP) + 1.0) * slope * (gate <= CLAMP)


def _sigmoid_gate_dlogit(dy: Tensor, x: Tensor, logit: Tensor) -> Tensor:
    share = torch.sigmoid(logit)
    return dy * x * (share * (1.0 - share))


def rotate(x: Tensor, angles: tuple[Tensor, Tensor], sign: float = 1.0) -> Tensor:
    """x [B, T, ..., H] with the first half of each head turned against the second, by cosines and sines [T or B T, ..., H/2].

    With fewer of these the first dims of a head alone are turned, two for each angle, and the others stay as they are.
    """
    cos, sin = (table.reshape(*table.shape[:-1], *(1,) * (x.dim() - 3), table.shape[-1]) for table in angles)
    half = cos.shape[-1]
    parts = half, half, x.shape[-1] - 2 * half
    first, second, rest = torch.split_with_sizes(x, parts, dim=-1)
    if torch.compiler.is_compiling():  # which loses what is written through `out=` to a view
        return torch.cat((first * cos - sign * second * sin, second * cos + sign * first * sin, rest), dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    to_first, to_second, to_rest = torch.split_with_sizes(out, parts, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=sign)
    to_rest.copy_(rest)
    return out


def rotate_back(dy: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """The transpose of `rotate`."""
    return rotate(dy, angles, -1.0)


# Elementwise over aligned operands.
FUNCTIONS: Mapping[str, Function] = {
    "add": lambda *terms: sum(terms[2:], terms[0] + terms[1]),
    "add_vector": torch.add,
    "negate": torch.neg,
    "sum_to": lambda dy: dy,
    "sigmoid_gate": lambda x, logit: x * torch.sigmoid(logit),
    "sigmoid_gate_dx": lambda dy, logit: dy * torch.sigmoid(logit),
    "sigmoid_gate_dlogit": _sigmoid_gate_dlogit,
    "swiglu": lambda gate, up: F.silu(gate).mul_(up),
    "swiglu_dgate": lambda dy, gate, up: _silu_dx(dy * up, gate),
    "swiglu_dup": lambda dy, gate: F.silu(gate).mul_(dy),
    "geglu": lambda gate, up: _gelu(gate).mul_(up),
    "geglu_dgate": lambda dy, gate, up: _gelu_dx(dy * up, gate),
    "geglu_dup": lambda dy, gate: _gelu(gate).mul_(dy),
    "clamped_swiglu": lambda gate, up: _clamped_gate(gate).mul_(up.clamp(-CLAMP, CLAMP).add_(1.0)),
    "clamped_swiglu_dgate": _clamped_swiglu_dgate,
    "clamped_swiglu_dup": lambda dy, gate, up: _clamped_gate(gate).mul_(dy).mul_(up.abs() <= CLAMP),
    "gelu": _gelu,
    "gelu_dx": _gelu_dx,
    "relu": torch.relu,
    "relu_dx": lambda dy, x: dy * (x > 0),
}
