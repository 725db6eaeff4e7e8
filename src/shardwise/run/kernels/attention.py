"""Causal grouped-query attention, forward and backward. Letters: B, T, K, G, H and U as in `model/decoder.py`, S keys.

Fused kernels (`attention_backends`) are called by name, one forward and one backward. What is kept between the two passes
is therefore what the derivation says: queries, keys, values, the output and a log-sum-exp for each query. Where a query
sees fewer than all keys up to its own, queries run in blocks, each over the keys that any of them sees; no mask is as
large as T x T. No fused kernel has capped scores or sinks; for these the scores of a block are computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model import Numerics
from shardwise.run.kernels.attention_backends import (
    BackwardInputs,
    QkvGradients,
    fused_backward,
    fused_forward,
    repeat_kv_heads,
    sum_query_heads,
)
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.positions_and_masks import AttentionMask


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with a model's scale and score cap. `sinks` [K, G] are logits of a key without a value."""

    scale: float
    cap: float | None

    @classmethod
    def of(cls, numerics: Numerics, width: int) -> Attention:
        """Build it from a model's numerics, for heads of a width."""
        return cls(
            width**-0.5 if numerics.attention_scale is None else numerics.attention_scale, numerics.attention_cap
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: AttentionMask, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output [B, T, K, G, U] and log-sum-exp [B, T, K, G] of q [B, T, K, G, H], k [B, S, K, H], v [B, S, K,
        U]."""
        keys, values = (attention_mask.sort_keys(tensor, 1).transpose(1, 2) for tensor in (k, pad_head_dim(v, k)))
        out, lse = self.attend_blocks(to_head_layout(q), keys, values, attention_mask, sinks)
        return to_query_layout(out, q, v), lse_to_query_layout(lse, q)

    def attend_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: AttentionMask, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output [B, K·G, T, H] and log-sum-exp [B, K·G, T] over sorted keys and values [B, K, S, H].

        A query that sees no key has zeros and minus infinity. On GPUs a kernel may pad T of its log-sum-exp; the
        padding is cut off where blocks are merged.
        """
        is_unfused = self.cap is not None or sinks is not None
        if attention_mask.is_plain and attention_mask.is_whole and not is_unfused:
            return fused_forward(query, key, value, None, self.scale)
        out, lse, written_rows = torch.zeros_like(query), None, set[int]()
        for block in attention_mask.blocks(query.shape[2], key.shape[2], masked=is_unfused):
            queries, keys_and_values = query[:, :, block.rows], (key[:, :, block.keys], value[:, :, block.keys])
            mask = attention_mask.mask(block, query.dtype, query.device) if block.masked else None
            if is_unfused:
                assert mask is not None
                part = self._attend_unfused(queries, *keys_and_values, mask, sinks)
            else:
                part = fused_forward(queries, *keys_and_values, mask, self.scale, causal=block.causal)
            # A query may see none of a rank's keys: its softmax is 0 / 0, so its output becomes 0 and its log-sum-exp minus
            # infinity, which is weight 0 in a merge. A GPU's log-sum-exps are padded (LSE_PADDING): cut them to the rows.
            if mask is not None and attention_mask.keys is not None:
                sees_nothing = (
                    mask.amax(dim=-1).isneginf()[..., None] if mask.dim() > 2 else mask.amax(dim=-1).isneginf()[:, None]
                )
                part_lse = part[1][..., : queries.shape[2]]
                part = part[0].masked_fill(sees_nothing, 0.0), part_lse.masked_fill(sees_nothing[..., 0], float("-inf"))
            if lse is None:
                lse = part[1].new_full((*query.shape[:2], query.shape[2]), float("-inf"))
            target = out[:, :, block.rows], lse[:, :, block.rows]
            if block.rows.start in written_rows:  # these rows have attended to other keys: merge the two softmaxes
                merge_attention(target, part)
            else:
                written_rows.add(block.rows.start)
                target[0].copy_(part[0])
                target[1].copy_(part[1][..., : target[1].shape[-1]])
        return out, query.new_full(
            query.shape[:3], float("-inf"), dtype=at_least_fp32(query.dtype)
        ) if lse is None else lse

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: AttentionMask,
        out: Tensor,
        lse: Tensor,
        dy: Tensor,
        *sinks: Tensor,
    ) -> QkvGradients:
        """Return the gradients of q, k and v."""
        keys, values = (attention_mask.sort_keys(tensor, 1).transpose(1, 2) for tensor in (k, pad_head_dim(v, k)))
        dy, out = to_head_layout(pad_head_dim(dy, k)), to_head_layout(pad_head_dim(out, k))
        inputs = BackwardInputs(dy, to_head_layout(q), keys, values, out, lse_to_head_layout(lse))
        dq, dk, dv = self.attend_blocks_backward(inputs, attention_mask, has_sinks=bool(sinks))
        dk, dv = (attention_mask.unsort_keys(gradient.transpose(1, 2), 1) for gradient in (dk, dv[..., : v.shape[-1]]))
        return to_query_layout(dq, q, q), dk, dv

    def attend_blocks_backward(
        self, inputs: BackwardInputs, attention_mask: AttentionMask, *, has_sinks: bool = False
    ) -> QkvGradients:
        """Return gradients over sorted keys and values."""
        is_unfused = self.cap is not None or has_sinks
        if attention_mask.is_plain and attention_mask.is_whole and not is_unfused:
            return fused_backward(inputs, None, self.scale)
        query, key = inputs.query, inputs.key
        dq, dk, dv = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(inputs.value)
        for block in attention_mask.blocks(query.shape[2], key.shape[2], masked=is_unfused):
            block_inputs = inputs.block(block.rows, block.keys)
            mask = attention_mask.mask(block, query.dtype, query.device) if block.masked else None
            if is_unfused:
                assert mask is not None
                gradients = self._attend_unfused_backward(block_inputs, mask)
            else:
                gradients = fused_backward(block_inputs, mask, self.scale, causal=block.causal)
            block_rows = (block.rows, block.keys, block.keys)
            for total, gradient, rows in zip((dq, dk, dv), gradients, block_rows, strict=True):
                total[:, :, rows] += gradient
        return dq, dk, dv

    def _scores(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """Return scores [B, K·G, T, S] with cap and mask, in float32 or wider."""
        scores = query @ repeat_kv_heads(query, key).transpose(-1, -2) * self.scale
        scores = scores.to(at_least_fp32(scores.dtype))
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        return scores + mask

    def _attend_unfused(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of a block."""
        scores = self._scores(query, key, mask)
        lse = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype).flatten()[:, None])
        shares = scores.sub_(lse[..., None]).exp_()
        return shares.to(value.dtype) @ repeat_kv_heads(query, value), lse

    def _attend_unfused_backward(self, inputs: BackwardInputs, mask: Tensor) -> QkvGradients:
        """Compute a block's scores again, and from them its gradients (Dao et al. 2022, algorithm 4)."""
        dy, query, key, value, out, lse = inputs
        groups = query.shape[1] // key.shape[1]
        scores = self._scores(query, key, mask)
        shares = (scores - lse[..., None]).exp_()
        dy_out = (dy.to(lse.dtype) * out).sum(dim=-1, keepdim=True)
        dscores = (dy @ repeat_kv_heads(query, value).transpose(-1, -2)).to(lse.dtype).sub_(dy_out).mul_(shares)
        if self.cap is not None:
            dscores.mul_(1.0 - torch.where(shares > 0, scores / self.cap, 0.0).square_())
        dscores = dscores.mul_(self.scale).to(query.dtype)
        dk, dv = dscores.transpose(-1, -2) @ query, shares.to(dy.dtype).transpose(-1, -2) @ dy
        return dscores @ repeat_kv_heads(query, key), sum_query_heads(dk, groups), sum_query_heads(dv, groups)


def merge_attention(total: tuple[Tensor, Tensor], part: tuple[Tensor, Tensor]) -> None:
    """Merge attention over other keys into `total`, in place: outputs [.., T, H] and log-sum-exps [.., T] (online
    softmax, Milakov et al. 2018)."""
    (out, lse), (part_out, part_lse) = total, part
    part_lse = part_lse[..., : lse.shape[-1]]
    merged_lse = torch.logaddexp(lse, part_lse)
    shares = [torch.exp(partial_lse - merged_lse).nan_to_num_(nan=0.0)[..., None] for partial_lse in (lse, part_lse)]
    out.copy_(out * shares[0] + part_out * shares[1])
    lse.copy_(merged_lse)


def sink_gradient(dy: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks [K, G]: minus the sum of their attention weights times the row sum of dy · out."""
    shares = torch.exp(sinks.to(lse.dtype) - lse)  # [B, T, K, G]
    return -(shares * (dy * out).sum(dim=-1, dtype=lse.dtype)).sum(dim=(0, 1)).to(sinks.dtype)


def lse_to_query_layout(lse: Tensor, q: Tensor) -> Tensor:
    """Return log-sum-exps [B, K·G, T] as a view [B, T, K, G], as the program has it, without a kernel's padding of T."""
    return torch.unflatten(lse[..., : q.shape[1]].transpose(1, 2), 2, q.shape[2:4])


def lse_to_head_layout(lse: Tensor) -> Tensor:
    """Return log-sum-exps [B, T, K, G] as [B, K·G, T], as kernels take them."""
    return lse.flatten(2, 3).transpose(1, 2)


def to_head_layout(x: Tensor) -> Tensor:
    """Return [B, T, K, G, H] as [B, K·G, T, H]."""
    return x.flatten(2, 3).transpose(1, 2)


def to_query_layout(x: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """Return [B, K·G, T, H] as [B, T, K, G, U], cut to the width of a value."""
    output = torch.unflatten(x.transpose(1, 2), 2, q.shape[2:4])
    return output if output.shape[-1] == v.shape[-1] else output[..., : v.shape[-1]].contiguous()


def pad_head_dim(x: Tensor, k: Tensor) -> Tensor:
    """Pad x with zeros to the width of a key: fused kernels take heads of one width."""
    return x if x.shape[-1] == k.shape[-1] else F.pad(x, (0, k.shape[-1] - x.shape[-1]))
