"""Causal attention of grouped queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.numerics import Numerics
from shardwise.train.model.functions import at_least_fp32, cap


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, numerics: Numerics) -> Tensor:
    """Queries [B, T, K, G, H] over keys and values [B, T, K, H], to [B, T, K, G, H].

    `mask` is what each query sees, [T, T] or [B, 1, T, T]; None: all keys up to its own.
    """
    groups = q.shape[3]
    query, key, value = q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if numerics.attention_cap is not None:
        out = _capped(query, key, value, mask, numerics)
    else:
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=numerics.attention_scale,
            enable_gqa=groups > 1,
        )
    return torch.unflatten(out.transpose(1, 2), 2, (-1, groups))


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, numerics: Numerics) -> Tensor:
    """The same with capped scores, which PyTorch's attention has no place for: the whole square is in memory."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if numerics.attention_scale is None else numerics.attention_scale
    scores = cap(query @ key.transpose(-1, -2) * scale, numerics.attention_cap)
    seen = scores.new_ones(scores.shape[-2:]).tril().bool() if mask is None else mask
    shares = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1, dtype=at_least_fp32(scores.dtype))
    return shares.to(value.dtype) @ value
