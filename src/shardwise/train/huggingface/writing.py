"""A model of `transformers` written tensor by tensor: of its weights one tensor of one file is held at a time.

A file in safetensors is eight bytes that say how long its header is, the header, JSON that has format, shape and place of each
tensor, and the tensors, one behind the other. Source: the format's own description (README.md of huggingface/safetensors).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from shardwise.files import BLOCK, sync, write_synced
from shardwise.model.architecture import Architecture
from shardwise.train.conversion.entries import (
    BYTES_PER_FILE,
    Entry,
    entries,
    format_name,
    in_files,
    require_no_bias,
)
from shardwise.train.conversion.places import Read, places
from shardwise.train.conversion.publishing import Publication, draft
from shardwise.train.huggingface.config import write_config
from shardwise.train.huggingface.names import FAMILIES

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PUBLICATION = Publication(CONFIG, re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"))
# Formats by their names in a header. Source: the format's description.
FORMATS: Mapping[str, str] = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
ALIGNED = 8  # bytes: tensors begin at a multiple of it, behind a header that is filled with spaces


def write_model(
    folder: str | Path, architecture: Architecture, read: Read, dtype: torch.dtype, *, seq_len: int, model_type: str = "",
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:  # fmt: skip
    """Write a model of which `read` gives any box of a parameter, in `dtype`; complete, or nothing that reads as a model.

    A file has `bytes_per_file` of tensors at most, or one tensor. Raises `InputError` where no family (or not the one named) has
    what the model has, biases that its routers have moved included, for a format that no weights have, and where the folder
    cannot be written.
    """
    config, family = write_config(architecture, seq_len, model_type)
    config["dtype"] = format_name(dtype)
    found = entries(architecture, places(architecture, family.naming), dtype)
    if not family.balance_bias:
        having = ", ".join(name for name, other in FAMILIES.items() if other.balance_bias)
        require_no_bias(architecture, read, family.built_as, f"one of {having} (routers that score by sigmoid)")
    with draft(Path(folder), PUBLICATION) as part:
        _write_files(part, in_files(found, bytes_per_file), read)
        _write_json(part / CONFIG, config)


def file_of(number: int, count: int) -> str:
    """The name of the file of that number, from 1, of so many."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _write_files(folder: Path, files: Sequence[Sequence[Entry]], read: Read) -> None:
    index: dict[str, str] = {}
    for number, found in enumerate(files, start=1):
        name = file_of(number, len(files))
        _write_file(folder / name, found, read)
        index |= {entry.name: name for entry in found}
    if len(files) > 1:
        size = sum(entry.num_bytes for found in files for entry in found)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": index})


def _write_file(path: Path, found: Sequence[Entry], read: Read) -> None:
    found = sorted(found, key=lambda entry: -entry.dtype.itemsize)  # each begins at a multiple of its elements
    with path.open("wb") as file:
        file.write(_header(found))
        for entry in found:  # a function of its own writes it, so that it is gone when the next one comes
            _write_tensor(file, entry.value(read))
        sync(file)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    content = tensor.view(-1).view(torch.uint8).numpy()
    for start in range(0, len(content), BLOCK):
        file.write(content[start : start + BLOCK].data)


def _header(found: Sequence[Entry]) -> bytes:
    """What stands in front of the tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in found:
        kind, stop = FORMATS[format_name(entry.dtype)], start + entry.num_bytes
        header[entry.name] = {"dtype": kind, "shape": entry.whole, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNED)
    return len(text).to_bytes(8, "little") + text


def _write_json(path: Path, content: object) -> None:
    write_synced(path, (json.dumps(content, indent=2) + "\n").encode())
