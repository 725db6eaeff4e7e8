"""Gated activations act(gate) · up: the product, and both of its gradients in one pass.

swiglu: gate · sigmoid(gate) · up (Shazeer 2020). geglu: GELU(gate) · up with the tanh form of GELU (Hendrycks and
Gimpel 2016). clamped_swiglu: g · sigmoid(1.702 g) · (u + 1) with g = min(gate, 7) and u = up clamped to ±7 (OpenAI
2025, gpt-oss). gated_relu2: max(gate, 0)² · up.

Bytes of N elements of b bytes: 3 N b forward (two reads, one write), 5 N b for both gradients (dy, gate, up; two
writes), where separate functions read and write 11 N b. FLOPs: about 5 N and 12 N. References:
`run.kernels.elementwise.FUNCTIONS`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.model import SWIGLU_CLAMP
from shardwise.model.numerics import CLAMPED_SWIGLU_SLOPE
from shardwise.run.triton_kernels.arithmetic import tanh

BLOCK, NUM_WARPS = 2048, 8  # 8 elements a thread: loads of 16 bytes
CLAMP, SLOPE = tl.constexpr(SWIGLU_CLAMP), tl.constexpr(CLAMPED_SWIGLU_SLOPE)
GELU_FACTOR = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
GELU_CUBIC = tl.constexpr(0.044715)  # Hendrycks and Gimpel 2016, section 2
SWIGLU, GEGLU, CLAMPED_SWIGLU, GATED_RELU2 = (tl.constexpr(number) for number in range(4))
KINDS = {"swiglu": SWIGLU, "geglu": GEGLU, "clamped_swiglu": CLAMPED_SWIGLU, "gated_relu2": GATED_RELU2}


@triton.jit
def activation(gate, KIND: tl.constexpr):
    """Return act(gate) and its derivative, in float32."""
    if KIND == GEGLU:
        inner = (gate + gate * gate * gate * GELU_CUBIC) * GELU_FACTOR
        share = tanh(inner)
        slope = (gate * gate * (3.0 * GELU_CUBIC) + 1.0) * GELU_FACTOR
        half = 0.5 * (1.0 + share)
        value = gate * half
        derivative = half * (1.0 + gate * (1.0 - share) * slope)
    elif KIND == CLAMPED_SWIGLU:
        low = tl.minimum(gate, CLAMP)
        share = tl.sigmoid(low * SLOPE)
        value = low * share
        derivative = tl.where(gate <= CLAMP, share * (1.0 + low * SLOPE * (1.0 - share)), 0.0)
    elif KIND == GATED_RELU2:
        positive = tl.maximum(gate, 0.0)
        value = positive * positive
        derivative = 2.0 * positive
    else:
        share = tl.sigmoid(gate)
        value = gate * share
        derivative = share * (1.0 + gate * (1.0 - share))
    return value, derivative


@triton.jit
def linear_factor(up, KIND: tl.constexpr):
    """Return the factor that `up` enters by, in float32."""
    if KIND == CLAMPED_SWIGLU:
        up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP) + 1.0
    return up


@triton.jit
def gated_value(gate, up, KIND: tl.constexpr):
    """Return act(gate) · up, in float32."""
    value, _ = activation(gate, KIND)
    return value * linear_factor(up, KIND)


@triton.jit
def gate_gradient(gradient, gate, up, KIND: tl.constexpr):
    """Return the gradient of gate, in float32."""
    _, derivative = activation(gate, KIND)
    return gradient * linear_factor(up, KIND) * derivative


@triton.jit
def up_gradient(gradient, gate, up, KIND: tl.constexpr):
    """Return the gradient of up, in float32; its value counts in `clamped_swiglu` alone."""
    value, _ = activation(gate, KIND)
    through_up = gradient * value
    if KIND == CLAMPED_SWIGLU:
        through_up = tl.where(tl.abs(up) <= CLAMP, through_up, 0.0)
    return through_up


@triton.jit
def gated_forward_kernel(gate, up, out, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write act(gate) · up of a block of elements."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    gate_values = tl.load(gate + index, mask=inside).to(tl.float32)
    result = gated_value(gate_values, tl.load(up + index, mask=inside).to(tl.float32), KIND)
    tl.store(out + index, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(dy, gate, up, dgate, dup, size, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradients of gate and up of a block of elements."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    gradient = tl.load(dy + index, mask=inside).to(tl.float32)
    gate_values = tl.load(gate + index, mask=inside).to(tl.float32)
    linear = tl.load(up + index, mask=inside).to(tl.float32)
    through_gate = gate_gradient(gradient, gate_values, linear, KIND)
    tl.store(dgate + index, through_gate.to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + index, up_gradient(gradient, gate_values, linear, KIND).to(dup.dtype.element_ty), mask=inside)


def gated_forward(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return act(gate) · up of contiguous tensors of one shape; `kind` is one of `KINDS`."""
    out, size = torch.empty_like(gate), gate.numel()
    gated_forward_kernel[(triton.cdiv(size, BLOCK),)](
        gate, up, out, size, KIND=KINDS[kind], BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return out


def gated_backward(kind: str, dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up."""
    dgate, dup, size = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    gated_backward_kernel[(triton.cdiv(size, BLOCK),)](
        dy, gate, up, dgate, dup, size, KIND=KINDS[kind], BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return dgate, dup
