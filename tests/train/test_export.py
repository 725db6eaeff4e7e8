"""A checkpoint written as a model of `transformers`: a tensor of it at a time, complete or nothing that reads as a model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train.writers import Alive, Killed, dies, save_in_parts

from shardwise.interop.frameworks.huggingface_families import CONFIG_FILE, WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from shardwise.interop.weights import checkpoint_to_hf, load_hf, save_hf
from shardwise.model.architecture import Architecture
from shardwise.run.checkpoints.reader import OpenCheckpoint
from shardwise.run.engine.model_builder import ModelWeights, initial_weights
from shardwise.step.rank_program import balance_biases
from shardwise.values.boxes import Box
from shardwise.values.errors import InputError

MODEL = Architecture(
    name="small", d_model=16, num_layers=5, num_heads=2, num_kv_heads=1, head_dim=8, d_ff=24, vocab_size=31, num_experts=4,
    experts_per_token=2,
)  # fmt: skip
BIASES = {name: torch.zeros(MODEL.num_experts) for name in balance_biases(MODEL).values()}
FILE = 10_000  # bytes of a file at most


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_export_holds_at_most_two_tensors(
    dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = initial_weights(MODEL, 1)
    path, count, read = save_in_parts(tmp_path / "run", weights, BIASES), [0], OpenCheckpoint.read

    def counted(self: OpenCheckpoint, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        values = read(self, name, shape, box)
        count[0] += values.nbytes
        return values

    monkeypatch.setattr(OpenCheckpoint, "read", counted)
    with Alive() as alive:
        checkpoint_to_hf(path, MODEL, tmp_path / "hf", seq_len=16, dtype=dtype, bytes_per_file=FILE)
    whole = sum(tensor.nbytes for tensor in (*weights.tensors.values(), *BIASES.values()))
    largest = max(math.prod(tensor.shape[1:] if "experts" in name else tensor.shape) * 4
                  for name, tensor in weights.tensors.items())  # fmt: skip
    assert largest < FILE < whole / 5
    assert largest <= alive.peak_bytes <= 2 * largest, "a tensor as it is read and as the file has it"
    assert not alive.sizes, "nothing is kept"
    assert count[0] == whole, "every element is read once"
    files = sorted(file.name for file in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 5
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    exported = load_hf(tmp_path / "hf").tensors
    assert all(
        torch.equal(exported[name], tensor.to(dtype or tensor.dtype)) for name, tensor in weights.tensors.items()
    )


def test_parts_without_the_wanted_box_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a parameter in as many parts as it has experts, each expert's tensor is one of them."""
    from shardwise.run.checkpoints.manifest import Schema2Files, TensorChunk

    weights = initial_weights(MODEL, 1)
    path, opened, elements = (
        save_in_parts(tmp_path / "run", weights, BIASES, MODEL.num_experts),
        [0],
        Schema2Files.read_chunk,
    )

    def counted(self: Schema2Files, part: TensorChunk, dtype: torch.dtype) -> torch.Tensor:
        opened[0] += part.box.volume
        return elements(self, part, dtype)

    monkeypatch.setattr(Schema2Files, "read_chunk", counted)
    checkpoint_to_hf(path, MODEL, tmp_path / "hf", seq_len=16)
    assert opened[0] == sum(tensor.numel() for tensor in (*weights.tensors.values(), *BIASES.values()))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "unlink"])
def test_a_writer_that_is_killed_leaves_nothing_that_reads_as_complete(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model before, the new one, or none: in a folder that had a model, at every call of a kind that there is."""
    old, new = initial_weights(MODEL, 1), initial_weights(MODEL, 2)
    (tmp_path / "tokenizer.json").write_text("{}")
    where: dict[str, tuple[Any, str]] = {
        "write": (OpenCheckpoint, "read"), "fsync": (os, "fsync"), "rename": (Path, "rename"), "unlink": (Path, "unlink"),
    }  # fmt: skip
    path, outcomes, num_calls = save_in_parts(tmp_path / "run", new, BIASES), set(), 0
    while True:
        save_hf(old, tmp_path / "hf", seq_len=16)
        with monkeypatch.context() as patch:
            dies(patch, *where[call], num_calls)
            patch.setattr("shutil.rmtree", lambda *args, **kwargs: None)  # a process that is killed removes nothing
            try:
                checkpoint_to_hf(path, MODEL, tmp_path / "hf", seq_len=16, bytes_per_file=FILE)
            except Killed:
                outcomes.add(model_stored_in(tmp_path / "hf", {"old": old, "new": new}))
            else:
                break
        num_calls += 1
    assert num_calls > 0
    assert (
        outcomes
        == {"write": {"old"}, "fsync": {"old", "none", "new"}, "rename": {"none"}, "unlink": {"old", "none"}}[call]
    )
    checkpoint_to_hf(path, MODEL, tmp_path / "hf", seq_len=16)
    assert model_stored_in(tmp_path / "hf", {"new": new}) == "new"
    assert sorted(file.name for file in (tmp_path / "hf").iterdir()) == [CONFIG_FILE, WEIGHTS_FILE], "no litter"


def model_stored_in(folder: Path, models: dict[str, ModelWeights]) -> str:
    """Which of some models a folder reads as."""
    if not (folder / CONFIG_FILE).exists():
        with pytest.raises(InputError, match="cannot read"):
            load_hf(folder)
        return "none"
    stored = load_hf(folder).tensors
    (name,) = (
        name
        for name, model in models.items()
        if all(torch.equal(stored[weight], tensor) for weight, tensor in model.tensors.items())
    )
    return name


def test_writing_replaces_a_model_in_several_files(tmp_path: Path) -> None:
    """An index that is left would name the files of the model before."""
    save_hf(initial_weights(MODEL, 1), tmp_path, seq_len=16, bytes_per_file=FILE)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert (tmp_path / WEIGHTS_INDEX_FILE).exists()
    save_hf(initial_weights(MODEL, 2), tmp_path, seq_len=16)
    assert sorted(file.name for file in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE, "tokenizer.json"]
    assert model_stored_in(tmp_path, {"new": initial_weights(MODEL, 2)}) == "new"


@pytest.mark.parametrize("fault", ["full", "file"])
def test_unwritable_folders_are_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "hf"
    if fault == "full":
        monkeypatch.setattr(os, "fsync", full)
    else:
        folder.write_text("a file")
    message = {"full": "No space left", "file": "Not a directory"}[fault]
    with pytest.raises(InputError, match=rf"cannot write to .*hf: {message}.*; a folder with room"):
        save_hf(initial_weights(MODEL, 1), folder, seq_len=16)
    assert fault == "file" or not list(folder.iterdir())


def test_formats_that_no_weights_have_are_refused(tmp_path: Path) -> None:
    cast: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.long
    weights = ModelWeights(MODEL, {name: cast(tensor) for name, tensor in initial_weights(MODEL, 1).tensors.items()})
    with pytest.raises(InputError, match="int64"):
        save_hf(weights, tmp_path / "hf", seq_len=16)
