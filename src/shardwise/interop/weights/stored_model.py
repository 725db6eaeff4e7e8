"""A model in the files of a framework: any box of any parameter is read, and nothing else of the files.

The same read function is given for weights in memory and for a checkpoint, so that writers do not know where weights come from.
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
from shardwise.model.architecture import Architecture
from shardwise.run.checkpoints.process_group import CheckpointGroup
from shardwise.run.checkpoints.reader import BUFFER_PREFIX, MODEL_PREFIX, OpenCheckpoint, common_shape, open_checkpoint
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.step.whole_parameters import balance_biases, parameter_shapes
from shardwise.values.boxes import Box, Shape
from shardwise.values.errors import InputError, raise_problems

MAX_NAMES_SHOWN = 4  # names of tensors in a message


class TensorFolder(Protocol):
    """The tensors of a folder."""

    @property
    def folder(self) -> Path: ...
    @property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        """By file ("" where a name is enough) and name those that are a model's; not what a framework keeps beside them."""

    def read(self, file: str, name: str, box: Box) -> Tensor:
        """A box of one of them; as little else as can be is read."""

    def dtype(self) -> torch.dtype:
        """The format of the weights."""


class StoredModel:
    """The model of a folder, whose parameters are read box by box; `biases` are the names of those of its routers' choices.

    Raises `InputError` where the folder's tensors are not those of the architecture, which is what `authority` says.
    """

    def __init__(
        self,
        architecture: Architecture,
        places: Iterable[StoredSlice],
        tensors: TensorFolder,
        authority: str = "the given model",
    ) -> None:
        self.architecture, self.tensors = architecture, tensors
        self.shapes = parameter_shapes(architecture)
        found = list(places)
        raise_problems(list(_tensor_problems(found, tensors, authority)))
        self.slices: dict[str, list[StoredSlice]] = {}
        for place in found:
            if not place.copy:
                self.slices.setdefault(place.parameter, []).append(place)
        self.biases = self.slices.keys() - self.shapes.keys()
        raise_problems(list(self._incomplete_parameters(authority)))

    def _incomplete_parameters(self, authority: str) -> Iterator[str]:
        """Of which weights the folder has a part alone: files of ranks may be of fewer layers, or have fewer rows."""
        held = {name: sum(place.box.volume for place in self.slices.get(name, ())) for name in self.shapes}
        for name in [name for name, shape in self.shapes.items() if held[name] != math.prod(shape)][:MAX_NAMES_SHOWN]:
            size = math.prod(self.shapes[name])
            yield f"model: {self.tensors.folder} has {held[name]:,} of the {size:,} elements of {name} that {authority} has"

    def read(self, parameter: str, box: Box) -> Tensor:
        """A box of a parameter, in the format of the files."""
        found: Tensor | None = None
        for place in self.slices[parameter]:
            shared = place.box.intersection(box)
            if shared is None:
                continue
            values = place.read_box(partial(self.tensors.read, place.file, place.name), shared)
            if shared == box:
                return values
            found = torch.empty(box.lengths, dtype=values.dtype) if found is None else found
            found[shared.seen_from(box).slices] = values
        assert found is not None, f"no place has {box} of {parameter}"
        return found

    def bias(self, name: str) -> Tensor:
        """The bias of a router's choice [E], one of `biases`, in fp32 at least."""
        found = self.read(name, Box((0,), (self.architecture.num_experts,)))
        return found.to(at_least_fp32(found.dtype))

    def weights(self, dtype: torch.dtype | None = None) -> ModelWeights:
        """All of them, on the CPU, in `dtype` or in the format of the files."""
        wanted = dtype or self.tensors.dtype()
        boxes = {name: Box((0,) * len(shape), shape) for name, shape in self.shapes.items()}
        read = {name: self.read(name, box).to(wanted).contiguous() for name, box in boxes.items()}
        return ModelWeights(self.architecture, read, {name: self.bias(name) for name in sorted(self.biases)})

    def read_flat(self, parameter: str, boxes: Iterable[Box]) -> Tensor:
        """The elements of some boxes of a parameter, one box after the other, [n]."""
        return torch.cat([self.read(parameter, box).flatten() for box in boxes])


def drop_missing_biases(
    places: Iterable[StoredSlice], architecture: Architecture, tensors: TensorFolder
) -> Iterator[StoredSlice]:
    """Places without those of biases of routers' choices that a folder does not have: a model may be made without them."""
    biases = set(balance_biases(architecture).values())
    return (place for place in places if place.parameter not in biases or (place.file, place.name) in tensors.shapes)


def _tensor_problems(places: Iterable[StoredSlice], tensors: TensorFolder, authority: str) -> Iterator[str]:
    """What the folder lacks, has beside the model, and has in other shapes."""
    wanted = {(place.file, place.name): place.tensor_shape for place in places if not place.copy}
    copies = {(place.file, place.name) for place in places if place.copy}
    found = tensors.shapes
    lists = {
        "lacks": sorted(wanted.keys() - found.keys()),
        f"has, besides what {authority} says,": sorted(found.keys() - wanted.keys() - copies),
    }
    for verb, keys in lists.items():
        if keys:
            shown = ", ".join(_shown(*key) for key in keys[:MAX_NAMES_SHOWN]) + (
                ", ..." if len(keys) > MAX_NAMES_SHOWN else ""
            )
            yield f"model: {tensors.folder} {verb} {len(keys)} tensors: {shown}"
    differ = [key for key in wanted if key in found and found[key] != wanted[key]]
    for key in differ[:MAX_NAMES_SHOWN]:
        yield f"model: {_shown(*key)} of {tensors.folder} has shape {found[key]}; {authority} says {wanted[key]}"


def _shown(file: str, name: str) -> str:
    return f"{name} in {file}" if file else name


def boxes_of_weights(weights: ModelWeights) -> ReadBox:
    """Boxes of weights in memory; biases of routers' choices that they lack are zeros."""
    zero = torch.zeros(weights.architecture.num_experts)

    def read(name: str, box: Box) -> Tensor:
        found = weights.tensors.get(name)
        return (weights.biases.get(name, zero) if found is None else found)[box.slices]

    return read


def boxes_of_stored(stored: StoredModel) -> ReadBox:
    """Boxes of a stored model; biases of routers' choices that it lacks are zeros."""

    def read(name: str, box: Box) -> Tensor:
        held = name in stored.slices
        return stored.read(name, box) if held else torch.zeros(box.lengths)

    return read


def boxes_of_checkpoint(checkpoint: str | Path, architecture: Architecture) -> tuple[ReadBox, torch.dtype]:
    """Boxes of the weights of a checkpoint, and the format that the optimizer updated (the master copy's, where the run had one).

    Raises `InputError` for a checkpoint that is damaged, or of another architecture.
    """
    found, shapes = open_checkpoint(Path(checkpoint), CheckpointGroup()), _checkpoint_shapes(architecture)
    _require_same_weights(Path(checkpoint), architecture, found)
    kept = {name.partition(".")[2]: name for name in shapes}

    def read(name: str, box: Box) -> Tensor:
        return found.read(kept[name], shapes[kept[name]], box)

    return read, found.tensors[next(iter(shapes))].torch_dtype


def _checkpoint_shapes(architecture: Architecture) -> dict[str, Shape]:
    """What a checkpoint keeps of a model, by the names that it has there: parameters, and biases of routers' choices."""
    biases = {BUFFER_PREFIX + name: (architecture.num_experts,) for name in balance_biases(architecture).values()}
    return {MODEL_PREFIX + name: shape for name, shape in parameter_shapes(architecture).items()} | biases


def _require_same_weights(path: Path, architecture: Architecture, checkpoint: OpenCheckpoint) -> None:
    """Raise `InputError` where the checkpoint's weights are those of another model."""
    wanted = _checkpoint_shapes(architecture)
    found = {
        name: one.shape for name, one in checkpoint.tensors.items() if name.startswith((MODEL_PREFIX, BUFFER_PREFIX))
    }
    other = wanted.keys() ^ found.keys()
    other |= {name for name in wanted.keys() & found.keys() if common_shape(wanted[name], found[name]) is None}
    if other:
        names = ", ".join(name.partition(".")[2] for name in sorted(other)[:4])
        raise InputError(
            f"{path}: found the weights of another model than {architecture.name}: {names} differ; the plan that the run was of "
            "is required"
        )
