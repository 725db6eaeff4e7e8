"""Megatron-LM's older checkpoints of weights (`--ckpt-format torch`): a file of each rank along tp, pp and ep.

A run of those degrees begins with one by `--load FOLDER`. A file is what `torch.save` makes of a dict; it is written without its
elements first, and these then tensor by tensor into their places. Source: Megatron-LM at d98e8a64, training/checkpointing.py.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import skip_data

from shardwise.errors import chosen
from shardwise.files import BLOCK, sync, write_synced
from shardwise.model.architecture import Architecture
from shardwise.train.conversion.dcp_writing import save
from shardwise.train.conversion.entries import Entry, entries, require_no_bias
from shardwise.train.conversion.megatron import EXTRA, PUBLICATION, RELEASE, SIGMOID_FIX, TRACKER
from shardwise.train.conversion.megatron_models import TITLE
from shardwise.train.conversion.megatron_names import NUMBERED, RANK_NAMES, naming_of
from shardwise.train.conversion.megatron_parts import Degrees, even_stages, rank_parts
from shardwise.train.conversion.naming import Naming, Stored
from shardwise.train.conversion.places import Place, Read, places
from shardwise.train.conversion.publishing import draft

FILE = "model_optim_rng.pt"
LINEAR = re.compile(r"(?:.*\.)?(?:linear_\w+|output_layer)")  # modules that have a state beside their weights


def write_megatron_ranks(
    folder: str | Path, architecture: Architecture, read: Read, dtype: torch.dtype, *, degrees: Degrees,
    implementation: str = "transformer_engine",
) -> None:  # fmt: skip
    """Write a model of which `read` gives any box of a parameter, in `dtype`, for ranks of some degrees; complete, or not at all.

    Raises `InputError` where GPTModel computes no such model or ranks cannot have it, and as `draft` and `entries` do.
    """
    degrees.require(architecture)
    naming = naming_of_ranks(architecture, implementation, degrees)
    found = entries(architecture, places_of_ranks(architecture, naming, degrees), dtype)
    if naming.balance_bias is None:
        require_no_bias(architecture, read, TITLE, SIGMOID_FIX)
    files: dict[str, list[Entry]] = {}
    for entry in found:
        files.setdefault(entry.file, []).append(entry)
    with draft(Path(folder), PUBLICATION) as part:
        for name, own in files.items():
            (part / RELEASE / name).mkdir(parents=True)
            _write_file(part / RELEASE / name / FILE, own, read)
        write_synced(part / TRACKER, RELEASE.encode())


def naming_of_ranks(architecture: Architecture, implementation: str, degrees: Degrees) -> Naming:
    """The names of a model's weights in files of ranks."""
    naming = naming_of(architecture, chosen(RANK_NAMES, implementation, "--transformer-impl"), NUMBERED)
    if architecture.tied_embeddings and degrees.pp > 1:  # the last stage has a copy of the first one's matrix
        return replace(naming, copies={"head": {"head": Stored("output_layer.weight", "[V]+Z, D")}})
    return naming


def places_of_ranks(architecture: Architecture, naming: Naming, degrees: Degrees) -> Iterator[Place]:
    """The places in the files of all ranks."""
    stages, rows = even_stages(architecture, degrees.pp), degrees.padded(architecture.vocab_size)
    for rank, part in rank_parts(architecture, degrees, stages, rows):
        yield from places(architecture, naming, replace(part, file=degrees.folder(*rank)))


def _write_file(path: Path, found: list[Entry], read: Read) -> None:
    with path.open("w+b") as file:
        with FakeTensorMode():
            model: dict[str, Any] = {entry.name: torch.empty(entry.whole, dtype=entry.dtype) for entry in found}
        modules = {entry.name.rpartition(".")[0] for entry in found}
        nothing = torch.empty(0, dtype=torch.uint8)
        model |= {f"{module}.{EXTRA}": nothing for module in modules if LINEAR.fullmatch(module)}
        with skip_data(materialize_fake_tensors=True):
            save({"model": model, "checkpoint_version": 3.0}, file)
        begins = _begins(file)
        for number, entry in enumerate(found):
            _write_tensor(file, begins[number], entry.value(read))
        sync(file)


def _begins(file: BinaryIO) -> dict[int, int]:
    """Where the elements of each tensor of a file begin, by its number: records of a zip file that are not compressed."""
    found = {}
    with zipfile.ZipFile(file) as records:
        for info in records.infolist():
            _, _, number = info.filename.rpartition("/data/")
            if number.isdigit():
                file.seek(
                    info.header_offset + 26
                )  # of a local header of 30 bytes the last four: lengths of what follows it
                lengths = file.read(4)
                more = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                found[int(number)] = info.header_offset + 30 + more
    return found


def _write_tensor(file: BinaryIO, begin: int, tensor: Tensor) -> None:
    content = tensor.view(-1).view(torch.uint8).numpy()
    file.seek(begin)
    for start in range(0, len(content), BLOCK):
        file.write(content[start : start + BLOCK].data)
