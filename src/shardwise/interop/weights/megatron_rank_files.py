"""Megatron-LM's older checkpoints of weights (`--ckpt-format torch`): a file of each rank along tp, pp and ep, written and read.

A run of those degrees begins with one by `--load FOLDER`. A file is what `torch.save` makes of a dict; it is written without its
elements first, and these then tensor by tensor into their places. Files are read as one model, whatever degrees and virtual
stages they were of. Experts are split along tp as the rest is. Source: Megatron-LM at d98e8a64, training/checkpointing.py.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from shardwise.interop.frameworks.megatron.weight_names import (
    EMBEDDING,
    EXTRA_STATE,
    NUMBERED,
    RANK_NAMES,
    RELEASE_FOLDER,
    SIGMOID_FIX,
    TITLE,
    TRACKER_FILE,
    megatron_weight_table,
    tracked_folder,
)
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
    list_slices,
    output_chunks,
    require_zero_biases,
)
from shardwise.model.architecture import Architecture
from shardwise.run.checkpoints.safe_pickle import SafeTensorPickle
from shardwise.values.boxes import Box, Shape
from shardwise.values.checksums import READ_BYTES, flush_to_disk, write_synced
from shardwise.values.errors import InputError, lookup, raise_problems

SPLIT_DIMS = (
    "KFMS"  # dims that `tp` splits: groups of queries with their keys; widths of MLPs, experts and shared experts
)
VOCAB_MULTIPLE = (
    128  # a vocabulary is padded to a multiple of it × tp: --make-vocab-size-divisible-by (training/arguments.py)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDegrees:
    """Degrees of Megatron-LM's ranks, and the rows that a vocabulary is padded to a multiple of on each of them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    divisible: int = VOCAB_MULTIPLE

    def require(self, architecture: Architecture) -> None:
        """Raise `InputError` where the model cannot be split so."""
        widths = {name: getattr(architecture, name) for name in ("d_ff", "dense_d_ff", "shared_expert_width")}
        asked = {
            "tp": {"num_kv_heads": architecture.num_kv_heads, **widths}, "pp": {"num_layers": architecture.num_layers},
            "ep": {"num_experts": architecture.num_experts},
        }  # fmt: skip
        problems = [
            f"--{axis}: found {getattr(self, axis)}; a divisor of {name} = {size} of {architecture.name} is required"
            for axis, sizes in asked.items()
            for name, size in sizes.items()
            if size % getattr(self, axis)
        ]
        if self.ep > 1 and not architecture.num_experts:
            problems.append(f"--ep: found {self.ep}; {architecture.name} has no experts, so that 1 is required")
        raise_problems(problems)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Rows of a vocabulary on all ranks together."""
        multiple = self.divisible * self.tp
        return -(-vocab_size // multiple) * multiple

    def rank_folder(self, tp: int, pp: int, ep: int) -> str:
        """Of a rank's file (get_checkpoint_name in training/checkpointing.py)."""
        return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if self.pp > 1 else "") + (f"_{ep:03d}" if self.ep > 1 else "")


def even_stages(architecture: Architecture, pp: int) -> list[range]:
    """The layers of each stage."""
    count = architecture.num_layers // pp
    return [range(stage * count, (stage + 1) * count) for stage in range(pp)]


def rank_shards(
    architecture: Architecture, degrees: RankDegrees, stages: Sequence[range], rows: int
) -> Iterator[tuple[tuple[int, int, int], ModelShard]]:
    """Of each rank along tp, pp and ep its part, by the layers of each stage and the rows of the padded vocabulary."""
    for tp, stage, ep in product(range(degrees.tp), range(len(stages)), range(degrees.ep)):
        sizes, begins = dict(architecture.dims), {}
        for dim in SPLIT_DIMS:
            sizes[dim] = max(sizes[dim] // degrees.tp, 1)
            begins[dim] = tp * sizes[dim]
        begins["V"] = min(tp * rows // degrees.tp, architecture.vocab_size)
        sizes["V"] = min(rows // degrees.tp, architecture.vocab_size - begins["V"])
        sizes["Z"] = rows // degrees.tp - sizes["V"]
        experts = architecture.num_experts // degrees.ep
        ends = {"embedding"} if stage == 0 else set()
        yield (tp, stage, ep), ModelShard(
            sizes=sizes, offsets=begins, layers=stages[stage], experts=range(ep * experts, (ep + 1) * experts),
            end_units=frozenset(ends | ({"head"} if stage == len(stages) - 1 else set())),
        )  # fmt: skip


RANK_FILE = "model_optim_rng.pt"
STATEFUL_MODULES = re.compile(r"(?:.*\.)?(?:linear_\w+|output_layer)")  # modules that have a state beside their weights


def write_megatron_ranks(
    folder: str | Path, architecture: Architecture, read: ReadBox, dtype: torch.dtype, *, degrees: RankDegrees,
    implementation: str = "transformer_engine",
) -> None:  # fmt: skip
    """Write a model of which `read` gives any box of a parameter, in `dtype`, for ranks of some degrees; complete, or not at all.

    Raises `InputError` where GPTModel computes no such model or ranks cannot have it, and as `replace_model` and
    `output_chunks` do.
    """
    degrees.require(architecture)
    naming = rank_weight_table(architecture, implementation, degrees)
    found = output_chunks(architecture, rank_slices(architecture, naming, degrees), dtype)
    if naming.balance_bias is None:
        require_zero_biases(architecture, read, TITLE, SIGMOID_FIX)
    files: dict[str, list[OutputChunk]] = {}
    for entry in found:
        files.setdefault(entry.file, []).append(entry)
    with replace_model(Path(folder), MEGATRON_FILES) as part:
        for name, own in files.items():
            (part / RELEASE_FOLDER / name).mkdir(parents=True)
            _write_file(part / RELEASE_FOLDER / name / RANK_FILE, own, read)
        write_synced(part / TRACKER_FILE, RELEASE_FOLDER.encode())


def rank_weight_table(architecture: Architecture, implementation: str, degrees: RankDegrees) -> WeightTable:
    """The names of a model's weights in files of ranks."""
    naming = megatron_weight_table(architecture, lookup(RANK_NAMES, implementation, "--transformer-impl"), NUMBERED)
    if architecture.tied_embeddings and degrees.pp > 1:  # the last stage has a copy of the first one's matrix
        return replace(naming, copies={"head": {"head": TensorPattern("output_layer.weight", "[V]+Z, D")}})
    return naming


def rank_slices(architecture: Architecture, naming: WeightTable, degrees: RankDegrees) -> Iterator[StoredSlice]:
    """The places in the files of all ranks."""
    stages, rows = even_stages(architecture, degrees.pp), degrees.padded_vocab_size(architecture.vocab_size)
    for rank, part in rank_shards(architecture, degrees, stages, rows):
        yield from list_slices(architecture, naming, replace(part, file=degrees.rank_folder(*rank)))


def _write_file(path: Path, found: list[OutputChunk], read: ReadBox) -> None:
    with path.open("w+b") as file:
        with FakeTensorMode():
            model: dict[str, Any] = {entry.name: torch.empty(entry.tensor_shape, dtype=entry.dtype) for entry in found}
        modules = {entry.name.rpartition(".")[0] for entry in found}
        nothing = torch.empty(0, dtype=torch.uint8)
        model |= {f"{module}.{EXTRA_STATE}": nothing for module in modules if STATEFUL_MODULES.fullmatch(module)}
        with skip_data(materialize_fake_tensors=True):
            torch_save({"model": model, "checkpoint_version": 3.0}, file)
        begins = _data_offsets(file)
        for number, entry in enumerate(found):
            _write_tensor(file, begins[number], entry.assemble_values(read))
        flush_to_disk(file)


def _data_offsets(file: BinaryIO) -> dict[int, int]:
    """Where the elements of each tensor of a file begin, by its number: records of a zip file that are not compressed."""
    found = {}
    with zipfile.ZipFile(file) as records:
        for info in records.infolist():
            _, _, number = info.filename.rpartition("/data/")
            if number.isdigit():
                file.seek(
                    info.header_offset + 26
                )  # of a local header of 30 bytes the last four: lengths of what follows it
                lengths = file.read(4)
                more = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                found[int(number)] = info.header_offset + 30 + more
    return found


def _write_tensor(file: BinaryIO, begin: int, tensor: Tensor) -> None:
    content = tensor.view(-1).view(torch.uint8).numpy()
    file.seek(begin)
    for start in range(0, len(content), READ_BYTES):
        file.write(content[start : start + READ_BYTES].data)


RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class RankFilesFolder:
    """The tensors of a folder's files, mapped: by folder and virtual stage (`mp_rank_00_001`, `mp_rank_00_001/1`)."""

    folder: Path
    models: Mapping[str, Mapping[str, Tensor]]

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        return {(file, name): tuple(one.shape) for file, model in self.models.items() for name, one in model.items()}

    def dtype(self) -> torch.dtype:
        model = next(iter(self.models.values()))
        return model[min(model)].dtype

    def read(self, file: str, name: str, box: Box) -> Tensor:
        return self.models[file][name][box.slices]


def open_megatron_ranks(folder: str | Path, architecture: Architecture) -> StoredModel:
    """The model of a folder with a tracker, or of one checkpoint. Raises `InputError` where it is another, or cannot be read."""
    folder = tracked_folder(Path(folder))
    tensors = RankFilesFolder(folder, dict(_load_models(folder)))
    degrees, virtual = _read_degrees(tensors)
    degrees.require(architecture)
    candidates = (
        list(
            drop_missing_biases(_slices_in_files(architecture, tensors, degrees, virtual, names), architecture, tensors)
        )
        for names in RANK_NAMES
    )
    found = min(
        candidates, key=lambda places: len({(place.file, place.name) for place in places} - tensors.shapes.keys())
    )
    return StoredModel(architecture, found, tensors)


def _load_models(folder: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The state dicts of the files, without what modules keep beside weights."""
    for path in sorted(folder.glob(f"mp_rank_*/{RANK_FILE}")):
        try:
            content = torch.load(
                path, map_location="cpu", mmap=True, weights_only=False, pickle_module=SafeTensorPickle
            )
            stages = [content["model"]] if "model" in content else _virtual_stage_models(content)
        except Exception as error:  # of what is no such file, anything may be raised
            raise InputError(f"model: cannot read {path}: {str(error).splitlines()[0]}") from None
        for number, stage in enumerate(stages):
            key = path.parent.name + (f"/{number}" if len(stages) > 1 else "")
            yield key, {name: one for name, one in stage.items() if isinstance(one, Tensor) and EXTRA_STATE not in name}


def _virtual_stage_models(content: Mapping[str, Any]) -> list[Any]:
    """The state dicts of a rank's virtual stages (generate_state_dict in training/checkpointing.py)."""
    found = [content[f"model{number}"] for number in range(len(content)) if f"model{number}" in content]
    if not found:
        raise ValueError("it has neither model nor model0")
    return found


def _read_degrees(tensors: RankFilesFolder) -> tuple[RankDegrees, int]:
    """Degrees, and virtual stages of each rank, by the names of the files.

    One number behind that along tp is the one along ep where all have an embedding, and else that along pp.
    """
    files = {file.partition("/")[0] for file in tensors.models}
    matches = [match for file in files if (match := RANK_FOLDER.fullmatch(file))]
    if len(matches) < len(files) or not files:
        raise InputError(f"model: {tensors.folder} has no files mp_rank_00/{RANK_FILE} of ranks, which are required")
    tp, second, third = (1 + max(int(match[group] or 0) for match in matches) for group in (1, 2, 3))
    everywhere = all(EMBEDDING in tensors.models.get(file, ()) for file in files)
    degrees = (
        RankDegrees(tp=tp, pp=1, ep=second) if third == 1 and everywhere else RankDegrees(tp=tp, pp=second, ep=third)
    )
    wanted = {degrees.rank_folder(*rank) for rank in product(range(degrees.tp), range(degrees.pp), range(degrees.ep))}
    if lacking := sorted(wanted - files):
        raise InputError(
            f"model: {tensors.folder} lacks {', '.join(lacking[:MAX_NAMES_SHOWN])}, besides {max(files)}; those "
            "of all ranks are required"
        )
    return degrees, len(tensors.models) // len(files)


def _slices_in_files(
    architecture: Architecture, tensors: RankFilesFolder, degrees: RankDegrees, virtual: int, names: str
) -> Iterator[StoredSlice]:
    """Of boxes that several ranks have the first one is read."""

    def key(tp: int, stage: int, ep: int) -> str:
        chunk, pp = divmod(stage, degrees.pp)
        return degrees.rank_folder(tp, pp, ep) + (f"/{chunk}" if virtual > 1 else "")

    stages = _consecutive_ranges(
        [len(_layer_numbers(tensors.models[key(0, stage, 0)])) for stage in range(degrees.pp * virtual)]
    )
    rows = tensors.shapes.get((key(0, 0, 0), EMBEDDING), (0,))[0] * degrees.tp
    naming, seen = rank_weight_table(architecture, names, degrees), set[tuple[str, Box]]()
    for rank, part in rank_shards(architecture, degrees, stages, rows):
        for place in list_slices(architecture, naming, replace(part, file=key(*rank))):
            yield replace(place, copy=place.copy or (place.parameter, place.box) in seen)
            seen.add((place.parameter, place.box))


def _layer_numbers(model: Iterable[str]) -> set[str]:
    return {match[1] for name in model if (match := LAYER_NAME.match(name))}


def _consecutive_ranges(counts: Iterable[int]) -> list[range]:
    """The layers of stages that have so many each, one after the other."""
    found, start = [], 0
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return found
