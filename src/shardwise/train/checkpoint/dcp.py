"""A folder that torch.distributed.checkpoint wrote: which tensors it has, and the elements of their parts.

Its `.metadata` is a pickle, and so might be anything: it is read as plain data. Elements are read by
`torch.load(weights_only=True)`, which has an allow-list of its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from shardwise.train.checkpoint.manifest import Part, StoredTensor, tensor_fault
from shardwise.train.checkpoint.plain_pickle import PlainUnpickler

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """Its tensors by name, and how many bytes of which file each part is, by the file and where it begins."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    lengths: Mapping[tuple[str, int], int]

    def elements(self, part: Part) -> Tensor:
        """The elements of a part, in its shape. Raises `ValueError` for what is not a tensor of as many."""
        with (self.folder / part.file).open("rb") as file:
            section = _Section(file, part.start, self.lengths[part.file, part.start])
            found = torch.load(cast(IO[bytes], section), map_location="cpu", weights_only=True)
        if not isinstance(found, Tensor) or found.numel() != part.box.volume:
            raise ValueError(f"it holds another tensor than {METADATA} says")
        return found.detach().view(part.lengths)


def read_dcp(folder: Path, unpickler: type[PlainUnpickler] = PlainUnpickler) -> DcpFolder:
    """What `.metadata` tells. Raises `OSError` where there is none, and for what is none anything at all."""
    found = unpickler(io.BytesIO((folder / METADATA).read_bytes())).load()
    places = {(key.fqn, getattr(key, "offset", None)): info for key, info in found.storage_data.items()}
    lengths: dict[tuple[str, int], int] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in found.state_dict_metadata.items():
        if hasattr(tensor, "chunks"):
            parts = []
            for chunk in tensor.chunks:
                info = places[name, chunk.offsets]
                lengths[info.relative_path, info.offset] = info.length
                parts.append(Part(chunk.offsets, chunk.sizes, _file(info), info.offset))
            tensors[name] = _stored(name, tensor, tuple(parts))
    return DcpFolder(folder, tensors, lengths)


def _stored(name: str, tensor: Any, parts: tuple[Part, ...]) -> StoredTensor:
    dtype, *_ = tensor.properties.given
    stored = StoredTensor(tensor.size, dtype, parts)
    if fault := tensor_fault(stored):
        raise ValueError(f"{name} has {fault}")
    return stored


def _file(info: Any) -> str:
    name: str = info.relative_path
    if Path(name).name != name:
        raise ValueError(f"a file is called {name!r}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is compressed or encrypted")
    return name


class _Section(io.RawIOBase):
    """Bytes of a file from a place on, as a file of their own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self.file, self.start, self.length, self.place = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.length}[whence]
        return self.place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer).cast("B")
        self.file.seek(self.start + self.place)
        count = self.file.readinto(room[: max(min(len(room), self.length - self.place), 0)])
        self.place += count
        return count
