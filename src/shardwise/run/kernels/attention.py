"""Causal attention of grouped queries, forward and backward. Letters: B, T, K, G, H and U as in `model/decoder.py`, S
keys.

The kernels are PyTorch's own, called by name: a forward and a backward one for each kind of device, so that what lies
between the two passes is what the derivation says: queries, keys, values, the output and a log-sum-exp for each query.
Where a query sees less than all keys up to its own, queries go in blocks, each over the keys that any of them sees: no
mask is as large as T x T. Scores with a cap, and sinks, are in no kernel: for these the scores of a block are made
here.

Of the kernels by name queries are [B, K·G, T, H], keys and values [B, K, S, H]. `mask` is what is added to the scores,
[T, S] or [B, 1, T, S]; None: a query sees the keys up to its own, or all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.numerics import Numerics
from shardwise.run.kernels import device_dispatch
from shardwise.run.kernels.attention_mask import AttentionMask
from shardwise.run.kernels.device_dispatch import at_least_fp32


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with a model's scale and cap. `sinks` [K, G] are logits of a key that every query of a head sees, without a
    value."""

    scale: float
    cap: float | None

    @classmethod
    def of(cls, numerics: Numerics, width: int) -> Attention:
        return cls(
            width**-0.5 if numerics.attention_scale is None else numerics.attention_scale, numerics.attention_cap
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sight: AttentionMask, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, T, K, G, U] and log-sum-exp [B, T, K, G] of q [B, T, K, G, H], k [B, S, K, H], v [B, S, K, U]."""
        keys, values = (sight.sort_keys(one, 1).transpose(1, 2) for one in (k, pad_head_dim(v, k)))
        out, lse = self.attend_blocks(to_head_layout(q), keys, values, sight, sinks)
        return to_query_layout(out, q, v), lse_by_query(lse, q)

    def attend_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, sight: AttentionMask, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, K·G, T, H] and log-sum-exp [B, K·G, T] over keys and values [B, K, S, H] that are in order; nothing and
        minus infinity for a query that sees no key."""
        in_steps = self.cap is not None or sinks is not None
        if sight.is_plain and sight.is_whole and not in_steps:
            return fused_forward(query, key, value, None, self.scale)
        out, lse, begun = torch.zeros_like(query), None, set[int]()
        for one in sight.blocks(query.shape[2], key.shape[2], masked=in_steps):
            own, seen = query[:, :, one.rows], (key[:, :, one.keys], value[:, :, one.keys])
            mask = sight.mask(one, query.dtype, query.device) if one.masked else None
            if in_steps:
                assert mask is not None
                found = self._attend_unfused(own, *seen, mask, sinks)
            else:
                found = fused_forward(own, *seen, mask, self.scale, causal=one.causal)
            if mask is not None and sight.keys is not None:  # of a rank's keys a query may see none
                none = (
                    mask.amax(dim=-1).isneginf()[..., None] if mask.dim() > 2 else mask.amax(dim=-1).isneginf()[:, None]
                )
                rows = found[1][..., : own.shape[2]]
                found = found[0].masked_fill(none, 0.0), rows.masked_fill(none[..., 0], float("-inf"))
            if lse is None:
                lse = found[1].new_full((*query.shape[:2], query.shape[2]), float("-inf"))
            whole = out[:, :, one.rows], lse[:, :, one.rows]
            if one.rows.start in begun:
                merge_attention(whole, found)
            else:
                begun.add(one.rows.start)
                whole[0].copy_(found[0])
                whole[1].copy_(found[1][..., : whole[1].shape[-1]])
        return out, query.new_full(
            query.shape[:3], float("-inf"), dtype=at_least_fp32(query.dtype)
        ) if lse is None else lse

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sight: AttentionMask,
        out: Tensor,
        lse: Tensor,
        dy: Tensor,
        *sinks: Tensor,
    ) -> QkvGradients:
        """Gradients of q, k and v."""
        keys, values = (sight.sort_keys(one, 1).transpose(1, 2) for one in (k, pad_head_dim(v, k)))
        parts = (
            to_head_layout(pad_head_dim(dy, k)),
            to_head_layout(q),
            keys,
            values,
            to_head_layout(pad_head_dim(out, k)),
        )
        dq, dk, dv = self.attend_blocks_backward(*parts, lse_by_head(lse), sight, has_sinks=bool(sinks))
        dk, dv = (sight.unsort_keys(one.transpose(1, 2), 1) for one in (dk, dv[..., : v.shape[-1]]))
        return to_query_layout(dq, q, q), dk, dv

    def attend_blocks_backward(
        self, dy: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, sight: AttentionMask, *,
        has_sinks: bool = False,
    ) -> QkvGradients:  # fmt: skip
        """Gradients over keys and values that are in order; `out` and `lse` are those over all keys there are."""
        in_steps = self.cap is not None or has_sinks
        if sight.is_plain and sight.is_whole and not in_steps:
            return fused_backward(dy, query, key, value, out, lse, None, self.scale)
        dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for one in sight.blocks(query.shape[2], key.shape[2], masked=in_steps):
            rows, seen = one.rows, one.keys
            parts = (
                dy[:, :, rows],
                query[:, :, rows],
                key[:, :, seen],
                value[:, :, seen],
                out[:, :, rows],
                lse[:, :, rows],
            )
            mask = sight.mask(one, query.dtype, query.device) if one.masked else None
            if in_steps:
                assert mask is not None
                found = self._attend_unfused_backward(*parts, mask, self.scale)
            else:
                found = fused_backward(*parts, mask, self.scale, causal=one.causal)
            for whole, part, at in zip((dq, dk, dv), found, (rows, seen, seen), strict=True):
                whole[:, :, at] += part
        return dq, dk, dv

    def _scores(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """[B, K·G, T, S], with cap and mask, in float32 at least."""
        scores = query @ repeat_kv_heads(query, key).transpose(-1, -2) * self.scale
        scores = scores.to(at_least_fp32(scores.dtype))
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        return scores + mask

    def _attend_unfused(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a block."""
        scores = self._scores(query, key, mask)
        lse = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype).flatten()[:, None])
        shares = scores.sub_(lse[..., None]).exp_()
        return shares.to(value.dtype) @ repeat_kv_heads(query, value), lse

    def _attend_unfused_backward(
        self,
        dy: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor,
        scale: float,
    ) -> QkvGradients:
        """A block's scores again, and with them its gradients (Dao et al. 2022, algorithm 4)."""
        groups = query.shape[1] // key.shape[1]
        scores = self._scores(query, key, mask)
        shares = (scores - lse[..., None]).exp_()
        row = (dy.to(lse.dtype) * out).sum(dim=-1, keepdim=True)
        dscores = (dy @ repeat_kv_heads(query, value).transpose(-1, -2)).to(lse.dtype).sub_(row).mul_(shares)
        if self.cap is not None:
            dscores.mul_(1.0 - torch.where(shares > 0, scores / self.cap, 0.0).square_())
        dscores = dscores.mul_(scale).to(query.dtype)
        dk, dv = dscores.transpose(-1, -2) @ query, shares.to(dy.dtype).transpose(-1, -2) @ dy
        return dscores @ repeat_kv_heads(query, key), sum_query_heads(dk, groups), sum_query_heads(dv, groups)


def merge_attention(whole: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor]) -> None:
    """Make attention over some keys that over others too: outputs [.., T, H] and log-sum-exps [.., T], the first pair in place
    (online softmax, Milakov et al. 2018)."""
    (out, lse), (further, own) = whole, part
    own = own[..., : lse.shape[-1]]
    both = torch.logaddexp(lse, own)
    shares = [torch.exp(one - both).nan_to_num_(nan=0.0)[..., None] for one in (lse, own)]
    out.copy_(out * shares[0] + further * shares[1])
    lse.copy_(both)


def sink_gradient(dy: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Of sinks [K, G]: their share of each query's weights times the row sum of dy · out, which the softmax's Jacobian leaves."""
    shares = torch.exp(sinks.to(lse.dtype) - lse)  # [B, T, K, G]
    return -(shares * (dy * out).sum(dim=-1, dtype=lse.dtype)).sum(dim=(0, 1)).to(sinks.dtype)


def lse_by_query(lse: Tensor, q: Tensor) -> Tensor:
    """[B, K·G, T] as [B, T, K, G], as the program has it, without what a kernel pads T with: a view."""
    return torch.unflatten(lse[..., : q.shape[1]].transpose(1, 2), 2, q.shape[2:4])


def lse_by_head(lse: Tensor) -> Tensor:
    """[B, T, K, G] as [B, K·G, T], as kernels have it."""
    return lse.flatten(2, 3).transpose(1, 2)


def to_head_layout(x: Tensor) -> Tensor:
    """[B, T, K, G, H] as [B, K·G, T, H]."""
    return x.flatten(2, 3).transpose(1, 2)


def to_query_layout(x: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """[B, K·G, T, H] as [B, T, K, G, U], as wide as a value."""
    found = torch.unflatten(x.transpose(1, 2), 2, q.shape[2:4])
    return found if found.shape[-1] == v.shape[-1] else found[..., : v.shape[-1]].contiguous()


def pad_head_dim(x: Tensor, k: Tensor) -> Tensor:
    """x with zeros up to the width of a key: kernels take heads of one width."""
    return x if x.shape[-1] == k.shape[-1] else F.pad(x, (0, k.shape[-1] - x.shape[-1]))


aten = torch.ops.aten
QkvGradients = tuple[Tensor, Tensor, Tensor]
# Of PyTorch's memory-efficient attention on a GPU: its log-sum-exps are padded to a multiple of so many queries, and rows of what
# is added to scores are aligned to so many elements (attention.cu, pad_bias in attention.cpp).
LSE_PADDING, MASK_ALIGNMENT = 32, 16


def fused_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, *, causal: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Output [B, K·G, T, H] and log-sum-exp [B, K·G, T], of which a GPU pads T.

    `causal`: a query sees the keys up to its own (None: where there is no mask).
    """
    causal = mask is None if causal is None else causal
    if not device_dispatch.on_gpu(query):
        on_cpu: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return on_cpu
    if _has_flash(query, mask):
        flash: tuple[Any, ...] = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
        return flash[0], flash[1]
    key, value = repeat_kv_heads(query, key), repeat_kv_heads(query, value)
    efficient: tuple[Any, ...] = aten._scaled_dot_product_efficient_attention(
        query, key, value, _expand_mask(mask, query), True, 0.0, causal, scale=scale
    )
    return efficient[0], efficient[1]


def fused_backward(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, scale: float, *,
    causal: bool | None = None,
) -> QkvGradients:  # fmt: skip
    """Gradients of queries, keys and values."""
    causal = mask is None if causal is None else causal
    if not device_dispatch.on_gpu(query):
        on_cpu: QkvGradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, query, key, value, out, lse.contiguous(), 0.0, causal, attn_mask=mask, scale=scale
        )
        return on_cpu
    unused = torch.empty(0, dtype=torch.int64, device=query.device)  # seeds of a dropout that there is not
    if _has_flash(query, mask):
        lengths = query.shape[2], key.shape[2]
        flash: QkvGradients = aten._scaled_dot_product_flash_attention_backward(
            dy, query, key, value, out, lse.contiguous(), None, None, *lengths, 0.0, causal, unused, unused, scale=scale
        )
        return flash
    groups = query.shape[1] // key.shape[1]
    wanted = [True, True, True, False]
    heads = repeat_kv_heads(query, key), repeat_kv_heads(query, value)
    lse = F.pad(lse, (0, -lse.shape[-1] % LSE_PADDING), value=float("inf")).contiguous()
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dy, query, *heads, _expand_mask(mask, query), out, lse, unused, unused, 0.0, wanted, causal, scale=scale
    )
    return dq, sum_query_heads(dk, groups), sum_query_heads(dv, groups)


def _has_flash(query: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch's flash attention takes these on a GPU: 16 bits, causal, heads of at most 256 (sdp_utils.cpp)."""
    return mask is None and query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256


def _expand_mask(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask for every sequence and head, its rows aligned."""
    if mask is None:
        return None
    rows = F.pad(mask, (0, -mask.shape[-1] % MASK_ALIGNMENT))[..., : mask.shape[-1]]
    return rows.expand(len(query), query.shape[1], *mask.shape[-2:])


def repeat_kv_heads(query: Tensor, key: Tensor) -> Tensor:
    """Keys or values as often as there are query heads for each."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def sum_query_heads(x: Tensor, groups: int) -> Tensor:
    """[B, K·G, S, H] added up over the query heads of each key-value head."""
    return torch.unflatten(x, 1, (-1, groups)).sum(dim=2)
