"""A run's checkpoint as a model of `transformers`."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from shardwise.engine.torch.weights import Weights, parameter_shapes
from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.train.checkpoint import whole
from shardwise.train.huggingface.files import save_hf


def checkpoint_to_hf(
    checkpoint: str | Path, architecture: Architecture, folder: str | Path, *, seq_len: int,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint, whatever ranks it was made on, as `transformers` reads them.

    In `dtype`, or in the format that the optimizer updated (the master copy's, where the run had one). `seq_len` is the longest
    sequence that the model was trained for. Raises `InputError` as `whole` and `save_hf` do, and where the checkpoint is of
    another architecture.
    """
    values, shapes = whole(checkpoint), parameter_shapes(architecture)
    wanted = {name: math.prod(shape) for name, shape in shapes.items()}
    found = {name: one.numel() for name, one in values.items()}
    if found != wanted:
        other = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise InputError(
            f"{checkpoint}: found the weights of another model than {architecture.name}: {', '.join(other[:4])} differ; the plan "
            "that the run was of is required"
        )
    tensors = {name: values[name].view(shape).to(dtype or values[name].dtype) for name, shape in shapes.items()}
    save_hf(Weights(architecture, tensors), folder, seq_len=seq_len)
