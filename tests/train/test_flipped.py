"""Any flipped bit in any file of a checkpoint is found before its data is read."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shardwise.run.checkpoints import Checkpointer, TensorShard, latest, load
from shardwise.run.checkpoints.manifest import MANIFEST, CheckpointState
from shardwise.values.errors import InputError

PLACES = 200


def state(fill: float) -> CheckpointState:
    """Several formats, parts that end within a block, and plain values, a float with an exponent among them."""
    tensors = {
        "model.w": torch.full((31, 7), fill), "model.b": torch.full((5,), fill, dtype=torch.bfloat16),
        "exp_avg.w": torch.full((31, 7), fill, dtype=torch.float64),
    }  # fmt: skip
    pieces = {name: TensorShard(tuple(tensor.shape), (0,) * tensor.ndim, tensor) for name, tensor in tensors.items()}
    return {**pieces, "step": 7, "loss_scale": {"scale": 1e-05, "name": "naïve é"}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with Checkpointer(folder, keep=1) as checkpoints:
        checkpoints.save(7, state(1.5))
    path = latest(folder)
    assert path is not None
    return path


def is_found(checkpoint: Path, file: Path, place: int, bit: int) -> bool:
    """Return whether a load with the bit flipped is refused, names the file and changes no piece."""
    content = file.read_bytes()
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    file.write_bytes(changed)
    target = state(0.0)
    try:
        load(checkpoint, target)
    except InputError as error:
        weight = target["model.w"]
        assert isinstance(weight, TensorShard)
        return str(file) in str(error) and not weight.values.any()
    finally:
        file.write_bytes(content)
    return False


def test_a_flipped_bit_in_any_file_is_found(checkpoint: Path) -> None:
    drawn = random.Random(0)
    files = sorted(checkpoint.iterdir())
    assert [file.name for file in files] == [MANIFEST, "rank-00000.bin"]
    places = [(file, place) for file in files for place in range(file.stat().st_size)]
    tried = [(file, place, drawn.randrange(8)) for file, place in drawn.sample(places, PLACES)]
    assert {file for file, _, _ in tried} == set(files)
    assert [flip for flip in tried if not is_found(checkpoint, *flip)] == []
    assert load(checkpoint, state(0.0))["step"] == 7


def test_every_flipped_bit_of_the_manifest_is_found(checkpoint: Path) -> None:
    """Numbers can be written in several ways, and none but the one that was written is taken."""
    file = checkpoint / MANIFEST
    missed = [
        (place, bit) for place in range(file.stat().st_size) for bit in range(8) if not is_found(checkpoint, file, place, bit)
    ]  # fmt: skip
    assert missed == []
