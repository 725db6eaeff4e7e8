"""ELU, softmax and their launchers in Triton, one pass over memory or several."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, ROW_BLOCK, NUM_WARPS = 1024, 1024, 4


@triton.jit
def elu_kernel(x, out, size, BLOCK: tl.constexpr):
    """Write x where it is positive, and exp(x) - 1 elsewhere."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    values = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    result = tl.where(values > 0, values, tl.exp(tl.minimum(values, 0.0)) - 1.0)
    tl.store(out + index, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def strided_elu_kernel(x, out, size, num_programs, BLOCK: tl.constexpr):
    """Write ELU with neighbouring lanes `num_programs` elements apart: no two of a warp share a sector."""
    index = tl.program_id(0).to(tl.int64) + tl.arange(0, BLOCK).to(tl.int64) * num_programs
    inside = index < size
    values = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    result = tl.where(values > 0, values, tl.exp(tl.minimum(values, 0.0)) - 1.0)
    tl.store(out + index, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def softmax_in_passes_kernel(x, out, width, BLOCK: tl.constexpr):
    """Read a row three times: for its maximum, for its sum, and to write it."""
    row = tl.program_id(0).to(tl.int64) * width
    largest = -float("inf")
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        block = tl.load(x + row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(block))
    total = 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        block = tl.load(x + row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(block - largest))
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        block = tl.load(x + row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        tl.store(out + row + columns, (tl.exp(block - largest) / total).to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def online_softmax_kernel(x, out, width, BLOCK: tl.constexpr):
    """Read a row twice: its maximum and its sum are found together, and the sum is rescaled where the maximum grows."""
    row = tl.program_id(0).to(tl.int64) * width
    largest, total = -float("inf"), 0.0
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        block = tl.load(x + row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        top = tl.maximum(largest, tl.max(block))
        total = total * tl.exp(largest - top) + tl.sum(tl.exp(block - top))
        largest = top
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        block = tl.load(x + row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
        tl.store(out + row + columns, (tl.exp(block - largest) / total).to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def softmax_in_registers_kernel(x, out, width, BLOCK: tl.constexpr):
    """Read a row once: it stays in registers."""
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
    exponentials = tl.exp(values - tl.max(values))
    shares = exponentials / tl.sum(exponentials)
    tl.store(out + row + columns, shares.to(out.dtype.element_ty), mask=columns < width)


@triton.jit
def add_steps_kernel(x, out, size, num_steps, BLOCK: tl.constexpr):
    """Write x with 1 added some times, each sum rounded as if it passed through memory."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    values = tl.load(x + index, mask=inside, other=0.0)
    for _ in range(0, num_steps):
        values = (values.to(tl.float32) + 1.0).to(x.dtype.element_ty)
    tl.store(out + index, values, mask=inside)


def elu(x: Tensor) -> Tensor:
    """Return ELU of a contiguous tensor, neighbouring elements by neighbouring threads."""
    out, size = torch.empty_like(x), x.numel()
    elu_kernel[(triton.cdiv(size, BLOCK),)](x, out, size, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def strided_elu(x: Tensor) -> Tensor:
    """Return ELU of a contiguous tensor, each thread of a warp in another sector of memory."""
    out, size = torch.empty_like(x), x.numel()
    num_programs = triton.cdiv(size, BLOCK)
    strided_elu_kernel[(num_programs,)](x, out, size, num_programs, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def softmax_in_passes(x: Tensor) -> Tensor:
    """Return the softmax of each row [N, W] in three reads."""
    out = torch.empty_like(x)
    softmax_in_passes_kernel[(len(x),)](x, out, x.shape[1], BLOCK=ROW_BLOCK, num_warps=NUM_WARPS)
    return out


def online_softmax(x: Tensor) -> Tensor:
    """Return the softmax of each row [N, W] in two reads."""
    out = torch.empty_like(x)
    online_softmax_kernel[(len(x),)](x, out, x.shape[1], BLOCK=ROW_BLOCK, num_warps=NUM_WARPS)
    return out


def softmax_in_registers(x: Tensor) -> Tensor:
    """Return the softmax of each row [N, W] in one read."""
    out, width = torch.empty_like(x), x.shape[1]
    softmax_in_registers_kernel[(len(x),)](x, out, width, BLOCK=triton.next_power_of_2(width), num_warps=2 * NUM_WARPS)
    return out


def add_steps(x: Tensor, num_steps: int) -> Tensor:
    """Return a contiguous tensor with 1 added some times."""
    out, size = torch.empty_like(x), x.numel()
    add_steps_kernel[(triton.cdiv(size, BLOCK),)](x, out, size, num_steps, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out
