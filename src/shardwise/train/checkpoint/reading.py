"""What a checkpoint holds, opened and looked at, and pieces filled from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.files import SEAL, DamagedError, Sum, seal_fault
from shardwise.train.box import Box, Shape
from shardwise.train.checkpoint import older
from shardwise.train.checkpoint.manifest import (
    MANIFEST,
    SCHEMA,
    WRITTEN,
    CurrentFiles,
    Part,
    StoredTensor,
    read_payload,
)
from shardwise.train.checkpoint.piece import Piece, boxed, view_of
from shardwise.train.checkpoint.ranks import Ranks


class Files(Protocol):
    """The files of a checkpoint of one schema or another, as far as checkpoint.json tells of them."""

    @property
    def step(self) -> int: ...
    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def files(self) -> Mapping[str, Sum]: ...
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors, once the files are known to be what was written."""

    def elements(self, part: Part, dtype: torch.dtype) -> Tensor:
        """The elements of a part, in its shape."""


SCHEMAS: Mapping[str, Callable[[Path, Mapping[str, Any]], Files]] = {
    SCHEMA: CurrentFiles,
    older.SCHEMA: older.OlderFiles,
}


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint whose files are what was written."""

    files: Files
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """A box of the tensor of that name, in `shape`, or whose flattened elements these are; nothing else of it is read."""
        values = torch.empty(box.lengths, dtype=self.tensors[name].format)
        self.fill(name, Piece(shape, box.offsets, values))
        return values

    def fill(self, name: str, piece: Piece) -> None:
        """Fill a piece of the tensor of that name in place; the kinds agree."""
        tensor = self.tensors[name]
        shape = common_shape(piece.shape, tensor.shape)
        assert shape is not None
        if len(piece.offsets) == 1 and all(len(part.offsets) == 1 for part in tensor.parts):
            shape = view_of(shape, 1)
        wanted = list(boxed(shape, piece.box, piece.values))
        first, last = piece.box.span(view_of(shape, len(piece.offsets)))
        for part in tensor.parts:
            start, stop = part.box.span(view_of(shape, len(part.offsets)))
            if piece.box.volume and start < last and first < stop:
                _copy(shape, part, self.files.elements(part, tensor.format), wanted)


def _copy(shape: Shape, part: Part, values: Tensor, wanted: list[tuple[Any, Tensor]]) -> None:
    """Copy what a part has of the wanted boxes."""
    for held, source in boxed(shape, part.box, values):
        for box, target in wanted:
            shared = held.intersection(box)
            if shared is not None:
                target[shared.seen_from(box).slices].copy_(source[shared.seen_from(held).slices])


def common_shape(one: Shape, other: Shape) -> Shape | None:
    """The shape of a tensor that one knows by `one` and another by `other`: the same, or one of them flattened."""
    if one == other or len(other) == 1:
        shape = one
    elif len(one) == 1:
        shape = other
    else:
        return None
    return shape if view_of(one, 1) == view_of(other, 1) else None


def opened(path: Path, ranks: Ranks) -> Opened:
    """What a checkpoint holds. The sums of its files are looked at first, shared among the ranks, which all call this.

    Raises on all ranks `DamagedError` for what is not as it was written, and `InputError` for another schema.
    """
    payload = ranks.each(lambda: read_payload(path))
    if len(set(map(str, ranks.agree(lambda: payload.get(SEAL))))) > 1:
        raise InputError(f"checkpoint: ranks find different files as {path / MANIFEST}; one folder for all is required")
    files = ranks.each(lambda: files_of(path, payload))
    _require_undamaged(path, files.files, ranks)
    return Opened(files, ranks.each(files.tensors))


def files_of(path: Path, payload: Mapping[str, Any]) -> Files:
    """The files of a checkpoint by its checkpoint.json. Raises `DamagedError` for one that is not as it was written, and
    `InputError` for another schema."""
    schema = str(payload.get("schema"))
    if schema not in SCHEMAS:
        raise (DamagedError if seal_fault(payload) else InputError)(
            f"checkpoint: {path / MANIFEST}: found schema {schema!r}; {' or '.join(SCHEMAS)} is required: read it with the "
            "version of Shardwise that wrote it"
        )
    return SCHEMAS[schema](path, payload)


def _require_undamaged(path: Path, files: Mapping[str, Sum], ranks: Ranks) -> None:
    """Raise `DamagedError`, on all ranks, that names the files that are not what was written."""

    def faults() -> list[str]:
        own = [name for number, name in enumerate(sorted(files)) if number % ranks.size == ranks.rank]
        return [f"{path / name} {fault}" for name in own if (fault := files[name].fault(path / name))]

    found = [fault for rank in ranks.agree(faults) for fault in rank]
    if found:
        raise DamagedError(*(f"checkpoint: {fault}; {WRITTEN}" for fault in found))
