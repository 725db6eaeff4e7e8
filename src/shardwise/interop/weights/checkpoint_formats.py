"""The formats that a model's weights are written in and read from, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
from shardwise.interop.weights.stored_slices import WeightSource
from shardwise.model import Architecture
from shardwise.run import METADATA_FILE
from shardwise.values import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """Options that only some formats need.

    `seq_len` is the longest sequence that the model was trained for (Hugging Face); `degrees` and `implementation` are those
    of Megatron-LM's rank files.
    """

    seq_len: int | None = None
    degrees: RankDegrees = field(default_factory=RankDegrees)
    implementation: str = "transformer_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A format of weights.

    `title` is the framework's word for it, `matches` tells whether a folder has it, `read` opens a folder (without an
    architecture if the folder itself has it), `write` writes one, and `begin` is the option or call that starts from it.
    """

    title: str
    matches: Callable[[Path], bool]
    read: Callable[[Path, Architecture | None], StoredModel]
    write: Callable[[Path, WeightSource, ConvertOptions], None]
    begin: str


def _write_huggingface(folder: Path, source: WeightSource, options: ConvertOptions) -> None:
    if options.seq_len is None:
        raise InputError(
            "--seq-len: a config.json says the longest sequence that a model was trained for, which is required"
        )
    write_huggingface(folder, source, seq_len=options.seq_len)


def _read_huggingface(folder: Path, architecture: Architecture | None) -> StoredModel:
    if architecture is not None:
        require_same_model(folder, architecture)
    return open_hf(folder)


def _write_ranks(folder: Path, source: WeightSource, options: ConvertOptions) -> None:
    write_megatron_ranks(folder, source, degrees=options.degrees, implementation=options.implementation)


def _require_model(
    read: Callable[[Path, Architecture], StoredModel],
) -> Callable[[Path, Architecture | None], StoredModel]:
    """Return a reader of folders that do not say which model they have."""

    def read_with_model(folder: Path, architecture: Architecture | None) -> StoredModel:
        if architecture is None:
            raise InputError(f"--model: {folder} does not say which model its weights are of, which is required")
        return read(folder, architecture)

    return read_with_model


WEIGHT_FORMATS: Mapping[str, WeightFormat] = {
    "huggingface": WeightFormat(
        title="a model of transformers", matches=lambda folder: (folder / CONFIG_FILE).is_file(), read=_read_huggingface,
        write=_write_huggingface, begin="AutoModelForCausalLM.from_pretrained('{folder}')",
    ),
    "megatron": WeightFormat(
        title="a distributed checkpoint of Megatron-Core",
        matches=lambda folder: (weight_names.tracked_folder(folder) / distributed_checkpoints.MEGATRON_CONFIG_FILE).is_file(),
        read=_require_model(distributed_checkpoints.open_megatron),
        write=lambda folder, source, options: distributed_checkpoints.write_megatron(folder, source),
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
        write=lambda folder, source, options: distributed_checkpoints.write_torchtitan(folder, source),
        begin="--checkpoint.enable --checkpoint.initial_load_path {folder}",
    ),
}  # fmt: skip


def detect_format(folder: Path, flag: str) -> WeightFormat:
    """Return the format of a folder. Raises `InputError`, which names `flag`, if it has none."""
    weight_format = next((candidate for candidate in WEIGHT_FORMATS.values() if candidate.matches(folder)), None)
    if weight_format is None:
        titles = ", ".join(candidate.title for candidate in WEIGHT_FORMATS.values())
        raise InputError(f"{flag}: found none of {titles} in {folder}; one of them is required")
    return weight_format


def open_stored_model(folder: str | Path, architecture: Architecture | None, flag: str = "--from") -> StoredModel:
    """Open the model of a folder in any format. Raises `InputError` if it has none, or another model."""
    return detect_format(Path(folder), flag).read(Path(folder), architecture)
