"""Models of `transformers` in and out: config.json beside weights in safetensors, in one file or in several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shardwise.errors import InputError, require
from shardwise.train.huggingface.config import read_config, write_config
from shardwise.train.huggingface.layout import Place, places, stored, taken
from shardwise.train.model.decoder import Decoder, build

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
BYTES_PER_FILE = 5 * 10**9  # a file of weights: what `save_pretrained` had as its default (max_shard_size) for years
SHOWN = 4  # names of tensors in a message


def load_hf(folder: str | Path, dtype: torch.dtype | None = None) -> Decoder:
    """The model of a folder on the CPU, in `dtype` or in the format of its weights. Raises `InputError`."""
    folder = Path(folder)
    architecture, numerics, family = read_config(_json(folder / CONFIG), name=folder.resolve().name)
    tensors = Tensors(folder)
    model = build(architecture, numerics, dtype or tensors.dtype())
    found = list(places(model, family))
    tensors.require([place.name for place in found])
    model.to_empty(device="cpu")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for place in found:
            part = place.part(parameters[place.parameter])
            part.copy_(taken(tensors.read(place.name), place, tuple(part.shape)))
        for buffer in model.buffers():
            buffer.zero_()
    return model


def save_hf(
    model: Decoder, folder: str | Path, *, seq_len: int, model_type: str = "", bytes_per_file: int = BYTES_PER_FILE
) -> None:
    """Write a model so that `transformers` reads it; `seq_len` is the longest sequence that it was made for.

    Raises `InputError` where no family (or not the one named) has what the model has, or the folder cannot be written.
    """
    config, family = write_config(model.architecture, model.numerics, seq_len, model_type)
    config["dtype"] = str(next(model.parameters()).dtype).removeprefix("torch.")
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(model, list(places(model, family)), folder, bytes_per_file)
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise InputError(f"model: cannot write to {folder}: {error}") from None


def _write(model: Decoder, found: Iterable[Place], folder: Path, bytes_per_file: int) -> None:
    parameters = dict(model.named_parameters())
    files: list[list[Place]] = []
    room = 0
    for place in found:
        part = place.part(parameters[place.parameter])
        size = part.numel() * part.element_size()
        if not files or size > room:
            files.append([])
            room = bytes_per_file
        files[-1].append(place)
        room -= size
    index: dict[str, str] = {}
    for number, held in enumerate(files, start=1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {place.name: stored(place.part(parameters[place.parameter].detach()), place) for place in held}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
        content = {"metadata": {"total_size": size}, "weight_map": index}
        (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Tensors:
    """The tensors of a folder's files by name. Raises `InputError` where there are none or they cannot be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(set(_json(folder / INDEX)["weight_map"].values())) if (folder / INDEX).exists() else [SINGLE]
        self.files: dict[str, Any] = {}
        for name in names:
            try:
                file: Any = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise InputError(f"model: cannot read {folder / name}: {error}") from None
            self.files |= dict.fromkeys(file.keys(), file)

    def read(self, name: str) -> Tensor:
        found: Tensor = self.files[name].get_tensor(name)
        return found

    def dtype(self) -> torch.dtype:
        """The format of the first of them."""
        return self.read(min(self.files)).dtype

    def require(self, names: Iterable[str]) -> None:
        """Every one of these is there, and no other but what a model makes for itself."""
        wanted = set(names)
        more = [
            n for n in self.files if n not in wanted and n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")
        ]
        lists = {"lacks": sorted(wanted - set(self.files)), "has, beside what its config says,": sorted(more)}
        require(
            [
                f"model: {self.folder} {what} {len(n)} tensors: {', '.join(n[:SHOWN])}{', ...' if len(n) > SHOWN else ''}"
                for what, n in lists.items()
                if n
            ]
        )


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"model: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"model: {path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"model: {path} holds a {type(found).__name__}; an object is required")
    return found
