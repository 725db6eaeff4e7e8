"""The content of a checkpoint, a rank's boxes of tensors and plain values, and its manifest, checkpoint.json: step, plain values,
place of each box of a tensor, file checksums.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwise.values import (
    CHECKSUM_KEY,
    Box,
    DamagedFileError,
    FileChecksum,
    FileMessages,
    InputError,
    Shape,
    decode_text,
    describe_checksum_problem,
    interval_boxes,
    parse_dataclass,
    parse_json,
    read_bytes,
    write_synced,
)
from shardwise.values.boxes import tiles
from shardwise.values.durable_files import add_checksum

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A rank's box of a tensor of full shape `shape`: it begins at `offsets` and has the shape of `values`.

    With one offset it is an interval of the flattened tensor (row-major), and `values` are [n]; otherwise offsets and
    values have the dims of the tensor. `values` may be empty, of any dtype, on any device. Boxes of two ranks are equal
    (replicas) or do not overlap. Raises `ValueError` for a box outside the tensor.

    >>> import torch
    >>> TensorShard((4, 6), (2, 0), torch.zeros(2, 6)).box
    Box(offsets=(2, 0), lengths=(2, 6))
    >>> TensorShard((4, 6), (13,), torch.zeros(8)).view
    (24,)
    """

    shape: Shape
    offsets: Shape
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != len(self.offsets) or len(self.offsets) not in (1, len(self.shape)):
            raise ValueError(
                f"a piece of {self.values.ndim} dims has {len(self.offsets)} offsets in a tensor of shape {self.shape}; one "
                "offset for each dim is required, or one in the flattened tensor"
            )
        if not self.box.fits(self.view):
            raise ValueError(f"a piece is {self.box} of shape {self.view}; one inside is required")

    @property
    def box(self) -> Box:
        """The box, in the shape `view`."""
        return Box(self.offsets, tuple(self.values.shape))

    @property
    def view(self) -> Shape:
        """The shape that offsets count in: the tensor's own, or that of the flattened tensor."""
        return view_shape(self.shape, len(self.offsets))

    @property
    def kind(self) -> str:
        """Shape and dtype in words, which must agree between a checkpoint and its reader."""
        return describe_tensor(self.shape, self.values.dtype)


CheckpointState = Mapping[str, TensorShard | tuple[TensorShard, ...] | Json]  # a tuple: several shards of one tensor


def view_shape(shape: Shape, num_offsets: int) -> Shape:
    """Return the shape in which a box with so many offsets lies."""
    return shape if len(shape) == num_offsets else (math.prod(shape),)


def split_into_boxes(shape: Shape, box: Box, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes of `shape` that make up a box or an interval of the flattened tensor, each with a view of its
    values."""
    if len(box.offsets) == len(shape):
        yield box, values
        return
    (start,), (length,) = box.offsets, box.lengths
    position = 0
    for part_box in interval_boxes(shape, start, start + length):
        yield part_box, values[position : position + part_box.volume].view(part_box.lengths)
        position += part_box.volume


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype without "torch."; a name stays as it is."""
    return str(dtype).removeprefix("torch.")


def describe_tensor(shape: Shape, dtype: object) -> str:
    return f"{list(shape)} of {dtype_name(dtype)}"


def split_state(state: CheckpointState) -> tuple[list[tuple[str, TensorShard]], dict[str, Any]]:
    """Return the named shards and the plain values of a state. Raises `ValueError` for a value that JSON does not
    restore exactly."""
    shards_by_name = {name: _shards_of(value) for name, value in state.items()}
    named_shards = [(name, shard) for name, shards in shards_by_name.items() for shard in shards]
    values = {name: value for name, value in state.items() if not shards_by_name[name]}
    for name, value in values.items():
        try:
            survives_json = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            survives_json = False
        if not survives_json:
            raise ValueError(f"{name} is {value!r}; a Piece or a value that JSON keeps as it is is required")
    return named_shards, values


def _shards_of(value: object) -> tuple[TensorShard, ...]:
    candidates = value if isinstance(value, tuple) else (value,)
    return tuple(candidate for candidate in candidates if isinstance(candidate, TensorShard))


AnyManifest = TypeVar("AnyManifest")
MANIFEST = "checkpoint.json"
MAX_MANIFEST_BYTES = 1_000_000_000  # 100 bytes for each of ten million chunks
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
    missing = FileMessages("checkpoint: ", "a folder step-... that a run has written is required", DamagedFileError)
    damaged = FileMessages("checkpoint: ", DAMAGE_FIX, DamagedFileError)
    text = decode_text(read_bytes(path, missing, MAX_MANIFEST_BYTES), str(path), damaged)
    payload = parse_json(text, str(path), damaged, max_values=MAX_MANIFEST_BYTES)
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
