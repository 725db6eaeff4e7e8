"""Models of `transformers` in and out: config.json beside weights in safetensors, in one file or in several with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.engine.torch.weights import Weights
from shardwise.errors import InputError
from shardwise.train.box import Box, Shape
from shardwise.train.conversion.entries import BYTES_PER_FILE
from shardwise.train.conversion.places import places
from shardwise.train.conversion.sources import of_weights
from shardwise.train.conversion.stored import StoredModel
from shardwise.train.huggingface.config import read_config
from shardwise.train.huggingface.writing import CONFIG, INDEX, SINGLE, write_model

TIED = "lm_head.weight"  # which some files have of a tied model too
MADE = "rotary_emb.inv_freq"  # the end of the names of what a model makes for itself


def open_hf(folder: str | Path) -> StoredModel:
    """The model of a folder. Raises `InputError` for what its config does not say, and for tensors that are not those it says."""
    folder = Path(folder)
    architecture, family = read_config(_json(folder / CONFIG), name=folder.resolve().name)
    tied = {TIED} if architecture.tied_embeddings else set()
    return StoredModel(architecture, places(architecture, family.naming), Tensors(folder, tied), "its config")


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> Weights:
    """The weights of a folder on the CPU, in `dtype` or in the format of the files. Raises `InputError`."""
    return open_hf(folder).weights(dtype)


def save_hf(
    weights: Weights, folder: str | Path, *, seq_len: int, model_type: str = "", bytes_per_file: int = BYTES_PER_FILE
) -> None:
    """Write weights so that `transformers` reads it; `seq_len` is the longest sequence that it was made for.

    Raises `InputError` where no family (or not the one named) has what the model has, or the folder cannot be written.
    """
    write_model(
        folder, weights.architecture, of_weights(weights), weights.dtype, seq_len=seq_len, model_type=model_type,
        bytes_per_file=bytes_per_file,
    )  # fmt: skip


class Tensors:
    """The tensors of a folder's files, without those of some names. Raises `InputError` where they cannot be read."""

    def __init__(self, folder: Path, without: set[str]) -> None:
        self.folder, self._without = folder, without
        names = sorted(set(_json(folder / INDEX)["weight_map"].values())) if (folder / INDEX).exists() else [SINGLE]
        self.files: dict[str, Any] = {}
        for name in names:
            try:
                file: Any = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InputError(f"model: cannot read {folder / name}: {error}") from None
            self.files |= dict.fromkeys(file.keys(), file)

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        own = [name for name in self.files if name not in self._without and not name.endswith(MADE)]
        return {("", name): tuple(self.files[name].get_slice(name).get_shape()) for name in own}

    def read(self, file: str, name: str, box: Box) -> Tensor:
        found: Tensor = self.files[name].get_slice(name)[box.slices]
        return found

    def dtype(self) -> torch.dtype:
        """The format of the first of them."""
        (file, name), shape = min(self.shapes.items())
        return self.read(file, name, Box((0,) * len(shape), (0,) * len(shape))).dtype


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"model: {path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"model: {path} holds a {type(found).__name__}; an object is required")
    return found
