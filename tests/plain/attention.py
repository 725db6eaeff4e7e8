"""Causal attention of grouped queries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plain.functions import cap
from plain.gradients import at_least_fp32
from shardwise.model.numerics import Numerics


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, numerics: Numerics, sinks: Tensor | None = None
) -> Tensor:
    """Queries [B, T, K, G, H] over keys [B, T, K, H] and values [B, T, K, U], to [B, T, K, G, U].

    `mask` is what each query sees, [T, T] or [B, 1, T, T]; None: all keys up to its own. `sinks` [K, G] are logits of a key
    without a value that every query of a head sees.
    """
    groups = q.shape[3]
    query, key, value = q.flatten(2, 3).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if numerics.attention_cap is not None or sinks is not None:
        out = _in_steps(query, key, value, mask, numerics, sinks)
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


def _in_steps(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, numerics: Numerics, sinks: Tensor | None
) -> Tensor:
    """The same with caps and sinks, which PyTorch's attention has no place for: the whole square is in memory."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if numerics.attention_scale is None else numerics.attention_scale
    scores = cap(query @ key.transpose(-1, -2) * scale, numerics.attention_cap)
    visible = scores.new_ones(scores.shape[-2:]).tril().bool() if mask is None else mask
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.flatten()[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    shares = scores.softmax(dim=-1, dtype=at_least_fp32(scores.dtype))[..., : key.shape[-2]]
    return shares.to(value.dtype) @ value
