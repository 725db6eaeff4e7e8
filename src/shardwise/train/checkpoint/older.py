"""Checkpoints of schema shardwise.checkpoint/1, which torch.distributed.checkpoint wrote: read, and no longer written.

Their `.metadata` is a pickle, and so might be anything: of what PyTorch 2.13 writes plain data is made (`dcp.py`), and a file
that names anything else is refused.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.files import DamagedError, Sum
from shardwise.planning.codec import parse
from shardwise.train.checkpoint.dcp import METADATA, DcpFolder, read_dcp
from shardwise.train.checkpoint.manifest import DTYPES, MANIFEST, WRITTEN, Part, StoredTensor
from shardwise.train.checkpoint.plain_pickle import PLAIN, Known, PlainUnpickler, Record, joined

SCHEMA = "shardwise.checkpoint/1"
FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_TORCH = "torch.distributed.checkpoint"


class _Unpickler(PlainUnpickler):
    """Refuses what no such file names."""

    known: ClassVar[Known] = {
        **PLAIN,
        **{
            (f"{_TORCH}.metadata", name): Record
            for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
                         "StorageMeta", "_MEM_FORMAT_ENCODING")
        },
        (f"{_TORCH}.filesystem", "_StorageInfo"): Record,
        ("torch.serialization", "_get_layout"): joined,
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known and not (module == "torch" and name in DTYPES):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


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

    def tensors(self) -> Mapping[str, StoredTensor]:
        """What `.metadata` tells."""
        return self._held.tensors

    @cached_property
    def _held(self) -> DcpFolder:
        path = self.folder / METADATA
        try:
            found = read_dcp(self.folder, _Unpickler)
            for name, _ in found.lengths:
                if name not in self.files:
                    raise ValueError(f"a file is called {name!r}")
        except Exception as error:  # of what is no pickle, or another one, anything may be raised
            raise DamagedError(f"checkpoint: {path} is not what was written: {error}; {WRITTEN}") from None
        return found

    def elements(self, part: Part, dtype: torch.dtype) -> Tensor:
        """The elements of a part, in its shape."""
        path = self.folder / part.file
        try:
            found = self._held.elements(part)
        except Exception as error:
            text = str(error).splitlines()[0]
            raise DamagedError(f"checkpoint: {path} is not what was written: {text}; {WRITTEN}") from None
        if found.dtype != dtype:
            raise DamagedError(f"checkpoint: {path} holds another tensor than {METADATA} says; {WRITTEN}")
        return found
