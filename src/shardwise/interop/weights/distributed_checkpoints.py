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
    EXTRA,
    NUMBERED,
    RELEASE,
    SIGMOID_FIX,
    STACKED,
    TITLE,
    TRACKER,
    Implementation,
    folder_of,
    naming_of,
)
from shardwise.interop.frameworks.torchtitan.models import titan_model
from shardwise.interop.frameworks.weight_table import Stored
from shardwise.interop.weights.dcp_folder import FILES, DcpTensors, write_dcp
from shardwise.interop.weights.replace_model_folder import Publication, draft
from shardwise.interop.weights.stored_model import StoredModel, Tensors, with_biases_held
from shardwise.interop.weights.stored_slices import (
    BYTES_PER_FILE,
    Entry,
    Place,
    Read,
    entries,
    places,
    require_no_bias,
    whole_model,
)
from shardwise.model.architecture import Architecture
from shardwise.run.checkpoints.dcp_reader import METADATA
from shardwise.values.boxes import Shape
from shardwise.values.checksums import write_synced

TORCHTITAN_FILES = Publication(METADATA, FILES)
TORCHTITAN_TENSORS = re.compile(
    r"(tok_embeddings|layers|mtp_layers|norm|lm_head)\."
)  # what the names of a model's tensors begin with


def write_titan(
    folder: str | Path,
    architecture: Architecture,
    read: Read,
    dtype: torch.dtype,
    *,
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:
    """Write a model of which `read` gives any box of a parameter, in `dtype`; complete, or no checkpoint at all.

    Raises `InputError` where no model of torchtitan is such a one, and as `draft` and `entries` do.
    """
    found = entries(architecture, places(architecture, titan_model(architecture).naming), dtype)
    with draft(Path(folder), TORCHTITAN_FILES) as part:
        write_dcp(part, found, read, bytes_per_file)


def open_titan(folder: str | Path, architecture: Architecture) -> StoredModel:
    """The model of a folder. Raises `InputError` where that is another one, or cannot be read."""
    naming = titan_model(architecture).naming
    tensors = DcpTensors(Path(folder), TORCHTITAN_TENSORS)
    return StoredModel(architecture, with_biases_held(places(architecture, naming), architecture, tensors), tensors)


MEGATRON_FILES = Publication(TRACKER, re.compile(RELEASE))
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
    read: Read,
    dtype: torch.dtype,
    *,
    bytes_per_file: int = BYTES_PER_FILE,
) -> None:
    """Write a model of which `read` gives any box of a parameter, in `dtype`; complete, or no checkpoint at all.

    Raises `InputError` where GPTModel computes no such model, and as `draft` and `entries` do.
    """
    found = entries(architecture, places_of(architecture, layers_of(architecture)), dtype)
    if not any(entry.name.endswith("expert_bias") for entry in found):
        require_no_bias(architecture, read, TITLE, SIGMOID_FIX)
    with draft(Path(folder), MEGATRON_FILES) as part:
        inner = part / RELEASE
        inner.mkdir()
        write_dcp(inner, found, read, bytes_per_file, dict(_extra_states(found)))
        write_synced(inner / MEGATRON_COMMON_FILE, _saved({"checkpoint_version": 3.0}))
        write_synced(inner / MEGATRON_CONFIG_FILE, json.dumps(MEGATRON_CONFIG).encode())
        write_synced(part / TRACKER, RELEASE.encode())


def layers_of(architecture: Architecture) -> Stored:
    """How layers are named: those of one kind are one tensor, those of several a tensor each (moe_layer_freq)."""
    return NUMBERED if architecture.num_dense_layers else STACKED


def places_of(
    architecture: Architecture,
    layer: Stored,
    implementations: Sequence[Implementation] = DISTRIBUTED_NAMES,
    padding: int = 0,
) -> Iterator[Place]:
    """Places by the names of the first implementation, and copies by those that others have beside them."""
    part, seen = whole_model(architecture, padding), set[object]()
    for names in implementations:
        found = list(places(architecture, naming_of(architecture, names, layer), part))
        yield from (replace(place, copy=bool(seen)) for place in found if place.chunk not in seen)
        seen |= {place.chunk for place in found}


def _extra_states(found: Iterable[Entry]) -> Iterator[tuple[str, bytes]]:
    """The empty states that modules ask for beside their weights (ShardedObject.unique_key in mapping.py).

    Transformer Engine keeps scales of fp8 there; without any it is an empty tensor.
    """
    content = _saved([torch.empty(0, dtype=torch.uint8)])
    for entry in found:
        counts = entry.places[0].counts
        number, count = entry.box.offsets[:counts] or (0,), entry.whole[:counts] or (1,)
        yield f"{entry.name.rpartition('.')[0]}.{EXTRA}/shard_{_dotted(number)}_{_dotted(count)}", content


def _dotted(numbers: Shape) -> str:
    return ".".join(map(str, numbers))


def _saved(content: object) -> bytes:
    """What `torch.save` makes of it."""
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def open_megatron(folder: str | Path, architecture: Architecture) -> StoredModel:
    """The model of a folder with a tracker, or of one checkpoint. Raises `InputError` where it is another, or cannot be read."""
    tensors = DcpTensors(folder_of(Path(folder)), MEGATRON_TENSORS)
    padding = max(tensors.shapes.get(("", EMBEDDING), (0,))[0] - architecture.vocab_size, 0)
    candidates = (
        list(with_biases_held(places_of(architecture, layer, names, padding), architecture, tensors))
        for layer in (STACKED, NUMBERED)
        for names in (DISTRIBUTED_NAMES, DISTRIBUTED_NAMES[::-1])
    )
    found = min(candidates, key=lambda places: _lacking(places, tensors))
    return StoredModel(architecture, found, tensors)


def _lacking(places: Iterable[Place], tensors: Tensors) -> int:
    """How many tensors a folder lacks."""
    return len({("", place.name) for place in places if not place.copy} - tensors.shapes.keys())
