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

from shardwise.interop.weights.stored_slices import Entry, Read, in_files
from shardwise.run.checkpoints.dcp_reader import METADATA, DcpFolder, read_dcp
from shardwise.run.checkpoints.manifest import Part
from shardwise.values.boxes import Box, Shape
from shardwise.values.checksums import sync, write_synced
from shardwise.values.errors import InputError


class DcpTensors:
    """Those whose names a pattern begins with. Raises `InputError` for a folder that is not what was written."""

    def __init__(self, folder: Path, own: re.Pattern[str]) -> None:
        self.folder = folder
        self._held = _opened(folder)
        self._own = {name: tensor for name, tensor in self._held.tensors.items() if own.match(name)}
        self._last: tuple[Part, Tensor] | None = None  # boxes of one part are asked for one after the other

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        return {("", name): tensor.shape for name, tensor in self._own.items()}

    def dtype(self) -> torch.dtype:
        return self._own[min(self._own)].format

    def read(self, file: str, name: str, box: Box) -> Tensor:
        """A box of a tensor: a view of the part that has it, or what several have."""
        tensor, found = self._own[name], None
        for part in tensor.parts:
            shared = part.box.intersection(box)
            if shared is None:
                continue
            values = self._elements(part)[shared.seen_from(part.box).slices]
            if shared == box:
                return values
            found = torch.empty(box.lengths, dtype=tensor.format) if found is None else found
            found[shared.seen_from(box).slices] = values
        assert found is not None, f"no part has {box} of {name}"
        return found

    def _elements(self, part: Part) -> Tensor:
        if self._last is None or self._last[0] is not part:
            self._last = None  # before the next one is read
            try:
                self._last = part, self._held.elements(part)
            except Exception as error:  # of what is no tensor, anything may be raised
                raise InputError(f"model: cannot read {self.folder / part.file}: {_first_line(error)}") from None
        return self._last[1]


def _opened(folder: Path) -> DcpFolder:
    try:
        return read_dcp(folder)
    except Exception as error:  # of what is no pickle, or another one, anything may be raised
        raise InputError(f"model: cannot read {folder / METADATA}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0]


FILES = re.compile(r"__\d+_\d+\.distcp")


def write_dcp(
    folder: Path, entries: Iterable[Entry], read: Read, bytes_per_file: int, objects: Mapping[str, bytes] | None = None
) -> None:
    """Write entries, and beside them what `torch.save` made of some objects. Raises `OSError`, of a full disk too."""
    from shardwise.interop.weights.dcp_metadata import Index  # which takes a rank that only trains a second to import

    index = Index()
    files = in_files(entries, bytes_per_file)
    for number, found in enumerate(files):
        name = f"__0_{number}.distcp"
        with (folder / name).open("wb") as file:
            for entry in found:
                start = file.tell()
                save(entry.value(read), file)
                index.add_tensor(entry, name, start, file.tell() - start)
            sync(file)
    if objects:
        name = f"__0_{len(files)}.distcp"
        write_synced(folder / name, b"".join(objects.values()))
        index.add_objects(objects, name)
    write_synced(folder / METADATA, index.dump())


def save(content: object, file: BinaryIO) -> None:
    """What `torch.save` does, but for a full disk, of which its writer ends the process: it is an `OSError`."""
    guarded = _Guarded(file)
    torch.save(content, cast(IO[bytes], guarded))
    if guarded.fault is not None:
        raise guarded.fault


class _Guarded:
    """A file that keeps to itself what goes wrong, as long as it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.fault: OSError | None = None

    def write(self, content: bytes) -> int:
        try:
            if self.fault is None:
                self.file.write(content)
        except OSError as error:
            self.fault = error
        return len(content)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        return self.file.tell()

    def flush(self) -> None:
        """Nothing: the file is flushed when it is complete."""
