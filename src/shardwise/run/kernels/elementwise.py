"""Elementwise functions of a decoder by their names in the program.

`model/operations/elementwise_functions.py` cites the source of each.

Operands come aligned, so that they broadcast. A function never overwrites an operand; where that is allowed, the call
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model import SWIGLU_CLAMP
from shardwise.model.numerics import CLAMPED_SWIGLU_SLOPE
from shardwise.run.kernels.activation_casts import CastActivation, OutputCast, matrix_shape
from shardwise.run.kernels.device_dispatch import has_triton

ElementwiseFunction = Callable[..., Tensor]
aten = torch.ops.aten


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_dx(dy: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = aten.gelu_backward(dy, x, approximate="tanh")
    return gradient


def _silu_dx(dy: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = aten.silu_backward(dy, x)
    return gradient


def _clamped_gate(gate: Tensor) -> Tensor:
    low = gate.clamp(max=SWIGLU_CLAMP)
    return low * torch.sigmoid(CLAMPED_SWIGLU_SLOPE * low)


def _clamped_swiglu_dgate(dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    low = gate.clamp(max=SWIGLU_CLAMP)
    share = torch.sigmoid(CLAMPED_SWIGLU_SLOPE * low)
    slope = share * (1.0 + CLAMPED_SWIGLU_SLOPE * low * (1.0 - share))
    return dy * (up.clamp(-SWIGLU_CLAMP, SWIGLU_CLAMP) + 1.0) * slope * (gate <= SWIGLU_CLAMP)


def _sigmoid_gate_dlogit(dy: Tensor, x: Tensor, logit: Tensor) -> Tensor:
    share = torch.sigmoid(logit)
    return dy * x * (share * (1.0 - share))


def _gated(kind: str, reference: ElementwiseFunction) -> ElementwiseFunction:
    """Return a gated activation by Triton's kernel where there is one, else by its reference."""

    def forward(gate: Tensor, up: Tensor) -> Tensor:
        if not has_triton(gate, up):
            return reference(gate, up)
        from shardwise.run.triton_kernels import gated_activation as fused

        return fused.gated_forward(kind, gate, up)

    return forward


FUNCTIONS: Mapping[str, ElementwiseFunction] = {
    "add": lambda *terms: sum(terms[2:], terms[0] + terms[1]),
    "add_vector": torch.add,
    "negate": torch.neg,
    "sum_to": lambda dy: dy,
    "sigmoid_gate": lambda x, logit: x * torch.sigmoid(logit),
    "sigmoid_gate_dx": lambda dy, logit: dy * torch.sigmoid(logit),
    "sigmoid_gate_dlogit": _sigmoid_gate_dlogit,
    "swiglu": _gated("swiglu", lambda gate, up: F.silu(gate).mul_(up)),
    "swiglu_dgate": lambda dy, gate, up: _silu_dx(dy * up, gate),
    "swiglu_dup": lambda dy, gate: F.silu(gate).mul_(dy),
    "geglu": _gated("geglu", lambda gate, up: _gelu(gate).mul_(up)),
    "geglu_dgate": lambda dy, gate, up: _gelu_dx(dy * up, gate),
    "geglu_dup": lambda dy, gate: _gelu(gate).mul_(dy),
    "clamped_swiglu": _gated(
        "clamped_swiglu",
        lambda gate, up: _clamped_gate(gate).mul_(up.clamp(-SWIGLU_CLAMP, SWIGLU_CLAMP).add_(1.0)),
    ),
    "clamped_swiglu_dgate": _clamped_swiglu_dgate,
    "clamped_swiglu_dup": lambda dy, gate, up: _clamped_gate(gate).mul_(dy).mul_(up.abs() <= SWIGLU_CLAMP),
    "gelu": _gelu,
    "gelu_dx": _gelu_dx,
    "relu": torch.relu,
    "relu_dx": lambda dy, x: dy * (x > 0),
    "relu2": lambda x: F.relu(x).square_(),
    "relu2_dx": lambda dy, x: F.relu(x).mul_(2.0).mul_(dy),
    "gated_relu2": _gated("gated_relu2", lambda gate, up: F.relu(gate).square_().mul_(up)),
    "gated_relu2_dgate": lambda dy, gate, up: F.relu(gate).mul_(2.0).mul_(up).mul_(dy),
    "gated_relu2_dup": lambda dy, gate: F.relu(gate).square_().mul_(dy),
}


def gated_forms(kind: str, cast: OutputCast, gate: Tensor, up: Tensor) -> tuple[Tensor | CastActivation, ...]:
    """Return a gated activation in the forms of a cast, from one kernel where Triton has it."""
    if not (cast.has_blocks and has_triton(gate, up)):
        return cast.of(FUNCTIONS[kind](gate, up))
    from shardwise.run.triton_kernels import fused_casts

    return cast.of_kernel(gate, fused_casts.gated_forms(kind, gate, up, matrix_shape(gate), cast.options))


def gated_gradient_forms(
    kind: str, casts: tuple[OutputCast | None, OutputCast | None], dy: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor | CastActivation, ...]:
    """Return the gradients of gate and up of a gated activation, each in the forms of its cast, or as it is; from one kernel
    where Triton has it and both have the same forms."""
    first, second = casts
    if first is not None and first == second and first.has_blocks and has_triton(dy, gate, up):
        from shardwise.run.triton_kernels import fused_casts

        of_gate, of_up = fused_casts.gated_gradient_forms(kind, (dy, gate, up), matrix_shape(gate), first.options)
        return *first.of_kernel(gate, of_gate), *first.of_kernel(up, of_up)
    gradients = gated_gradients(kind, dy, gate, up)
    forms = (
        (gradient,) if cast is None else cast.of(gradient) for cast, gradient in zip(casts, gradients, strict=True)
    )
    return tuple(form for gradient_forms in forms for form in gradient_forms)


def gated_gradients(kind: str, dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up of a gated activation, in one pass where Triton has a kernel."""
    if has_triton(dy, gate, up):
        from shardwise.run.triton_kernels import gated_activation as fused

        return fused.gated_backward(kind, dy, gate, up)
    factors = (gate, up) if kind == "clamped_swiglu" else (gate,)
    return FUNCTIONS[f"{kind}_dgate"](dy, gate, up), FUNCTIONS[f"{kind}_dup"](dy, *factors)
