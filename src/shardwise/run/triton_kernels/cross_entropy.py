"""Cross-entropy over logits in place: the loss of each row, and the gradient of its logits written over them.

Of a row x with target t: loss = lse - x_t with lse = log(sum of exp x), gradient = (exp(x - lse) - [column = t]) times
a scale. One program has one row and walks its columns twice, first for the largest logit and the sum of exponentials
(online softmax, Milakov et al. 2018), then for the gradient. Rows whose target is ignored have no loss and a gradient
of zero. A soft cap c replaces x by c tanh(x / c).

Bytes of N rows of V logits of b bytes: 3 N V b with the gradient (two reads and a write; the second read comes from the
L2 cache where the rows in flight fit into it), N V b without. FLOPs: about 4 N V for the sum and 4 N V for the
gradient. References: `run.kernels.cross_entropy.cross_entropy` and `VocabParallelCrossEntropy`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.triton_kernels.arithmetic import tanh

BLOCK, NUM_WARPS = 4096, 16  # columns at a time: 8 a thread, so that nothing is spilled


@triton.jit
def _load_logits(row, columns, num_words, cap, HAS_CAP: tl.constexpr):
    """Load capped logits in float32; -inf after the last word."""
    logits = tl.load(row + columns, mask=columns < num_words, other=0.0).to(tl.float32)
    if HAS_CAP:
        logits = cap * tanh(logits / cap)
    return tl.where(columns < num_words, logits, -float("inf"))


@triton.jit
def _write_gradient(row, width, num_words, target, lse, scale, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Overwrite a row of logits with its gradient; columns after the last word become zero."""
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = _load_logits(row, columns, num_words, cap, HAS_CAP)
        shares = tl.exp(logits - lse)
        gradient = tl.where(columns == target, shares - 1.0, shares) * scale
        if HAS_CAP:
            gradient *= tl.where(columns < num_words, 1.0 - (logits / cap) * (logits / cap), 0.0)
        tl.store(row + columns, gradient.to(row.dtype.element_ty), mask=columns < width)


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, scale, stride, num_words, cap,
    IGNORE: tl.constexpr, HAS_CAP: tl.constexpr, REPLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the loss of a row; with REPLACE, overwrite its logits with their gradient."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    target = tl.load(targets + index)
    if target == IGNORE:
        tl.store(losses + index, 0.0)
        if REPLACE:
            for start in range(0, num_words, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tl.store(row + columns, tl.zeros([BLOCK], row.dtype.element_ty), mask=columns < num_words)
    else:
        largest, total = -float("inf"), 0.0
        for start in range(0, num_words, BLOCK):
            block = _load_logits(row, start + tl.arange(0, BLOCK), num_words, cap, HAS_CAP)
            top = tl.maximum(largest, tl.max(block))
            total = total * tl.exp(largest - top) + tl.sum(tl.exp(block - top))
            largest = top
        lse = largest + tl.log(total)
        target_logit = tl.load(row + target).to(tl.float32)
        if HAS_CAP:
            target_logit = cap * tanh(target_logit / cap)
        tl.store(losses + index, lse - target_logit)
        if REPLACE:
            tl.debug_barrier()  # another warp may overwrite the target's logit before this one has read it
            _write_gradient(row, num_words, num_words, target, lse, tl.load(scale), cap, HAS_CAP, BLOCK)


@triton.jit
def row_maximum_kernel(logits, maxima, stride, num_words, BLOCK: tl.constexpr):
    """Write the largest logit of a row, before any cap."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    largest = -float("inf")
    for start in range(0, num_words, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        block = tl.load(row + columns, mask=columns < num_words, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, tl.max(block))
    tl.store(maxima + index, largest)


@triton.jit
def row_sum_exp_kernel(
    logits, maxima, sums, stride, num_words, cap, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the sum of exp(logit - maximum) of a row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    largest, total = tl.load(maxima + index), 0.0
    for start in range(0, num_words, BLOCK):
        block = _load_logits(row, start + tl.arange(0, BLOCK), num_words, cap, HAS_CAP)
        total += tl.sum(tl.exp(block - largest))
    tl.store(sums + index, total)


@triton.jit
def vocab_parallel_gradient_kernel(
    logits, targets, lse, scale, stride, width, first, num_words, cap,
    IGNORE: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite a row of this rank's logits with their gradient; `lse` is over the whole vocabulary."""
    index = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + index)
    factor = tl.where(target == IGNORE, 0.0, tl.load(scale))
    local = tl.where(target == IGNORE, -1, target - first)
    row = logits + index * stride
    _write_gradient(row, width, num_words, local, tl.load(lse + index), factor, cap, HAS_CAP, BLOCK)


def cross_entropy(
    logits: Tensor, targets: Tensor, scale: float | Tensor, cap: float | None, *, replace: bool
) -> Tensor:
    """Return the scaled sum of the losses of targets [..., N] over logits [..., N, V]; see `run.kernels.cross_entropy`."""
    rows, flat_targets = logits.flatten(0, -2), targets.flatten()
    losses = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(len(rows),)](
        rows, flat_targets, losses, _as_scalar(scale, logits), rows.stride(0), rows.shape[1], cap or 1.0,
        IGNORE=IGNORE_INDEX, HAS_CAP=cap is not None, REPLACE=replace, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    loss: Tensor = losses.sum() * scale
    return loss


def row_maximum(logits: Tensor, num_words: int) -> Tensor:
    """Return the largest of the first `num_words` logits of each row [..., V], in float32."""
    maxima = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    rows = logits.flatten(0, -2)
    row_maximum_kernel[(len(rows),)](rows, maxima, rows.stride(0), num_words, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return maxima


def row_sum_exp(logits: Tensor, largest: Tensor, num_words: int, cap: float | None) -> Tensor:
    """Return the sum of exp(logit - largest) over the first `num_words` logits of each row, in float32."""
    sums, rows = torch.empty_like(largest), logits.flatten(0, -2)
    row_sum_exp_kernel[(len(rows),)](
        rows, largest.contiguous(), sums, rows.stride(0), num_words, cap or 1.0, HAS_CAP=cap is not None, BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return sums


def vocab_parallel_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, scale: float | Tensor, local_words: range, cap: float | None
) -> Tensor:
    """Overwrite this rank's logits of `local_words` [B, T, V/n] with their gradient, and return them."""
    rows = logits.flatten(0, -2)
    vocab_parallel_gradient_kernel[(len(rows),)](
        rows, targets.contiguous(), lse.contiguous(), _as_scalar(scale, logits), rows.stride(0), rows.shape[1], local_words.start,
        len(local_words), cap or 1.0, IGNORE=IGNORE_INDEX, HAS_CAP=cap is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return logits


def _as_scalar(scale: Any, like: Tensor) -> Tensor:
    """Return a scale as a float32 tensor on the device of another; a Python number is copied there without waiting."""
    if isinstance(scale, Tensor):
        return scale.to(torch.float32)
    return torch.full((), float(scale), dtype=torch.float32, device=like.device)
