"""Cross-entropy where each rank has a part of the vocabulary. Letters: B sequences, T positions, V words of this rank's part.

Between its steps the largest logit, the sum of the exponentials and the target's logit of each token are made whole over the
ranks. Logits stay until the backward pass writes their gradient over them. Those of padding behind the last word are -inf from
the first step on, and so their gradient is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.data.sequences import IGNORED
from shardwise.engine.torch.loss import capped, num_rows


@dataclass(frozen=True, slots=True)
class SplitVocabulary:
    """A rank's `words` from `first` on; what further logits it has is padding. `cap` bends logits."""

    first: int
    words: int
    cap: float | None

    def largest(self, logits: Tensor) -> Tensor:
        """Of each token [B, T], in float32 at least: a cap keeps the order. Padding is left out from here on."""
        if self.words < logits.shape[-1]:
            logits[..., self.words :] = -math.inf
        return capped(logits.amax(dim=-1), self.cap)

    def sum_exp(self, logits: Tensor, largest: Tensor) -> Tensor:
        """Of each token [B, T]."""
        found = torch.empty_like(largest)
        for part, top, out in _rows(logits, largest[..., None], found[..., None]):
            out.copy_((capped(part, self.cap) - top).exp_()[..., : self.words].sum(dim=-1, keepdim=True))
        return found

    def target_logit(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of each token [B, T]; zero where another rank has the word, or the target is ignored."""
        places, has = self._own(targets)
        return torch.where(has, capped(logits.gather(-1, places[..., None])[..., 0], self.cap), 0.0)

    def loss(self, total: Tensor, largest: Tensor, target: Tensor, targets: Tensor, scale: float | Tensor) -> Tensor:
        """Added up over the targets that are not ignored, times `scale`."""
        losses = (total.log() + largest - target).mul_(targets != IGNORED)
        found: Tensor = losses.sum() * scale
        return found

    def gradient(
        self, logits: Tensor, largest: Tensor, total: Tensor, targets: Tensor, scale: float | Tensor
    ) -> Tensor:
        """That of the logits, over them."""
        logs, counted = (largest + total.log())[..., None], (targets != IGNORED)[..., None]
        places, has = (one[..., None] for one in self._own(targets))
        for part, log, counts, place, hit in _rows(logits, logs, counted, places, has):
            values = part if self.cap is None else torch.tanh(part.to(log.dtype) / self.cap)
            shares = ((values if self.cap is None else values * self.cap) - log).exp_()
            shares.scatter_add_(-1, place, -hit.to(shares.dtype)).mul_(counts)
            part.copy_((shares if self.cap is None else shares.mul_(1.0 - values.square())).mul_(scale))
        return logits

    def _own(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of the targets among this rank's words, and which are among them."""
        found = targets - self.first
        has = (found >= 0) & (found < self.words) & (targets != IGNORED)
        return torch.where(has, found, 0), has


def _rows(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of logits [.., V] at a time, and of others [.., n]: so much is in float32."""
    flat = [one.flatten(0, -2) for one in (logits, *others)]
    count = num_rows(len(flat[0]), logits.shape[-1])
    yield from zip(*(torch.split(one, count) for one in flat), strict=True)
