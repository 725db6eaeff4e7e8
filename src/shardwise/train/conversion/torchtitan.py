"""torchtitan's checkpoints of weights: folders that torch.distributed.checkpoint writes, with the names of its models.

A run of torchtitan begins with one by `--checkpoint.enable --checkpoint.initial_load_path FOLDER`; what such a run saves
(`checkpoint/step-100`) is read, its optimizer left out.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from shardwise.model.architecture import Architecture
from shardwise.train.checkpoint.dcp import METADATA
from shardwise.train.conversion.dcp_tensors import DcpTensors
from shardwise.train.conversion.dcp_writing import FILES, write_dcp
from shardwise.train.conversion.entries import BYTES_PER_FILE, entries
from shardwise.train.conversion.places import Read, places
from shardwise.train.conversion.publishing import Publication, draft
from shardwise.train.conversion.stored import StoredModel, with_biases_held
from shardwise.train.conversion.torchtitan_names import titan_model

PUBLICATION = Publication(METADATA, FILES)
OWN = re.compile(r"(tok_embeddings|layers|mtp_layers|norm|lm_head)\.")  # what the names of a model's tensors begin with


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
    with draft(Path(folder), PUBLICATION) as part:
        write_dcp(part, found, read, bytes_per_file)


def open_titan(folder: str | Path, architecture: Architecture) -> StoredModel:
    """The model of a folder. Raises `InputError` where that is another one, or cannot be read."""
    naming = titan_model(architecture).naming
    tensors = DcpTensors(Path(folder), OWN)
    return StoredModel(architecture, with_biases_held(places(architecture, naming), architecture, tensors), tensors)
