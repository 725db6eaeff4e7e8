"""A model of `transformers` written tensor by tensor: of its weights one tensor of one file is held at a time.

A file in safetensors is eight bytes that say how long its header is, the header, JSON that has format, shape and place of each
tensor, and the tensors, one behind the other. Source: the format's own description (README.md of huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from shardwise.engine.torch.build import balance_biases
from shardwise.engine.torch.weights import parameter_shapes
from shardwise.errors import InputError, chosen
from shardwise.files import BLOCK, sync, write_synced
from shardwise.model.architecture import Architecture
from shardwise.train.box import Box, Shape
from shardwise.train.huggingface.config import write_config
from shardwise.train.huggingface.layout import Place, places, put, shape_of
from shardwise.train.huggingface.names import FAMILIES, StoredFamily
from shardwise.train.huggingface.publishing import CONFIG, INDEX, draft, file_of

BYTES_PER_FILE = 5 * 10**9  # a file of weights: what `save_pretrained` had as its default (max_shard_size) for years
# Formats by their names in a header. Source: the format's description; those that weights are trained in.
FORMATS: Mapping[str, str] = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ALIGNED = 8  # bytes: tensors begin at a multiple of it, behind a header that is filled with spaces
# Of the biases of routers' choices, whatever that of the weights is: `_keep_in_fp32_modules_strict` of DeepseekV3PreTrainedModel.
BIAS_FORMAT = torch.float32
Read = Callable[[str, Box], Tensor]  # a box of a parameter, or of the bias of a router's choice, by its name


class Entry(NamedTuple):
    """A tensor of a file: the places of what it holds, with the shapes of the whole parameters, and its format."""

    places: list[tuple[Place, Shape]]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.places[0][0].name

    @property
    def stored(self) -> Shape:
        """Its shape in the file."""
        place, shape = self.places[0]
        return shape_of(place, place.part(shape))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.stored) * self.dtype.itemsize

    def value(self, read: Read) -> Tensor:
        """What the file has of it; nothing else is read."""
        found = torch.empty(self.stored, dtype=self.dtype)
        for place, shape in self.places:
            put(read(place.parameter, place.box(shape)).view(place.part(shape)), place, found)
        return found


def write_model(
    folder: str | Path, architecture: Architecture, read: Read, dtype: torch.dtype, *, seq_len: int, model_type: str = "",
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:  # fmt: skip
    """Write a model of which `read` gives any box of a parameter, in `dtype`; complete, or nothing that reads as a model.

    A file has `bytes_per_file` of tensors at most, or one tensor. Raises `InputError` where no family (or not the one named) has
    what the model has, biases that its routers have moved included, for a format that no weights have, and where the folder
    cannot be written.
    """
    config, family = write_config(architecture, seq_len, model_type)
    config["dtype"] = str(dtype).removeprefix("torch.")
    chosen(FORMATS, config["dtype"], "dtype")
    if not family.balance_bias:
        _require_no_bias(architecture, read, family)
    entries = _entries(architecture, family, dtype)
    try:
        with draft(Path(folder)) as part:
            _write_files(part, _files(entries, bytes_per_file), read)
            _write_json(part / CONFIG, config)
    except OSError as error:
        raise InputError(
            f"model: cannot write to {folder}: {error.strerror}; a folder with room, and the permission to write in it, are "
            "required"
        ) from None


def _entries(architecture: Architecture, family: StoredFamily, dtype: torch.dtype) -> list[Entry]:
    shapes, bias = parameter_shapes(architecture), (architecture.num_experts,)
    found: dict[str, Entry] = {}
    for place in places(architecture, family):
        entry = found.setdefault(place.name, Entry([], dtype if place.parameter in shapes else BIAS_FORMAT))
        entry.places.append((place, shapes.get(place.parameter, bias)))
    return list(found.values())


def _require_no_bias(architecture: Architecture, read: Read, family: StoredFamily) -> None:
    """Raise `InputError` where a router's choice has moved by a bias: without it tokens would go to other experts."""
    for name in balance_biases(architecture).values():
        if read(name, Box((0,), (architecture.num_experts,))).any():
            having = ", ".join(one for one, other in FAMILIES.items() if other.balance_bias)
            raise InputError(
                f"model {architecture.name}: {name}, which its experts are chosen by, has no place in a {family.built_as}; one "
                f"of {having} (routers that score by sigmoid), or training with --set recipe.balance=auxiliary is required"
            )


def _files(entries: Sequence[Entry], bytes_per_file: int) -> list[list[Entry]]:
    """The tensors of each file."""
    files: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not files or entry.num_bytes > room:
            files.append([])
            room = bytes_per_file
        files[-1].append(entry)
        room -= entry.num_bytes
    return files


def _write_files(folder: Path, files: Sequence[Sequence[Entry]], read: Read) -> None:
    index: dict[str, str] = {}
    for number, entries in enumerate(files, start=1):
        name = file_of(number, len(files))
        _write_file(folder / name, entries, read)
        index |= {entry.name: name for entry in entries}
    if len(files) > 1:
        size = sum(entry.num_bytes for entries in files for entry in entries)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})


def _write_file(path: Path, entries: Sequence[Entry], read: Read) -> None:
    entries = sorted(
        entries, key=lambda entry: -entry.dtype.itemsize
    )  # so that each begins at a multiple of its elements
    with path.open("wb") as file:
        file.write(_header(entries))
        for entry in entries:
            _write_tensor(
                file, entry.value(read)
            )  # in a function of its own, so that it is gone when the next one comes
        sync(file)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    content = tensor.view(-1).view(torch.uint8).numpy()
    for start in range(0, len(content), BLOCK):
        file.write(content[start : start + BLOCK].data)


def _header(entries: Sequence[Entry]) -> bytes:
    """What stands in front of the tensors."""
    found: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        kind, stop = FORMATS[str(entry.dtype).removeprefix("torch.")], start + entry.num_bytes
        found[entry.name] = {"dtype": kind, "shape": entry.stored, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(found).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, content: object) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())
