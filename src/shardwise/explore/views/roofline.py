"""Roofline of the kernels of one block, on one device of the layout: what `shardwise roofline MODEL --layout` prints."""

from __future__ import annotations

from typing import Any

from shardwise.books.roofline import bandwidths, block_roofline
from shardwise.books.roofline.payload import block_payload
from shardwise.explore.asked import Asked


def roofline(asked: Asked) -> dict[str, Any]:
    """The payload of the block's kernels, and bytes/s of the chip's other memories and links."""
    asked.require_legal()
    chip = asked.cluster.chip
    found = block_roofline(asked.model, chip, asked.layout.micro_batch_seqs, asked.job.seq_len, asked.layout)
    return {"roofline": block_payload(found, asked.model, chip), "bandwidths": bandwidths(chip, {})}
