"""PyTorch's attention kernels, forward and backward, by name: those of a CPU, and those of a GPU.

Queries [B, K·G, T, H], keys and values [B, K, S, H]. `mask` is what is added to the scores, [T, S] or [B, 1, T, S]; None: a query
sees the keys up to its own, or all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.torch import devices

aten = torch.ops.aten
Gradients = tuple[Tensor, Tensor, Tensor]
# Of PyTorch's memory-efficient attention on a GPU: its log-sum-exps are padded to a multiple of so many queries, and rows of what
# is added to scores are aligned to so many elements (attention.cu, pad_bias in attention.cpp).
PADDED, ALIGNED = 32, 16


def fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, causal: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, K·G, T, H] and log-sum-exp [B, K·G, T], of which a GPU pads T.

    `causal`: a query sees the keys up to its own (None: where there is no mask).
    """
    causal = mask is None if causal is None else causal
    if not devices.on_gpu(query):
        on_cpu: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return on_cpu
    if _has_flash(query, mask):
        flash: tuple[Any, ...] = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return flash[0], flash[1]
    key, value = repeated(query, key), repeated(query, value)
    efficient: tuple[Any, ...] = aten._scaled_dot_product_efficient_attention(
        query, key, value, _of_queries(mask, query), True, 0.0, causal, scale=scale
    )
    return efficient[0], efficient[1]


def fused_backward(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float, *,
    causal: bool | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of queries, keys and values."""
    causal = mask is None if causal is None else causal
    if not devices.on_gpu(query):
        on_cpu: Gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, query, key, value, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scale
        )
        return on_cpu
    unused = torch.empty(0, dtype=torch.int64, device=query.device)  # seeds of a dropout that there is not
    if _has_flash(query, mask):
        lengths = query.shape[2], key.shape[2]
        flash: Gradients = aten._scaled_dot_product_flash_attention_backward(
            dy, query, key, value, out, lse.contiguous(), None, None, *lengths, 0.0, causal, unused, unused, scale=scale
        )
        return flash
    groups = query.shape[1] // key.shape[1]
    wanted = [True, True, True, False]
    heads = repeated(query, key), repeated(query, value)
    lse = F.pad(lse, (0, -lse.shape[-1] % PADDED), value=float("inf")).contiguous()
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dy, query, *heads, _of_queries(mask, query), out, lse, unused, unused, 0.0, wanted, causal, scale=scale
    )
    return dq, grouped(dk, groups), grouped(dv, groups)


def _has_flash(query: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch's flash attention takes these on a GPU: 16 bits, causal, heads of at most 256 (sdp_utils.cpp)."""
    return mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256


def _of_queries(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask for every sequence and head, its rows aligned."""
    if mask is None:
        return None
    rows = F.pad(mask, (0, -mask.shape[-1] % ALIGNED))[..., : mask.shape[-1]]
    return rows.expand(len(query), query.shape[1], *mask.shape[-2:])


def repeated(query: Tensor, key: Tensor) -> Tensor:
    """Keys or values as often as there are query heads for each."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def grouped(x: Tensor, groups: int) -> Tensor:
    """[B, K·G, S, H] added up over the query heads of each key-value head."""
    return torch.unflatten(x, 1, (-1, groups)).sum(dim=2)
