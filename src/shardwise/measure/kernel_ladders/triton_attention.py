"""Causal attention in Triton without scores in memory, forward and backward (Dao et al. 2022, algorithms 1 and 4; Dao
2023).

Of queries, keys and values [heads, T, H]: a program has a block of queries and walks the keys up to them with an online
softmax. The backward pass rebuilds the scores from the log-sum-exp of each row. The sum over keys of P dP, which the
gradient of a softmax needs, is dO · O, so that it is one number of each row that is known before any score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.measure.kernel_ladders.closed_forms import ATTENTION_BLOCK as BLOCK

NUM_WARPS, NUM_STAGES = 4, 2


@triton.jit
def _load_rows(tensor, rows, length, WIDTH: tl.constexpr):
    """Load rows of a [T, H] matrix; rows past the end are zero."""
    offsets = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(tensor + offsets, mask=(rows < length)[:, None], other=0.0)


@triton.jit
def _store_rows(tensor, values, rows, length, WIDTH: tl.constexpr):
    offsets = rows[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(tensor + offsets, values.to(tensor.dtype.element_ty), mask=(rows < length)[:, None])


@triton.jit
def flash_forward_kernel(query, key, value, out, lse, length, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write the output of a block of queries, and the log-sum-exp of their scores."""
    head = tl.program_id(1).to(tl.int64) * length
    start = tl.program_id(0) * BLOCK
    rows = start + tl.arange(0, BLOCK)
    queries = _load_rows(query + head * WIDTH, rows, length, WIDTH)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    attended = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first_key in range(0, tl.minimum(start + BLOCK, length), BLOCK):
        columns = first_key + tl.arange(0, BLOCK)
        keys = _load_rows(key + head * WIDTH, columns, length, WIDTH)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        visible = (columns[None, :] <= rows[:, None]) & (columns < length)[None, :]
        scores = tl.where(visible, scores, -float("inf"))
        top = tl.maximum(largest, tl.max(scores, axis=1))
        rescale = tl.exp(largest - top)
        shares = tl.exp(scores - top[:, None])
        total = total * rescale + tl.sum(shares, axis=1)
        values = _load_rows(value + head * WIDTH, columns, length, WIDTH)
        attended = attended * rescale[:, None] + tl.dot(shares.to(values.dtype), values, input_precision="ieee")
        largest = top
    _store_rows(out + head * WIDTH, attended / total[:, None], rows, length, WIDTH)
    tl.store(lse + head + rows, largest + tl.log(total), mask=rows < length)


@triton.jit
def row_products_kernel(dy, out, row_products, length, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write dO · O of each row."""
    head = tl.program_id(1).to(tl.int64) * length
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gradients = _load_rows(dy + head * WIDTH, rows, length, WIDTH).to(tl.float32)
    outputs = _load_rows(out + head * WIDTH, rows, length, WIDTH).to(tl.float32)
    tl.store(row_products + head + rows, tl.sum(gradients * outputs, axis=1), mask=rows < length)


@triton.jit
def _shares_and_gradients(queries, keys, values, gradients, lse, products, rows, columns, length, scale):
    """Return the attention weights of a block, and the gradient of its scores."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    visible = (columns[None, :] <= rows[:, None]) & (rows < length)[:, None]
    shares = tl.where(visible, tl.exp(scores - lse[:, None]), 0.0)
    dshares = tl.dot(gradients, tl.trans(values), input_precision="ieee")
    return shares, shares * (dshares - products[:, None]) * scale


@triton.jit
def flash_dquery_kernel(
    query, key, value, dy, lse, row_products, dquery, length, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the gradient of a block of queries."""
    head = tl.program_id(1).to(tl.int64) * length
    start = tl.program_id(0) * BLOCK
    rows = start + tl.arange(0, BLOCK)
    queries = _load_rows(query + head * WIDTH, rows, length, WIDTH)
    gradients = _load_rows(dy + head * WIDTH, rows, length, WIDTH)
    row_lse = tl.load(lse + head + rows, mask=rows < length, other=0.0)
    products = tl.load(row_products + head + rows, mask=rows < length, other=0.0)
    result = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first_key in range(0, tl.minimum(start + BLOCK, length), BLOCK):
        columns = first_key + tl.arange(0, BLOCK)
        keys = _load_rows(key + head * WIDTH, columns, length, WIDTH)
        values = _load_rows(value + head * WIDTH, columns, length, WIDTH)
        _, dscores = _shares_and_gradients(
            queries, keys, values, gradients, row_lse, products, rows, columns, length, scale
        )
        result += tl.dot(dscores.to(keys.dtype), keys, input_precision="ieee")
    _store_rows(dquery + head * WIDTH, result, rows, length, WIDTH)


@triton.jit
def flash_dkey_dvalue_kernel(
    query, key, value, dy, lse, row_products, dkey, dvalue, length, scale, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the gradients of a block of keys and values, from the queries that see them."""
    head = tl.program_id(1).to(tl.int64) * length
    first_key = tl.program_id(0) * BLOCK
    columns = first_key + tl.arange(0, BLOCK)
    keys = _load_rows(key + head * WIDTH, columns, length, WIDTH)
    values = _load_rows(value + head * WIDTH, columns, length, WIDTH)
    key_gradient = tl.zeros([BLOCK, WIDTH], tl.float32)
    value_gradient = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(first_key, length, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        queries = _load_rows(query + head * WIDTH, rows, length, WIDTH)
        gradients = _load_rows(dy + head * WIDTH, rows, length, WIDTH)
        row_lse = tl.load(lse + head + rows, mask=rows < length, other=0.0)
        products = tl.load(row_products + head + rows, mask=rows < length, other=0.0)
        shares, dscores = _shares_and_gradients(
            queries, keys, values, gradients, row_lse, products, rows, columns, length, scale
        )
        value_gradient += tl.dot(tl.trans(shares.to(gradients.dtype)), gradients, input_precision="ieee")
        key_gradient += tl.dot(tl.trans(dscores.to(queries.dtype)), queries, input_precision="ieee")
    _store_rows(dkey + head * WIDTH, key_gradient, columns, length, WIDTH)
    _store_rows(dvalue + head * WIDTH, value_gradient, columns, length, WIDTH)


def flash_forward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [heads, T, H] and log-sum-exp [heads, T] of contiguous operands; H is a power of two of at least 16."""
    heads, length, width = query.shape
    out, lse = torch.empty_like(query), query.new_empty((heads, length), dtype=torch.float32)
    flash_forward_kernel[(triton.cdiv(length, BLOCK), heads)](
        query, key, value, out, lse, length, width**-0.5, WIDTH=width, BLOCK=BLOCK, num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )  # fmt: skip
    return out, lse


def flash_backward(
    dy: Tensor, operands: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    (query, key, value), (heads, length, width) = operands, dy.shape
    grid, sizes = (triton.cdiv(length, BLOCK), heads), {"WIDTH": width, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
    row_products, dquery, dkey, dvalue = torch.empty_like(lse), *(torch.empty_like(x) for x in operands)
    row_products_kernel[grid](dy, out, row_products, length, **sizes)
    flash_dquery_kernel[grid](
        query, key, value, dy, lse, row_products, dquery, length, width**-0.5, num_stages=NUM_STAGES, **sizes
    )
    flash_dkey_dvalue_kernel[grid](
        query, key, value, dy, lse, row_products, dkey, dvalue, length, width**-0.5, num_stages=NUM_STAGES, **sizes
    )
    return dquery, dkey, dvalue
