"""Cross-entropy over the vocabulary, in place over the logits: on a rank that has all words, and on one that has a
part of them.

Letters: N rows of tokens, B sequences, T positions, V words. Between the steps of a vocabulary that is split over
ranks the largest logit, the sum of the exponentials and the target's logit of each token are made whole over the
ranks. Logits stay until the backward pass writes their gradient over them. Those of padding behind the last word are
-inf from the first step on, and so their gradient is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.kernels.device_dispatch import at_least_fp32

# The loss is made for a part of the rows at a time: at most so many parts, so that a GPU launches few kernels and what is in
# float32 is 1/16 byte for each logit, ...
MAX_PARTS = 128
# ... and of at least so many logits: 128 KiB in float32 stay in the second-level cache of a core.
MIN_LOGITS = 2**15


def cross_entropy(
    logits: Tensor, targets: Tensor, scale: float | Tensor, cap: float | None, *, replace: bool
) -> Tensor:
    """Added up over targets [..., N] of logits [..., N, V], times `scale`.

    Targets of `IGNORE_INDEX` do not count; `cap` bends logits.
    With `replace` the logits' gradient is written over them, so that one value in their format is held for each.
    """
    rows, wanted = logits.flatten(0, -2), targets.flatten()
    count = rows_at_once(len(rows), rows.shape[-1])
    loss = torch.zeros((), dtype=at_least_fp32(logits.dtype), device=logits.device)
    for part, of_part in zip(torch.split(rows, count), torch.split(wanted, count), strict=True):
        loss += _rows_loss(part, of_part, cap, scale, replace=replace)
    return loss


def rows_at_once(rows: int, words: int) -> int:
    """How many rows of logits go at a time."""
    return max(-(-rows // MAX_PARTS), MIN_LOGITS // words, 1)


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Logits in float32 at least, bent by their cap."""
    values = logits.to(at_least_fp32(logits.dtype))
    return values if cap is None else cap * torch.tanh(values / cap)


def _rows_loss(logits: Tensor, targets: Tensor, cap: float | None, scale: float | Tensor, *, replace: bool) -> Tensor:
    """The loss of some rows, scaled; with `replace` their logits become their gradient."""
    counted = (targets != IGNORE_INDEX)[:, None]
    places, fine = torch.where(counted, targets[:, None], 0), at_least_fp32(logits.dtype)
    values = logits if cap is None else torch.tanh(logits.to(fine) / cap)
    logs = torch.log_softmax(values if cap is None else values * cap, dim=-1, dtype=fine)
    loss = -torch.where(counted, logs.gather(-1, places), 0.0).sum()
    if replace:
        shares = logs.exp_().scatter_add_(-1, places, logs.new_full(places.shape, -1.0)).mul_(counted)
        # scaled here, where they are fine: a factor in the format of the logits would be rounded, once for the whole gradient
        logits.copy_((shares if cap is None else shares.mul_(1.0 - values.square())).mul_(scale))
    return loss * scale


@dataclass(frozen=True, slots=True)
class VocabParallelCrossEntropy:
    """A rank's `words` from `first` on; what further logits it has is padding. `cap` bends logits."""

    first: int
    words: int
    cap: float | None

    def largest(self, logits: Tensor) -> Tensor:
        """Of each token [B, T], in float32 at least: a cap keeps the order. Padding is left out from here on."""
        if self.words < logits.shape[-1]:
            logits[..., self.words :] = -math.inf
        return cap_logits(logits.amax(dim=-1), self.cap)

    def sum_exp(self, logits: Tensor, largest: Tensor) -> Tensor:
        """Of each token [B, T]."""
        found = torch.empty_like(largest)
        for part, top, out in _iterate_rows(logits, largest[..., None], found[..., None]):
            out.copy_((cap_logits(part, self.cap) - top).exp_()[..., : self.words].sum(dim=-1, keepdim=True))
        return found

    def target_logit(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of each token [B, T]; zero where another rank has the word, or the target is ignored."""
        places, has = self._own(targets)
        return torch.where(has, cap_logits(logits.gather(-1, places[..., None])[..., 0], self.cap), 0.0)

    def loss(self, total: Tensor, largest: Tensor, target: Tensor, targets: Tensor, scale: float | Tensor) -> Tensor:
        """Added up over the targets that are not ignored, times `scale`."""
        losses = (total.log() + largest - target).mul_(targets != IGNORE_INDEX)
        found: Tensor = losses.sum() * scale
        return found

    def gradient(
        self, logits: Tensor, largest: Tensor, total: Tensor, targets: Tensor, scale: float | Tensor
    ) -> Tensor:
        """That of the logits, over them."""
        logs, counted = (largest + total.log())[..., None], (targets != IGNORE_INDEX)[..., None]
        places, has = (one[..., None] for one in self._own(targets))
        for part, log, counts, place, hit in _iterate_rows(logits, logs, counted, places, has):
            values = part if self.cap is None else torch.tanh(part.to(log.dtype) / self.cap)
            shares = ((values if self.cap is None else values * self.cap) - log).exp_()
            shares.scatter_add_(-1, place, -hit.to(shares.dtype)).mul_(counts)
            part.copy_((shares if self.cap is None else shares.mul_(1.0 - values.square())).mul_(scale))
        return logits

    def _own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the targets among this rank's words, and which are among them."""
        found = targets - self.first
        has = (found >= 0) & (found < self.words) & (targets != IGNORE_INDEX)
        return torch.where(has, found, 0), has


def _iterate_rows(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of logits [.., V] at a time, and of others [.., n]: so much is in float32."""
    flat = [one.flatten(0, -2) for one in (logits, *others)]
    count = rows_at_once(len(flat[0]), logits.shape[-1])
    yield from zip(*(torch.split(one, count) for one in flat), strict=True)
