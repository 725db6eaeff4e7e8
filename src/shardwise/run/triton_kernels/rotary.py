"""Rotary embedding: the first half of a head's rotated part against the second, in one pass.

Of a pair (a, b) at angle θ: (a cos θ - b sin θ, b cos θ + a sin θ); the backward pass turns by -θ (Su et al. 2021).
Dims of a head after the rotated part are copied. One program has the heads of one token.

Bytes of N elements of b bytes: 2 N b, and the angles of each token once. FLOPs: 3 N. Reference:
`run.kernels.positions_and_masks.rotate`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ELEMENTS = 4096  # pairs of a program at a time: 32 a thread
NUM_WARPS = 4


@triton.jit
def rotate_kernel(
    x, cos, sin, out, sign, num_rows, num_heads, head_dim, half,
    HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate the heads of one token; `num_rows` angles are repeated over the tokens."""
    token = tl.program_id(0).to(tl.int64)
    angle = (token % num_rows) * half
    pairs = tl.arange(0, HALF)
    is_pair = pairs < half
    cosines = tl.load(cos + angle + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
    sines = tl.load(sin + angle + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :] * sign
    for first_head in range(0, num_heads, HEADS):
        heads = first_head + tl.arange(0, HEADS)
        offsets = (token * num_heads + heads[:, None]) * head_dim
        inside = (heads < num_heads)[:, None]
        mask = inside & is_pair[None, :]
        first = tl.load(x + offsets + pairs[None, :], mask=mask).to(tl.float32)
        second = tl.load(x + offsets + half + pairs[None, :], mask=mask).to(tl.float32)
        tl.store(out + offsets + pairs[None, :], (first * cosines - second * sines).to(out.dtype.element_ty), mask=mask)
        rotated = second * cosines + first * sines
        tl.store(out + offsets + half + pairs[None, :], rotated.to(out.dtype.element_ty), mask=mask)
        if REST > 0:
            rest = tl.arange(0, REST)
            rest_offsets = offsets + 2 * half + rest[None, :]
            rest_mask = inside & (2 * half + rest < head_dim)[None, :]
            tl.store(out + rest_offsets, tl.load(x + rest_offsets, mask=rest_mask), mask=rest_mask)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor], sign: float) -> Tensor:
    """Return contiguous x [B, T, ..., H] rotated by cosines and sines [T or B T, H/2 at most]; `sign` -1.0 turns back."""
    cos, sin = (table.contiguous() for table in angles)
    head_dim, half = x.shape[-1], cos.shape[-1]
    num_tokens = x.shape[0] * x.shape[1]
    num_heads = x.numel() // (num_tokens * head_dim) if num_tokens else 0
    out, half_block, rest = torch.empty_like(x), triton.next_power_of_2(half), head_dim - 2 * half
    if x.numel():
        heads = min(triton.next_power_of_2(num_heads), max(MAX_ELEMENTS // half_block, 1))
        rotate_kernel[(num_tokens,)](
            x, cos, sin, out, sign, cos.numel() // half, num_heads, head_dim, half,
            HALF=half_block, REST=triton.next_power_of_2(rest) if rest else 0, HEADS=heads, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
