"""What is written in one piece of a stored model: of all its weights one is held at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.engine.torch.build import balance_biases
from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.train.box import Box, Shape
from shardwise.train.conversion.places import Place, Read

# Formats that weights are written in, by their names in a plan's precision.
FORMATS: Mapping[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
# Of the biases of routers' choices, whatever that of the weights is: `_keep_in_fp32_modules_strict` of transformers'
# DeepseekV3PreTrainedModel, MoE.expert_bias_E of torchtitan, TopKRouter.expert_bias of Megatron-Core.
BIAS_FORMAT = torch.float32
BYTES_PER_FILE = 5 * 10**9  # a file of weights: what `save_pretrained` had as its default (max_shard_size) for years


class Entry(NamedTuple):
    """A chunk of a tensor: the places of what it holds, and its format."""

    places: list[Place]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The tensor's."""
        return self.places[0].name

    @property
    def file(self) -> str:
        return self.places[0].file

    @property
    def whole(self) -> Shape:
        """The shape of the tensor."""
        return self.places[0].whole

    @property
    def box(self) -> Box:
        """The chunk in the tensor."""
        return Box(self.places[0].begin, self.places[0].arrangement.shape)

    @property
    def num_bytes(self) -> int:
        return self.box.volume * self.dtype.itemsize

    def value(self, read: Read) -> Tensor:
        """What it holds; nothing else is read. Rows behind the vocabulary's end are zeros."""
        full = sum(place.box.volume for place in self.places) == self.box.volume
        found = (torch.empty if full else torch.zeros)(self.box.lengths, dtype=self.dtype)
        for place in self.places:
            if place.box.volume:
                place.arrangement.put(read(place.parameter, place.box), found)
        return found


def entries(architecture: Architecture, places: Iterable[Place], dtype: torch.dtype) -> list[Entry]:
    """What is to be written, in `dtype`. Raises `InputError` for a format that no weights have."""
    if dtype not in FORMATS.values():
        raise InputError(
            f"dtype: found {format_name(dtype)}, which no weights have; one of {', '.join(FORMATS)} is required"
        )
    biases = set(balance_biases(architecture).values())
    found: dict[tuple[str, str, Shape], Entry] = {}
    for place in places:
        entry = found.setdefault(place.chunk, Entry([], BIAS_FORMAT if place.parameter in biases else dtype))
        entry.places.append(place)
    return list(found.values())


def format_name(dtype: torch.dtype) -> str:
    """PyTorch's name of a format, such as float32."""
    return str(dtype).removeprefix("torch.")


def in_files(entries: Iterable[Entry], bytes_per_file: int) -> list[list[Entry]]:
    """The entries of each file, of `bytes_per_file` at most or of one entry."""
    files: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not files or entry.num_bytes > room:
            files.append([])
            room = bytes_per_file
        files[-1].append(entry)
        room -= entry.num_bytes
    return files


def require_no_bias(architecture: Architecture, read: Read, title: str, fix: str) -> None:
    """Raise `InputError` where a router's choice has moved by a bias: without it tokens would go to other experts."""
    for name in balance_biases(architecture).values():
        if read(name, Box((0,), (architecture.num_experts,))).any():
            raise InputError(
                f"model {architecture.name}: {name}, which its experts are chosen by, has no place in a {title}; {fix}, or "
                "training with --set recipe.balance=auxiliary is required"
            )
