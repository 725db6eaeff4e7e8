"""Checkpoints of schema shardwise.checkpoint/1, which torch.distributed.checkpoint wrote: read, and no longer written.

Their `.metadata` is a pickle, and so might be anything: it is unpickled by an allow-list that makes plain data of what PyTorch
2.13 writes and refuses all else. The elements are read by `torch.load(weights_only=True)`, which has an allow-list of its own.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.files import DamagedError, Sum
from shardwise.planning.codec import parse
from shardwise.train.checkpoint.manifest import DTYPES, MANIFEST, WRITTEN, Part, StoredTensor, tensor_fault

SCHEMA = "shardwise.checkpoint/1"
METADATA = ".metadata"
FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_TORCH = "torch.distributed.checkpoint"


class _Record:
    """A value whose fields are data: it stands for each class that the file names."""

    def __init__(self, *given: object) -> None:
        self.given = given

    def __hash__(self) -> int:
        return id(self)  # a key before it has its fields

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.given = state


def _name(*given: object) -> str:
    return "/".join(map(str, given))


def _sizes(given: Any = ()) -> tuple[int, ...]:
    return tuple(given)


_ALLOWED: Mapping[tuple[str, str], Callable[..., object]] = {
    **{
        (f"{_TORCH}.metadata", name): _Record
        for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
                     "StorageMeta", "_MEM_FORMAT_ENCODING")
    },
    (f"{_TORCH}.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _name,
    ("torch", "Size"): _sizes,
    ("pathlib", "PosixPath"): _name,
    ("pathlib", "WindowsPath"): _name,
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Gives plain data for what `_ALLOWED` names, formats of PyTorch by their name, and nothing for any other name."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return _ALLOWED[module, name]


@dataclass(frozen=True, slots=True)
class _Manifest:
    step: int
    values: Mapping[str, Any]
    files: Mapping[str, Sum]


class OlderFiles:
    """A checkpoint of this schema. Raises `DamagedError` for what is not as it was written."""

    def __init__(self, folder: Path, payload: Mapping[str, Any]) -> None:
        self.folder = folder
        own = {key: value for key, value in payload.items() if key != "schema"}
        try:
            manifest: _Manifest = parse(_Manifest, own, f"checkpoint: {folder / MANIFEST}")
        except InputError as error:
            raise DamagedError(*error.problems) from None
        self.step, self.values, self.files = manifest.step, manifest.values, manifest.files
        if others := [name for name in self.files if not FILE.fullmatch(name)]:
            raise DamagedError(f"checkpoint: {folder / MANIFEST}: a file is called {others[0]!r}; {WRITTEN}")
        self._lengths: dict[tuple[str, int], int] = {}

    def tensors(self) -> Mapping[str, StoredTensor]:
        """What `.metadata` tells."""
        path = self.folder / METADATA
        try:
            found = _Unpickler(io.BytesIO(path.read_bytes())).load()
            places = {(key.fqn, key.offset): info for key, info in found.storage_data.items()}
            return {name: self._tensor(name, tensor, places) for name, tensor in found.state_dict_metadata.items()}
        except Exception as error:  # of what is no pickle, or another one, anything may be raised
            raise DamagedError(f"checkpoint: {path} is not what was written: {error}; {WRITTEN}") from None

    def _tensor(self, name: str, tensor: Any, places: Mapping[Any, Any]) -> StoredTensor:
        parts = []
        for chunk in tensor.chunks:
            info = places[name, chunk.offsets]
            if info.relative_path not in self.files:
                raise ValueError(f"a file is called {info.relative_path!r}")
            self._lengths[info.relative_path, info.offset] = info.length
            parts.append(Part(chunk.offsets, chunk.sizes, info.relative_path, info.offset))
        dtype, *_ = tensor.properties.given
        stored = StoredTensor(tensor.size, dtype, tuple(parts))
        if fault := tensor_fault(stored):
            raise ValueError(f"{name} has {fault}")
        return stored

    def elements(self, part: Part, dtype: torch.dtype) -> Tensor:
        """The elements of a part, in its shape."""
        with (self.folder / part.file).open("rb") as file:
            file.seek(part.start)
            content = file.read(self._lengths[part.file, part.start])
        try:
            found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            text = str(error).splitlines()[0]
            raise DamagedError(
                f"checkpoint: {self.folder / part.file} is not what was written: {text}; {WRITTEN}"
            ) from None
        if not isinstance(found, Tensor) or (found.dtype, tuple(found.shape)) != (dtype, part.lengths):
            raise DamagedError(
                f"checkpoint: {self.folder / part.file} holds another tensor than {METADATA} says; {WRITTEN}"
            )
        return found
