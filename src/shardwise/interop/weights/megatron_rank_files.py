"""Megatron-LM's older checkpoints of weights (`--ckpt-format torch`): one file per rank along tp, pp and ep, written and read.

A run with these degrees starts from one with `--load FOLDER`. A file is a dict written by `torch.save`; it is first written
without the tensors' elements, which then go to their places tensor by tensor. Files are read as one model, whatever their
degrees and virtual stages. Experts are split along tp as the rest is. Source: Megatron-LM at d98e8a64,
training/checkpointing.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from shardwise.interop.frameworks.megatron import weight_names
from shardwise.interop.frameworks.weight_table import TensorPattern, WeightTable
from shardwise.interop.weights.dcp_folder import torch_save
from shardwise.interop.weights.distributed_checkpoints import MEGATRON_FILES
from shardwise.interop.weights.replace_model_folder import replace_model
from shardwise.interop.weights.stored_model import MAX_NAMES_SHOWN, StoredModel, drop_missing_biases
from shardwise.interop.weights.stored_slices import (
    ModelShard,
    OutputChunk,
    ReadBox,
    StoredSlice,
    WeightSource,
    list_slices,
    output_chunks,
    require_zero_biases,
    write_elements,
)
from shardwise.model import Architecture
from shardwise.run.checkpoints.dcp_reader import SafeTensorPickle
from shardwise.run.checkpoints.torch_archive import data_offsets, verify_records, write_checksums
from shardwise.values import (
    Box,
    InputError,
    Shape,
    describe_error,
    flush_to_disk,
    lookup,
    open_input,
    raise_problems,
    write_synced,
)
from shardwise.values.input_texts import parse_integer

SPLIT_DIMS = "KFMS"  # dims that tp splits: query groups with their keys; widths of MLPs, experts and shared experts
VOCAB_MULTIPLE = 128  # default of --make-vocab-size-divisible-by (training/arguments.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDegrees:
    """Degrees of Megatron-LM's ranks. The vocabulary is padded to a multiple of `divisible` × tp."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    divisible: int = VOCAB_MULTIPLE

    def require(self, architecture: Architecture) -> None:
        """Raise `InputError` if the model cannot be split by these degrees."""
        widths = {name: getattr(architecture, name) for name in ("d_ff", "dense_d_ff", "shared_expert_width")}
        divisible_sizes = {
            "tp": {"num_kv_heads": architecture.num_kv_heads, **widths}, "pp": {"num_layers": architecture.num_layers},
            "ep": {"num_experts": architecture.num_experts},
        }  # fmt: skip
        problems = [
            f"--{axis}: found {getattr(self, axis)}; a divisor of {name} = {size} of {architecture.name} is required"
            for axis, sizes in divisible_sizes.items()
            for name, size in sizes.items()
            if size % getattr(self, axis)
        ]
        if self.ep > 1 and not architecture.num_experts:
            problems.append(f"--ep: found {self.ep}; {architecture.name} has no experts, so that 1 is required")
        raise_problems(problems)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the rows of the padded vocabulary, on all ranks together."""
        multiple = self.divisible * self.tp
        return -(-vocab_size // multiple) * multiple

    def rank_folder(self, tp: int, pp: int, ep: int) -> str:
        """Return the folder name of a rank's file (get_checkpoint_name in training/checkpointing.py)."""
        return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.pp > 1 else "") + (f"_{ep:03d}" if self.ep > 1 else "")


def even_stages(architecture: Architecture, pp: int) -> list[range]:
    """Return the layers of each stage if all have as many."""
    count = architecture.num_layers // pp
    return [range(stage * count, (stage + 1) * count) for stage in range(pp)]


def rank_shards(
    architecture: Architecture, degrees: RankDegrees, stages: Sequence[range], rows: int
) -> Iterator[tuple[tuple[int, int, int], ModelShard]]:
    """Yield ((tp, stage, ep), shard) of each rank, for these layers of each stage and `rows` of the padded vocabulary."""
    for tp, stage, ep in product(range(degrees.tp), range(len(stages)), range(degrees.ep)):
        sizes, offsets = dict(architecture.dims), {}
        for dim in SPLIT_DIMS:
            sizes[dim] = max(sizes[dim] // degrees.tp, 1)
            offsets[dim] = tp * sizes[dim]
        offsets["V"] = min(tp * rows // degrees.tp, architecture.vocab_size)
        sizes["V"] = min(rows // degrees.tp, architecture.vocab_size - offsets["V"])
        sizes["Z"] = rows // degrees.tp - sizes["V"]
        experts = architecture.num_experts // degrees.ep
        end_units = {"embedding"} if stage == 0 else set()
        yield (tp, stage, ep), ModelShard(
            sizes=sizes, offsets=offsets, layers=stages[stage], experts=range(ep * experts, (ep + 1) * experts),
            end_units=frozenset(end_units | ({"head"} if stage == len(stages) - 1 else set())),
        )  # fmt: skip


RANK_FILE = "model_optim_rng.pt"
# Modules with an extra state beside their weights.
STATEFUL_MODULES = re.compile(r"(?:.*\.)?(?:linear_\w+|output_layer)")


def write_megatron_ranks(
    folder: str | Path, source: WeightSource, *, degrees: RankDegrees, implementation: str = "transformer_engine"
) -> None:
    """Write a model for Megatron-LM's ranks. It is complete or absent.

    Raises `InputError` if GPTModel computes no such model or it cannot be split by these degrees, and as `replace_model` and
    `output_chunks` do.
    """
    degrees.require(source.architecture)
    weight_table = rank_weight_table(source.architecture, implementation, degrees)
    chunks = output_chunks(source, rank_slices(source.architecture, weight_table, degrees))
    if weight_table.balance_bias is None:
        require_zero_biases(source, weight_names.TITLE, weight_names.SIGMOID_FIX)
    files: dict[str, list[OutputChunk]] = {}
    for chunk in chunks:
        files.setdefault(chunk.file, []).append(chunk)
    with replace_model(Path(folder), MEGATRON_FILES) as draft:
        for name, file_chunks in files.items():
            (draft / weight_names.RELEASE_FOLDER / name).mkdir(parents=True)
            _write_file(draft / weight_names.RELEASE_FOLDER / name / RANK_FILE, file_chunks, source.read)
        write_synced(draft / weight_names.TRACKER_FILE, weight_names.RELEASE_FOLDER.encode())


def rank_weight_table(architecture: Architecture, implementation: str, degrees: RankDegrees) -> WeightTable:
    """Return the names of a model's weights in the files of ranks."""
    names = lookup(weight_names.RANK_NAMES, implementation, "--transformer-impl")
    weight_table = weight_names.megatron_weight_table(architecture, names, weight_names.NUMBERED)
    if architecture.tied_embeddings and degrees.pp > 1:  # the last stage has a copy of the first one's matrix
        return replace(weight_table, copies={"head": {"head": TensorPattern("output_layer.weight", "[V]+Z, D")}})
    return weight_table


def rank_slices(architecture: Architecture, weight_table: WeightTable, degrees: RankDegrees) -> Iterator[StoredSlice]:
    """Yield the slices in the files of all ranks."""
    stages, rows = even_stages(architecture, degrees.pp), degrees.padded_vocab_size(architecture.vocab_size)
    for rank, shard in rank_shards(architecture, degrees, stages, rows):
        yield from list_slices(architecture, weight_table, replace(shard, file=degrees.rank_folder(*rank)))


def _write_file(path: Path, chunks: list[OutputChunk], read: ReadBox) -> None:
    with path.open("w+b") as file:
        with FakeTensorMode():
            model: dict[str, Any] = {chunk.name: torch.empty(chunk.tensor_shape, dtype=chunk.dtype) for chunk in chunks}
        modules = {chunk.name.rpartition(".")[0] for chunk in chunks}
        empty = torch.empty(0, dtype=torch.uint8)
        model |= {
            f"{module}.{weight_names.EXTRA_STATE}": empty for module in modules if STATEFUL_MODULES.fullmatch(module)
        }
        with skip_data(materialize_fake_tensors=True):
            torch_save({"model": model, "checkpoint_version": 3.0}, file)
        offsets = data_offsets(file)
        crcs: dict[int, int] = {}
        for number, chunk in enumerate(chunks):
            file.seek(offsets[number])
            crcs[number] = write_elements(file, chunk.assemble_values(read))
        write_checksums(file, crcs | dict.fromkeys(offsets.keys() - crcs.keys(), 0))
        flush_to_disk(file)


RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class RankFilesFolder:
    """The tensors of a folder's files, memory-mapped, by folder and virtual stage (`mp_rank_00_001`, `mp_rank_00_001/1`)."""

    folder: Path
    models: Mapping[str, Mapping[str, Tensor]]

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        return {
            (file, name): tuple(tensor.shape) for file, model in self.models.items() for name, tensor in model.items()
        }

    def dtype(self) -> torch.dtype:
        model = next(iter(self.models.values()))
        return model[min(model)].dtype

    def read(self, file: str, name: str, box: Box) -> Tensor:
        return self.models[file][name][box.slices]


def open_megatron_ranks(folder: str | Path, architecture: Architecture) -> StoredModel:
    """Open the model of a checkpoint, or of a folder with a tracker. Raises `InputError` for another or a damaged model."""
    folder = weight_names.tracked_folder(Path(folder))
    tensors = RankFilesFolder(folder, dict(_load_models(folder)))
    degrees, num_virtual_stages = _read_degrees(tensors)
    degrees.require(architecture)

    def slices_of(implementation: str) -> list[StoredSlice]:
        slices = _slices_in_files(architecture, tensors, degrees, num_virtual_stages, implementation)
        return list(drop_missing_biases(slices, architecture, tensors))

    def count_missing(slices: Iterable[StoredSlice]) -> int:
        return len({stored_slice.tensor_key for stored_slice in slices} - tensors.shapes.keys())

    return StoredModel(architecture, min(map(slices_of, weight_names.RANK_NAMES), key=count_missing), tensors)


def _load_models(folder: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the state dicts of the files by folder and virtual stage, without what modules keep beside weights."""
    for path in sorted(folder.glob(f"mp_rank_*/{RANK_FILE}")):
        try:
            with open_input(path) as file:
                verify_records(file)
            content = torch.load(
                path, map_location="cpu", mmap=True, weights_only=False, pickle_module=SafeTensorPickle
            )
            state_dicts = [content["model"]] if "model" in content else _virtual_stage_models(content)
        except Exception as error:  # a file of another kind may raise anything
            raise InputError(f"model: cannot read {path}: {describe_error(error)}") from None
        for number, state_dict in enumerate(state_dicts):
            key = path.parent.name + (f"/{number}" if len(state_dicts) > 1 else "")
            tensors = {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, Tensor)}
            yield key, {name: tensor for name, tensor in tensors.items() if weight_names.EXTRA_STATE not in name}


def _virtual_stage_models(content: Mapping[str, Any]) -> list[Any]:
    """Return the state dicts of a rank's virtual stages (generate_state_dict in training/checkpointing.py)."""
    state_dicts = [content[f"model{number}"] for number in range(len(content)) if f"model{number}" in content]
    if not state_dicts:
        raise ValueError("it has neither model nor model0")
    return state_dicts


def _read_degrees(tensors: RankFilesFolder) -> tuple[RankDegrees, int]:
    """Return the degrees, and the virtual stages of each rank, from the names of the files."""
    files = {file.partition("/")[0] for file in tensors.models}
    matches = [match for file in files if (match := RANK_FOLDER.fullmatch(file))]
    if len(matches) < len(files) or not files:
        raise InputError(f"model: {tensors.folder} has no files mp_rank_00/{RANK_FILE} of ranks, which are required")
    tp, second, third = (1 + max(parse_integer(match[group] or "0") for match in matches) for group in (1, 2, 3))
    all_embed = all(weight_names.EMBEDDING in tensors.models.get(file, ()) for file in files)
    # A name has pp before ep, each only if above 1. A single second number is ep if every file has an embedding, as only the
    # first stage of a pipeline has one.
    pp, ep = (1, second) if third == 1 and all_embed else (second, third)
    degrees = RankDegrees(tp=tp, pp=pp, ep=ep)
    rank_folders = {degrees.rank_folder(*rank) for rank in product(range(tp), range(pp), range(ep))}
    if missing := sorted(rank_folders - files):
        raise InputError(
            f"model: {tensors.folder} lacks {', '.join(missing[:MAX_NAMES_SHOWN])}, besides {max(files)}; those "
            "of all ranks are required"
        )
    return degrees, len(tensors.models) // len(files)


def _slices_in_files(
    architecture: Architecture,
    tensors: RankFilesFolder,
    degrees: RankDegrees,
    num_virtual_stages: int,
    implementation: str,
) -> Iterator[StoredSlice]:
    """Yield the slices in all files; a box that several ranks have is read from the first."""

    def key(tp: int, stage: int, ep: int) -> str:
        virtual_stage, pp = divmod(stage, degrees.pp)
        return degrees.rank_folder(tp, pp, ep) + (f"/{virtual_stage}" if num_virtual_stages > 1 else "")

    models = [tensors.models[key(0, stage, 0)] for stage in range(degrees.pp * num_virtual_stages)]
    stages = _consecutive_ranges(len(_layer_numbers(model)) for model in models)
    rows = tensors.shapes.get((key(0, 0, 0), weight_names.EMBEDDING), (0,))[0] * degrees.tp
    weight_table, read_boxes = rank_weight_table(architecture, implementation, degrees), set[tuple[str, Box]]()
    for rank, shard in rank_shards(architecture, degrees, stages, rows):
        for stored_slice in list_slices(architecture, weight_table, replace(shard, file=key(*rank))):
            key_of_box = (stored_slice.parameter, stored_slice.box)
            yield replace(stored_slice, copy=stored_slice.copy or key_of_box in read_boxes)
            read_boxes.add(key_of_box)


def _layer_numbers(model: Iterable[str]) -> set[str]:
    return {match[1] for name in model if (match := LAYER_NAME.match(name))}


def _consecutive_ranges(counts: Iterable[int]) -> list[range]:
    """Return consecutive ranges of layers with these lengths."""
    ranges, start = [], 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return ranges
