"""Folders of Hugging Face `transformers`: config.json beside weights in safetensors, in one file or in several with an index.

Only one tensor is in memory while weights are written. A safetensors file is eight bytes with the length of the header, the
header (JSON with dtype, shape and byte range of each tensor), and the tensors one behind the other. Source: the format's own
description (README.md of huggingface/safetensors).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.interop.frameworks.huggingface_families import (
    CONFIG_FILE,
    FAMILIES,
    WEIGHTS_FILE,
    WEIGHTS_INDEX_FILE,
    read_config,
    without_missing_modules,
    write_config,
)
from shardwise.interop.weights.replace_model_folder import ModelFiles, replace_model
from shardwise.interop.weights.stored_model import StoredModel, boxes_of_checkpoint, boxes_of_weights
from shardwise.interop.weights.stored_slices import (
    BYTES_PER_FILE,
    OutputChunk,
    ReadBox,
    WeightSource,
    dtype_name,
    group_into_files,
    list_slices,
    output_chunks,
    require_zero_biases,
    write_elements,
)
from shardwise.model import Architecture
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.values import (
    Box,
    FileMessages,
    InputError,
    Shape,
    describe_error,
    flush_to_disk,
    read_json_object,
    require_regular,
    short_repr,
    write_synced,
)

HUGGINGFACE_FILES = ModelFiles(CONFIG_FILE, re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"))
# Names of dtypes in a header. Source: the format's description.
SAFETENSORS_DTYPES: Mapping[str, str] = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
HEADER_ALIGNMENT = 8  # bytes: tensors begin at a multiple, so the header is padded with spaces


def write_huggingface(
    folder: str | Path,
    source: WeightSource,
    *,
    seq_len: int,
    model_type: str = "",
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:
    """Write a model for transformers. It is complete or absent.

    A file holds at most `bytes_per_file` of tensors, or one tensor. Raises `InputError` if no family (or not `model_type`) has
    such a model, including biases that its routers have moved, for a dtype that no weights have, and if the folder cannot be
    written.
    """
    config, family = write_config(source.architecture, seq_len, model_type)
    config["dtype"] = dtype_name(source.dtype)
    chunks = output_chunks(source, list_slices(source.architecture, family.weight_table))
    if not family.balance_bias:
        supporting = ", ".join(name for name, family_with_bias in FAMILIES.items() if family_with_bias.balance_bias)
        require_zero_biases(source, family.model_class, f"one of {supporting} (routers that score by sigmoid)")
    with replace_model(Path(folder), HUGGINGFACE_FILES) as draft:
        _write_files(draft, group_into_files(chunks, bytes_per_file), source.read)
        _write_json(draft / CONFIG_FILE, config)


def weights_file_name(number: int, count: int) -> str:
    """Return the name of file `number` (from 1) of `count`."""
    return WEIGHTS_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_files(folder: Path, files: Sequence[Sequence[OutputChunk]], read: ReadBox) -> None:
    index: dict[str, str] = {}
    for number, file_chunks in enumerate(files, start=1):
        name = weights_file_name(number, len(files))
        _write_file(folder / name, file_chunks, read)
        index |= {chunk.name: name for chunk in file_chunks}
    if len(files) > 1:
        size = sum(chunk.num_bytes for file_chunks in files for chunk in file_chunks)
        _write_json(folder / WEIGHTS_INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": index})


def _write_file(path: Path, chunks: Sequence[OutputChunk], read: ReadBox) -> None:
    chunks = sorted(chunks, key=lambda chunk: -chunk.dtype.itemsize)  # widest first, so that each is aligned
    with path.open("wb") as file:
        file.write(_format_header(chunks))
        for chunk in chunks:  # written by a function, which frees each tensor before the next is read
            write_elements(file, chunk.assemble_values(read))
        flush_to_disk(file)


def _format_header(chunks: Sequence[OutputChunk]) -> bytes:
    """Return the length and the header that stand before the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for chunk in chunks:
        dtype, stop = SAFETENSORS_DTYPES[dtype_name(chunk.dtype)], start + chunk.num_bytes
        header[chunk.name] = {"dtype": dtype, "shape": chunk.tensor_shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, content: object) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())


TIED_HEAD = "lm_head.weight"  # some files of tied models have it as well
COMPUTED_SUFFIX = "rotary_emb.inv_freq"  # buffers that a model computes itself


def open_hf(folder: str | Path) -> StoredModel:
    """Open the model of a folder, without modules of multi-token prediction if it has no weights of them.

    Raises `InputError` for an unsupported config, and for tensors that do not match it.
    """
    folder = Path(folder)
    architecture, family = read_config(read_json(folder / CONFIG_FILE), name=folder.resolve().name)
    tied = {TIED_HEAD} if architecture.tied_embeddings else set()
    tensors = SafetensorsFolder(folder, tied)
    architecture = without_missing_modules(architecture, tensors.files)
    return StoredModel(architecture, list_slices(architecture, family.weight_table), tensors, "its config")


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> ModelWeights:
    """Load the weights of a folder to the CPU, in `dtype` or the dtype of the files. Raises `InputError`."""
    return open_hf(folder).weights(dtype)


def save_hf(
    weights: ModelWeights,
    folder: str | Path,
    *,
    seq_len: int,
    model_type: str = "",
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:
    """Write weights so that `transformers` reads them; `seq_len` is the longest sequence that the model is made for.

    Raises `InputError` if no family (or not `model_type`) has such a model, or if the folder cannot be written.
    """
    source = WeightSource(weights.architecture, boxes_of_weights(weights), weights.dtype)
    write_huggingface(folder, source, seq_len=seq_len, model_type=model_type, bytes_per_file=bytes_per_file)


def _indexed_files(path: Path) -> list[str]:
    """Return the names of the files in an index. Raises `InputError` for an index that is damaged, or names other folders."""
    names_by_tensor = read_json(path).get("weight_map")
    if not isinstance(names_by_tensor, dict) or not names_by_tensor:
        raise InputError(
            f"model: {path} has the weight_map {short_repr(names_by_tensor)}; file names by tensor are required"
        )
    for name in names_by_tensor.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise InputError(
                f"model: {path} has a tensor in {short_repr(name)}; the name of a file beside it is required"
            )
    return sorted(set(names_by_tensor.values()))


class SafetensorsFolder:
    """The tensors of a folder's files except `ignored_names` (`stored_model.TensorFolder`). Raises `InputError` if unreadable."""

    def __init__(self, folder: Path, ignored_names: set[str]) -> None:
        self.folder, self._without = folder, ignored_names
        names = [WEIGHTS_FILE]
        if (folder / WEIGHTS_INDEX_FILE).exists():
            names = _indexed_files(folder / WEIGHTS_INDEX_FILE)
        self.files: dict[str, Any] = {}
        for name in names:
            try:
                require_regular(folder / name)
                file: Any = safe_open(folder / name, framework="pt")
            except (OSError, ValueError, SafetensorError) as error:
                raise InputError(f"model: cannot read {folder / name}: {describe_error(error)}") from None
            if repeated := sorted(self.files.keys() & set(file.keys())):
                raise InputError(
                    f"model: {folder / name} has {repeated[0]}, as another file has; each tensor once is required"
                )
            self.files |= dict.fromkeys(file.keys(), file)

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        names = [name for name in self.files if name not in self._without and not name.endswith(COMPUTED_SUFFIX)]
        return {("", name): tuple(self.files[name].get_slice(name).get_shape()) for name in names}

    def read(self, file: str, name: str, box: Box) -> Tensor:
        tensor: Tensor = self.files[name].get_slice(name)[box.slices]
        return tensor

    def dtype(self) -> torch.dtype:
        """Return the dtype of the first tensor."""
        (file, name), shape = min(self.shapes.items())
        return self.read(file, name, Box((0,) * len(shape), (0,) * len(shape))).dtype


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file of a model. Raises `InputError` if it cannot be read or holds something else."""
    return read_json_object(path, FileMessages("model: "))


def checkpoint_to_hf(
    checkpoint: str | Path, architecture: Architecture, folder: str | Path, *, seq_len: int,
    dtype: torch.dtype | None = None, bytes_per_file: int = BYTES_PER_FILE,
) -> None:  # fmt: skip
    """Write the weights of a checkpoint, saved on any number of ranks, so that `transformers` reads them.

    `dtype` defaults to the one that the optimizer updates (the master copy's, if there is one). `seq_len` is the longest
    sequence that the model was trained for. One tensor is in memory at a time. Raises `InputError` for a checkpoint that is
    damaged, or of another architecture, and as `save_hf` does.
    """
    read_box, stored_dtype = boxes_of_checkpoint(checkpoint, architecture)
    source = WeightSource(architecture, read_box, dtype or stored_dtype)
    write_huggingface(folder, source, seq_len=seq_len, bytes_per_file=bytes_per_file)
