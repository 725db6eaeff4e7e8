"""Checkpoints of weights of torchtitan and of Megatron-Core, which are folders of torch.distributed.checkpoint.

torchtitan: a run begins with one by `--checkpoint.enable --checkpoint.initial_load_path FOLDER`; what such a run saves
(`checkpoint/step-100`) is read, its optimizer left out.

Megatron-Core (`--ckpt-format torch_dist`), of any degrees on any degrees: a run begins with one by `--load FOLDER`; it is a
release, of which nothing but weights is loaded. What a run saved (`iter_0000100`) is read, its optimizer left out. Source:
Megatron-LM at d98e8a64 (Megatron-Core 0.20.0), dist_checkpointing/ and training/checkpointing.py.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shardwise.interop.frameworks.megatron.weight_names import (
    DISTRIBUTED_NAMES,
    EMBEDDING,
    EXTRA_STATE,
    NUMBERED,
    RELEASE_FOLDER,
    SIGMOID_FIX,
    STACKED,
    TITLE,
    TRACKER_FILE,
    ModuleNames,
    megatron_weight_table,
    tracked_folder,
)
from shardwise.interop.frameworks.torchtitan.models import torchtitan_model
from shardwise.interop.frameworks.weight_table import TensorPattern
from shardwise.interop.weights.dcp_folder import DCP_FILES, DcpModelFolder, write_dcp
from shardwise.interop.weights.replace_model_folder import ModelFiles, replace_model
from shardwise.interop.weights.stored_model import StoredModel, TensorFolder, drop_missing_biases
from shardwise.interop.weights.stored_slices import (
    BYTES_PER_FILE,
    OutputChunk,
    ReadBox,
    StoredSlice,
    list_slices,
    output_chunks,
    require_zero_biases,
    whole_shard,
)
from shardwise.model.architecture import Architecture
from shardwise.run.checkpoints.dcp_reader import METADATA_FILE
from shardwise.values.boxes import Shape
from shardwise.values.checksums import write_synced

TORCHTITAN_FILES = ModelFiles(METADATA_FILE, DCP_FILES)
TORCHTITAN_TENSORS = re.compile(
    r"(tok_embeddings|layers|mtp_layers|norm|lm_head)\."
)  # what the names of a model's tensors begin with


def write_torchtitan(
    folder: str | Path,
    architecture: Architecture,
    read: ReadBox,
    dtype: torch.dtype,
    *,
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:
    """Write a model of which `read` gives any box of a parameter, in `dtype`; complete, or no checkpoint at all.

    Raises `InputError` where no model of torchtitan is such a one, and as `replace_model` and `output_chunks` do.
    """
    found = output_chunks(architecture, list_slices(architecture, torchtitan_model(architecture).weight_table), dtype)
    with replace_model(Path(folder), TORCHTITAN_FILES) as part:
        write_dcp(part, found, read, bytes_per_file)


def open_torchtitan(folder: str | Path, architecture: Architecture) -> StoredModel:
    """The model of a folder. Raises `InputError` where that is another one, or cannot be read."""
    naming = torchtitan_model(architecture).weight_table
    tensors = DcpModelFolder(Path(folder), TORCHTITAN_TENSORS)
    return StoredModel(
        architecture, drop_missing_biases(list_slices(architecture, naming), architecture, tensors), tensors
    )


MEGATRON_FILES = ModelFiles(TRACKER_FILE, re.compile(RELEASE_FOLDER))
MEGATRON_CONFIG_FILE = "metadata.json"
# What `save_config` writes (dist_checkpointing/core.py); the last two are of releases before 0.20.
MEGATRON_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
MEGATRON_COMMON_FILE = "common.pt"
MEGATRON_TENSORS = re.compile(
    r"(embedding|decoder|output_layer|mtp)\.(?!.*\b_extra_state\b)"
)  # the names of a model's tensors


def write_megatron(
    folder: str | Path,
    architecture: Architecture,
    read: ReadBox,
    dtype: torch.dtype,
    *,
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:
    """Write a model of which `read` gives any box of a parameter, in `dtype`; complete, or no checkpoint at all.

    Raises `InputError` where GPTModel computes no such model, and as `replace_model` and `output_chunks` do.
    """
    found = output_chunks(architecture, megatron_slices(architecture, layer_prefix(architecture)), dtype)
    if not any(entry.name.endswith("expert_bias") for entry in found):
        require_zero_biases(architecture, read, TITLE, SIGMOID_FIX)
    with replace_model(Path(folder), MEGATRON_FILES) as part:
        inner = part / RELEASE_FOLDER
        inner.mkdir()
        write_dcp(inner, found, read, bytes_per_file, dict(_extra_states(found)))
        write_synced(inner / MEGATRON_COMMON_FILE, _torch_save_bytes({"checkpoint_version": 3.0}))
        write_synced(inner / MEGATRON_CONFIG_FILE, json.dumps(MEGATRON_CONFIG).encode())
        write_synced(part / TRACKER_FILE, RELEASE_FOLDER.encode())


def layer_prefix(architecture: Architecture) -> TensorPattern:
    """How layers are named: those of one kind are one tensor, those of several a tensor each (moe_layer_freq)."""
    return NUMBERED if architecture.num_dense_layers else STACKED


def megatron_slices(
    architecture: Architecture,
    layer: TensorPattern,
    implementations: Sequence[ModuleNames] = DISTRIBUTED_NAMES,
    padding: int = 0,
) -> Iterator[StoredSlice]:
    """Places by the names of the first implementation, and copies by those that others have beside them."""
    part, seen = whole_shard(architecture, padding), set[object]()
    for names in implementations:
        found = list(list_slices(architecture, megatron_weight_table(architecture, names, layer), part))
        yield from (replace(place, copy=bool(seen)) for place in found if place.chunk_key not in seen)
        seen |= {place.chunk_key for place in found}


def _extra_states(found: Iterable[OutputChunk]) -> Iterator[tuple[str, bytes]]:
    """The empty states that modules ask for beside their weights (ShardedObject.unique_key in mapping.py).

    Transformer Engine keeps scales of fp8 there; without any it is an empty tensor.
    """
    content = _torch_save_bytes([torch.empty(0, dtype=torch.uint8)])
    for entry in found:
        counts = entry.slices[0].num_counted_dims
        number, count = entry.box.offsets[:counts] or (0,), entry.tensor_shape[:counts] or (1,)
        yield f"{entry.name.rpartition('.')[0]}.{EXTRA_STATE}/shard_{_join_dots(number)}_{_join_dots(count)}", content


def _join_dots(numbers: Shape) -> str:
    return ".".join(map(str, numbers))


def _torch_save_bytes(content: object) -> bytes:
    """What `torch.save` makes of it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def open_megatron(folder: str | Path, architecture: Architecture) -> StoredModel:
    """The model of a folder with a tracker, or of one checkpoint. Raises `InputError` where it is another, or cannot be read."""
    tensors = DcpModelFolder(tracked_folder(Path(folder)), MEGATRON_TENSORS)
    padding = max(tensors.shapes.get(("", EMBEDDING), (0,))[0] - architecture.vocab_size, 0)
    candidates = (
        list(drop_missing_biases(megatron_slices(architecture, layer, names, padding), architecture, tensors))
        for layer in (STACKED, NUMBERED)
        for names in (DISTRIBUTED_NAMES, DISTRIBUTED_NAMES[::-1])
    )
    found = min(candidates, key=lambda places: _count_missing(places, tensors))
    return StoredModel(architecture, found, tensors)


def _count_missing(places: Iterable[StoredSlice], tensors: TensorFolder) -> int:
    """How many tensors a folder lacks."""
    return len({("", place.name) for place in places if not place.copy} - tensors.shapes.keys())
