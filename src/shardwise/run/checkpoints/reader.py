"""Read a checkpoint: verify its checksums, fill the shards of a state on any number of ranks, or load its weights in
one process.

`load` fills a state on all ranks together. `load_tensors` loads tensors by a prefix of their names. `open_checkpoint`
verifies a checkpoint and gives access to any box of any of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.batch_size.batch_schedule import BATCH_RAMP_KEY
from shardwise.records.run_folder import RUN_KEY
from shardwise.run.checkpoints import dcp_reader
from shardwise.run.checkpoints.manifest import (
    DAMAGE_FIX,
    MANIFEST,
    SCHEMA,
    CheckpointState,
    Schema2Files,
    StoredTensor,
    TensorChunk,
    TensorShard,
    describe_tensor,
    dtype_name,
    read_payload,
    split_into_boxes,
    split_state,
    view_shape,
)
from shardwise.run.checkpoints.process_group import CheckpointGroup
from shardwise.values import (
    CHECKSUM_KEY,
    Box,
    DamagedFileError,
    FileChecksum,
    InputError,
    Shape,
    describe_checksum_problem,
    raise_problems,
)


class CheckpointFiles(Protocol):
    """The files of a checkpoint of either schema, as checkpoint.json describes them."""

    @property
    def step(self) -> int: ...
    @property
    def values(self) -> Mapping[str, Any]: ...
    @property
    def files(self) -> Mapping[str, FileChecksum]: ...
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Return the tensors, once the files are verified."""

    def read_chunk(self, chunk: TensorChunk, dtype: torch.dtype) -> Tensor:
        """Return the elements of a chunk, in its shape."""


SCHEMAS: Mapping[str, Callable[[Path, Mapping[str, Any]], CheckpointFiles]] = {
    SCHEMA: Schema2Files,
    dcp_reader.SCHEMA_1: dcp_reader.Schema1Files,
}


@dataclass(frozen=True, slots=True)
class OpenCheckpoint:
    """A checkpoint whose files are verified."""

    files: CheckpointFiles
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str, shape: Shape, box: Box) -> Tensor:
        """Return a box of a tensor; `shape` is the tensor's own, or that of the flattened tensor. Only the box is read."""
        values = torch.empty(box.lengths, dtype=self.tensors[name].torch_dtype)
        self.fill(name, TensorShard(shape, box.offsets, values))
        return values

    def fill(self, name: str, shard: TensorShard) -> None:
        """Fill a shard of a tensor in place; its shape and dtype must fit."""
        tensor = self.tensors[name]
        shape = common_shape(shard.shape, tensor.shape)
        assert shape is not None
        if len(shard.offsets) == 1 and all(len(chunk.offsets) == 1 for chunk in tensor.parts):
            shape = view_shape(shape, 1)
        targets = list(split_into_boxes(shape, shard.box, shard.values))
        first, last = shard.box.span(view_shape(shape, len(shard.offsets)))
        for chunk in tensor.parts:
            start, stop = chunk.box.span(view_shape(shape, len(chunk.offsets)))
            if shard.box.volume and start < last and first < stop:
                _copy_overlap(shape, chunk, self.files.read_chunk(chunk, tensor.torch_dtype), targets)


def _copy_overlap(shape: Shape, chunk: TensorChunk, values: Tensor, targets: list[tuple[Any, Tensor]]) -> None:
    """Copy what a chunk has of the target boxes."""
    for source_box, source in split_into_boxes(shape, chunk.box, values):
        for box, target in targets:
            shared = source_box.intersection(box)
            if shared is not None:
                target[shared.seen_from(box).slices].copy_(source[shared.seen_from(source_box).slices])


def common_shape(first: Shape, second: Shape) -> Shape | None:
    """Return the shape of a tensor known by two shapes, which are equal or one of which is flattened; None for other
    pairs."""
    if first == second or len(second) == 1:
        shape = first
    elif len(first) == 1:
        shape = second
    else:
        return None
    return shape if view_shape(first, 1) == view_shape(second, 1) else None


def open_checkpoint(path: Path, ranks: CheckpointGroup) -> OpenCheckpoint:
    """Open a checkpoint after verifying the checksums of its files, divided among the ranks, which all call this.
    Raises on all ranks `DamagedFileError` for damaged files, and `InputError` for another schema."""
    payload = ranks.run_on_all(lambda: read_payload(path))
    if len(set(map(str, ranks.all_gather(lambda: payload.get(CHECKSUM_KEY))))) > 1:
        raise InputError(f"checkpoint: ranks find different files as {path / MANIFEST}; one folder for all is required")
    files = ranks.run_on_all(lambda: checkpoint_files(path, payload))
    _require_undamaged(path, files.files, ranks)
    return OpenCheckpoint(files, ranks.run_on_all(files.tensors))


def checkpoint_files(path: Path, payload: Mapping[str, Any]) -> CheckpointFiles:
    """Return the files of a checkpoint by its checkpoint.json. Raises `DamagedFileError` for a damaged one, and
    `InputError` for another schema."""
    schema = str(payload.get("schema"))
    if schema not in SCHEMAS:
        raise (DamagedFileError if describe_checksum_problem(payload) else InputError)(
            f"checkpoint: {path / MANIFEST}: found schema {schema!r}; {' or '.join(SCHEMAS)} is required: read it with the "
            "version of Shardwise that wrote it"
        )
    return SCHEMAS[schema](path, payload)


def _require_undamaged(path: Path, files: Mapping[str, FileChecksum], ranks: CheckpointGroup) -> None:
    """Raise `DamagedFileError` on all ranks that names the damaged files."""

    def faults() -> list[str]:
        local_names = [name for number, name in enumerate(sorted(files)) if number % ranks.size == ranks.rank]
        return [f"{path / name} {fault}" for name in local_names if (fault := files[name].describe_damage(path / name))]

    damage = [fault for rank in ranks.all_gather(faults) for fault in rank]
    if damage:
        raise DamagedFileError(*(f"checkpoint: {fault}; {DAMAGE_FIX}" for fault in damage))


MAX_NAMES_SHOWN = 4  # names of tensors in a message
MODEL_PREFIX = "model."  # of the names of a model's weights
BUFFER_PREFIX = "buffer."  # of the names of its buffers (`TrainingEngine.buffers`)
NUM_LEFT_OUT = "num_left_out"  # steps that did not update the weights
ADDED_VALUES = frozenset({NUM_LEFT_OUT, BATCH_RAMP_KEY, RUN_KEY})  # values that checkpoints of earlier versions lack
LOAD_FIX = "load it with the plan and the optimizer that it was saved with"
# In names of scales of a parameter's parts, followed by the number of parts (`run.parallel.sharded_optimizer`).
PARTIAL_SCALES = "_scales_of_"
PARTIAL_SCALES_FIX = (
    "its moments have scales of the parts that tensor and expert parallelism make, which those degrees alone read: plan again "
    "with the degrees that it was saved with"
)
RequiredTensor = tuple[str, Shape, str]  # name of a shard, shape of its tensor, dtype


def load(path: str | Path, state: CheckpointState, ranks: CheckpointGroup | None = None) -> dict[str, Any]:
    """Fill the shards of `state` in place, on any ranks, and return the plain values.

    All ranks call this together (`ranks`: all of the job). Their names together must be those of the checkpoint; shapes
    and dtypes must agree, but for tensors that are flattened on one side. Raises `InputError` on all ranks if they do
    not, and its subclass `DamagedFileError` for a folder that is damaged or no checkpoint; no shard is changed then.
    """
    path, ranks = Path(path), ranks or CheckpointGroup.join()
    checkpoint = open_checkpoint(path, ranks)
    shards, values = split_state(state)
    local_tensors = [(name, shard.shape, dtype_name(shard.values.dtype)) for name, shard in shards]
    gathered = ranks.gather_to_first(lambda: (local_tensors, list(values)))

    def compare() -> None:
        required = dict.fromkeys(
            (name, tuple(shape), dtype) for tensors, _ in gathered or () for name, shape, dtype in tensors
        )
        raise_problems(list(_tensor_problems(path, list(required), checkpoint.tensors)))
        required_names = {name for _, value_names in gathered or () for name in value_names}
        raise_problems(
            list(
                _name_problems(
                    path, "values", required_names - ADDED_VALUES, set(checkpoint.files.values) - ADDED_VALUES
                )
            )
        )

    ranks.run_on_first(compare)

    def fill() -> None:
        for name, shard in shards:
            checkpoint.fill(name, shard)

    ranks.all_gather(fill)
    return dict(checkpoint.files.values)


def load_tensors(path: str | Path, prefix: str = MODEL_PREFIX) -> dict[str, Tensor]:
    """Load all tensors whose names begin with `prefix` into the CPU memory of this process, by the rest of their names.
    For "model." these are the parameters. Raises `InputError` as `load` does."""
    path = Path(path)
    checkpoint = open_checkpoint(path, CheckpointGroup())
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if name.startswith(prefix)}
    if not shapes:
        available = _join_names(sorted(checkpoint.tensors))
        raise InputError(f"checkpoint: no tensor of {path} begins with {prefix!r}; found {available}")
    boxes = {name: Box((0,) * len(shape), shape) for name, shape in shapes.items()}
    return {name.removeprefix(prefix): checkpoint.read(name, shapes[name], box) for name, box in boxes.items()}


def _tensor_problems(
    path: Path, required: Sequence[RequiredTensor], stored: Mapping[str, StoredTensor]
) -> Iterator[str]:
    yield from _name_problems(path, "tensors", {name for name, _, _ in required}, set(stored))
    mismatched = [
        (name, shape, dtype)
        for name, shape, dtype in required
        if name in stored and (dtype != stored[name].dtype or common_shape(shape, stored[name].shape) is None)
    ]
    for name, shape, dtype in mismatched[:MAX_NAMES_SHOWN]:
        stored_kind = describe_tensor(stored[name].shape, stored[name].dtype)
        yield f"checkpoint: {path} has {stored_kind} as {name}; {describe_tensor(shape, dtype)} is required: {LOAD_FIX}"
    if len(mismatched) > MAX_NAMES_SHOWN:
        yield f"checkpoint: {path} differs in {len(mismatched) - MAX_NAMES_SHOWN} more tensors"


def _name_problems(path: Path, label: str, required: set[str], stored: set[str]) -> Iterator[str]:
    differences = {"lacks": sorted(required - stored), "has, besides those of this run,": sorted(stored - required)}
    for verb, names in differences.items():
        if names:
            fix = PARTIAL_SCALES_FIX if any(PARTIAL_SCALES in name for name in required ^ stored) else LOAD_FIX
            yield f"checkpoint: {path} {verb} {len(names)} {label}: {_join_names(names)}; the same names are required: {fix}"


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (", ..." if len(names) > MAX_NAMES_SHOWN else "")
