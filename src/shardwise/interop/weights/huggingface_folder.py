"""Folders of Hugging Face `transformers`: config.json beside weights in safetensors, in one file or in several with an index.

Of weights that are written one tensor of one file is in memory at a time. A safetensors file is eight bytes that say how long its
header is, the header, JSON that has format, shape and place of each tensor, and the tensors, one behind the other. Source: the
format's own description (README.md of huggingface/safetensors).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.interop.frameworks.huggingface_families import (
    CONFIG_FILE,
    FAMILIES,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    read_config,
    write_config,
)
from shardwise.interop.weights.replace_model_folder import ModelFiles, replace_model
from shardwise.interop.weights.stored_model import StoredModel, boxes_of_checkpoint, boxes_of_weights
from shardwise.interop.weights.stored_slices import (
    BYTES_PER_FILE,
    OutputChunk,
    ReadBox,
    dtype_name,
    group_into_files,
    list_slices,
    output_chunks,
    require_zero_biases,
)
from shardwise.model.architecture import Architecture
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.values.boxes import Box, Shape
from shardwise.values.checksums import READ_BYTES, flush_to_disk, write_synced
from shardwise.values.errors import InputError

HUGGINGFACE_FILES = ModelFiles(CONFIG_FILE, re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"))
# Formats by their names in a header. Source: the format's description.
SAFETENSORS_DTYPES: Mapping[str, str] = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
HEADER_ALIGNMENT = 8  # bytes: tensors begin at a multiple of it, behind a header that is filled with spaces


def write_huggingface(
    folder: str | Path, architecture: Architecture, read: ReadBox, dtype: torch.dtype, *, seq_len: int, model_type: str = "",
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:  # fmt: skip
    """Write a model of which `read` gives any box of a parameter, in `dtype`; complete, or nothing that reads as a model.

    A file has `bytes_per_file` of tensors at most, or one tensor. Raises `InputError` where no family (or not the one named) has
    what the model has, biases that its routers have moved included, for a format that no weights have, and where the folder
    cannot be written.
    """
    config, family = write_config(architecture, seq_len, model_type)
    config["dtype"] = dtype_name(dtype)
    found = output_chunks(architecture, list_slices(architecture, family.weight_table), dtype)
    if not family.balance_bias:
        having = ", ".join(name for name, other in FAMILIES.items() if other.balance_bias)
        require_zero_biases(architecture, read, family.model_class, f"one of {having} (routers that score by sigmoid)")
    with replace_model(Path(folder), HUGGINGFACE_FILES) as part:
        _write_files(part, group_into_files(found, bytes_per_file), read)
        _write_json(part / CONFIG_FILE, config)


def weights_file_name(number: int, count: int) -> str:
    """The name of the file of that number, from 1, of so many."""
    return WEIGHTS_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_files(folder: Path, files: Sequence[Sequence[OutputChunk]], read: ReadBox) -> None:
    index: dict[str, str] = {}
    for number, found in enumerate(files, start=1):
        name = weights_file_name(number, len(files))
        _write_file(folder / name, found, read)
        index |= {entry.name: name for entry in found}
    if len(files) > 1:
        size = sum(entry.num_bytes for found in files for entry in found)
        _write_json(folder / WEIGHTS_INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": index})


def _write_file(path: Path, found: Sequence[OutputChunk], read: ReadBox) -> None:
    found = sorted(found, key=lambda entry: -entry.dtype.itemsize)  # each begins at a multiple of its elements
    with path.open("wb") as file:
        file.write(_format_header(found))
        for entry in found:  # a function of its own writes it, so that it is gone when the next one comes
            _write_tensor(file, entry.assemble_values(read))
        flush_to_disk(file)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    content = tensor.view(-1).view(torch.uint8).numpy()
    for start in range(0, len(content), READ_BYTES):
        file.write(content[start : start + READ_BYTES].data)


def _format_header(found: Sequence[OutputChunk]) -> bytes:
    """What stands in front of the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in found:
        kind, stop = SAFETENSORS_DTYPES[dtype_name(entry.dtype)], start + entry.num_bytes
        header[entry.name] = {"dtype": kind, "shape": entry.tensor_shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, content: object) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())


TIED_HEAD = "lm_head.weight"  # which some files have of a tied model too
COMPUTED_SUFFIX = "rotary_emb.inv_freq"  # the end of the names of what a model makes for itself


def open_hf(folder: str | Path) -> StoredModel:
    """The model of a folder. Raises `InputError` for what its config does not say, and for tensors that are not those it says."""
    folder = Path(folder)
    architecture, family = read_config(_read_json(folder / CONFIG_FILE), name=folder.resolve().name)
    tied = {TIED_HEAD} if architecture.tied_embeddings else set()
    return StoredModel(
        architecture, list_slices(architecture, family.weight_table), SafetensorsFolder(folder, tied), "its config"
    )


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> ModelWeights:
    """The weights of a folder on the CPU, in `dtype` or in the format of the files. Raises `InputError`."""
    return open_hf(folder).weights(dtype)


def save_hf(
    weights: ModelWeights,
    folder: str | Path,
    *,
    seq_len: int,
    model_type: str = "",
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:
    """Write weights so that `transformers` reads it; `seq_len` is the longest sequence that it was made for.

    Raises `InputError` where no family (or not the one named) has what the model has, or the folder cannot be written.
    """
    write_huggingface(
        folder, weights.architecture, boxes_of_weights(weights), weights.dtype, seq_len=seq_len, model_type=model_type,
        bytes_per_file=bytes_per_file,
    )  # fmt: skip


class SafetensorsFolder:
    """The tensors of a folder's files, without those of some names. Raises `InputError` where they cannot be read."""

    def __init__(self, folder: Path, without: set[str]) -> None:
        self.folder, self._without = folder, without
        names = (
            sorted(set(_read_json(folder / WEIGHTS_INDEX_FILE)["weight_map"].values()))
            if (folder / WEIGHTS_INDEX_FILE).exists()
            else [WEIGHTS_FILE]
        )
        self.files: dict[str, Any] = {}
        for name in names:
            try:
                file: Any = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InputError(f"model: cannot read {folder / name}: {error}") from None
            self.files |= dict.fromkeys(file.keys(), file)

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        own = [name for name in self.files if name not in self._without and not name.endswith(COMPUTED_SUFFIX)]
        return {("", name): tuple(self.files[name].get_slice(name).get_shape()) for name in own}

    def read(self, file: str, name: str, box: Box) -> Tensor:
        found: Tensor = self.files[name].get_slice(name)[box.slices]
        return found

    def dtype(self) -> torch.dtype:
        """The format of the first of them."""
        (file, name), shape = min(self.shapes.items())
        return self.read(file, name, Box((0,) * len(shape), (0,) * len(shape))).dtype


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"model: {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"model: {path} holds a {type(found).__name__}; an object is required")
    return found


def checkpoint_to_hf(
    checkpoint: str | Path, architecture: Architecture, folder: str | Path, *, seq_len: int,
    dtype: torch.dtype | None = None, bytes_per_file: int = BYTES_PER_FILE,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint, whatever ranks it was made on, as `transformers` reads them.

    In `dtype`, or in the format that the optimizer updated (the master copy's, where the run had one). `seq_len` is the longest
    sequence that the model was trained for. One tensor is held at a time. Raises `InputError` for a checkpoint that is damaged,
    or of another architecture, and as `save_hf` does.
    """
    read, own = boxes_of_checkpoint(checkpoint, architecture)
    write_huggingface(folder, architecture, read, dtype or own, seq_len=seq_len, bytes_per_file=bytes_per_file)
