"""Reading a checkpoint on any number of ranks, or all weights of it in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import InputError, require
from shardwise.train.checkpoint.manifest import Manifest, read_manifest, require_undamaged
from shardwise.train.checkpoint.piece import Piece, State, described, split
from shardwise.train.checkpoint.planners import read_pieces, stored_tensors
from shardwise.train.checkpoint.ranks import Ranks

SHOWN = 4  # names of tensors in a message
MODEL = "model."  # what the names of a model's own weights begin with
FIX = "load it with the plan and the optimizer that it was saved with"


def load(path: str | Path, state: State, ranks: Ranks | None = None) -> dict[str, Any]:
    """Fill the pieces of `state` in place, on whatever ranks they are; the plain values come back.

    All ranks call this together (`ranks`: all of the job). Their names together must be those of the checkpoint; sizes and
    formats must agree. Raises `InputError` on all ranks where they do not, and for a folder that is damaged or no checkpoint;
    no piece is changed then.
    """
    path, ranks = Path(path), ranks or Ranks.join()
    manifest, stored = _opened(path, ranks)
    pieces, values = split(state)
    wanted = ranks.agree(lambda: ({name: piece.kind for name, piece in pieces.items()}, set(values)))
    kinds = [(name, kind) for held, _ in wanted for name, kind in held.items()]
    require(list(_problems(path, kinds, stored)))
    require(list(_missing(path, "values", {name for _, held in wanted for name in held}, set(manifest.values))))
    ranks.agree(lambda: read_pieces(path, pieces))
    return dict(manifest.values)


def whole(path: str | Path, prefix: str = MODEL) -> dict[str, Tensor]:
    """All tensors of a checkpoint whose names begin with `prefix`, flattened, on the CPU of this process.

    By the rest of their names: for `model.` those of the parameters. Raises `InputError` as `load` does.
    """
    path, alone = Path(path), Ranks()
    _, stored = _opened(path, alone)
    pieces = {
        name: Piece(found.size[0], 0, torch.empty(found.size, dtype=found.properties.dtype))
        for name, found in stored.items()
        if name.startswith(prefix)
    }
    if not pieces:
        raise InputError(f"checkpoint: no tensor of {path} begins with {prefix!r}; found {_shown(sorted(stored))}")
    alone.agree(lambda: read_pieces(path, pieces))
    return {name.removeprefix(prefix): piece.values for name, piece in pieces.items()}


def _opened(path: Path, ranks: Ranks) -> tuple[Manifest, Mapping[str, Any]]:
    """What a checkpoint says that it holds. Its sums are looked at first: the rest is unpickled."""
    manifest = ranks.agree(lambda: read_manifest(path))[0]
    require_undamaged(path, manifest, ranks)
    stored: dict[str, Any] = {}
    ranks.agree(lambda: stored.update(stored_tensors(path)))
    return manifest, stored


def _problems(path: Path, wanted: list[tuple[str, str]], stored: Mapping[str, Any]) -> Iterator[str]:
    yield from _missing(path, "tensors", {name for name, _ in wanted}, set(stored))
    kinds = {name: described(found.size[0], found.properties.dtype) for name, found in stored.items()}
    differ = [(name, kind) for name, kind in dict.fromkeys(wanted) if kinds.get(name, kind) != kind]
    for name, kind in differ[:SHOWN]:
        yield f"checkpoint: {path} has {kinds[name]} as {name}; {kind} are required: {FIX}"
    if len(differ) > SHOWN:
        yield f"checkpoint: {path} differs in {len(differ) - SHOWN} more tensors"


def _missing(path: Path, what: str, wanted: set[str], found: set[str]) -> Iterator[str]:
    lists = {"lacks": sorted(wanted - found), "has, beside those of this run,": sorted(found - wanted)}
    for verb, names in lists.items():
        if names:
            yield f"checkpoint: {path} {verb} {len(names)} {what}: {_shown(names)}; the same names are required: {FIX}"


def _shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
