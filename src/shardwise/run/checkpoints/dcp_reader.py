"""Read folders that torch.distributed.checkpoint wrote: their tensors, and the elements of their chunks.

Their `.metadata` is a pickle, which could run any code: it is read as plain data (`SafeUnpickle`), and no callable that it
names is called, except a few known ones that construct data. Elements are read by `torch.load(weights_only=True)`, which has
an allow-list of its own.

Checkpoints of schema shardwise.checkpoint/1 (`Schema1Files`), such folders with a checkpoint.json, are read, but no
longer written. Only what PyTorch 2.13 writes is accepted: a file that names anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar, cast

import torch
from torch import Tensor

from shardwise.run.checkpoints.manifest import (
    DAMAGE_FIX,
    DTYPES,
    MANIFEST,
    StoredTensor,
    TensorChunk,
    parse_fields,
    tensor_problem,
)
from shardwise.run.checkpoints.torch_archive import require_cheap_pickle, verify_records
from shardwise.run.faults.rank_status import first_line
from shardwise.values import DamagedFileError, FileChecksum, Shape, open_input, read_bytes

KnownCallables = Mapping[tuple[str, str], Callable[..., object]]


class InertObject:
    """A value whose fields are data: it replaces each class and each function that a pickle names."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __new__(cls, *arguments: object) -> InertObject:
        return super().__new__(cls)

    def __hash__(self) -> int:
        return id(self)  # it may become a key before it has its fields

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.arguments = state

    def __setitem__(self, key: object, value: object) -> None:
        """Discard an entry of a dict-like object."""

    def append(self, value: object) -> None:
        """Discard an element of a list-like object."""


def join_path(*parts: object) -> str:
    """Join the parts of a path. Raises `UnpicklingError` for anything but texts, whose `str` might take for ever."""
    if not all(isinstance(part, str) for part in parts):
        raise pickle.UnpicklingError("a path has a part that is not a text")
    return "/".join(map(str, parts))


def size_tuple(sizes: Any = ()) -> tuple[int, ...]:
    """Return a `torch.Size` as a tuple. Raises `UnpicklingError` for anything but whole numbers."""
    if not isinstance(sizes, (tuple, list)) or not all(type(size) is int for size in sizes):
        raise pickle.UnpicklingError("a size is not a list of whole numbers")
    return tuple(sizes)


SAFE_CALLABLES: KnownCallables = {
    ("torch", "Size"): size_tuple,
    ("pathlib", "PosixPath"): join_path,
    ("pathlib", "WindowsPath"): join_path,
}


class SafeUnpickler(pickle.Unpickler):
    """Resolves a name to its entry in `callables`, a dtype of PyTorch to its name, and any other to `InertObject`.

    Raises `UnpicklingError` for a pickle that costs more than its bytes (`require_cheap_pickle`).
    """

    callables: ClassVar[KnownCallables] = SAFE_CALLABLES

    def __init__(self, file: IO[bytes], **options: Any) -> None:
        content = file.read()
        require_cheap_pickle(content)
        super().__init__(io.BytesIO(content), **options)

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        return self.callables.get((module, name), InertObject)


class SafeTensorPickle:
    """A pickle module for `torch.load`: tensors are restored, and all else is plain data."""

    class Unpickler(SafeUnpickler):
        callables: ClassVar[KnownCallables] = {
            **SAFE_CALLABLES,
            ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
            ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
            ("collections", "OrderedDict"): OrderedDict,
        }


METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 1_000_000_000  # 100 bytes for each of ten million chunks


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """The tensors of a folder by name. `lengths`: the bytes of each chunk, by file and offset."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    lengths: Mapping[tuple[str, int], int]

    def read_chunk(self, chunk: TensorChunk) -> Tensor:
        """Return the elements of a chunk, in its shape. Raises `ValueError` if the file has anything but a tensor of
        that size."""
        with open_input(self.folder / chunk.file) as file:
            section = cast(IO[bytes], _FileSection(file, chunk.start, self.lengths[chunk.file, chunk.start]))
            verify_records(section)
            section.seek(0)
            tensor = torch.load(section, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != chunk.lengths:
            raise ValueError(f"it holds another tensor than {METADATA_FILE} says")
        return tensor.detach().view(chunk.lengths)


def read_dcp(folder: Path, unpickler: type[SafeUnpickler] = SafeUnpickler) -> DcpFolder:
    """Read `.metadata`. Raises `OSError` if it is missing, and any exception at all if its content is something else."""
    metadata = unpickler(io.BytesIO(read_bytes(folder / METADATA_FILE, max_bytes=MAX_METADATA_BYTES))).load()
    storage_infos = {(key.fqn, getattr(key, "offset", None)): info for key, info in metadata.storage_data.items()}
    used_infos: set[tuple[str, Shape | None]] = set()
    lengths: dict[tuple[str, int], int] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in metadata.state_dict_metadata.items():
        _require_text(name)
        if hasattr(tensor, "chunks"):
            chunks = []
            for chunk in tensor.chunks:
                key = name, _whole_numbers(chunk.offsets)
                info = _find(storage_infos, key)
                used_infos.add(key)
                chunks.append(TensorChunk(key[1], _whole_numbers(chunk.sizes), _chunk_file(info), info.offset))
                lengths[info.relative_path, info.offset] = info.length
            tensors[name] = _stored_tensor(name, tensor, tuple(chunks))
        else:
            _find(storage_infos, (name, None))
            used_infos.add((name, None))
    # An entry too many or too few, or two in one place, is the trace of a changed name or offset: the metadata has no checksum.
    if used_infos != storage_infos.keys() or len(storage_infos) != len(metadata.storage_data):
        raise ValueError("its lists of tensors and of places in files are not of the same tensors")
    _require_disjoint(storage_infos.values())
    return DcpFolder(folder, tensors, lengths)


def _find(storage_infos: Mapping[Any, Any], key: tuple[str, Shape | None]) -> Any:
    if key not in storage_infos:
        raise ValueError(f"it does not say where {key[0][:200]} lies")
    return storage_infos[key]


def _require_disjoint(infos: Iterable[Any]) -> None:
    """Raise `ValueError` if two entries share bytes of a file."""
    last_file, last_end = "", 0
    places = [(_chunk_file(info), _whole_numbers((info.offset, info.length))) for info in infos]
    for file, (start, length) in sorted(places):
        if start < 0 or length < 1 or (file == last_file and start < last_end):
            raise ValueError(f"two tensors lie at byte {start:,} of {file[:200]}")
        last_file, last_end = file, start + length


def _require_text(name: object) -> None:
    if not isinstance(name, str):
        raise ValueError("it has a name that is not a text")


def _whole_numbers(numbers: Any) -> Shape:
    if not isinstance(numbers, tuple) or not all(type(number) is int for number in numbers):
        raise ValueError("it has a size or an offset that is not a whole number")
    return numbers


def _stored_tensor(name: str, tensor: Any, chunks: tuple[TensorChunk, ...]) -> StoredTensor:
    dtype, *_ = tensor.properties.arguments
    _require_text(dtype)
    stored = StoredTensor(_whole_numbers(tensor.size), dtype, chunks)
    if problem := tensor_problem(stored):
        raise ValueError(f"{name} has {problem}")
    return stored


def _chunk_file(info: Any) -> str:
    name: str = info.relative_path
    _require_text(name)
    if Path(name).name != name:
        raise ValueError(f"a file is called {name!r}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is compressed or encrypted")
    return name


class _FileSection(io.RawIOBase):
    """A section of a file, as a file of its own."""

    def __init__(self, file: Any, start: int, length: int) -> None:
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
        target = memoryview(buffer).cast("B")
        self.file.seek(self.start + self.place)
        count: int = self.file.readinto(target[: max(min(len(target), self.length - self.place), 0)])
        self.place += count
        return count


SCHEMA_1 = "shardwise.checkpoint/1"
SCHEMA_1_FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_DCP_MODULE = "torch.distributed.checkpoint"


class _Schema1Unpickler(SafeUnpickler):
    """Refuses names that no checkpoint of schema 1 contains."""

    callables: ClassVar[KnownCallables] = {
        **SAFE_CALLABLES,
        **{
            (f"{_DCP_MODULE}.metadata", name): InertObject
            for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
                         "StorageMeta", "_MEM_FORMAT_ENCODING")
        },
        (f"{_DCP_MODULE}.filesystem", "_StorageInfo"): InertObject,
        ("torch.serialization", "_get_layout"): join_path,
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.callables and not (module == "torch" and name in DTYPES):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


@dataclass(frozen=True, slots=True)
class _Schema1Manifest:
    step: int
    values: Mapping[str, Any]
    files: Mapping[str, FileChecksum]


class Schema1Files:
    """A checkpoint of schema 1. Raises `DamagedFileError` if it is not as it was written."""

    def __init__(self, folder: Path, payload: Mapping[str, Any]) -> None:
        self.folder = folder
        fields = {key: value for key, value in payload.items() if key != "schema"}
        manifest = parse_fields(_Schema1Manifest, folder / MANIFEST, fields)
        self.step, self.values, self.files = manifest.step, manifest.values, manifest.files
        if foreign_files := [name for name in self.files if not SCHEMA_1_FILE.fullmatch(name)]:
            raise DamagedFileError(
                f"checkpoint: {folder / MANIFEST}: a file is called {foreign_files[0]!r}; {DAMAGE_FIX}"
            )

    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return the tensors that `.metadata` lists."""
        return self._dcp_folder.tensors

    @cached_property
    def _dcp_folder(self) -> DcpFolder:
        path = self.folder / METADATA_FILE
        try:
            dcp_folder = read_dcp(self.folder, _Schema1Unpickler)
            for name, _ in dcp_folder.lengths:
                if name not in self.files:
                    raise ValueError(f"a file is called {name!r}")
        except Exception as error:  # a file that is no pickle, or another one, may raise anything
            raise DamagedFileError(f"checkpoint: {path} is not what was written: {error}; {DAMAGE_FIX}") from None
        return dcp_folder

    def read_chunk(self, chunk: TensorChunk, dtype: torch.dtype) -> Tensor:
        """Return the elements of a chunk, in its shape."""
        path = self.folder / chunk.file
        try:
            tensor = self._dcp_folder.read_chunk(chunk)
        except Exception as error:
            reason = first_line(error)
            raise DamagedFileError(f"checkpoint: {path} is not what was written: {reason}; {DAMAGE_FIX}") from None
        if tensor.dtype != dtype:
            raise DamagedFileError(f"checkpoint: {path} holds another tensor than {METADATA_FILE} says; {DAMAGE_FIX}")
        return tensor
