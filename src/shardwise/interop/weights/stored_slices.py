"""Boxes of parameters that stored tensors hold, and the chunks of tensors that are written in one piece.

The balance bias of a router is what it adds to the scores of experts when it chooses among them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from shardwise.interop.frameworks.weight_table import TensorPattern, WeightTable
from shardwise.interop.weights.dim_patterns import Arrangement, arrange, parse_pattern
from shardwise.model import MTP_UNITS, Architecture, is_layer
from shardwise.step import balance_biases, unit_paths
from shardwise.step.parameters import PlacedUnit
from shardwise.step.rank_program import single_device_instance
from shardwise.values import Box, InputError, Shape
from shardwise.values.durable_files import READ_BYTES
from shardwise.values.input_texts import parse_integer

ReadBox = Callable[[str, Box], Tensor]  # (name of a parameter or balance bias, box) → values
BIAS_DIMS = ("E",)  # dims of a balance bias


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A box of a parameter in a stored tensor.

    `file` is "" if the tensor's file is not known beforehand. The chunk with this box begins at `chunk_offsets` in the tensor,
    whose first `num_counted_dims` dims count layers or experts; `arrangement` says how the box lies in the chunk. A `copy` of
    what another tensor holds is written, but not read.
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
    def tensor_key(self) -> tuple[str, str]:
        """File and name of the tensor."""
        return self.file, self.name

    @property
    def chunk_key(self) -> tuple[str, str, Shape]:
        """File, tensor and offsets of the chunk: the slices of one chunk have the same, and are written in one piece."""
        return self.file, self.name, self.chunk_offsets

    def read_box(self, read: Callable[[Box], Tensor], box: Box) -> Tensor:
        """Return a box of the parameter that lies inside this slice's; `read` returns a box of the stored tensor."""
        return self.arrangement.read_box(lambda inner: read(inner.moved(self.chunk_offsets)), box.seen_from(self.box))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """The part of a model that a file has: its layers, experts, and `end_units` (embedding, head).

    `sizes` has each dim's size in this file and `offsets` where it begins in the parameter (default 0). The dim `Z` counts
    padding rows behind the vocabulary's end.
    """

    sizes: Mapping[str, int]
    layers: range
    experts: range
    file: str = ""
    end_units: frozenset[str] = frozenset({"embedding", "head"})
    offsets: Mapping[str, int] = field(default_factory=dict)


def whole_shard(architecture: Architecture, padding: int = 0) -> ModelShard:
    """Return the shard that is the whole model, with `padding` rows behind its vocabulary's end."""
    sizes = {**architecture.dims, "Z": padding}
    return ModelShard(sizes=sizes, layers=range(architecture.num_layers), experts=range(sizes["E"]))


def list_slices(
    architecture: Architecture, weight_table: WeightTable, shard: ModelShard | None = None
) -> Iterator[StoredSlice]:
    """Yield the stored slice of every parameter of a shard (default: the whole model). Raises `InputError` if one has none."""
    shard = shard or whole_shard(architecture)
    instance, biases = single_device_instance(architecture), balance_biases(architecture)
    for unit, numbers in _units_of_shard(architecture, shard):
        for weight, parameter in instance.parameters_by_unit[unit.path].items():
            borrowed = parameter.path != unit.path
            pattern = (
                weight_table.copy_of(unit.kind, weight) if borrowed else weight_table.tensor_of(parameter, architecture)
            )
            if pattern is not None:
                dims = parameter.use.dims
                yield from _slices_of_parameter(parameter.name, dims, pattern, numbers, shard, copy=borrowed)
            elif not borrowed:
                name = f"{parameter.weight} of the {parameter.unit}"
                raise InputError(f"model: {name} has no place in a {weight_table.title}")
        bias = weight_table.bias_of(unit.kind) if unit.path in biases else None
        if bias is not None:
            yield from _slices_of_parameter(biases[unit.path], BIAS_DIMS, bias, numbers, shard, copy=False)


def _units_of_shard(
    architecture: Architecture, shard: ModelShard
) -> Iterator[tuple[PlacedUnit, Mapping[str, tuple[int, int]]]]:
    """Yield the units of a shard; with each, (number, count) of its layer and prediction module in the file."""
    num_layers, num_modules = architecture.num_layers, architecture.num_predict_layers
    for unit in unit_paths(architecture):
        number = parse_integer(unit.path.rpartition(".")[2]) if "." in unit.path else 0
        if is_layer(unit.kind) and number in shard.layers:
            yield unit, {"layer": (number - shard.layers.start, num_layers)}
        elif unit.kind in MTP_UNITS and "head" in shard.end_units:
            layer = (num_layers + number, num_layers + num_modules)
            yield unit, {"layer": layer, "module": (number, num_modules)}
        elif unit.kind in shard.end_units:
            yield unit, {}


def _slices_of_parameter(
    parameter: str, dims: Sequence[str], pattern: TensorPattern, numbers: Mapping[str, tuple[int, int]], shard: ModelShard,
    *, copy: bool,
) -> Iterator[StoredSlice]:  # fmt: skip
    """Yield the slices of one parameter: one per expert if its name or dims have experts, else a single one."""
    per_expert = "{expert}" in pattern.name + pattern.dims
    sizes = {**shard.sizes, "E": 1} if per_expert else shard.sizes
    arrangement = arrange(pattern.dims, dims, sizes)
    counted_names = [group[0].number for group in parse_pattern(pattern.dims)] if pattern.dims else [""]
    for expert in shard.experts if per_expert else (0,):
        all_numbers = {**numbers, "expert": (expert - shard.experts.start, shard.sizes["E"])}
        chunk_offsets = tuple(all_numbers[number][0] if number else 0 for number in counted_names)
        names_and_sizes = zip(counted_names, arrangement.shape, strict=True)
        tensor_shape = tuple(all_numbers[number][1] if number else size for number, size in names_and_sizes)
        offsets = tuple(expert if per_expert and dim == "E" else shard.offsets.get(dim, 0) for dim in dims)
        box = Box(offsets, tuple(sizes[dim] for dim in dims))
        name = pattern.name.format(**{key: number for key, (number, _) in all_numbers.items()})
        yield StoredSlice(
            shard.file, name, tensor_shape, chunk_offsets, sum(map(bool, counted_names)), parameter, box, arrangement, copy,
        )  # fmt: skip


# Dtypes that weights are written in, by their names in a plan's precision.
WEIGHT_DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
# Balance biases have this dtype whatever the weights have: `_keep_in_fp32_modules_strict` of transformers'
# DeepseekV3PreTrainedModel, MoE.expert_bias_E of torchtitan, TopKRouter.expert_bias of Megatron-Core.
BIAS_DTYPE = torch.float32
BYTES_PER_FILE = 5 * 10**9  # per file of weights: long the default of `save_pretrained` (max_shard_size)


class WeightSource(NamedTuple):
    """A model to write: boxes of its weights, and the dtype to write them in."""

    architecture: Architecture
    read: ReadBox
    dtype: torch.dtype


class OutputChunk(NamedTuple):
    """A chunk of a tensor to write: the slices in it, and its dtype."""

    slices: list[StoredSlice]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.slices[0].name

    @property
    def file(self) -> str:
        return self.slices[0].file

    @property
    def tensor_shape(self) -> Shape:
        """Shape of the tensor."""
        return self.slices[0].tensor_shape

    @property
    def box(self) -> Box:
        """The chunk's box in the tensor."""
        return Box(self.slices[0].chunk_offsets, self.slices[0].arrangement.shape)

    @property
    def num_bytes(self) -> int:
        return self.box.volume * self.dtype.itemsize

    def assemble_values(self, read: ReadBox) -> Tensor:
        """Return the chunk's values, reading nothing else. Rows behind the vocabulary's end are zeros."""
        is_complete = sum(stored_slice.box.volume for stored_slice in self.slices) == self.box.volume
        chunk_values = (torch.empty if is_complete else torch.zeros)(self.box.lengths, dtype=self.dtype)
        for stored_slice in self.slices:
            if stored_slice.box.volume:
                stored_slice.arrangement.write_parameter(read(stored_slice.parameter, stored_slice.box), chunk_values)
        return chunk_values


def output_chunks(source: WeightSource, slices: Iterable[StoredSlice]) -> list[OutputChunk]:
    """Return the chunks to write for a source. Raises `InputError` for a dtype that no weights have."""
    dtype = source.dtype
    if dtype not in WEIGHT_DTYPES.values():
        raise InputError(
            f"dtype: found {dtype_name(dtype)}, which no weights have; one of {', '.join(WEIGHT_DTYPES)} is required"
        )
    biases = set(balance_biases(source.architecture).values())
    chunks: dict[tuple[str, str, Shape], OutputChunk] = {}
    for stored_slice in slices:
        chunk_dtype = BIAS_DTYPE if stored_slice.parameter in biases else dtype
        chunk = chunks.setdefault(stored_slice.chunk_key, OutputChunk([], chunk_dtype))
        chunk.slices.append(stored_slice)
    return list(chunks.values())


def write_elements(file: BinaryIO, tensor: Tensor) -> int:
    """Write the elements of a contiguous tensor at the file's position, and return their CRC-32."""
    content = tensor.view(-1).view(torch.uint8).numpy()
    crc = 0
    for start in range(0, len(content), READ_BYTES):
        block = content[start : start + READ_BYTES].data
        file.write(block)
        crc = zlib.crc32(block, crc)
    return crc


def dtype_name(dtype: torch.dtype) -> str:
    """Return PyTorch's name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


def group_into_files(chunks: Iterable[OutputChunk], bytes_per_file: int) -> list[list[OutputChunk]]:
    """Return the chunks of each file: at most `bytes_per_file`, or one chunk."""
    files: list[list[OutputChunk]] = []
    bytes_left = 0
    for chunk in chunks:
        if not files or chunk.num_bytes > bytes_left:
            files.append([])
            bytes_left = bytes_per_file
        files[-1].append(chunk)
        bytes_left -= chunk.num_bytes
    return files


def require_zero_biases(source: WeightSource, title: str, fix: str) -> None:
    """Raise `InputError` if a router has a balance bias other than zero: without it tokens would go to other experts."""
    architecture = source.architecture
    for name in balance_biases(architecture).values():
        if source.read(name, Box((0,), (architecture.num_experts,))).any():
            raise InputError(
                f"model {architecture.name}: {name}, which its experts are chosen by, has no place in a {title}; {fix}, or "
                "training with --set recipe.balance=auxiliary is required"
            )
