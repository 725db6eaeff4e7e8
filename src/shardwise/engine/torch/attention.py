"""Causal attention of grouped queries, forward and backward. Letters: B, T, K, G, H and U as in `model/decoder.py`, S keys.

The kernels are PyTorch's own, called by name: a forward and a backward one for each kind of device, so that what lies between
the two passes is what the derivation says: queries, keys, values, the output and a log-sum-exp for each query. Where a query sees
less than all keys up to its own, queries go in blocks, each over the keys that any of them sees: no mask is as large as T x T.
Scores with a cap, and sinks, are in no kernel: for these the scores of a block are made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.engine.torch.functions import at_least_fp32
from shardwise.engine.torch.fused_attention import PADDED, Gradients, fused, fused_backward, grouped, repeated
from shardwise.model.numerics import Numerics

BLOCK = 512  # queries that go together at least, where they go in blocks


class Block(NamedTuple):
    """Queries from `start` to `stop`, and the keys from `first` to `stop` that they see."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True, slots=True)
class Sight:
    """What queries see of the keys up to their own: those less than `window` away (None: all), of the same document by
    `documents` [B, T] (None: all)."""

    window: int | None = None
    documents: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.documents is None

    def blocks(self, length: int) -> Iterator[Block]:
        """The queries of a sequence in blocks."""
        size = -(-max(BLOCK, self.window or 0) // PADDED) * PADDED
        for start in range(0, length, size):
            first = 0 if self.window is None else max(start - self.window + 1, 0)
            yield Block(start, min(start + size, length), first)

    def mask(self, block: Block, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What is added to a block's scores, [queries, keys] or [B, 1, queries, keys]: minus infinity for what is not seen."""
        queries = torch.arange(block.start, block.stop, device=device)[:, None]
        distance = queries - torch.arange(block.first, block.stop, device=device)
        seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        if self.documents is not None:
            own, other = self.documents[:, block.start : block.stop], self.documents[:, block.first : block.stop]
            seen = (seen & (own[:, :, None] == other[:, None, :]))[:, None]
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))


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
        self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Output [B, T, K, G, U] and log-sum-exp [B, K·G, T] of q [B, T, K, G, H], k [B, S, K, H], v [B, S, K, U]."""
        query, key, value = _heads(q), k.transpose(1, 2), _widened(v, k).transpose(1, 2)
        in_steps = self.cap is not None or sinks is not None
        if sight.is_plain and not in_steps:
            out, lse = fused(query, key, value, None, self.scale)
            return _as_queries(out, q, v), lse
        out = torch.empty_like(q).flatten(2, 3).transpose(1, 2)
        lses = []
        for one in sight.blocks(q.shape[1]):
            own = query[:, :, one.start : one.stop]
            keys, values = key[:, :, one.first : one.stop], value[:, :, one.first : one.stop]
            mask = sight.mask(one, q.dtype, q.device)
            found = (
                self._in_steps(own, keys, values, mask, sinks)
                if in_steps
                else fused(own, keys, values, mask, self.scale)
            )
            out[:, :, one.start : one.stop] = found[0]
            lses.append(found[1])
        return _as_queries(out, q, v), torch.cat(lses, dim=-1)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, sight: Sight, out: Tensor, lse: Tensor, dy: Tensor, *sinks: Tensor
    ) -> Gradients:
        """Gradients of q, k and v."""
        query, key, value = _heads(q), k.transpose(1, 2), _widened(v, k).transpose(1, 2)
        made, given = _heads(_widened(out, k)), _heads(_widened(dy, k))
        in_steps = self.cap is not None or bool(sinks)
        if sight.is_plain and not in_steps:
            dq, dk, dv = fused_backward(given, query, key, value, made, lse, None, self.scale)
        else:
            dq, dk, dv = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
            for one in sight.blocks(q.shape[1]):
                rows, seen = slice(one.start, one.stop), slice(one.first, one.stop)
                parts = given[:, :, rows], query[:, :, rows], key[:, :, seen], value[:, :, seen], made[:, :, rows]
                mask = sight.mask(one, q.dtype, q.device)
                back = self._steps_back if in_steps else fused_backward
                own_lse = lse[:, :, one.start : one.stop + (-one.stop) % PADDED]  # no longer than there is any
                dq[:, :, rows], own_dk, own_dv = back(*parts, own_lse.contiguous(), mask, self.scale)
                dk[:, :, seen] += own_dk
                dv[:, :, seen] += own_dv
        return _as_queries(dq, q, q), dk.transpose(1, 2), dv[..., : v.shape[-1]].transpose(1, 2)

    def _scores(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        """[B, K·G, T, S], with cap and mask, in float32 at least."""
        scores = query @ repeated(query, key).transpose(-1, -2) * self.scale
        scores = scores.to(at_least_fp32(scores.dtype))
        if self.cap is not None:
            scores = self.cap * torch.tanh(scores / self.cap)
        return scores + mask

    def _in_steps(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a block."""
        scores = self._scores(query, key, mask)
        lse = torch.logsumexp(scores, dim=-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype).flatten()[:, None])
        shares = scores.sub_(lse[..., None]).exp_()
        return shares.to(value.dtype) @ repeated(query, value), lse

    def _steps_back(
        self,
        dy: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: Tensor,
        scale: float,
    ) -> Gradients:
        """A block's scores again, and with them its gradients (Dao et al. 2022, algorithm 4)."""
        groups = query.shape[1] // key.shape[1]
        scores = self._scores(query, key, mask)
        shares = (scores - lse[..., None]).exp_()
        row = (dy.to(lse.dtype) * out).sum(dim=-1, keepdim=True)
        dscores = (dy @ repeated(query, value).transpose(-1, -2)).to(lse.dtype).sub_(row).mul_(shares)
        if self.cap is not None:
            dscores.mul_(1.0 - torch.where(shares > 0, scores / self.cap, 0.0).square_())
        dscores = dscores.mul_(scale).to(query.dtype)
        dk, dv = dscores.transpose(-1, -2) @ query, shares.to(dy.dtype).transpose(-1, -2) @ dy
        return dscores @ repeated(query, key), grouped(dk, groups), grouped(dv, groups)


def sink_gradient(dy: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Of sinks [K, G]: their share of each query's weights times the row sum of dy · out, which the softmax's Jacobian leaves."""
    shares = torch.exp(sinks.to(lse.dtype).flatten()[:, None] - lse)  # [B, K·G, T]
    rows = (dy * out).sum(dim=-1, dtype=lse.dtype).flatten(2).transpose(1, 2)
    return -(shares * rows).sum(dim=(0, 2)).view(sinks.shape).to(sinks.dtype)


def _heads(x: Tensor) -> Tensor:
    """[B, T, K, G, H] as [B, K·G, T, H]."""
    return x.flatten(2, 3).transpose(1, 2)


def _as_queries(x: Tensor, q: Tensor, v: Tensor) -> Tensor:
    """[B, K·G, T, H] as [B, T, K, G, U], as wide as a value."""
    found = torch.unflatten(x.transpose(1, 2), 2, q.shape[2:4])
    return found if found.shape[-1] == v.shape[-1] else found[..., : v.shape[-1]].contiguous()


def _widened(x: Tensor, k: Tensor) -> Tensor:
    """x with zeros up to the width of a key: kernels take heads of one width."""
    return x if x.shape[-1] == k.shape[-1] else F.pad(x, (0, k.shape[-1] - x.shape[-1]))
