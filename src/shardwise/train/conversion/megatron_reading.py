"""Files of Megatron-LM's ranks (`--ckpt-format torch`) read as one model, whatever degrees and virtual stages they were of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.train.box import Box, Shape
from shardwise.train.checkpoint.plain_pickle import PlainTensors
from shardwise.train.conversion.megatron import EMBEDDING, EXTRA, folder_of
from shardwise.train.conversion.megatron_names import RANK_NAMES
from shardwise.train.conversion.megatron_parts import Degrees, rank_parts
from shardwise.train.conversion.megatron_ranks import FILE, naming_of_ranks
from shardwise.train.conversion.places import Place, places
from shardwise.train.conversion.stored import SHOWN, StoredModel, with_biases_held

RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class RankTensors:
    """The tensors of a folder's files, mapped: by folder and virtual stage (`mp_rank_00_001`, `mp_rank_00_001/1`)."""

    folder: Path
    models: Mapping[str, Mapping[str, Tensor]]

    @cached_property
    def shapes(self) -> Mapping[tuple[str, str], Shape]:
        return {(file, name): tuple(one.shape) for file, model in self.models.items() for name, one in model.items()}

    def dtype(self) -> torch.dtype:
        model = next(iter(self.models.values()))
        return model[min(model)].dtype

    def read(self, file: str, name: str, box: Box) -> Tensor:
        return self.models[file][name][box.slices]


def open_megatron_ranks(folder: str | Path, architecture: Architecture) -> StoredModel:
    """The model of a folder with a tracker, or of one checkpoint. Raises `InputError` where it is another, or cannot be read."""
    folder = folder_of(Path(folder))
    tensors = RankTensors(folder, dict(_models(folder)))
    degrees, virtual = _degrees(tensors)
    degrees.require(architecture)
    candidates = (
        list(with_biases_held(_places(architecture, tensors, degrees, virtual, names), architecture, tensors))
        for names in RANK_NAMES
    )
    found = min(
        candidates, key=lambda places: len({(place.file, place.name) for place in places} - tensors.shapes.keys())
    )
    return StoredModel(architecture, found, tensors)


def _models(folder: Path) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The state dicts of the files, without what modules keep beside weights."""
    for path in sorted(folder.glob(f"mp_rank_*/{FILE}")):
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=PlainTensors)
            stages = [content["model"]] if "model" in content else _virtual(content)
        except Exception as error:  # of what is no such file, anything may be raised
            raise InputError(f"model: cannot read {path}: {str(error).splitlines()[0]}") from None
        for number, stage in enumerate(stages):
            key = path.parent.name + (f"/{number}" if len(stages) > 1 else "")
            yield key, {name: one for name, one in stage.items() if isinstance(one, Tensor) and EXTRA not in name}


def _virtual(content: Mapping[str, Any]) -> list[Any]:
    """The state dicts of a rank's virtual stages (generate_state_dict in training/checkpointing.py)."""
    found = [content[f"model{number}"] for number in range(len(content)) if f"model{number}" in content]
    if not found:
        raise ValueError("it has neither model nor model0")
    return found


def _degrees(tensors: RankTensors) -> tuple[Degrees, int]:
    """Degrees, and virtual stages of each rank, by the names of the files.

    One number behind that along tp is the one along ep where all have an embedding, and else that along pp.
    """
    files = {file.partition("/")[0] for file in tensors.models}
    matches = [match for file in files if (match := RANK.fullmatch(file))]
    if len(matches) < len(files) or not files:
        raise InputError(f"model: {tensors.folder} has no files mp_rank_00/{FILE} of ranks, which are required")
    tp, second, third = (1 + max(int(match[group] or 0) for match in matches) for group in (1, 2, 3))
    everywhere = all(EMBEDDING in tensors.models.get(file, ()) for file in files)
    degrees = Degrees(tp=tp, pp=1, ep=second) if third == 1 and everywhere else Degrees(tp=tp, pp=second, ep=third)
    wanted = {degrees.folder(*rank) for rank in product(range(degrees.tp), range(degrees.pp), range(degrees.ep))}
    if lacking := sorted(wanted - files):
        raise InputError(
            f"model: {tensors.folder} lacks {', '.join(lacking[:SHOWN])}, besides {max(files)}; those of all ranks are required"
        )
    return degrees, len(tensors.models) // len(files)


def _places(
    architecture: Architecture, tensors: RankTensors, degrees: Degrees, virtual: int, names: str
) -> Iterator[Place]:
    """Of boxes that several ranks have the first one is read."""

    def key(tp: int, stage: int, ep: int) -> str:
        chunk, pp = divmod(stage, degrees.pp)
        return degrees.folder(tp, pp, ep) + (f"/{chunk}" if virtual > 1 else "")

    stages = _stages([len(_layers(tensors.models[key(0, stage, 0)])) for stage in range(degrees.pp * virtual)])
    rows = tensors.shapes.get((key(0, 0, 0), EMBEDDING), (0,))[0] * degrees.tp
    naming, seen = naming_of_ranks(architecture, names, degrees), set[tuple[str, Box]]()
    for rank, part in rank_parts(architecture, degrees, stages, rows):
        for place in places(architecture, naming, replace(part, file=key(*rank))):
            yield replace(place, copy=place.copy or (place.parameter, place.box) in seen)
            seen.add((place.parameter, place.box))


def _layers(model: Iterable[str]) -> set[str]:
    return {match[1] for name in model if (match := LAYER.match(name))}


def _stages(counts: Iterable[int]) -> list[range]:
    """The layers of stages that have so many each, one after the other."""
    found, start = [], 0
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return found
