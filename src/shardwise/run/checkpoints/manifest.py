"""The manifest of a checkpoint, checkpoint.json: step, plain values, place of each box of a tensor, file checksums.

{"schema": "shardwise.checkpoint/2", "step": 200, "values": {"step": 200, ...},
 "tensors": {"model.layers.0.wq": {"shape": [512, 8, 64], "dtype": "bfloat16", "parts": [
    {"offsets": [0], "lengths": [131072], "file": "rank-00000.bin", "start": 0}, ...]}, ...},
 "files": {"rank-00000.bin": {"bytes": 262144, "crc32": 907060870}, ...},
 "crc32": 3421780262}

A part with an offset for each dim is a box of the tensor; with one offset it is an interval of the flattened tensor (row-major).
Parts of a tensor do not overlap, and cover all of it. Files hold the elements of their parts, each part row-major and
little-endian from its start on. The last checksum is that of the rest of checkpoint.json.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.run.checkpoints.tensor_shards import dtype_name, view_shape
from shardwise.values import (
    CHECKSUM_KEY,
    Box,
    DamagedFileError,
    FileChecksum,
    InputError,
    Shape,
    describe_checksum_problem,
    parse_dataclass,
    write_synced,
)
from shardwise.values.boxes import tiles
from shardwise.values.checksums import add_checksum

AnyManifest = TypeVar("AnyManifest")
MANIFEST = "checkpoint.json"
SCHEMA = "shardwise.checkpoint/2"
RANK_FILE_PATTERN = re.compile(r"rank-\d{5,}\.bin")
ALIGNMENT_BYTES = 64  # bytes: a chunk starts at a multiple, so that any dtype can be mapped in place
DTYPES = {dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
DAMAGE_FIX = "what was written is required: remove the folder, and the checkpoint before it is the latest"


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a tensor, or an interval of the flattened one, and the byte at which its elements start in a file."""

    offsets: Shape
    lengths: Shape
    file: str
    start: int

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.lengths)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's full shape, its dtype by PyTorch's name, and its chunks."""

    shape: Shape
    dtype: str
    parts: tuple[TensorChunk, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint."""

    step: int
    values: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, FileChecksum]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and flush it to disk."""
    content = json.dumps(add_checksum({"schema": SCHEMA, **asdict(manifest)}))
    write_synced(folder / MANIFEST, content.encode("utf-8") + b"\n")


def read_payload(folder: Path) -> dict[str, Any]:
    """Return the content of the manifest. Raises `DamagedFileError` if it is missing or damaged."""
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
        payload = json.loads(text)
    except OSError as error:
        raise DamagedFileError(
            f"checkpoint: cannot read {path}: {error.strerror}; a folder step-... that a run has written is required"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"checkpoint: {path} is not JSON: {error}; {DAMAGE_FIX}") from None
    if not isinstance(payload, dict):
        raise DamagedFileError(f"checkpoint: {path} holds a {type(payload).__name__}; {DAMAGE_FIX}")
    if (
        payload.get("schema") == SCHEMA
        and not describe_checksum_problem(payload)
        and text.removesuffix("\n") != json.dumps(payload)
    ):
        raise DamagedFileError(
            f"checkpoint: {path} is damaged (the same content, written in another way); {DAMAGE_FIX}"
        )
    return payload


class Schema2Files:
    """A checkpoint of schema 2. Raises `DamagedFileError` if its manifest is not as written, or contradicts itself."""

    def __init__(self, folder: Path, payload: Mapping[str, Any]) -> None:
        self.folder = folder
        manifest = _parse_manifest(folder / MANIFEST, payload)
        self.step, self.values, self.files = manifest.step, manifest.values, manifest.files
        self._tensors = manifest.tensors

    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def read_chunk(self, chunk: TensorChunk, dtype: torch.dtype) -> Tensor:
        """Return the elements of a chunk, in its shape, mapped from its file."""
        num_bytes = chunk.box.volume * dtype.itemsize
        file = torch.from_file(str(self.folder / chunk.file), size=chunk.start + num_bytes, dtype=torch.uint8)
        return file[chunk.start :].view(dtype).view(chunk.lengths)


def parse_fields(manifest_type: type[AnyManifest], path: Path, fields: Mapping[str, Any]) -> AnyManifest:
    """Return a manifest of either schema from its fields. Raises `DamagedFileError`."""
    try:
        return parse_dataclass(manifest_type, fields, f"checkpoint: {path}")
    except InputError as error:
        raise DamagedFileError(*error.problems) from None


def _parse_manifest(path: Path, payload: Mapping[str, Any]) -> Manifest:
    if fault := describe_checksum_problem(payload):
        raise DamagedFileError(f"checkpoint: {path} {fault}; {DAMAGE_FIX}")
    fields = {key: value for key, value in payload.items() if key not in ("schema", CHECKSUM_KEY)}
    manifest = parse_fields(Manifest, path, fields)
    for problem in _manifest_problems(manifest):
        raise DamagedFileError(f"checkpoint: {path}: {problem}; {DAMAGE_FIX}")
    return manifest


def _manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what contradicts itself in a manifest, which may come from a stranger."""
    yield from (f"a file is called {name!r}" for name in manifest.files if not RANK_FILE_PATTERN.fullmatch(name))
    for name, tensor in manifest.tensors.items():
        fault = tensor_problem(tensor)
        misplaced = (chunk for chunk in tensor.parts if not fault and not _lies_in_file(chunk, tensor, manifest))
        yield from (f"{name} has a part at byte {chunk.start:,} of {chunk.file!r}" for chunk in misplaced)
        if fault:
            yield f"{name} has {fault}"


def tensor_problem(tensor: StoredTensor) -> str:
    """Return what is wrong with a tensor's dtype and chunks, in words; "" if nothing is."""
    if tensor.dtype not in DTYPES:
        return f"the format {tensor.dtype!r}"
    num_offsets = {len(chunk.offsets) for chunk in tensor.parts} or {1}
    if len(num_offsets) > 1 or not num_offsets <= {1, len(tensor.shape)}:
        return f"parts of {sorted(num_offsets)} dims and the shape {list(tensor.shape)}"
    return tiles([chunk.box for chunk in tensor.parts], view_shape(tensor.shape, *num_offsets))


def _lies_in_file(chunk: TensorChunk, tensor: StoredTensor, manifest: Manifest) -> bool:
    file = manifest.files.get(chunk.file)
    end = chunk.start + chunk.box.volume * tensor.torch_dtype.itemsize
    return file is not None and chunk.start >= 0 and chunk.start % ALIGNMENT_BYTES == 0 and end <= file.bytes
