"""Which box of which parameter each stored tensor holds, and the chunks of tensors that are written in one piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.interop.frameworks.weight_table import TensorPattern, WeightTable
from shardwise.interop.weights.dim_patterns import Arrangement, arrange, parse_pattern
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYER_UNITS, MTP_UNITS
from shardwise.step.parameters import PlacedUnit, unit_paths
from shardwise.step.whole_parameters import balance_biases, single_device_instance
from shardwise.values.boxes import Box, Shape
from shardwise.values.errors import InputError

ReadBox = Callable[[str, Box], Tensor]  # a box of a parameter, or of the bias of a router's choice, by its name
BIAS_DIMS = ("E",)  # dims of the bias of a router's choice


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A box of a parameter in a stored tensor: the tensor's file (where that is known beforehand), name and shape, where in it
    the chunk with this box begins, how many of its first dims count layers or experts, and how the box lies in the chunk.

    A `copy` of what another tensor holds is written, and not read.
    """

    file: str
    name: str
    tensor_shape: Shape
    chunk_offsets: Shape
    num_counted_dims: int
    parameter: str
    box: Box
    arrangement: Arrangement
    copy: bool = False

    @property
    def chunk_key(self) -> tuple[str, str, Shape]:
        """What is written in one piece: places of one chunk have the same."""
        return self.file, self.name, self.chunk_offsets

    def read_box(self, read: Callable[[Box], Tensor], box: Box) -> Tensor:
        """A box of the parameter that lies in this place's, of what `read` gives of the stored tensor."""
        return self.arrangement.read_box(lambda inner: read(inner.moved(self.chunk_offsets)), box.seen_from(self.box))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """The part of a model that a file has: its layers, its experts, and of each dim the size in this file and where it begins in
    the parameter (0 where it is not said). `Z` are the rows behind the vocabulary's end."""

    sizes: Mapping[str, int]
    layers: range
    experts: range
    file: str = ""
    end_units: frozenset[str] = frozenset({"embedding", "head"})
    offsets: Mapping[str, int] = field(default_factory=dict)


def whole_shard(architecture: Architecture, padding: int = 0) -> ModelShard:
    """All of a model, with so many rows behind its vocabulary's end."""
    sizes = {**architecture.dims, "Z": padding}
    return ModelShard(sizes=sizes, layers=range(architecture.num_layers), experts=range(sizes["E"]))


def list_slices(
    architecture: Architecture, naming: WeightTable, part: ModelShard | None = None
) -> Iterator[StoredSlice]:
    """Where a part of a model (None: all of it) has each parameter. Raises `InputError` that names what has no place."""
    part = part or whole_shard(architecture)
    instance, biases = single_device_instance(architecture), balance_biases(architecture)
    for unit, numbers in _units_of_shard(architecture, part):
        for weight, one in instance.parameters_by_unit[unit.path].items():
            lent = one.path != unit.path
            stored = naming.copy_of(unit.kind, weight) if lent else naming.tensor_of(one, architecture)
            if stored is not None:
                yield from _slices_of_parameter(one.name, one.use.dims, stored, numbers, part, copy=lent)
            elif not lent:
                raise InputError(f"model: {one.weight} of the {one.unit} has no place in a {naming.title}")
        bias = naming.bias_of(unit.kind) if unit.path in biases else None
        if bias is not None:
            yield from _slices_of_parameter(biases[unit.path], BIAS_DIMS, bias, numbers, part, copy=False)


def _units_of_shard(
    architecture: Architecture, part: ModelShard
) -> Iterator[tuple[PlacedUnit, Mapping[str, tuple[int, int]]]]:
    """The units of a part; of each the number of its layer and module in the file, and how many there are."""
    counts = {LAYER_UNITS: architecture.num_layers, MTP_UNITS: architecture.num_predict_layers}
    for unit in unit_paths(architecture):
        number = int(unit.path.rpartition(".")[2]) if "." in unit.path else 0
        if unit.kind in LAYER_UNITS and number in part.layers:
            yield unit, {"layer": (number - part.layers.start, counts[LAYER_UNITS])}
        elif unit.kind in MTP_UNITS and "head" in part.end_units:
            yield (
                unit,
                {"layer": (counts[LAYER_UNITS] + number, sum(counts.values())), "module": (number, counts[MTP_UNITS])},
            )
        elif unit.kind in part.end_units:
            yield unit, {}


def _slices_of_parameter(
    parameter: str, dims: Sequence[str], stored: TensorPattern, numbers: Mapping[str, tuple[int, int]], part: ModelShard,
    *, copy: bool,
) -> Iterator[StoredSlice]:  # fmt: skip
    """The places of one parameter."""
    each = "{expert}" in stored.name + stored.dims
    sizes = {**part.sizes, "E": 1} if each else part.sizes
    found = arrange(stored.dims, dims, sizes)
    counted = [group[0].number for group in parse_pattern(stored.dims)] if stored.dims else [""]
    for expert in part.experts if each else (0,):
        own = {**numbers, "expert": (expert - part.experts.start, part.sizes["E"])}
        begin = tuple(own[number][0] if number else 0 for number in counted)
        shape = zip(counted, found.shape, strict=True)
        whole = tuple(own[number][1] if number else size for number, size in shape)
        offsets = tuple(expert if each and dim == "E" else part.offsets.get(dim, 0) for dim in dims)
        box = Box(offsets, tuple(sizes[dim] for dim in dims))
        name = stored.name.format(**{key: number for key, (number, _) in own.items()})
        yield StoredSlice(part.file, name, whole, begin, sum(map(bool, counted)), parameter, box, found, copy)


# Formats that weights are written in, by their names in a plan's precision.
WEIGHT_DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
# Of the biases of routers' choices, whatever that of the weights is: `_keep_in_fp32_modules_strict` of transformers'
# DeepseekV3PreTrainedModel, MoE.expert_bias_E of torchtitan, TopKRouter.expert_bias of Megatron-Core.
BIAS_DTYPE = torch.float32
BYTES_PER_FILE = 5 * 10**9  # a file of weights: what `save_pretrained` had as its default (max_shard_size) for years


class OutputChunk(NamedTuple):
    """A chunk of a tensor: the places of what it holds, and its format."""

    slices: list[StoredSlice]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The tensor's."""
        return self.slices[0].name

    @property
    def file(self) -> str:
        return self.slices[0].file

    @property
    def tensor_shape(self) -> Shape:
        """The shape of the tensor."""
        return self.slices[0].tensor_shape

    @property
    def box(self) -> Box:
        """The chunk in the tensor."""
        return Box(self.slices[0].chunk_offsets, self.slices[0].arrangement.shape)

    @property
    def num_bytes(self) -> int:
        return self.box.volume * self.dtype.itemsize

    def assemble_values(self, read: ReadBox) -> Tensor:
        """What it holds; nothing else is read. Rows behind the vocabulary's end are zeros."""
        full = sum(place.box.volume for place in self.slices) == self.box.volume
        found = (torch.empty if full else torch.zeros)(self.box.lengths, dtype=self.dtype)
        for place in self.slices:
            if place.box.volume:
                place.arrangement.write_parameter(read(place.parameter, place.box), found)
        return found


def output_chunks(architecture: Architecture, places: Iterable[StoredSlice], dtype: torch.dtype) -> list[OutputChunk]:
    """What is to be written, in `dtype`. Raises `InputError` for a format that no weights have."""
    if dtype not in WEIGHT_DTYPES.values():
        raise InputError(
            f"dtype: found {dtype_name(dtype)}, which no weights have; one of {', '.join(WEIGHT_DTYPES)} is required"
        )
    biases = set(balance_biases(architecture).values())
    found: dict[tuple[str, str, Shape], OutputChunk] = {}
    for place in places:
        entry = found.setdefault(place.chunk_key, OutputChunk([], BIAS_DTYPE if place.parameter in biases else dtype))
        entry.slices.append(place)
    return list(found.values())


def dtype_name(dtype: torch.dtype) -> str:
    """PyTorch's name of a format, such as float32."""
    return str(dtype).removeprefix("torch.")


def group_into_files(entries: Iterable[OutputChunk], bytes_per_file: int) -> list[list[OutputChunk]]:
    """The entries of each file, of `bytes_per_file` at most or of one entry."""
    files: list[list[OutputChunk]] = []
    room = 0
    for entry in entries:
        if not files or entry.num_bytes > room:
            files.append([])
            room = bytes_per_file
        files[-1].append(entry)
        room -= entry.num_bytes
    return files


def require_zero_biases(architecture: Architecture, read: ReadBox, title: str, fix: str) -> None:
    """Raise `InputError` where a router's choice has moved by a bias: without it tokens would go to other experts."""
    for name in balance_biases(architecture).values():
        if read(name, Box((0,), (architecture.num_experts,))).any():
            raise InputError(
                f"model {architecture.name}: {name}, which its experts are chosen by, has no place in a {title}; {fix}, or "
                "training with --set recipe.balance=auxiliary is required"
            )
