"""Tokens to the rows of their experts and back, each in one pass over the rows.

Letters: N tokens of width D, k choices of each, R rows sorted by expert. `row_of_pair` [N, k] is the row of a token's choice, R
or more where it was dropped; `pair_of_row` [R] its inverse.

- Gathered sum: out[n] = sum over j of g[n, j] rows[row_of_pair[n, j]], in float32 and in the order of the choices; with gates
  the result of a mixture's layer, without them the gradient of its input.
- Gradient of the gates: dg[n, j] = dy[n] · rows[row_of_pair[n, j]].
- Gradient of the rows: drows[r] = g[n, j] dy[n] for the pair (n, j) of row r.

A program of the first two has one token and walks its width in blocks, so that each row is read once; one of the third has
one row.

Bytes of N k rows of D elements of b bytes, but for indices and gates: (k + 1) N D b for the sum and for the gates, 2 k N D b
for the rows. One kernel for each choice moves up to seven times as much. FLOPs: 2 k N D, 2 k N D, k N D. References:
`run.kernels.experts`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048  # elements of a row at a time
ELEMENTS_PER_WARP = 512
MAX_WARPS = 4


@triton.jit
def gathered_sum_kernel(
    rows, row_of_pair, gates, out, num_rows, width,
    NUM_CHOSEN: tl.constexpr, HAS_GATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up the rows of one token, weighted by its gates."""
    token = tl.program_id(0).to(tl.int64)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        total = tl.zeros([BLOCK], tl.float32)
        for choice in tl.static_range(NUM_CHOSEN):
            row = tl.load(row_of_pair + token * NUM_CHOSEN + choice)
            values = tl.load(
                rows + row * width + columns, mask=tl.where(inside, row, num_rows) < num_rows, other=0.0
            ).to(tl.float32)
            if HAS_GATES:
                values *= tl.load(gates + token * NUM_CHOSEN + choice)
            total += values
        tl.store(out + token * width + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_gradient_kernel(
    dy, rows, row_of_pair, dgates, num_rows, width, NUM_CHOSEN: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the products of one token's gradient with each of its rows."""
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, CHOICES)
    sums = tl.zeros([CHOICES], tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        gradient = tl.load(dy + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        for choice in tl.static_range(NUM_CHOSEN):
            row = tl.load(row_of_pair + token * NUM_CHOSEN + choice)
            values = tl.load(
                rows + row * width + columns, mask=tl.where(inside, row, num_rows) < num_rows, other=0.0
            ).to(tl.float32)
            sums += tl.where(choices == choice, tl.sum(gradient * values), 0.0)
    tl.store(dgates + token * NUM_CHOSEN + choices, sums, mask=choices < NUM_CHOSEN)


@triton.jit
def row_gradient_kernel(dy, gates, pair_of_row, drows, width, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient of one row: that of its token, times the gate."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_of_row + row)
    gate = tl.load(gates + pair)
    token = pair // NUM_CHOSEN
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        gradient = tl.load(dy + token * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(drows + row * width + columns, (gradient * gate).to(drows.dtype.element_ty), mask=inside)


def gathered_sum(rows: Tensor, row_of_pair: Tensor, gates: Tensor | None) -> Tensor:
    """Return the sum of each token's rows [R, D], weighted by gates [N, k] in float32 if there are any, [N, D]."""
    num_tokens, num_chosen = row_of_pair.shape
    out = rows.new_empty((num_tokens, rows.shape[-1]))
    if out.numel():
        gathered_sum_kernel[(num_tokens,)](
            rows, row_of_pair, row_of_pair if gates is None else gates, out, len(rows), rows.shape[-1],
            NUM_CHOSEN=num_chosen, HAS_GATES=gates is not None, **_launch_sizes(rows.shape[-1]),
        )  # fmt: skip
    return out


def gate_gradient(dy: Tensor, rows: Tensor, row_of_pair: Tensor) -> Tensor:
    """Return the gradient of the gates [N, k] in float32 from dy [N, D] and the experts' results [R, D]."""
    num_tokens, num_chosen = row_of_pair.shape
    dgates = torch.empty(row_of_pair.shape, dtype=torch.float32, device=rows.device)
    if dgates.numel():
        gate_gradient_kernel[(num_tokens,)](
            dy, rows, row_of_pair, dgates, len(rows), rows.shape[-1], NUM_CHOSEN=num_chosen,
            CHOICES=triton.next_power_of_2(num_chosen), **_launch_sizes(rows.shape[-1]),
        )  # fmt: skip
    return dgates


def row_gradient(dy: Tensor, gates: Tensor, pair_of_row: Tensor) -> Tensor:
    """Return the gradient of the experts' results [R, D] from dy [N, D] and gates [N, k] in float32."""
    drows = dy.new_empty((len(pair_of_row), dy.shape[-1]))
    if drows.numel():
        row_gradient_kernel[(len(pair_of_row),)](
            dy, gates, pair_of_row, drows, dy.shape[-1], NUM_CHOSEN=gates.shape[-1], **_launch_sizes(dy.shape[-1])
        )
    return drows


def _launch_sizes(width: int) -> dict[str, int]:
    block = min(int(triton.next_power_of_2(width)), MAX_BLOCK)
    return {"BLOCK": block, "num_warps": min(max(block // ELEMENTS_PER_WARP, 1), MAX_WARPS)}
