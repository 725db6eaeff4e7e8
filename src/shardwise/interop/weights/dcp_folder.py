"""The tensors of a model in a folder of torch.distributed.checkpoint, read and written; one chunk is in memory at a time.

Each chunk is what `torch.save` writes of it, one behind the other in files of some bytes; `.metadata` says where. Source:
torch.distributed.checkpoint, metadata.py and filesystem.py of PyTorch 2.13.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch
from torch import Tensor

from shardwise.interop.weights.stored_slices import OutputChunk, ReadBox, group_into_files
from shardwise.run.checkpoints.dcp_reader import METADATA_FILE, DcpFolder, read_dcp
from shardwise.run.checkpoints.manifest import TensorChunk
from shardwise.values.boxes import Box, Shape
from shardwise.values.checksums import flush_to_disk, write_synced
from shardwise.values.errors import InputError


class DcpModelFolder:
    """Those whose names a pattern begins with. Raises `InputError` for a folder that is not what was written."""

    def __init__(self, folder: Path, own: re.Pattern[str]) -> None:
        self.folder = folder
        self._dcp_folder = _open_folder(folder)
        self._model_tensors = {name: tensor for name, tensor in self._dcp_folder.tensors.items() if own.match(name)}
        self._last: tuple[TensorChunk, Tensor] | None = None  # boxes of one part are asked for one after the other

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        return {("", name): tensor.shape for name, tensor in self._model_tensors.items()}

    def dtype(self) -> torch.dtype:
        return self._model_tensors[min(self._model_tensors)].torch_dtype

    def read(self, file: str, name: str, box: Box) -> Tensor:
        """A box of a tensor: a view of the part that has it, or what several have."""
        tensor, found = self._model_tensors[name], None
        for part in tensor.parts:
            shared = part.box.intersection(box)
            if shared is None:
                continue
            values = self._read_chunk(part)[shared.seen_from(part.box).slices]
            if shared == box:
                return values
            found = torch.empty(box.lengths, dtype=tensor.torch_dtype) if found is None else found
            found[shared.seen_from(box).slices] = values
        assert found is not None, f"no part has {box} of {name}"
        return found

    def _read_chunk(self, part: TensorChunk) -> Tensor:
        if self._last is None or self._last[0] is not part:
            self._last = None  # before the next one is read
            try:
                self._last = part, self._dcp_folder.read_chunk(part)
            except Exception as error:  # of what is no tensor, anything may be raised
                raise InputError(f"model: cannot read {self.folder / part.file}: {_first_line(error)}") from None
        return self._last[1]


def _open_folder(folder: Path) -> DcpFolder:
    try:
        return read_dcp(folder)
    except Exception as error:  # of what is no pickle, or another one, anything may be raised
        raise InputError(f"model: cannot read {folder / METADATA_FILE}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


DCP_FILES = re.compile(r"__\d+_\d+\.distcp")


def write_dcp(
    folder: Path,
    entries: Iterable[OutputChunk],
    read: ReadBox,
    bytes_per_file: int,
    objects: Mapping[str, bytes] | None = None,
) -> None:
    """Write entries, and beside them what `torch.save` made of some objects. Raises `OSError`, of a full disk too."""
    from shardwise.interop.weights.dcp_metadata import (
        DcpMetadata,  # which takes a rank that only trains a second to import
    )

    index = DcpMetadata()
    files = group_into_files(entries, bytes_per_file)
    for number, found in enumerate(files):
        name = f"__0_{number}.distcp"
        with (folder / name).open("wb") as file:
            for entry in found:
                start = file.tell()
                torch_save(entry.assemble_values(read), file)
                index.add_tensor(entry, name, start, file.tell() - start)
            flush_to_disk(file)
    if objects:
        name = f"__0_{len(files)}.distcp"
        write_synced(folder / name, b"".join(objects.values()))
        index.add_objects(objects, name)
    write_synced(folder / METADATA_FILE, index.dump())


def torch_save(content: object, file: BinaryIO) -> None:
    """What `torch.save` does, but for a full disk, of which its writer ends the process: it is an `OSError`."""
    guarded = _DeferredErrorFile(file)
    torch.save(content, cast(IO[bytes], guarded))
    if guarded.error is not None:
        raise guarded.error


class _DeferredErrorFile:
    """A file that keeps to itself what goes wrong, as long as it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

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
        """Nothing: the file is flushed when it is complete."""
