"""Cross-entropy over the whole vocabulary. Letters: N rows of tokens, V words."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.data.sequences import IGNORED
from shardwise.engine.torch.functions import at_least_fp32

# The loss is made for a part of the rows at a time: at most so many parts, so that a GPU launches few kernels and what is in
# float32 is 1/16 byte for each logit, ...
MOST_PARTS = 128
# ... and of at least so many logits: 128 KiB in float32 stay in the second-level cache of a core.
LEAST_LOGITS = 2**15


def cross_entropy(
    logits: Tensor, targets: Tensor, scale: float | Tensor, cap: float | None, *, replace: bool
) -> Tensor:
    """Added up over targets [..., N] of logits [..., N, V], times `scale`. Targets of `IGNORED` do not count; `cap` bends logits.

    With `replace` the logits' gradient is written over them, so that one value in their format is held for each.
    """
    rows, wanted = logits.flatten(0, -2), targets.flatten()
    count = num_rows(len(rows), rows.shape[-1])
    loss = torch.zeros((), dtype=at_least_fp32(logits.dtype), device=logits.device)
    for part, of_part in zip(torch.split(rows, count), torch.split(wanted, count), strict=True):
        loss += _loss_of(part, of_part, cap, scale, replace=replace)
    return loss


def num_rows(rows: int, words: int) -> int:
    """How many rows of logits go at a time."""
    return max(-(-rows // MOST_PARTS), LEAST_LOGITS // words, 1)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Logits in float32 at least, bent by their cap."""
    values = logits.to(at_least_fp32(logits.dtype))
    return values if cap is None else cap * torch.tanh(values / cap)


def _loss_of(logits: Tensor, targets: Tensor, cap: float | None, scale: float | Tensor, *, replace: bool) -> Tensor:
    """The loss of some rows, scaled; with `replace` their logits become their gradient."""
    counted = (targets != IGNORED)[:, None]
    places, fine = torch.where(counted, targets[:, None], 0), at_least_fp32(logits.dtype)
    values = logits if cap is None else torch.tanh(logits.to(fine) / cap)
    logs = torch.log_softmax(values if cap is None else values * cap, dim=-1, dtype=fine)
    loss = -torch.where(counted, logs.gather(-1, places), 0.0).sum()
    if replace:
        shares = logs.exp_().scatter_add_(-1, places, logs.new_full(places.shape, -1.0)).mul_(counted)
        # scaled here, where they are fine: a factor in the format of the logits would be rounded, once for the whole gradient
        logits.copy_((shares if cap is None else shares.mul_(1.0 - values.square())).mul_(scale))
    return loss * scale
