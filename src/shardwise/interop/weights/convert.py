"""Convert a model's weights: from a run, a checkpoint or a framework's folder into a framework's folder, in formats by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardwise.interop.frameworks.huggingface_families import CONFIG_FILE, require_same_model
from shardwise.interop.frameworks.megatron import weight_names
from shardwise.interop.weights import distributed_checkpoints
from shardwise.interop.weights.huggingface_folder import open_hf, read_json, write_huggingface
from shardwise.interop.weights.megatron_rank_files import (
    RANK_FILE,
    RankDegrees,
    open_megatron_ranks,
    write_megatron_ranks,
)
from shardwise.interop.weights.stored_model import StoredModel, boxes_of_checkpoint, boxes_of_stored
from shardwise.interop.weights.stored_slices import WEIGHT_DTYPES as DTYPES
from shardwise.interop.weights.stored_slices import WeightSource
from shardwise.model import Architecture, ModelFacts, load_model
from shardwise.records import RunFolder
from shardwise.run import METADATA_FILE
from shardwise.run.checkpoints.manifest import MANIFEST
from shardwise.run.checkpoints.step_folders import latest
from shardwise.search import is_plan_file, load_plan
from shardwise.values import InputError, Payload, argument_label, lookup


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
class CheckpointFormat:
    """A format of weights.

    `title` is the framework's word for it, `matches` tells whether a folder has it, `read` opens a folder (without an
    architecture if the folder itself has it), `write` writes one, and `begin` is the option or call that starts from it.
    `has_checksums`: its files have checksums of the weights, which are verified as they are read.
    """

    title: str
    matches: Callable[[Path], bool]
    read: Callable[[Path, Architecture | None], StoredModel]
    write: Callable[[Path, WeightSource, ConvertOptions], None]
    begin: str
    has_checksums: bool = True


def _write_huggingface(folder: Path, source: WeightSource, options: ConvertOptions) -> None:
    if options.seq_len is None:
        raise InputError(
            "--seq-len: a config.json says the longest sequence that a model was trained for, which is required"
        )
    write_huggingface(folder, source, seq_len=options.seq_len)


def _read_huggingface(folder: Path, architecture: Architecture | None) -> StoredModel:
    stored = open_hf(folder)
    if architecture is not None:
        require_same_model(folder, stored.architecture, architecture)
    return stored


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


WEIGHT_FORMATS: Mapping[str, CheckpointFormat] = {
    "huggingface": CheckpointFormat(
        title="a model of transformers", matches=lambda folder: (folder / CONFIG_FILE).is_file(), read=_read_huggingface,
        write=_write_huggingface, has_checksums=False, begin="AutoModelForCausalLM.from_pretrained('{folder}')",
    ),
    "megatron": CheckpointFormat(
        title="a distributed checkpoint of Megatron-Core",
        matches=lambda folder: (weight_names.tracked_folder(folder) / distributed_checkpoints.MEGATRON_CONFIG_FILE).is_file(),
        read=_require_model(distributed_checkpoints.open_megatron),
        write=lambda folder, source, options: distributed_checkpoints.write_megatron(folder, source),
        begin="pretrain_gpt.py --load {folder}",
    ),
    "megatron-ranks": CheckpointFormat(
        title="files of Megatron-LM's ranks",
        matches=lambda folder: any(weight_names.tracked_folder(folder).glob(f"mp_rank_*/{RANK_FILE}")),
        read=_require_model(open_megatron_ranks), write=_write_ranks, begin="pretrain_gpt.py --load {folder} --ckpt-format torch",
    ),
    "torchtitan": CheckpointFormat(
        title="a checkpoint of torchtitan", matches=lambda folder: (folder / METADATA_FILE).is_file(),
        read=_require_model(distributed_checkpoints.open_torchtitan),
        write=lambda folder, source, options: distributed_checkpoints.write_torchtitan(folder, source),
        begin="--checkpoint.enable --checkpoint.initial_load_path {folder}",
    ),
}  # fmt: skip


def detect_format(folder: Path, flag: str) -> CheckpointFormat:
    """Return the format of a folder. Raises `InputError`, which names `flag`, if it has none."""
    weight_format = next((candidate for candidate in WEIGHT_FORMATS.values() if candidate.matches(folder)), None)
    if weight_format is None:
        titles = ", ".join(candidate.title for candidate in WEIGHT_FORMATS.values())
        raise InputError(f"{flag}: found none of {titles} in {folder}; one of them is required")
    return weight_format


def open_stored_model(folder: str | Path, architecture: Architecture | None, flag: str = "--from") -> StoredModel:
    """Open the model of a folder in any format. Raises `InputError` if it has none, or another model."""
    return detect_format(Path(folder), flag).read(Path(folder), architecture)


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """The weights to convert, described by `title`; `seq_len` is the longest sequence of the model's training, if known.

    `has_checksums`: damage of the weights would have been seen.
    """

    title: str
    model: WeightSource
    seq_len: int | None
    has_checksums: bool


@dataclass(frozen=True, slots=True)
class ConvertedModel:
    """Converted weights in `folder`, of dtype `dtype`; `source` describes the folder that was read, and its checksums."""

    source: str
    format: CheckpointFormat
    folder: Path
    architecture: Architecture
    dtype: str
    has_checksums: bool

    @property
    def begin(self) -> str:
        """The option or call with which the framework starts from the folder."""
        return self.format.begin.format(folder=self.folder.resolve())


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionRecord(Payload):
    """Conversion of weights: source, written format and folder, and the option or call with which the framework starts there.

    `has_checksums`: the source has checksums of its weights, which were verified.
    """

    SCHEMA = "shardwise.convert/1"
    model: ModelFacts
    dtype: str
    source: str
    has_checksums: bool
    written: str
    folder: str
    begin: str

    @classmethod
    def of(cls, converted: ConvertedModel) -> ConversionRecord:
        """Return the record of a conversion."""
        model, written = ModelFacts.of(converted.architecture), converted.format.title
        return cls.from_attributes(converted, model=model, written=written, folder=str(converted.folder))


def convert(
    folder: str | Path, to: str, out: str | Path, *, model: str | None = None, dtype: str | None = None,
    choices: ConvertOptions | None = None,
) -> ConvertedModel:  # fmt: skip
    """Write the weights of a folder in another format, tensor by tensor, in `dtype` or the dtype that they are stored in.

    `folder` is a run's (its latest checkpoint), one checkpoint's, or a framework's; `model` names the model (a plan, a name of
    the catalogue or a config.json) where the folder does not. Raises `InputError` if something cannot be read, written or
    represented.
    """
    weight_format = lookup(WEIGHT_FORMATS, to, argument_label("to"))
    source, choices = open_source(Path(folder), model), choices or ConvertOptions()
    weights = (
        source.model if dtype is None else source.model._replace(dtype=lookup(DTYPES, dtype, argument_label("dtype")))
    )
    weight_format.write(Path(out), weights, replace(choices, seq_len=choices.seq_len or source.seq_len))
    name = next(name for name, torch_dtype in DTYPES.items() if torch_dtype == weights.dtype)
    return ConvertedModel(source.title, weight_format, Path(out), weights.architecture, name, source.has_checksums)


def open_source(folder: Path, model: str | None) -> OpenedSource:
    """Open the weights of a folder of any kind. Raises `InputError` for an unknown kind, or if the model is not known."""
    run = next((candidate for candidate in (folder, *folder.resolve().parents[:2]) if _is_run(candidate)), None)
    checkpoint = folder if (folder / MANIFEST).is_file() else latest(RunFolder(folder).checkpoints)
    if checkpoint is not None:
        return _open_checkpoint(checkpoint, str(RunFolder(run).plan) if run and model is None else model)
    if run == folder:
        raise InputError(f"{folder}: found a run without a checkpoint; one that a run has written is required")
    weight_format = detect_format(folder, str(folder))
    seq_len = None
    if weight_format is WEIGHT_FORMATS["huggingface"]:
        if model is not None:
            raise InputError(f"{argument_label('model')}: {folder} says itself which model it has; leave it out")
        seq_len = read_json(folder / CONFIG_FILE).get("max_position_embeddings")
    architecture, plan_seq_len = (None, None) if model is None else _load_named(model)
    stored = weight_format.read(folder, architecture)
    source = WeightSource(stored.architecture, boxes_of_stored(stored), stored.tensors.dtype())
    return OpenedSource(weight_format.title, source, seq_len or plan_seq_len, weight_format.has_checksums)


def _is_run(folder: Path) -> bool:
    return RunFolder(folder).plan.is_file() and RunFolder(folder).checkpoints.is_dir()


def _open_checkpoint(checkpoint: Path, model: str | None) -> OpenedSource:
    if model is None:
        raise InputError(
            f"{argument_label('model')}: {checkpoint} lies in no run's folder, so that its plan, or its model, is required"
        )
    architecture, seq_len = _load_named(model)
    read_box, dtype = boxes_of_checkpoint(checkpoint, architecture)
    return OpenedSource(f"checkpoint {checkpoint.name}", WeightSource(architecture, read_box, dtype), seq_len, True)


def _load_named(model: str) -> tuple[Architecture, int | None]:
    """Return the model of a plan (with its sequence length), of the catalogue, or of a config.json."""
    if is_plan_file(model):
        plan = load_plan(model)
        return plan.model, plan.job.seq_len
    return load_model(model), None
