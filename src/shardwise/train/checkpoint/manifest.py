"""A checkpoint's own file: format, step, plain values, and the size and sum of every other file, by which damage is found."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import InputError, require
from shardwise.planning.codec import parse
from shardwise.train.checkpoint.ranks import Ranks
from shardwise.train.data.writer import write_synced

MANIFEST = "checkpoint.json"
SCHEMA = "shardwise.checkpoint/1"
BLOCK = 1 << 22  # bytes read at a time: large enough that zlib.crc32 lets other threads run (from 5 KiB on)
WRITER = re.compile(r"__(\d+)_")  # torch.distributed.checkpoint names a file by the rank that wrote it
AGAIN = "remove its folder, and the checkpoint before it is the latest"


@dataclass(frozen=True, slots=True)
class Sum:
    """A file's size in bytes and its CRC-32."""

    bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    step: int
    values: Mapping[str, Any]
    files: Mapping[str, Sum]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    content = json.dumps({"schema": SCHEMA, **asdict(manifest)}, indent=2, sort_keys=True) + "\n"
    write_synced(folder / MANIFEST, content.encode("utf-8"))


def read_manifest(folder: Path) -> Manifest:
    """Raises `InputError` for a folder that is no checkpoint, for one of another version, and for a file that is damaged."""
    path = folder / MANIFEST
    try:
        payload = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"checkpoint: cannot read {path}: {error.strerror}; a folder step-... that a run has written is required"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"checkpoint: {path} is no JSON: {error}; what was written is required: {AGAIN}") from None
    schema = payload.pop("schema", None) if isinstance(payload, dict) else type(payload).__name__
    if schema != SCHEMA:
        raise InputError(f"checkpoint: {path}: found schema {schema!r}; {SCHEMA!r} is required: {AGAIN}")
    return parse(Manifest, payload, f"checkpoint: {path}")


def sums(folder: Path, names: Iterable[str], ranks: Ranks) -> dict[str, Sum]:
    """Size and sum of each file there is of `names`; a rank reads those that the rank of its number has written."""

    def own() -> dict[str, Sum]:
        mine = [name for name in names if _writer(name) % ranks.size == ranks.rank]
        return {name: _sum(folder / name) for name in mine if (folder / name).is_file()}

    return {name: found for part in ranks.agree(own) for name, found in part.items()}


def require_undamaged(folder: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Raise `InputError`, on all ranks, that names the files that are not what was written."""
    found = sums(folder, manifest.files, ranks)
    require(
        [
            f"checkpoint: {folder / name} {_fault(found.get(name), written)}; what was written is required: {AGAIN}"
            for name, written in manifest.files.items()
            if found.get(name) != written
        ]
    )


def _fault(found: Sum | None, written: Sum) -> str:
    if found is None:
        return "is missing"
    if found.bytes != written.bytes:
        return f"has {found.bytes:,} bytes of {written.bytes:,}"
    return "is damaged (another CRC-32)"


def _writer(name: str) -> int:
    match = WRITER.match(name)
    return int(match[1]) if match else 0


def _sum(path: Path) -> Sum:
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return Sum(size, crc)
