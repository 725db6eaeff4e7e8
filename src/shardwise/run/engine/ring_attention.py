"""Attention in a ring: keys and values go around while each rank attends to the block that it has, and so do their gradients.

A rank merges attention over one block of keys after the other. On the way back a block's gradients travel with it, and end where
the block rests (Liu et al. 2023, Ring Attention). Letters: n ranks, B sequences, T queries and keys of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.engine.rank_coordinates import CollectiveHandle, CollectiveOps
from shardwise.run.kernels.attention import (
    Attention,
    QkvGradients,
    lse_by_head,
    lse_by_query,
    merge_attention,
    pad_head_dim,
    to_head_layout,
    to_query_layout,
)
from shardwise.run.kernels.attention_mask import AttentionMask
from shardwise.sharding.spec import Axes


class RingTransfer:
    """Tensors of a block that go to the next rank of a ring, and those that come in their place."""

    def __init__(self, exchange: CollectiveOps, axes: Axes, blocks: Sequence[Tensor]) -> None:
        sent = [block.contiguous() for block in blocks]
        self.arriving = [torch.empty_like(block) for block in sent]
        self.sent = sent  # until they have been sent
        self.pending: CollectiveHandle = exchange.shift(self.arriving, sent, axes)

    def wait(self) -> list[Tensor]:
        """What has been received; what has been sent is freed."""
        self.pending.wait()
        found, self.arriving, self.sent = self.arriving, [], []
        return found


@dataclass(frozen=True)
class RingAttention:
    """One rank's, at `place` along the axes of the ring. `sights` are what its queries see of the block of each rank."""

    attention: Attention
    exchange: CollectiveOps
    axes: Axes
    place: int

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, sights: Sequence[AttentionMask], sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, T, K, G, U] and log-sum-exp [B, T, K, G] of q [B, T, K, G, H] over the keys of all ranks; this one has
        k [B, T, K, H] and v [B, T, K, U]."""
        query, blocks, whole = to_head_layout(q), [k, v], None
        for turn in range(len(sights)):
            going = RingTransfer(self.exchange, self.axes, blocks) if turn + 1 < len(sights) else None
            sight = sights[(self.place - turn) % len(sights)]
            keys, values = _sorted_block(sight, blocks)
            part = self.attention.attend_blocks(query, keys, values, sight)
            if whole is None:
                whole = part[0], part[1][..., : query.shape[2]].contiguous()
            else:
                merge_attention(whole, part)
            blocks = going.wait() if going else blocks
        assert whole is not None
        if sinks is not None:  # a key that all see, without a value
            logits = sinks.to(whole[1].dtype).flatten()[:, None].expand_as(whole[1])
            merge_attention(whole, (torch.zeros_like(whole[0]), logits))
        return to_query_layout(whole[0], q, v), lse_by_query(whole[1], q)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, sights: Sequence[AttentionMask], out: Tensor, lse: Tensor, dy: Tensor
    ) -> QkvGradients:
        """Gradients of q, and of this rank's own k and v."""
        lse, query, given, made = (
            lse_by_head(lse),
            to_head_layout(q),
            to_head_layout(pad_head_dim(dy, k)),
            to_head_layout(pad_head_dim(out, k)),
        )
        count, dq, blocks = len(sights), torch.zeros_like(query), [k, v]
        coming: RingTransfer | None = None  # gradients of the block at hand, as the ranks before have left them
        arrived = RingTransfer(self.exchange, self.axes, blocks).wait() if count > 1 else blocks
        for turn in range(1, count + 1):  # a block begins at the next rank and comes home on the last turn
            going = RingTransfer(self.exchange, self.axes, arrived) if turn + 1 < count else None
            sight = sights[(self.place - turn) % count]
            used = arrived if turn < count else blocks
            keys, values = _sorted_block(sight, used)
            own, dk, dv = self.attention.attend_blocks_backward(given, query, keys, values, made, lse, sight)
            dq += own
            gradients = [sight.unsort_keys(one.transpose(1, 2), 1) for one in (dk, dv[..., : v.shape[-1]])]
            if coming is not None:
                gradients = [one.add_(other) for one, other in zip(coming.wait(), gradients, strict=True)]
            if turn < count:
                coming = RingTransfer(self.exchange, self.axes, gradients)
            arrived = going.wait() if going else arrived
        dk, dv = gradients
        return to_query_layout(dq, q, q), dk, dv


def _sorted_block(sight: AttentionMask, block: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values [B, K, S, H] of a block by their places, values as wide as keys."""
    keys, values = (sight.sort_keys(one, 1).transpose(1, 2) for one in block)
    return keys, pad_head_dim(values, keys)
