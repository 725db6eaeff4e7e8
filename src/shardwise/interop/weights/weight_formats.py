"""The formats that a model's weights are written in and read from, by name: one value each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from shardwise.interop.frameworks.huggingface_families import CONFIG_FILE, require_same_model
from shardwise.interop.frameworks.megatron import weight_names
from shardwise.interop.weights import distributed_checkpoints
from shardwise.interop.weights.huggingface_folder import open_hf, write_huggingface
from shardwise.interop.weights.megatron_rank_files import (
    RANK_FILE,
    RankDegrees,
    open_megatron_ranks,
    write_megatron_ranks,
)
from shardwise.interop.weights.stored_model import StoredModel
from shardwise.interop.weights.stored_slices import ReadBox
from shardwise.model.architecture import Architecture
from shardwise.run.checkpoints.dcp_reader import METADATA_FILE
from shardwise.values.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What some formats ask for beside the weights: the longest sequence that the model was trained for (Hugging Face), degrees
    and implementation (files of Megatron-LM's ranks)."""

    seq_len: int | None = None
    degrees: RankDegrees = field(default_factory=RankDegrees)
    implementation: str = "transformer_engine"


class WeightSource(NamedTuple):
    """What is to be written: a model, boxes of its weights, and the format of their numbers."""

    architecture: Architecture
    read: ReadBox
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format: what a framework calls it, what of a folder has it, how a model of a folder is read (None: the folder says
    itself which it is) and written, and what begins with one in the framework."""

    title: str
    matches: Callable[[Path], bool]
    read: Callable[[Path, Architecture | None], StoredModel]
    write: Callable[[Path, WeightSource, ConvertOptions], None]
    begin: str


def _write_huggingface(folder: Path, model: WeightSource, choices: ConvertOptions) -> None:
    if choices.seq_len is None:
        raise InputError(
            "--seq-len: a config.json says the longest sequence that a model was trained for, which is required"
        )
    write_huggingface(folder, *model, seq_len=choices.seq_len)


def _read_huggingface(folder: Path, architecture: Architecture | None) -> StoredModel:
    if architecture is not None:
        require_same_model(folder, architecture)
    return open_hf(folder)


def _write_ranks(folder: Path, model: WeightSource, choices: ConvertOptions) -> None:
    write_megatron_ranks(folder, *model, degrees=choices.degrees, implementation=choices.implementation)


def _require_model(
    read: Callable[[Path, Architecture], StoredModel],
) -> Callable[[Path, Architecture | None], StoredModel]:
    """Reading of a folder that does not say which model it has."""

    def found(folder: Path, architecture: Architecture | None) -> StoredModel:
        if architecture is None:
            raise InputError(f"--model: {folder} does not say which model its weights are of, which is required")
        return read(folder, architecture)

    return found


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "huggingface": WeightFormat(
        title="a model of transformers", matches=lambda folder: (folder / CONFIG_FILE).is_file(), read=_read_huggingface,
        write=_write_huggingface, begin="AutoModelForCausalLM.from_pretrained('{folder}')",
    ),
    "megatron": WeightFormat(
        title="a distributed checkpoint of Megatron-Core",
        matches=lambda folder: (weight_names.tracked_folder(folder) / distributed_checkpoints.MEGATRON_CONFIG_FILE).is_file(),
        read=_require_model(distributed_checkpoints.open_megatron),
        write=lambda folder, model, choices: distributed_checkpoints.write_megatron(folder, *model),
        begin="pretrain_gpt.py --load {folder}",
    ),
    "megatron-ranks": WeightFormat(
        title="files of Megatron-LM's ranks",
        matches=lambda folder: any(weight_names.tracked_folder(folder).glob(f"mp_rank_*/{RANK_FILE}")),
        read=_require_model(open_megatron_ranks), write=_write_ranks, begin="pretrain_gpt.py --load {folder} --ckpt-format torch",
    ),
    "torchtitan": WeightFormat(
        title="a checkpoint of torchtitan", matches=lambda folder: (folder / METADATA_FILE).is_file(),
        read=_require_model(distributed_checkpoints.open_torchtitan),
        write=lambda folder, model, choices: distributed_checkpoints.write_torchtitan(folder, *model),
        begin="--checkpoint.enable --checkpoint.initial_load_path {folder}",
    ),
}  # fmt: skip


def detect_format(folder: Path, flag: str) -> WeightFormat:
    """The format that a folder is in. Raises `InputError` for any other folder."""
    found = next((one for one in WEIGHT_FORMATS.values() if one.matches(folder)), None)
    if found is None:
        titles = ", ".join(one.title for one in WEIGHT_FORMATS.values())
        raise InputError(f"{flag}: found none of {titles} in {folder}; one of them is required")
    return found


def open_stored_model(folder: str | Path, architecture: Architecture | None, flag: str = "--from") -> StoredModel:
    """The model of a folder in any format. Raises `InputError` where it has none, or another one."""
    return detect_format(Path(folder), flag).read(Path(folder), architecture)
