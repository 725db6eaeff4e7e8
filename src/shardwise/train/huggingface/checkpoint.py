"""A run's checkpoint as a model of `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shardwise.engine.torch.build import balance_biases
from shardwise.engine.torch.weights import parameter_shapes
from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.train.box import Box, Shape
from shardwise.train.checkpoint.loading import BUFFER, MODEL
from shardwise.train.checkpoint.ranks import Ranks
from shardwise.train.checkpoint.reading import Opened, common_shape, opened
from shardwise.train.huggingface.writing import BYTES_PER_FILE, write_model


def checkpoint_to_hf(
    checkpoint: str | Path, architecture: Architecture, folder: str | Path, *, seq_len: int,
    dtype: torch.dtype | None = None, bytes_per_file: int = BYTES_PER_FILE,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint, whatever ranks it was made on, as `transformers` reads them.

    In `dtype`, or in the format that the optimizer updated (the master copy's, where the run had one). `seq_len` is the longest
    sequence that the model was trained for. One tensor is held at a time. Raises `InputError` for a checkpoint that is damaged,
    or of another architecture, and as `save_hf` does.
    """
    found, shapes = opened(Path(checkpoint), Ranks()), _shapes(architecture)
    _require_same(Path(checkpoint), architecture, found)
    kept = {name.partition(".")[2]: name for name in shapes}

    def read(name: str, box: Box) -> Tensor:
        return found.read(kept[name], shapes[kept[name]], box)

    own = found.tensors[next(iter(shapes))].format
    write_model(folder, architecture, read, dtype or own, seq_len=seq_len, bytes_per_file=bytes_per_file)


def _shapes(architecture: Architecture) -> dict[str, Shape]:
    """What a checkpoint keeps of a model, by the names that it has there: parameters, and biases of routers' choices."""
    biases = {BUFFER + name: (architecture.num_experts,) for name in balance_biases(architecture).values()}
    return {MODEL + name: shape for name, shape in parameter_shapes(architecture).items()} | biases


def _require_same(path: Path, architecture: Architecture, checkpoint: Opened) -> None:
    """Raise `InputError` where the checkpoint's weights are those of another model."""
    wanted = _shapes(architecture)
    found = {name: one.shape for name, one in checkpoint.tensors.items() if name.startswith((MODEL, BUFFER))}
    other = wanted.keys() ^ found.keys()
    other |= {name for name in wanted.keys() & found.keys() if common_shape(wanted[name], found[name]) is None}
    if other:
        names = ", ".join(name.partition(".")[2] for name in sorted(other)[:4])
        raise InputError(
            f"{path}: found the weights of another model than {architecture.name}: {names} differ; the plan that the run was of "
            "is required"
        )
