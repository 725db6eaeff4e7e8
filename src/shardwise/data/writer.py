"""Writes a folder of token shards: all of it or nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardwise.data.blocks import BlockWriter
from shardwise.data.index import (
    ENDS_DTYPE,
    INDEX_FILE,
    SHARD_FILE,
    TOKENIZER_FILE,
    Index,
    Shard,
    Split,
    index_payload,
)
from shardwise.errors import InputError
from shardwise.files import sync, write_synced

Tokens = np.ndarray[tuple[int], np.dtype[Any]]


class SplitWriter:
    """Writes the shards of one split into a folder, document by document; a document lies in one shard."""

    def __init__(self, folder: Path, name: str, shard_tokens: int) -> None:
        self.folder, self.name, self.shard_tokens = folder, name, shard_tokens
        self.shards: list[Shard] = []
        self.text_bytes = 0
        self._file: BinaryIO | None = None
        self._begin()

    def _begin(self) -> None:
        self._hash, self._blocks, self._ends = hashlib.sha256(), BlockWriter(), array("q")

    def add(self, tokens: Tokens, text_bytes: int) -> None:
        """Append a document: its tokens with its end."""
        if self._file is not None and self._ends[-1] + len(tokens) > self.shard_tokens:
            self._close_shard()
        if self._file is None:
            self._file = (self.folder / f"{self._shard_name()}.tokens").open("wb")
        data = tokens.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._blocks.add(data)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(tokens))
        self.text_bytes += text_bytes

    def finish(self) -> Split:
        """Close the last shard; what was written."""
        self._close_shard()
        return Split(shards=tuple(self.shards), text_bytes=self.text_bytes)

    def abandon(self) -> None:
        """Close the open file without finishing it."""
        if self._file is not None:
            self._file.close()

    def _shard_name(self) -> str:
        return f"{self.name}-{len(self.shards):05d}"

    def _close_shard(self) -> None:
        if self._file is None:
            return
        sync(self._file)
        self._file.close()
        ends, sums = np.array(self._ends, ENDS_DTYPE).tobytes(), self._blocks.finish()
        shard = Shard(
            name=self._shard_name(), num_tokens=self._ends[-1], num_documents=len(self._ends),
            tokens_sha256=self._hash.hexdigest(), ends_crc32=zlib.crc32(ends), sums_crc32=zlib.crc32(sums),
        )  # fmt: skip
        write_synced(self.folder / shard.ends_file, ends)
        write_synced(self.folder / shard.sums_file, sums)
        self.shards.append(shard)
        self._file = None
        self._begin()


def write_index(folder: Path, index: Index, tokenizer: bytes) -> None:
    """The tokenizer and, last of all files, the index."""
    write_synced(folder / TOKENIZER_FILE, tokenizer)
    write_synced(folder / INDEX_FILE, (json.dumps(index_payload(index), indent=2) + "\n").encode("utf-8"))


@contextlib.contextmanager
def whole_folder(out: str | Path, *, force: bool = False) -> Iterator[Path]:
    """A new folder beside `out` that takes its place when the block ends, and is gone when the block fails.

    Raises `InputError` before anything is written where `out` cannot be written, or holds something: with `force` token shards
    are replaced, and nothing else ever is.
    """
    target = _resolved(Path(out))
    _require_free(target, force)
    part = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
    try:
        try:
            part.mkdir()
        except (OSError, ValueError) as error:
            raise _cannot_write(target, error) from None
        yield part
        _put_in_place(part, target)
    except OSError as error:
        raise _cannot_write(target, error) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _resolved(path: Path) -> Path:
    """The folder itself where `path` is a link to it."""
    try:
        target = path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, links in a circle
        raise _cannot_write(path, error) from None
    if Path.cwd().is_relative_to(target):
        raise InputError(f"--out: {path} is the folder that this runs in; a folder of its own is required")
    return target


def _put_in_place(part: Path, target: Path) -> None:
    """Rename the folder; what was there before steps aside first and is removed last."""
    old = part.with_suffix(".old")
    there = target.is_dir()
    if there:
        os.rename(target, old)
    try:
        os.rename(part, target)
    except OSError:
        if there:
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _require_free(target: Path, force: bool) -> None:
    try:
        names = {entry.name for entry in target.iterdir()} if target.is_dir() else set()
        there = target.exists() and not target.is_dir()
    except (OSError, ValueError) as error:
        raise _cannot_write(target, error) from None
    if there:
        raise InputError(f"--out: {target} is a file; a folder is required: choose another name")
    if not names:
        return
    others = sorted(name for name in names - {INDEX_FILE, TOKENIZER_FILE} if not SHARD_FILE.fullmatch(name))
    if not any(map(SHARD_FILE.fullmatch, names)):
        raise InputError(f"--out: {target} holds files that tokenize did not write; choose a new folder")
    if not force:
        raise InputError(
            f"--out: {target} holds token shards already; choose a new folder, or replace them with --force"
        )
    if others:
        raise InputError(
            f"--out: {target} holds {others[0]!r} beside token shards; only these are replaced: move it, or choose a new folder"
        )


def _cannot_write(target: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"--out: cannot write {target}: {reason}; choose a folder that can be written")
