"""A model in the files of a framework: any box of a parameter can be read, and no more of the files is read than needed.

Weights in memory and checkpoints offer the same read function (`ReadBox`), so that writers do not know where weights come
from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shardwise.interop.weights.stored_slices import ReadBox, StoredSlice
from shardwise.model import Architecture
from shardwise.run.checkpoints.process_group import CheckpointGroup
from shardwise.run.checkpoints.reader import BUFFER_PREFIX, MODEL_PREFIX, OpenCheckpoint, common_shape, open_checkpoint
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.step import balance_biases
from shardwise.step.rank_program import parameter_shapes
from shardwise.values import Box, InputError, Shape, raise_problems

MAX_NAMES_SHOWN = 4  # tensor names in a message


class TensorFolder(Protocol):
    """The tensors of a folder."""

    @property
    def folder(self) -> Path: ...
    @property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        """Shapes of the model's tensors by file ("" if a name is enough) and name, without what a framework keeps beside them."""

    def read(self, file: str, name: str, box: Box) -> Tensor:
        """Return a box of a tensor, reading as little else as possible."""

    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""


class StoredModel:
    """The model of a folder, whose parameters are read box by box. `biases` are the names of its routers' balance biases.

    Raises `InputError` if the folder's tensors are not those of the architecture; messages name `authority` as its source.
    """

    def __init__(
        self,
        architecture: Architecture,
        slices: Iterable[StoredSlice],
        tensors: TensorFolder,
        authority: str = "the given model",
    ) -> None:
        self.architecture, self.tensors = architecture, tensors
        self.shapes = parameter_shapes(architecture)
        all_slices = list(slices)
        raise_problems(list(_tensor_problems(all_slices, tensors, authority)))
        self.slices: dict[str, list[StoredSlice]] = {}
        for stored_slice in all_slices:
            if not stored_slice.copy:
                self.slices.setdefault(stored_slice.parameter, []).append(stored_slice)
        self.biases = self.slices.keys() - self.shapes.keys()
        raise_problems(list(self._incomplete_parameters(authority)))

    def _incomplete_parameters(self, authority: str) -> Iterator[str]:
        """Yield a problem for each weight that the folder has only a part of: rank files may have fewer layers or rows."""
        stored_counts = {
            name: sum(stored_slice.box.volume for stored_slice in self.slices.get(name, ())) for name in self.shapes
        }
        incomplete = [name for name, shape in self.shapes.items() if stored_counts[name] != math.prod(shape)]
        for name in incomplete[:MAX_NAMES_SHOWN]:
            counts = f"{stored_counts[name]:,} of the {math.prod(self.shapes[name]):,} elements of {name}"
            yield f"model: {self.tensors.folder} has {counts} that {authority} has"

    def read(self, parameter: str, box: Box) -> Tensor:
        """Return a box of a parameter, in the dtype of the files."""
        box_values: Tensor | None = None
        for stored_slice in self.slices[parameter]:
            shared = stored_slice.box.intersection(box)
            if shared is None:
                continue
            shared_values = stored_slice.read_box(partial(self.tensors.read, *stored_slice.tensor_key), shared)
            if shared == box:
                return shared_values
            box_values = torch.empty(box.lengths, dtype=shared_values.dtype) if box_values is None else box_values
            box_values[shared.seen_from(box).slices] = shared_values
        assert box_values is not None, f"no place has {box} of {parameter}"
        return box_values

    def bias(self, name: str) -> Tensor:
        """Return the balance bias [E] of a router, one of `biases`, in fp32 at least."""
        bias = self.read(name, Box((0,), (self.architecture.num_experts,)))
        return bias.to(at_least_fp32(bias.dtype))

    def weights(self, dtype: torch.dtype | None = None) -> ModelWeights:
        """Load all weights to the CPU, in `dtype` or the dtype of the files."""
        weight_dtype = dtype or self.tensors.dtype()
        boxes = {name: Box((0,) * len(shape), shape) for name, shape in self.shapes.items()}
        tensors = {name: self.read(name, box).to(weight_dtype).contiguous() for name, box in boxes.items()}
        return ModelWeights(self.architecture, tensors, {name: self.bias(name) for name in sorted(self.biases)})

    def read_flat(self, parameter: str, boxes: Iterable[Box]) -> Tensor:
        """Return the elements of some boxes of a parameter, one box after the other, [n]."""
        return torch.cat([self.read(parameter, box).flatten() for box in boxes])


def drop_missing_biases(
    slices: Iterable[StoredSlice], architecture: Architecture, tensors: TensorFolder
) -> Iterator[StoredSlice]:
    """Return the slices without balance biases that the folder lacks: a model may be written without them."""
    biases = set(balance_biases(architecture).values())
    return (stored for stored in slices if stored.parameter not in biases or stored.tensor_key in tensors.shapes)


def _tensor_problems(slices: Iterable[StoredSlice], tensors: TensorFolder, authority: str) -> Iterator[str]:
    """Yield the tensors that the folder lacks, has besides the model, and has in other shapes."""
    expected = {stored.tensor_key: stored.tensor_shape for stored in slices if not stored.copy}
    copies = {stored.tensor_key for stored in slices if stored.copy}
    stored_shapes = tensors.shapes
    differences = {
        "lacks": sorted(expected.keys() - stored_shapes.keys()),
        f"has, besides what {authority} says,": sorted(stored_shapes.keys() - expected.keys() - copies),
    }
    for verb, keys in differences.items():
        if keys:
            listed = ", ".join(_format_name(*key) for key in keys[:MAX_NAMES_SHOWN])
            more = ", ..." if len(keys) > MAX_NAMES_SHOWN else ""
            yield f"model: {tensors.folder} {verb} {len(keys)} tensors: {listed}{more}"
    mismatched = [key for key in expected if key in stored_shapes and stored_shapes[key] != expected[key]]
    for key in mismatched[:MAX_NAMES_SHOWN]:
        yield f"model: {_format_name(*key)} of {tensors.folder} has shape {stored_shapes[key]}; {authority} says {expected[key]}"


def _format_name(file: str, name: str) -> str:
    return f"{name} in {file}" if file else name


def boxes_of_weights(weights: ModelWeights) -> ReadBox:
    """Return a function that reads boxes of weights in memory; missing balance biases are zeros."""
    zero = torch.zeros(weights.architecture.num_experts)

    def read(name: str, box: Box) -> Tensor:
        tensor = weights.tensors.get(name)
        return (weights.biases.get(name, zero) if tensor is None else tensor)[box.slices]

    return read


def boxes_of_stored(stored: StoredModel) -> ReadBox:
    """Return a function that reads boxes of a stored model; missing balance biases are zeros."""

    def read(name: str, box: Box) -> Tensor:
        return stored.read(name, box) if name in stored.slices else torch.zeros(box.lengths)

    return read


def boxes_of_checkpoint(checkpoint: str | Path, architecture: Architecture) -> tuple[ReadBox, torch.dtype]:
    """Return a function that reads boxes of a checkpoint, and the dtype that its optimizer updates (the master copy's, if any).

    Raises `InputError` for a checkpoint that is damaged, or of another architecture.
    """
    opened, shapes = open_checkpoint(Path(checkpoint), CheckpointGroup()), _checkpoint_shapes(architecture)
    _require_same_weights(Path(checkpoint), architecture, opened)
    checkpoint_names = {name.partition(".")[2]: name for name in shapes}

    def read(name: str, box: Box) -> Tensor:
        return opened.read(checkpoint_names[name], shapes[checkpoint_names[name]], box)

    return read, opened.tensors[next(iter(shapes))].torch_dtype


def _checkpoint_shapes(architecture: Architecture) -> dict[str, Shape]:
    """Return shapes of a model's parameters and balance biases by their names in a checkpoint."""
    biases = {BUFFER_PREFIX + name: (architecture.num_experts,) for name in balance_biases(architecture).values()}
    return {MODEL_PREFIX + name: shape for name, shape in parameter_shapes(architecture).items()} | biases


def _require_same_weights(path: Path, architecture: Architecture, checkpoint: OpenCheckpoint) -> None:
    """Raise `InputError` if the checkpoint's weights are those of another model."""
    expected = _checkpoint_shapes(architecture)
    names = {name for name in checkpoint.tensors if name.startswith((MODEL_PREFIX, BUFFER_PREFIX))}
    differing = expected.keys() ^ names
    for name in expected.keys() & names:
        if common_shape(expected[name], checkpoint.tensors[name].shape) is None:
            differing.add(name)
    if differing:
        listed = ", ".join(name.partition(".")[2] for name in sorted(differing)[:4])
        raise InputError(
            f"{path}: found the weights of another model than {architecture.name}: {listed} differ; the plan that the run was of "
            "is required"
        )
