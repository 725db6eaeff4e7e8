"""Which box of which parameter each stored tensor holds, and the chunks of tensors that are written in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.interop.frameworks.weight_table import Naming, Stored
from shardwise.interop.weights.dim_patterns import Arrangement, arranged, parsed
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, PREDICTS
from shardwise.step.parameters import PlacedUnit, unit_paths
from shardwise.step.whole_parameters import balance_biases, on_one_device
from shardwise.values.boxes import Box, Shape
from shardwise.values.errors import InputError

Read = Callable[[str, Box], Tensor]  # a box of a parameter, or of the bias of a router's choice, by its name
BIAS = ("E",)  # dims of the bias of a router's choice


@dataclass(frozen=True, slots=True)
class Place:
    """A box of a parameter in a stored tensor: the tensor's file (where that is known beforehand), name and shape, where in it
    the chunk with this box begins, how many of its first dims count layers or experts, and how the box lies in the chunk.

    A `copy` of what another tensor holds is written, and not read.
    """

    file: str
    name: str
    whole: Shape
    begin: Shape
    counts: int
    parameter: str
    box: Box
    arrangement: Arrangement
    copy: bool = False

    @property
    def chunk(self) -> tuple[str, str, Shape]:
        """What is written in one piece: places of one chunk have the same."""
        return self.file, self.name, self.begin

    def taken(self, read: Callable[[Box], Tensor], box: Box) -> Tensor:
        """A box of the parameter that lies in this place's, of what `read` gives of the stored tensor."""
        return self.arrangement.taken(lambda inner: read(inner.moved(self.begin)), box.seen_from(self.box))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a model that a file has: its layers, its experts, and of each dim the size in this file and where it begins in
    the parameter (0 where it is not said). `Z` are the rows behind the vocabulary's end."""

    sizes: Mapping[str, int]
    layers: range
    experts: range
    file: str = ""
    ends: frozenset[str] = frozenset({"embedding", "head"})
    begins: Mapping[str, int] = field(default_factory=dict)


def whole_model(architecture: Architecture, padding: int = 0) -> Part:
    """All of a model, with so many rows behind its vocabulary's end."""
    sizes = {**architecture.dims, "Z": padding}
    return Part(sizes=sizes, layers=range(architecture.num_layers), experts=range(sizes["E"]))


def places(architecture: Architecture, naming: Naming, part: Part | None = None) -> Iterator[Place]:
    """Where a part of a model (None: all of it) has each parameter. Raises `InputError` that names what has no place."""
    part = part or whole_model(architecture)
    instance, biases = on_one_device(architecture), balance_biases(architecture)
    for unit, numbers in _units(architecture, part):
        for weight, one in instance.used[unit.path].items():
            lent = one.path != unit.path
            stored = naming.copy(unit.kind, weight) if lent else naming.stored(one, architecture)
            if stored is not None:
                yield from _places(one.name, one.use.dims, stored, numbers, part, copy=lent)
            elif not lent:
                raise InputError(f"model: {one.weight} of the {one.unit} has no place in a {naming.title}")
        bias = naming.bias(unit.kind) if unit.path in biases else None
        if bias is not None:
            yield from _places(biases[unit.path], BIAS, bias, numbers, part, copy=False)


def _units(architecture: Architecture, part: Part) -> Iterator[tuple[PlacedUnit, Mapping[str, tuple[int, int]]]]:
    """The units of a part; of each the number of its layer and module in the file, and how many there are."""
    counts = {LAYERS: architecture.num_layers, PREDICTS: architecture.num_predict_layers}
    for unit in unit_paths(architecture):
        number = int(unit.path.rpartition(".")[2]) if "." in unit.path else 0
        if unit.kind in LAYERS and number in part.layers:
            yield unit, {"layer": (number - part.layers.start, counts[LAYERS])}
        elif unit.kind in PREDICTS and "head" in part.ends:
            yield unit, {"layer": (counts[LAYERS] + number, sum(counts.values())), "module": (number, counts[PREDICTS])}
        elif unit.kind in part.ends:
            yield unit, {}


def _places(
    parameter: str, dims: Sequence[str], stored: Stored, numbers: Mapping[str, tuple[int, int]], part: Part, *, copy: bool
) -> Iterator[Place]:  # fmt: skip
    """The places of one parameter."""
    each = "{expert}" in stored.name + stored.layout
    sizes = {**part.sizes, "E": 1} if each else part.sizes
    found = arranged(stored.layout, dims, sizes)
    counted = [group[0].number for group in parsed(stored.layout)] if stored.layout else [""]
    for expert in part.experts if each else (0,):
        own = {**numbers, "expert": (expert - part.experts.start, part.sizes["E"])}
        begin = tuple(own[number][0] if number else 0 for number in counted)
        shape = zip(counted, found.shape, strict=True)
        whole = tuple(own[number][1] if number else size for number, size in shape)
        offsets = tuple(expert if each and dim == "E" else part.begins.get(dim, 0) for dim in dims)
        box = Box(offsets, tuple(sizes[dim] for dim in dims))
        name = stored.name.format(**{key: number for key, (number, _) in own.items()})
        yield Place(part.file, name, whole, begin, sum(map(bool, counted)), parameter, box, found, copy)


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
