"""A run's checkpoint as a model of `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch

from shardwise.model.architecture import Architecture
from shardwise.train.conversion.entries import BYTES_PER_FILE
from shardwise.train.conversion.sources import of_checkpoint
from shardwise.train.huggingface.writing import write_model


def checkpoint_to_hf(
    checkpoint: str | Path, architecture: Architecture, folder: str | Path, *, seq_len: int,
    dtype: torch.dtype | None = None, bytes_per_file: int = BYTES_PER_FILE,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint, whatever ranks it was made on, as `transformers` reads them.

    In `dtype`, or in the format that the optimizer updated (the master copy's, where the run had one). `seq_len` is the longest
    sequence that the model was trained for. One tensor is held at a time. Raises `InputError` for a checkpoint that is damaged,
    or of another architecture, and as `save_hf` does.
    """
    read, own = of_checkpoint(checkpoint, architecture)
    write_model(folder, architecture, read, dtype or own, seq_len=seq_len, bytes_per_file=bytes_per_file)
