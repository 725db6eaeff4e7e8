"""Products of 16-bit activations with int8 weights in Triton, which leave memory as one byte each.

Y [N, F] = X [N, K] · (s [F] * Q [F, K])ᵀ with Q in int8 and a scale for each feature. A tile of Q becomes 16-bit numbers in
registers, exactly, since these have 8 bits of mantissa or more; it is the left operand, which tensor cores take from registers.
The scale multiplies the sum. Source: "How to Scale Your Model", All About Rooflines, question 2 (int8 weights, bf16 products).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.measure.kernel_ladders.closed_forms import int8_parts, int8_tiles
from shardwise.measure.kernel_ladders.triton_products import add_parts

LARGEST = 127  # of symmetric int8


@triton.jit
def load_weights(weights, features, ks, num_features, depth):
    """Return a tile [FEATURES, DEPTH] of weights in int8."""
    mask = (features < num_features)[:, None] & (ks < depth)[None, :]
    return tl.load(weights + features[:, None] * depth + ks[None, :], mask=mask, other=0)


@triton.jit
def load_rows(x, rows, ks, num_rows, depth):
    """Return a tile [DEPTH, ROWS] of activations, turned."""
    mask = (ks < depth)[:, None] & (rows < num_rows)[None, :]
    return tl.load(x + rows[None, :] * depth + ks[:, None], mask=mask, other=0.0)


@triton.jit
def int8_product_kernel(
    x, weights, scales, out, num_rows, num_features, depth, span, ROWS: tl.constexpr, FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Write a tile of x · Wᵀ, or of the sum over a part of K. Tiles that share weights run side by side, so that the L2 cache
    has these for the second one."""
    part = tl.program_id(1)
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    features = (tl.program_id(0) // row_tiles) * FEATURES + tl.arange(0, FEATURES)
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in range(part * span, tl.minimum((part + 1) * span, depth), DEPTH):
        ks = start + tl.arange(0, DEPTH)
        x_tile = load_rows(x, rows, ks, num_rows, depth)
        weight_tile = load_weights(weights, features, ks, num_features, depth).to(x_tile.dtype)
        total = tl.dot(weight_tile, x_tile, total, input_precision="ieee")
    total *= tl.load(scales + features, mask=features < num_features, other=0.0)[:, None]
    mask = (features < num_features)[:, None] & (rows < num_rows)[None, :]
    target = out + part * num_rows * num_features + rows[None, :] * num_features + features[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def int8_gated_kernel(
    x, weights, scales, out, num_rows, num_features, depth, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Write a tile of silu(x · Gᵀ) * (x · Uᵀ); `weights` and `scales` have those of G, then those of U."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    rows = (tl.program_id(0) % row_tiles) * ROWS + tl.arange(0, ROWS)
    features = (tl.program_id(0) // row_tiles) * FEATURES + tl.arange(0, FEATURES)
    up_weights, up_scales = weights + num_features * depth, scales + num_features
    gate = tl.zeros([FEATURES, ROWS], tl.float32)
    up = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in range(0, depth, DEPTH):
        ks = start + tl.arange(0, DEPTH)
        x_tile = load_rows(x, rows, ks, num_rows, depth)
        gate_tile = load_weights(weights, features, ks, num_features, depth).to(x_tile.dtype)
        gate = tl.dot(gate_tile, x_tile, gate, input_precision="ieee")
        up_tile = load_weights(up_weights, features, ks, num_features, depth).to(x_tile.dtype)
        up = tl.dot(up_tile, x_tile, up, input_precision="ieee")
    gate *= tl.load(scales + features, mask=features < num_features, other=0.0)[:, None]
    up *= tl.load(up_scales + features, mask=features < num_features, other=0.0)[:, None]
    mask = (features < num_features)[:, None] & (rows < num_rows)[None, :]
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + rows[None, :] * num_features + features[:, None], result.to(out.dtype.element_ty), mask=mask)


def quantize_features(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights [F, K] in int8 and their scales [F] in float32: the largest of a feature becomes 127."""
    scales = weights.float().abs().amax(dim=1) / LARGEST
    return torch.round(weights.float() / scales[:, None]).to(torch.int8), scales


def multiply_by_int8(x: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Return the product [N, F] of contiguous x [N, K] with int8 weights [F, K] and their scales [F]."""
    (num_rows, depth), num_features = x.shape, len(weights)
    tiles, num_parts = int8_tiles(num_rows), int8_parts((num_rows, depth, num_features))
    out = x.new_empty((num_rows, num_features))
    sums = x.new_empty((num_parts, num_rows, num_features), dtype=torch.float32) if num_parts > 1 else out
    span = triton.cdiv(triton.cdiv(depth, num_parts), tiles.depth) * tiles.depth
    int8_product_kernel[(tiles.count(num_rows, num_features), num_parts)](
        x, weights, scales, sums, num_rows, num_features, depth, span, ROWS=tiles.rows, FEATURES=tiles.columns,
        DEPTH=tiles.depth, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return add_parts(sums, out) if num_parts > 1 else out


def gated_by_int8(x: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """Return silu(x · Gᵀ) * (x · Uᵀ) [N, F] of contiguous x [N, K]; `weights` [2 F, K] and `scales` [2 F]: G's, then U's."""
    (num_rows, depth), num_features = x.shape, len(weights) // 2
    tiles = int8_tiles(num_rows, num_weights=2)
    out = x.new_empty((num_rows, num_features))
    int8_gated_kernel[(tiles.count(num_rows, num_features),)](
        x, weights, scales, out, num_rows, num_features, depth, ROWS=tiles.rows, FEATURES=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def gated_layer(x: Tensor, wide: Tensor, wide_scales: Tensor, down: Tensor, down_scales: Tensor) -> Tensor:
    """Return a gated MLP of contiguous x [N, K], its weights in int8: a kernel, and one or two for the second product."""
    return multiply_by_int8(gated_by_int8(x, wide, wide_scales), down, down_scales)
