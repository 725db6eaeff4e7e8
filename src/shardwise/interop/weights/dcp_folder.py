"""The tensors of a model in a folder of torch.distributed.checkpoint, read and written; one chunk is in memory at a time.

Each chunk is written by `torch.save`, one behind the other in files of a given size; `.metadata` (`DcpMetadata`) says where each
lies. Source: torch.distributed.checkpoint, metadata.py and filesystem.py of PyTorch 2.13.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.interop.weights.stored_slices import OutputChunk, ReadBox, group_into_files
from shardwise.run import METADATA_FILE
from shardwise.run.checkpoints.dcp_reader import DcpFolder, read_dcp
from shardwise.run.checkpoints.manifest import TensorChunk
from shardwise.values import Box, InputError, Shape, describe_error, flush_to_disk, write_synced


class DcpMetadata:
    """The metadata of a folder, to which each chunk and object is added as it is written."""

    def __init__(self) -> None:
        self.metadata = Metadata({}, planner_data={}, storage_data={}, version="1.0.0")

    def add_tensor(self, chunk: OutputChunk, file: str, start: int, num_bytes: int) -> None:
        """Add a chunk of a tensor, which has `num_bytes` of a file from `start` on."""
        empty = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), Size(chunk.tensor_shape), [])
        tensor = cast(TensorStorageMetadata, self.metadata.state_dict_metadata.setdefault(chunk.name, empty))
        chunk_metadata = ChunkStorageMetadata(Size(chunk.box.offsets), Size(chunk.box.lengths))
        tensor.chunks.append(chunk_metadata)
        self.metadata.planner_data[chunk.name] = (chunk.name,)
        key = MetadataIndex(chunk.name, chunk_metadata.offsets)
        self.metadata.storage_data[key] = _StorageInfo(file, start, num_bytes)

    def add_objects(self, objects: Mapping[str, bytes], file: str) -> None:
        """Add objects that lie one behind the other in a file."""
        start = 0
        for name, content in objects.items():
            self.metadata.state_dict_metadata[name] = BytesStorageMetadata()
            self.metadata.planner_data[name] = (name,)
            self.metadata.storage_data[MetadataIndex(name)] = _StorageInfo(file, start, len(content))
            start += len(content)

    def dump(self) -> bytes:
        """Return the content of `.metadata`."""
        return pickle.dumps(self.metadata)


class DcpModelFolder:
    """The tensors of a folder whose names match a pattern (a `TensorFolder`). Raises `InputError` for a damaged folder."""

    def __init__(self, folder: Path, name_pattern: re.Pattern[str]) -> None:
        self.folder = folder
        self._dcp_folder = _open_folder(folder)
        tensors = self._dcp_folder.tensors
        self._model_tensors = {name: tensor for name, tensor in tensors.items() if name_pattern.match(name)}
        self._last: tuple[TensorChunk, Tensor] | None = None  # boxes of one chunk are usually read in a row

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        return {("", name): tensor.shape for name, tensor in self._model_tensors.items()}

    def dtype(self) -> torch.dtype:
        return self._model_tensors[min(self._model_tensors)].torch_dtype

    def read(self, file: str, name: str, box: Box) -> Tensor:
        """Return a box of a tensor: a view of the chunk that has all of it, or a new tensor from several chunks."""
        tensor, box_values = self._model_tensors[name], None
        for chunk in tensor.parts:
            shared = chunk.box.intersection(box)
            if shared is None:
                continue
            shared_values = self._read_chunk(name, chunk)[shared.seen_from(chunk.box).slices]
            if shared == box:
                return shared_values
            box_values = torch.empty(box.lengths, dtype=tensor.torch_dtype) if box_values is None else box_values
            box_values[shared.seen_from(box).slices] = shared_values
        assert box_values is not None, f"no part has {box} of {name}"
        return box_values

    def _read_chunk(self, name: str, chunk: TensorChunk) -> Tensor:
        if self._last is None or self._last[0] is not chunk:
            self._last = None  # free its memory before the next one is read
            try:
                values = self._dcp_folder.read_chunk(chunk)
                if values.dtype != self._model_tensors[name].torch_dtype:
                    raise ValueError(f"it holds another dtype than {METADATA_FILE} says")
                self._last = chunk, values
            except Exception as error:  # bytes that are no tensor may raise anything
                raise InputError(f"model: cannot read {self.folder / chunk.file}: {describe_error(error)}") from None
        return self._last[1]


def _open_folder(folder: Path) -> DcpFolder:
    try:
        return read_dcp(folder)
    except Exception as error:  # a file that is no pickle, or another one, may raise anything
        raise InputError(f"model: cannot read {folder / METADATA_FILE}: {describe_error(error)}") from None


DCP_FILES = re.compile(r"__\d+_\d+\.distcp")


def write_dcp(
    folder: Path,
    chunks: Iterable[OutputChunk],
    read: ReadBox,
    bytes_per_file: int,
    objects: Mapping[str, bytes] | None = None,
) -> None:
    """Write chunks, and `objects` that `torch.save` already serialised, by name. Raises `OSError`, also if the disk is full."""
    # torch.distributed.checkpoint takes a second to import, for which a rank that only trains should not wait.

    metadata = DcpMetadata()
    files = group_into_files(chunks, bytes_per_file)
    for number, file_chunks in enumerate(files):
        name = f"__0_{number}.distcp"
        with (folder / name).open("wb") as file:
            for chunk in file_chunks:
                start = file.tell()
                torch_save(chunk.assemble_values(read), file)
                metadata.add_tensor(chunk, name, start, file.tell() - start)
            flush_to_disk(file)
    if objects:
        name = f"__0_{len(files)}.distcp"
        write_synced(folder / name, b"".join(objects.values()))
        metadata.add_objects(objects, name)
    write_synced(folder / METADATA_FILE, metadata.dump())


def torch_save(content: object, file: BinaryIO) -> None:
    """Run `torch.save`, but raise `OSError` on a full disk, where PyTorch's writer would end the process."""
    guarded = _DeferredErrorFile(file)
    torch.save(content, cast(IO[bytes], guarded))
    if guarded.error is not None:
        raise guarded.error


class _DeferredErrorFile:
    """A file that keeps the first error and discards what is written after it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    # PyTorch's zip writer is C++ and ends the process if the file object raises, for example on a full disk. So an error is kept,
    # and raised after `torch.save` returns.
    def write(self, content: bytes) -> int:
        try:
            if self.error is None:
                self.file.write(content)
        except OSError as error:
            self.error = error
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        """Do nothing: the file is flushed when it is complete."""
