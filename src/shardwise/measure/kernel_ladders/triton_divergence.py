"""A function with two sides in Triton, whose lanes of a warp go to both sides or to one.

Even elements go through one sum of many steps, odd ones through another. A warp runs a side as soon as one of its lanes needs
it, with the others masked off. Triton's programs have no lanes that branch by themselves, so that a program here is one warp
(32 elements, one for each lane) that votes on each side, as the hardware does. Source: Ultra-Scale Playbook, "Minimizing control
divergence".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.run.triton_kernels.traffic import WARP_LANES


@triton.jit
def even_side(values, num_steps):
    """Return the sum of an even element."""
    for _ in range(0, num_steps):
        values = values * 0.5 + 0.25
    return values


@triton.jit
def odd_side(values, num_steps):
    """Return the sum of an odd element."""
    for _ in range(0, num_steps):
        values = values * -0.5 + 0.75
    return values


@triton.jit
def chosen_sides_kernel(x, out, size, num_steps, LANES: tl.constexpr):
    """Write both sides' choice: each lane goes through both."""
    index = tl.program_id(0) * LANES + tl.arange(0, LANES)
    values = tl.load(x + index, mask=index < size, other=0.0).to(tl.float32)
    result = tl.where(index % 2 == 1, odd_side(values, num_steps), even_side(values, num_steps))
    tl.store(out + index, result.to(out.dtype.element_ty), mask=index < size)


@triton.jit
def voted_sides_kernel(x, out, size, num_steps, LANES: tl.constexpr, SORTED: tl.constexpr):
    """Write a warp's elements by the sides that its lanes need. `SORTED`: each second element of 64, which are alike; else
    neighbours."""
    if SORTED:
        index = (tl.program_id(0) // 2) * 2 * LANES + 2 * tl.arange(0, LANES) + tl.program_id(0) % 2
    else:
        index = tl.program_id(0) * LANES + tl.arange(0, LANES)
    values = tl.load(x + index, mask=index < size, other=0.0).to(tl.float32)
    side = index % 2
    result = values
    if tl.min(side) == 0:
        result = tl.where(side == 0, even_side(values, num_steps), result)
    if tl.max(side) == 1:
        result = tl.where(side == 1, odd_side(values, num_steps), result)
    tl.store(out + index, result.to(out.dtype.element_ty), mask=index < size)


def choose_sides(x: Tensor, num_steps: int) -> Tensor:
    """Return both sides' results chosen for each element of a contiguous tensor."""
    out, grid = torch.empty_like(x), _num_programs(x)
    chosen_sides_kernel[grid](x, out, x.numel(), num_steps, LANES=WARP_LANES, num_warps=1)
    return out


def vote_sides(x: Tensor, num_steps: int, is_sorted: bool) -> Tensor:
    """Return the sides' results of a contiguous tensor, each warp with neighbours or with elements that are alike."""
    out, grid = torch.empty_like(x), _num_programs(x)
    voted_sides_kernel[grid](x, out, x.numel(), num_steps, LANES=WARP_LANES, SORTED=is_sorted, num_warps=1)
    return out


def _num_programs(x: Tensor) -> tuple[int]:
    return (2 * triton.cdiv(x.numel(), 2 * WARP_LANES),)
