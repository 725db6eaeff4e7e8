"""Shares of scores with a window or in chunks are those of the masks that `transformers` builds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwise.model.architecture import Architecture

SEQ_LEN = 32


@pytest.mark.parametrize(
    ("kind", "size"), [("sliding", 8), ("sliding", 32), ("chunked", 4), ("chunked", 8), ("chunked", 32)]
)
@pytest.mark.parametrize("last_of", [1, 2, 4])
def test_attended_shares_equal_the_masks_of_transformers(kind: str, size: int, last_of: int) -> None:
    """A query sees half of the key at its own position, so that causal attention is half of the square; where a window cuts off
    the first keys, half of the last of these is seen as well."""
    from transformers import masking_utils

    masks = {
        "sliding": masking_utils.sliding_window_causal_mask_function(size),
        "chunked": masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int)),
    }
    batch, queries, keys = torch.tensor(0), torch.arange(SEQ_LEN)[:, None], torch.arange(SEQ_LEN)[None]
    mask = masks[kind](batch, batch, queries, keys).numpy().astype(float)
    halves = np.where((np.arange(SEQ_LEN) < size) | (kind == "chunked"), 0.5, 0.0)
    visible = (mask.sum(axis=1) - halves)[SEQ_LEN - SEQ_LEN // last_of :]
    model = Architecture(
        name="masked", num_layers=1, d_model=8, d_ff=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=8,
        sliding_window=size, window_kind=kind,  # type: ignore[arg-type]
    )  # fmt: skip
    assert model.mean_attended_share(SEQ_LEN, last_of=last_of) == pytest.approx(visible.mean() / SEQ_LEN)
