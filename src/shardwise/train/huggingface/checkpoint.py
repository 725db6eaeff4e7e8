"""A run's checkpoint as a model of `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch

from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.train.checkpoint import whole
from shardwise.train.huggingface.files import save_hf
from shardwise.train.model import build


def checkpoint_to_hf(
    checkpoint: str | Path, architecture: Architecture, folder: str | Path, *, seq_len: int,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint, whatever ranks it was made on, as `transformers` reads them.

    In `dtype`, or in the format that the optimizer updated (the master copy's, where the run had one). `seq_len` is the longest
    sequence that the model was trained for. Raises `InputError` as `whole` and `save_hf` do, and where the checkpoint is of
    another architecture.
    """
    values = whole(checkpoint)
    model = build(architecture, dtype or next(iter(values.values())).dtype)
    wanted = {name: one.numel() for name, one in model.named_parameters()}
    found = {name: one.numel() for name, one in values.items()}
    if found != wanted:
        other = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise InputError(
            f"{checkpoint}: found the weights of another model than {architecture.name}: {', '.join(other[:4])} differ; the plan "
            "that the run was of is required"
        )
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name].view(parameter.shape))
    save_hf(model, folder, seq_len=seq_len)
