"""The loss over parts of a vocabulary equals that over the whole, whatever values pad the parts."""

from __future__ import annotations

import pytest
import torch

from shardwise.run.data.batches import IGNORE_INDEX
from shardwise.run.kernels.cross_entropy import VocabParallelCrossEntropy, cross_entropy

SEQS, POSITIONS, SCALE = 2, 5, 0.25
PADDING = 1e3  # larger than any logit


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize(("words", "parts"), [(24, 4), (23, 2), (23, 4), (9, 4), (3, 4)])
def test_loss_and_gradient_of_vocabulary_parts_equal_the_whole(words: int, parts: int, cap: float | None) -> None:
    """Of nine words over four ranks the last has none. Without a cap logits are so small that zeros would outweigh them."""
    generator, width = torch.Generator().manual_seed(1), -(-words // parts)
    logits = torch.randn(SEQS, POSITIONS, words, generator=generator, dtype=torch.float64) - (0.0 if cap else 1e3)
    targets = torch.randint(words, (SEQS, POSITIONS), generator=generator)
    targets[0, 1] = IGNORE_INDEX
    shards = torch.nn.functional.pad(logits, (0, parts * width - words), value=PADDING).split(width, dim=-1)
    shards = tuple(shard.clone() for shard in shards)
    rank_losses = [
        VocabParallelCrossEntropy(place * width, sorted((0, words - place * width, width))[1], cap)
        for place in range(parts)
    ]
    largest = torch.stack([rank_loss.largest(part) for rank_loss, part in zip(rank_losses, shards, strict=True)]).amax(
        dim=0
    )
    total = torch.stack(
        [rank_loss.local_sum_exp(part, largest) for rank_loss, part in zip(rank_losses, shards, strict=True)]
    ).sum(dim=0)
    target = torch.stack(
        [rank_loss.target_logit(part, targets) for rank_loss, part in zip(rank_losses, shards, strict=True)]
    ).sum(dim=0)
    losses = [rank_loss.loss(total, largest, target, targets, SCALE) for rank_loss in rank_losses]
    gradient = torch.cat(
        [
            rank_loss.gradient(part, largest, total, targets, SCALE)
            for rank_loss, part in zip(rank_losses, shards, strict=True)
        ],
        -1,
    )
    expected = cross_entropy(logits, targets, SCALE, cap, replace=True)  # logits are their gradient from here on
    torch.testing.assert_close(torch.stack(losses), expected.expand(parts), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradient[..., :words], logits, rtol=1e-10, atol=1e-14)
    assert not gradient[..., words:].any()
