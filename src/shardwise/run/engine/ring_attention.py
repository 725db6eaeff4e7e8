"""Ring attention: keys and values travel around the ranks while each attends to the block that it has; so do their
gradients.

A rank merges attention over one block of keys after the other. In the backward pass a block's gradients travel with it,
and end at the rank that stores the block (Liu et al. 2023, Ring Attention). Letters: n ranks, B sequences, T queries
and keys of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.engine.rank_coordinates import CollectiveHandle, CollectiveOps
from shardwise.run.kernels.attention import (
    Attention,
    BackwardInputs,
    QkvGradients,
    lse_to_head_layout,
    lse_to_query_layout,
    merge_attention,
    pad_head_dim,
    to_head_layout,
    to_query_layout,
)
from shardwise.run.kernels.attention_mask import AttentionMask
from shardwise.sharding import Axes


class RingTransfer:
    """Transfer of a block's tensors to the next rank of a ring, and of the previous rank's to this one."""

    def __init__(self, collectives: CollectiveOps, axes: Axes, blocks: Sequence[Tensor]) -> None:
        sent = [block.contiguous() for block in blocks]
        self.arriving = [torch.empty_like(block) for block in sent]
        self.sent = sent  # until they have been sent
        self.pending: CollectiveHandle = collectives.shift(self.arriving, sent, axes)

    def wait(self) -> list[Tensor]:
        """Return the received tensors, and free those sent."""
        self.pending.wait()
        received, self.arriving, self.sent = self.arriving, [], []
        return received


@dataclass(frozen=True)
class RingAttention:
    """Attention of one rank, at `place` along the axes of the ring."""

    attention: Attention
    collectives: CollectiveOps
    axes: Axes
    place: int

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[AttentionMask], sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output [B, T, K, G, U] and log-sum-exp [B, T, K, G] of q [B, T, K, G, H] over the keys of all ranks.

        This rank has k [B, T, K, H] and v [B, T, K, U]; `masks` are from its queries to the block of each rank.
        """
        query, blocks, merged = to_head_layout(q), [k, v], None
        for turn in range(len(masks)):
            transfer = RingTransfer(self.collectives, self.axes, blocks) if turn + 1 < len(masks) else None
            mask = masks[(self.place - turn) % len(masks)]
            keys, values = _sorted_block(mask, blocks)
            part = self.attention.attend_blocks(query, keys, values, mask)
            if merged is None:
                merged = part[0], part[1][..., : query.shape[2]].contiguous()
            else:
                merge_attention(merged, part)
            blocks = transfer.wait() if transfer else blocks
        assert merged is not None
        if sinks is not None:  # a key that all see, without a value
            logits = sinks.to(merged[1].dtype).flatten()[:, None].expand_as(merged[1])
            merge_attention(merged, (torch.zeros_like(merged[0]), logits))
        return to_query_layout(merged[0], q, v), lse_to_query_layout(merged[1], q)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Sequence[AttentionMask], out: Tensor, lse: Tensor, dy: Tensor
    ) -> QkvGradients:
        """Return the gradients of q, and of this rank's k and v."""
        lse = lse_to_head_layout(lse)
        query = to_head_layout(q)
        dy_heads = to_head_layout(pad_head_dim(dy, k))
        out_heads = to_head_layout(pad_head_dim(out, k))
        count, dq, blocks = len(masks), torch.zeros_like(query), [k, v]
        incoming: RingTransfer | None = None  # gradients of the block at hand, as the ranks before have left them
        arrived_block = RingTransfer(self.collectives, self.axes, blocks).wait() if count > 1 else blocks
        for turn in range(1, count + 1):  # a block begins at the next rank and comes home on the last turn
            transfer = RingTransfer(self.collectives, self.axes, arrived_block) if turn + 1 < count else None
            mask = masks[(self.place - turn) % count]
            block = arrived_block if turn < count else blocks
            inputs = BackwardInputs(dy_heads, query, *_sorted_block(mask, block), out_heads, lse)
            dq_block, dk, dv = self.attention.attend_blocks_backward(inputs, mask)
            dq += dq_block
            gradients = [mask.unsort_keys(gradient.transpose(1, 2), 1) for gradient in (dk, dv[..., : v.shape[-1]])]
            if incoming is not None:
                gradients = [total.add_(gradient) for total, gradient in zip(incoming.wait(), gradients, strict=True)]
            if turn < count:
                incoming = RingTransfer(self.collectives, self.axes, gradients)
            arrived_block = transfer.wait() if transfer else arrived_block
        dk, dv = gradients
        return to_query_layout(dq, q, q), dk, dv


def _sorted_block(mask: AttentionMask, block: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a block's keys and values [B, K, S, H] sorted by position, values padded to the width of keys."""
    keys, values = (mask.sort_keys(tensor, 1).transpose(1, 2) for tensor in block)
    return keys, pad_head_dim(values, keys)
