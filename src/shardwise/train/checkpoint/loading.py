"""Reading a checkpoint on any number of ranks, or all weights of it in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import InputError, require
from shardwise.train.batching import BATCH_RAMP
from shardwise.train.box import Box, Shape
from shardwise.train.checkpoint.manifest import StoredTensor
from shardwise.train.checkpoint.piece import State, described, split
from shardwise.train.checkpoint.ranks import Ranks
from shardwise.train.checkpoint.reading import common_shape, opened

SHOWN = 4  # names of tensors in a message
MODEL = "model."  # what the names of a model's own weights begin with
BUFFER = "buffer."  # and those of what a model has beside them (`Engine.buffers`)
LEFT_OUT = "num_left_out"  # steps that did not update the weights
ADDED = frozenset({LEFT_OUT, BATCH_RAMP})  # values that checkpoints of earlier versions lack
FIX = "load it with the plan and the optimizer that it was saved with"
# What the names of scales have that belong to parts of a parameter (`train.parallel.blocks`), before how many these are.
OF_PARTS = "_scales_of_"
FIX_OF_PARTS = (
    "its moments have scales of the parts that tensor and expert parallelism make, which those degrees alone read: plan again "
    "with the degrees that it was saved with"
)
Wanted = tuple[str, Shape, str]  # the name of a piece, the shape of its tensor, and its format


def load(path: str | Path, state: State, ranks: Ranks | None = None) -> dict[str, Any]:
    """Fill the pieces of `state` in place, on whatever ranks they are; the plain values come back.

    All ranks call this together (`ranks`: all of the job). Their names together must be those of the checkpoint; shapes and
    formats must agree, but for tensors that one of both knows flattened. Raises `InputError` on all ranks where they do not, and
    `DamagedError`, which is one, for a folder that is damaged or no checkpoint; no piece is changed then.
    """
    path, ranks = Path(path), ranks or Ranks.join()
    checkpoint = opened(path, ranks)
    pieces, values = split(state)
    own = [(name, piece.shape, _name(piece.values.dtype)) for name, piece in pieces]
    asked = ranks.to_first(lambda: (own, list(values)))

    def compare() -> None:
        wanted = dict.fromkeys((name, tuple(shape), dtype) for held, _ in asked or () for name, shape, dtype in held)
        require(list(_problems(path, list(wanted), checkpoint.tensors)))
        names = {name for _, held in asked or () for name in held}
        require(list(_missing(path, "values", names - ADDED, set(checkpoint.files.values) - ADDED)))

    ranks.on_first(compare)

    def fill() -> None:
        for name, piece in pieces:
            checkpoint.fill(name, piece)

    ranks.agree(fill)
    return dict(checkpoint.files.values)


def whole(path: str | Path, prefix: str = MODEL) -> dict[str, Tensor]:
    """All tensors of a checkpoint whose names begin with `prefix`, whole, on the CPU of this process.

    By the rest of their names: for `model.` those of the parameters. Raises `InputError` as `load` does.
    """
    path = Path(path)
    checkpoint = opened(path, Ranks())
    shapes = {name: one.shape for name, one in checkpoint.tensors.items() if name.startswith(prefix)}
    if not shapes:
        found = _shown(sorted(checkpoint.tensors))
        raise InputError(f"checkpoint: no tensor of {path} begins with {prefix!r}; found {found}")
    boxes = {name: Box((0,) * len(shape), shape) for name, shape in shapes.items()}
    return {name.removeprefix(prefix): checkpoint.read(name, shapes[name], box) for name, box in boxes.items()}


def _problems(path: Path, wanted: Sequence[Wanted], stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    yield from _missing(path, "tensors", {name for name, _, _ in wanted}, set(stored))
    differ = [
        (name, shape, dtype)
        for name, shape, dtype in wanted
        if name in stored and not _fits(shape, dtype, stored[name])
    ]
    for name, shape, dtype in differ[:SHOWN]:
        found = described(stored[name].shape, stored[name].dtype)
        yield f"checkpoint: {path} has {found} as {name}; {described(shape, dtype)} is required: {FIX}"
    if len(differ) > SHOWN:
        yield f"checkpoint: {path} differs in {len(differ) - SHOWN} more tensors"


def _fits(shape: Shape, dtype: str, stored: StoredTensor) -> bool:
    return dtype == stored.dtype and common_shape(shape, stored.shape) is not None


def _missing(path: Path, what: str, wanted: set[str], found: set[str]) -> Iterator[str]:
    lists = {"lacks": sorted(wanted - found), "has, besides those of this run,": sorted(found - wanted)}
    for verb, names in lists.items():
        if names:
            fix = FIX_OF_PARTS if any(OF_PARTS in name for name in wanted ^ found) else FIX
            yield f"checkpoint: {path} {verb} {len(names)} {what}: {_shown(names)}; the same names are required: {fix}"


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
