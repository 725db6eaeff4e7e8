"""Checkpoints of weights of torchtitan and of Megatron-Core, which are folders of torch.distributed.checkpoint.

torchtitan starts from one with `--checkpoint.enable --checkpoint.initial_load_path FOLDER`. What a torchtitan run saves
(`checkpoint/step-100`) is read without its optimizer.

Megatron-Core (`--ckpt-format torch_dist`) reads one on any degrees, whatever degrees wrote it: a run starts from one with
`--load FOLDER`. What is written here is a release, from which Megatron-LM loads only weights. What a run saved
(`iter_0000100`) is read without its optimizer. Source: Megatron-LM at d98e8a64 (Megatron-Core 0.20.0), dist_checkpointing/ and
training/checkpointing.py.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from shardwise.interop.frameworks.megatron import weight_names
from shardwise.interop.frameworks.torchtitan.models import torchtitan_model
from shardwise.interop.frameworks.weight_table import TensorPattern
from shardwise.interop.weights.dcp_folder import DCP_FILES, DcpModelFolder, write_dcp
from shardwise.interop.weights.replace_model_folder import ModelFiles, replace_model
from shardwise.interop.weights.stored_model import StoredModel, TensorFolder, drop_missing_biases
from shardwise.interop.weights.stored_slices import (
    BYTES_PER_FILE,
    OutputChunk,
    StoredSlice,
    WeightSource,
    list_slices,
    output_chunks,
    require_zero_biases,
    whole_shard,
)
from shardwise.model import Architecture
from shardwise.run import METADATA_FILE
from shardwise.values import Shape, write_synced

TORCHTITAN_FILES = ModelFiles(METADATA_FILE, DCP_FILES)
# What the names of a model's tensors begin with; an optimizer's state begins otherwise.
TORCHTITAN_TENSORS = re.compile(r"(tok_embeddings|layers|mtp_layers|norm|lm_head)\.")


def write_torchtitan(folder: str | Path, source: WeightSource, *, bytes_per_file: int = BYTES_PER_FILE) -> None:
    """Write a model for torchtitan. The checkpoint is complete or absent.

    Raises `InputError` if torchtitan has no such model, and as `replace_model` and `output_chunks` do.
    """
    weight_table = torchtitan_model(source.architecture).weight_table
    chunks = output_chunks(source, list_slices(source.architecture, weight_table))
    with replace_model(Path(folder), TORCHTITAN_FILES) as draft:
        write_dcp(draft, chunks, source.read, bytes_per_file)


def open_torchtitan(folder: str | Path, architecture: Architecture) -> StoredModel:
    """Open the model of a folder. Raises `InputError` if it is another model, or cannot be read."""
    weight_table = torchtitan_model(architecture).weight_table
    tensors = DcpModelFolder(Path(folder), TORCHTITAN_TENSORS)
    slices = drop_missing_biases(list_slices(architecture, weight_table), architecture, tensors)
    return StoredModel(architecture, slices, tensors)


MEGATRON_FILES = ModelFiles(weight_names.TRACKER_FILE, re.compile(weight_names.RELEASE_FOLDER))
MEGATRON_CONFIG_FILE = "metadata.json"
# What `save_config` writes (dist_checkpointing/core.py); releases before 0.20 read the last two.
MEGATRON_CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
                   "common_backend_version": 1}  # fmt: skip
MEGATRON_COMMON_FILE = "common.pt"
MEGATRON_TENSORS = re.compile(r"(embedding|decoder|output_layer|mtp)\.(?!.*\b_extra_state\b)")


def write_megatron(folder: str | Path, source: WeightSource, *, bytes_per_file: int = BYTES_PER_FILE) -> None:
    """Write a model for Megatron-Core. The checkpoint is complete or absent.

    Raises `InputError` if GPTModel computes no such model, and as `replace_model` and `output_chunks` do.
    """
    chunks = output_chunks(source, megatron_slices(source.architecture, layer_prefix(source.architecture)))
    if not any(chunk.name.endswith("expert_bias") for chunk in chunks):
        require_zero_biases(source, weight_names.TITLE, weight_names.SIGMOID_FIX)
    with replace_model(Path(folder), MEGATRON_FILES) as draft:
        release_folder = draft / weight_names.RELEASE_FOLDER
        release_folder.mkdir()
        write_dcp(release_folder, chunks, source.read, bytes_per_file, dict(_extra_states(chunks)))
        write_synced(release_folder / MEGATRON_COMMON_FILE, _torch_save_bytes({"checkpoint_version": 3.0}))
        write_synced(release_folder / MEGATRON_CONFIG_FILE, json.dumps(MEGATRON_CONFIG).encode())
        write_synced(draft / weight_names.TRACKER_FILE, weight_names.RELEASE_FOLDER.encode())


def layer_prefix(architecture: Architecture) -> TensorPattern:
    """Return the name prefix of layers: stacked in one tensor, or numbered if dense layers come first (moe_layer_freq)."""
    return weight_names.NUMBERED if architecture.num_dense_layers else weight_names.STACKED


def megatron_slices(
    architecture: Architecture,
    layer: TensorPattern,
    implementations: Sequence[weight_names.ModuleNames] = weight_names.DISTRIBUTED_NAMES,
    padding: int = 0,
) -> Iterator[StoredSlice]:
    """Yield slices under the names of the first implementation, and copies under those names that only others have."""
    shard, chunk_keys = whole_shard(architecture, padding), set[object]()
    for module_names in implementations:
        slices = list(
            list_slices(architecture, weight_names.megatron_weight_table(architecture, module_names, layer), shard)
        )
        new_slices = [stored_slice for stored_slice in slices if stored_slice.chunk_key not in chunk_keys]
        yield from (replace(stored_slice, copy=bool(chunk_keys)) for stored_slice in new_slices)
        chunk_keys |= {stored_slice.chunk_key for stored_slice in slices}


def _extra_states(chunks: Iterable[OutputChunk]) -> Iterator[tuple[str, bytes]]:
    """Yield the empty states that modules expect beside their weights (ShardedObject.unique_key in mapping.py), by key.

    Transformer Engine keeps fp8 scales there; without any it is an empty tensor.
    """
    content = _torch_save_bytes([torch.empty(0, dtype=torch.uint8)])
    for chunk in chunks:
        num_counted = chunk.slices[0].num_counted_dims
        number, count = chunk.box.offsets[:num_counted] or (0,), chunk.tensor_shape[:num_counted] or (1,)
        yield (
            f"{chunk.name.rpartition('.')[0]}.{weight_names.EXTRA_STATE}/shard_{_join_dots(number)}_{_join_dots(count)}",
            content,
        )


def _join_dots(numbers: Shape) -> str:
    return ".".join(map(str, numbers))


def _torch_save_bytes(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def open_megatron(folder: str | Path, architecture: Architecture) -> StoredModel:
    """Open the model of a checkpoint, or of a folder with a tracker. Raises `InputError` for another or a damaged model."""
    tensors = DcpModelFolder(weight_names.tracked_folder(Path(folder)), MEGATRON_TENSORS)
    padding = max(tensors.shapes.get(("", weight_names.EMBEDDING), (0,))[0] - architecture.vocab_size, 0)
    candidates = (
        list(drop_missing_biases(megatron_slices(architecture, layer, module_names, padding), architecture, tensors))
        for layer in (weight_names.STACKED, weight_names.NUMBERED)
        for module_names in (weight_names.DISTRIBUTED_NAMES, weight_names.DISTRIBUTED_NAMES[::-1])
    )
    best_slices = min(candidates, key=lambda slices: _count_missing(slices, tensors))
    return StoredModel(architecture, best_slices, tensors)


def _count_missing(slices: Iterable[StoredSlice], tensors: TensorFolder) -> int:
    """Return how many of the slices' tensors a folder lacks."""
    return len({("", stored_slice.name) for stored_slice in slices if not stored_slice.copy} - tensors.shapes.keys())
