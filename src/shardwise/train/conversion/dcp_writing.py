"""A folder that torch.distributed.checkpoint reads, written chunk by chunk: of its tensors one chunk is held at a time.

Each chunk is what `torch.save` writes of it, one behind the other in files of some bytes; `.metadata` says where. Source:
torch.distributed.checkpoint, metadata.py and filesystem.py of PyTorch 2.13.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch

from shardwise.files import sync, write_synced
from shardwise.train.checkpoint.dcp import METADATA
from shardwise.train.conversion.entries import Entry, in_files
from shardwise.train.conversion.places import Read

FILES = re.compile(r"__\d+_\d+\.distcp")


def write_dcp(
    folder: Path, entries: Iterable[Entry], read: Read, bytes_per_file: int, objects: Mapping[str, bytes] | None = None
) -> None:
    """Write entries, and beside them what `torch.save` made of some objects. Raises `OSError`, of a full disk too."""
    from shardwise.train.conversion.dcp_index import Index  # which takes a rank that only trains a second to import

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
