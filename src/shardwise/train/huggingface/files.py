"""Models of `transformers` in and out: config.json beside weights in safetensors, in one file or in several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.engine.torch.functions import at_least_fp32
from shardwise.engine.torch.weights import Weights, parameter_shapes
from shardwise.errors import InputError, require
from shardwise.train.box import Box, Shape
from shardwise.train.huggingface.config import read_config
from shardwise.train.huggingface.layout import Place, places, shape_of, taken
from shardwise.train.huggingface.publishing import CONFIG, INDEX, SINGLE
from shardwise.train.huggingface.writing import BYTES_PER_FILE, write_model

SHOWN = 4  # names of tensors in a message


class StoredModel:
    """The model of a folder, whose parameters are read box by box; `biases` are the names of those of its routers' choices.

    Raises `InputError` for what its config does not say.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        self.architecture, family = read_config(_json(folder / CONFIG), name=folder.resolve().name)
        self.tensors = Tensors(folder)
        self.shapes = parameter_shapes(self.architecture)
        found = [place for place in places(self.architecture, family) if not place.copy]
        self.biases = {place.parameter for place in found} - self.shapes.keys()
        copies = {place.name for place in places(self.architecture, family) if place.copy}
        self.tensors.require({place.name: shape_of(place, self._part(place)) for place in found}, copies)
        self.places: dict[str, list[Place]] = {}
        for place in found:
            self.places.setdefault(place.parameter, []).append(place)

    def _part(self, place: Place) -> Shape:
        """The shape of what a tensor holds of a parameter."""
        shape = (self.architecture.num_experts,) if place.parameter in self.biases else self.shapes[place.parameter]
        return place.part(shape)

    def read(self, parameter: str, box: Box) -> Tensor:
        """A box of a parameter, in the format of the files. Nothing else of it is read."""
        held = self.places[parameter]
        if held[0].expert is None:
            return self._taken(held[0], box)
        inner = Box(box.offsets[1:], box.lengths[1:])
        first, count = box.offsets[0], box.lengths[0]
        return torch.stack([self._taken(place, inner) for place in held[first : first + count]])

    def _taken(self, place: Place, box: Box) -> Tensor:
        return taken(partial(self.tensors.read, place.name), place, self._part(place), box)

    def bias(self, name: str) -> Tensor:
        """The bias of a router's choice [E], one of `biases`, in fp32 at least."""
        found = self.read(name, Box((0,), (self.architecture.num_experts,)))
        return found.to(at_least_fp32(found.dtype))

    def flat(self, parameter: str, boxes: Iterable[Box]) -> torch.Tensor:
        """The elements of some boxes of a parameter, one box after the other, [n]."""
        return torch.cat([self.read(parameter, box).flatten() for box in boxes])


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> Weights:
    """The weights of a folder on the CPU, in `dtype` or in the format of the files. Raises `InputError`."""
    stored = StoredModel(folder)
    wanted = dtype or stored.tensors.dtype()
    read = (
        (name, stored.read(name, Box((0,) * len(shape), shape)).to(wanted).contiguous())
        for name, shape in stored.shapes.items()
    )
    return Weights(stored.architecture, dict(read), {name: stored.bias(name) for name in sorted(stored.biases)})


def save_hf(
    weights: Weights, folder: str | Path, *, seq_len: int, model_type: str = "", bytes_per_file: int = BYTES_PER_FILE
) -> None:
    """Write weights so that `transformers` reads it; `seq_len` is the longest sequence that it was made for.

    Raises `InputError` where no family (or not the one named) has what the model has, or the folder cannot be written.
    """
    zero = torch.zeros(weights.architecture.num_experts)

    def read(name: str, box: Box) -> Tensor:
        found = weights.tensors.get(name)
        return (weights.biases.get(name, zero) if found is None else found)[box.slices]

    write_model(
        folder, weights.architecture, read, weights.dtype, seq_len=seq_len, model_type=model_type, bytes_per_file=bytes_per_file
    )  # fmt: skip


class Tensors:
    """The tensors of a folder's files by name. Raises `InputError` where there are none or they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(set(_json(folder / INDEX)["weight_map"].values())) if (folder / INDEX).exists() else [SINGLE]
        self.files: dict[str, Any] = {}
        for name in names:
            try:
                file: Any = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InputError(f"model: cannot read {folder / name}: {error}") from None
            self.files |= dict.fromkeys(file.keys(), file)

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """What of a tensor the slices are; nothing else is read."""
        found: Tensor = self.files[name].get_slice(name)[slices]
        return found

    def dtype(self) -> torch.dtype:
        """The format of the first of them."""
        name = min(self.files)
        return self.read(name, tuple(slice(0, 0) for _ in self._shape(name))).dtype

    def _shape(self, name: str) -> Shape:
        return tuple(self.files[name].get_slice(name).get_shape())

    def require(self, shapes: Mapping[str, Shape], copies: Set[str]) -> None:
        """Every one of these is there, in its shape, and no other but copies and what a model makes for itself."""
        known = {*shapes, *copies, "lm_head.weight"}
        more = [name for name in self.files if name not in known and not name.endswith("rotary_emb.inv_freq")]
        lists = {"lacks": sorted(set(shapes) - set(self.files)), "has, beside what its config says,": sorted(more)}
        require(
            [
                f"model: {self.folder} {what} {len(n)} tensors: {', '.join(n[:SHOWN])}{', ...' if len(n) > SHOWN else ''}"
                for what, n in lists.items()
                if n
            ]
        )
        found = {name: self._shape(name) for name in shapes}
        differ = [name for name in shapes if found[name] != shapes[name]]
        require([f"model: {name} has shape {found[name]}; its config says {shapes[name]}" for name in differ[:SHOWN]])


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"model: {path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"model: {path} holds a {type(found).__name__}; an object is required")
    return found
