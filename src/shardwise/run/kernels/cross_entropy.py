"""Cross-entropy over the vocabulary, in place over the logits; on one rank, or vocabulary-parallel.

Letters: N rows of tokens, B sequences, T positions, V words. Where ranks have a part of the vocabulary each,
collectives reduce three statistics of each token between the steps: the largest logit, the sum of exponentials and the
target's logit. Logits stay until the backward pass overwrites them with their gradient. Logits of padding after the
last word are -inf from the first step on, and so their gradient is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.kernels.device_dispatch import at_least_fp32, has_triton

# The loss is computed for some rows at a time: in at most MAX_PARTS parts, so that a GPU launches few kernels and the float32
# copies take 4/128 byte for each logit, and of at least MIN_LOGITS logits, whose 128 KiB in float32 stay in a core's L2 cache.
MAX_PARTS, MIN_LOGITS = 128, 2**15


def cross_entropy(
    logits: Tensor, targets: Tensor, scale: float | Tensor, cap: float | None, *, replace: bool
) -> Tensor:
    """Sum the losses of targets [..., N] over logits [..., N, V], times `scale`.

    Targets of `IGNORE_INDEX` do not count; `cap` is a soft cap on logits. With `replace`, the gradient of the logits
    overwrites them.
    """
    if has_triton(logits):
        from shardwise.run.triton_kernels import cross_entropy as fused

        return fused.cross_entropy(logits, targets, scale, cap, replace=replace)
    rows, flat_targets = logits.flatten(0, -2), targets.flatten()
    count = rows_at_once(len(rows), rows.shape[-1])
    loss = torch.zeros((), dtype=at_least_fp32(logits.dtype), device=logits.device)
    for part, part_targets in zip(torch.split(rows, count), torch.split(flat_targets, count), strict=True):
        loss += _rows_loss(part, part_targets, cap, scale, replace=replace)
    return loss


def rows_at_once(num_rows: int, num_words: int) -> int:
    """Return how many rows of logits are processed at a time."""
    return max(-(-num_rows // MAX_PARTS), MIN_LOGITS // num_words, 1)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits in float32 or wider, with their soft cap applied."""
    values = logits.to(at_least_fp32(logits.dtype))
    return values if cap is None else cap * torch.tanh(values / cap)


def _rows_loss(logits: Tensor, targets: Tensor, cap: float | None, scale: float | Tensor, *, replace: bool) -> Tensor:
    """Return the scaled loss of some rows; with `replace` their logits become their gradient."""
    counted = (targets != IGNORE_INDEX)[:, None]
    columns, sum_dtype = torch.where(counted, targets[:, None], 0), at_least_fp32(logits.dtype)
    values = logits if cap is None else torch.tanh(logits.to(sum_dtype) / cap)
    logs = torch.log_softmax(values if cap is None else values * cap, dim=-1, dtype=sum_dtype)
    loss = -torch.where(counted, logs.gather(-1, columns), 0.0).sum()
    if replace:
        shares = logs.exp_().scatter_add_(-1, columns, logs.new_full(columns.shape, -1.0)).mul_(counted)
        # Scaled here, in float32: a factor in the dtype of the logits would be rounded.
        logits.copy_((shares if cap is None else shares.mul_(1.0 - values.square())).mul_(scale))
    return loss * scale


@dataclass(frozen=True, slots=True)
class VocabParallelCrossEntropy:
    """Loss on a rank that has `num_words` words of the vocabulary from `first` on; further columns of its logits are
    padding. `cap` is a soft cap on logits."""

    first: int
    num_words: int
    cap: float | None

    def largest(self, logits: Tensor) -> Tensor:
        """Return each token's largest capped logit [B, T] in float32 or wider; padding becomes -inf."""
        if has_triton(logits):
            from shardwise.run.triton_kernels import cross_entropy as fused

            return cap_logits(fused.row_maximum(logits, self.num_words), self.cap)
        if self.num_words < logits.shape[-1]:
            logits[..., self.num_words :] = -math.inf
        return cap_logits(logits.amax(dim=-1), self.cap)

    def local_sum_exp(self, logits: Tensor, largest: Tensor) -> Tensor:
        """Return each token's sum of exponentials over this rank's words [B, T]."""
        if has_triton(logits):
            from shardwise.run.triton_kernels import cross_entropy as fused

            return fused.row_sum_exp(logits, largest, self.num_words, self.cap)
        sums = torch.empty_like(largest)
        for part, top, out in _iterate_rows(logits, largest[..., None], sums[..., None]):
            out.copy_((cap_logits(part, self.cap) - top).exp_()[..., : self.num_words].sum(dim=-1, keepdim=True))
        return sums

    def target_logit(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return each token's target logit [B, T]; zero where another rank has the word, or the target is ignored."""
        columns, is_local = self._local_columns(targets)
        return torch.where(is_local, cap_logits(logits.gather(-1, columns[..., None])[..., 0], self.cap), 0.0)

    def loss(self, total: Tensor, largest: Tensor, target: Tensor, targets: Tensor, scale: float | Tensor) -> Tensor:
        """Return the sum of losses over the targets that are not ignored, times `scale`."""
        losses = (total.log() + largest - target).mul_(targets != IGNORE_INDEX)
        loss: Tensor = losses.sum() * scale
        return loss

    def gradient(
        self, logits: Tensor, largest: Tensor, total: Tensor, targets: Tensor, scale: float | Tensor
    ) -> Tensor:
        """Overwrite the logits with their gradient."""
        lse = largest + total.log()
        if has_triton(logits):
            from shardwise.run.triton_kernels import cross_entropy as fused

            local_words = range(self.first, self.first + self.num_words)
            return fused.vocab_parallel_gradient(logits, targets, lse, scale, local_words, self.cap)
        logs, counted = lse[..., None], (targets != IGNORE_INDEX)[..., None]
        columns, is_local = (tensor[..., None] for tensor in self._local_columns(targets))
        for part, log, counts, column, hits in _iterate_rows(logits, logs, counted, columns, is_local):
            values = part if self.cap is None else torch.tanh(part.to(log.dtype) / self.cap)
            shares = ((values if self.cap is None else values * self.cap) - log).exp_()
            shares.scatter_add_(-1, column, -hits.to(shares.dtype)).mul_(counts)
            part.copy_((shares if self.cap is None else shares.mul_(1.0 - values.square())).mul_(scale))
        return logits

    def _local_columns(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each target, and which targets are among this rank's words."""
        local_index = targets - self.first
        is_local = (local_index >= 0) & (local_index < self.num_words) & (targets != IGNORE_INDEX)
        return torch.where(is_local, local_index, 0), is_local


def _iterate_rows(logits: Tensor, *statistics: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield some rows of logits [.., V] and of statistics [.., n] at a time, to limit what is in float32."""
    flat = [tensor.flatten(0, -2) for tensor in (logits, *statistics)]
    count = rows_at_once(len(flat[0]), logits.shape[-1])
    yield from zip(*(torch.split(tensor, count) for tensor in flat), strict=True)
