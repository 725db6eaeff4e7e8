"""What can be converted: weights in memory, and a run's checkpoint, made on any ranks. A stored model reads by itself."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shardwise.engine.torch.build import balance_biases
from shardwise.engine.torch.weights import Weights, parameter_shapes
from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.train.box import Box, Shape
from shardwise.train.checkpoint.loading import BUFFER, MODEL
from shardwise.train.checkpoint.ranks import Ranks
from shardwise.train.checkpoint.reading import Opened, common_shape, opened
from shardwise.train.conversion.places import Read
from shardwise.train.conversion.stored import StoredModel


def of_weights(weights: Weights) -> Read:
    """Boxes of weights in memory; biases of routers' choices that they lack are zeros."""
    zero = torch.zeros(weights.architecture.num_experts)

    def read(name: str, box: Box) -> Tensor:
        found = weights.tensors.get(name)
        return (weights.biases.get(name, zero) if found is None else found)[box.slices]

    return read


def of_stored(stored: StoredModel) -> Read:
    """Boxes of a stored model; biases of routers' choices that it lacks are zeros."""

    def read(name: str, box: Box) -> Tensor:
        held = name in stored.places
        return stored.read(name, box) if held else torch.zeros(box.lengths)

    return read


def of_checkpoint(checkpoint: str | Path, architecture: Architecture) -> tuple[Read, torch.dtype]:
    """Boxes of the weights of a checkpoint, and the format that the optimizer updated (the master copy's, where the run had one).

    Raises `InputError` for a checkpoint that is damaged, or of another architecture.
    """
    found, shapes = opened(Path(checkpoint), Ranks()), _shapes(architecture)
    _require_same(Path(checkpoint), architecture, found)
    kept = {name.partition(".")[2]: name for name in shapes}

    def read(name: str, box: Box) -> Tensor:
        return found.read(kept[name], shapes[kept[name]], box)

    return read, found.tensors[next(iter(shapes))].format


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
