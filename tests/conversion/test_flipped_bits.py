"""One flipped bit in a folder of another framework is found, or changes no weight: by the checksums of zip files, and by what
`.metadata`, which has none, says of itself. 2,000 bits of each format: `python -m conversion.test_flipped_bits 2000` in tests."""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from conversion.random_models import random_weights

from shardwise.interop.weights import distributed_checkpoints
from shardwise.interop.weights.convert import WEIGHT_FORMATS, ConvertOptions, open_stored_model
from shardwise.interop.weights.megatron_rank_files import RankDegrees
from shardwise.interop.weights.stored_model import boxes_of_weights
from shardwise.interop.weights.stored_slices import WeightSource
from shardwise.model import Architecture
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.values import InputError

MODEL = Architecture(
    name="small", num_layers=2, d_model=8, d_ff=16, num_heads=2, num_kv_heads=2, head_dim=4, vocab_size=32,
)  # fmt: skip
FORMATS = ("torchtitan", "megatron", "megatron-ranks")
FOUND, HARMLESS, WRONG = "found", "harmless", "wrong"


def write_weights(folder: Path, name: str) -> ModelWeights:
    """The weights of a folder in a format, in several files where the format has them."""
    weights = random_weights(MODEL, 1)
    source = WeightSource(MODEL, boxes_of_weights(weights), weights.dtype)
    if name == "torchtitan":
        distributed_checkpoints.write_torchtitan(folder, source, bytes_per_file=2_000)
    elif name == "megatron":
        distributed_checkpoints.write_megatron(folder, source, bytes_per_file=2_000)
    else:
        WEIGHT_FORMATS[name].write(folder, source, ConvertOptions(degrees=RankDegrees(tp=2, divisible=8)))
    return weights


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def effect(folder: Path, weights: ModelWeights) -> str:
    """What reading a damaged folder comes to."""
    try:
        read = open_stored_model(folder, MODEL).weights()
    except InputError:
        return FOUND
    same = all(torch.equal(read.tensors[name], tensor) for name, tensor in weights.tensors.items())
    return HARMLESS if same else WRONG


def flip_all(folder: Path, name: str, count: int, seed: int, *, only: str = "*") -> Counter[str]:
    """What `count` flipped bits come to, one at a time; a file is drawn first, so that small ones are not left out."""
    weights, draw = write_weights(folder, name), random.Random(seed)
    files = sorted(path for path in folder.rglob(only) if path.is_file())
    effects: Counter[str] = Counter()
    for _ in range(count):
        path = draw.choice(files)
        bit = draw.randrange(8 * path.stat().st_size)
        flip(path, bit)
        result = effect(folder, weights)
        effects[result] += 1
        if result == WRONG:
            print(f"{name}: bit {bit} of {path.relative_to(folder)}")
        flip(path, bit)
    assert effect(folder, weights) == HARMLESS
    return effects


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_flipped_bit_is_found_or_changes_no_weight(name: str, tmp_path: Path) -> None:
    effects = flip_all(tmp_path / "model", name, 60, 2)
    assert effects[WRONG] == 0
    assert effects[FOUND] > 20


@pytest.mark.parametrize("name", ["torchtitan", "megatron"])
def test_a_flipped_bit_of_the_metadata_is_found_or_changes_no_weight(name: str, tmp_path: Path) -> None:
    assert flip_all(tmp_path / "model", name, 200, 3, only=".metadata")[WRONG] == 0


def test_every_bit_of_the_elements_is_seen(tmp_path: Path) -> None:
    """Also those of rank files, whose elements are written after the checksums of the rest."""
    for name in FORMATS:
        weights = write_weights(tmp_path / name, name)
        values = next(iter(weights.tensors.values())).flatten()[:4].numpy().tobytes()
        (path,) = [p for p in (tmp_path / name).rglob("*") if p.is_file() and values in p.read_bytes()][:1]
        flip(path, 8 * path.read_bytes().index(values) + 3)
        with pytest.raises(InputError, match=r"CRC-32|damaged|checksum"):
            open_stored_model(tmp_path / name, MODEL).weights()


def test_files_without_checksums_are_refused(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write_weights(tmp_path / "model", "torchtitan")
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(InputError, match=r"has no checksum.*set_crc32_options\(True\)"):
        open_stored_model(tmp_path / "model", MODEL).weights()


def test_rank_files_have_the_checksums_of_torch_save(tmp_path: Path) -> None:
    """What is written is byte for byte a file of `torch.save`, also for other readers of zip files."""
    import zipfile

    write_weights(tmp_path / "model", "megatron-ranks")
    files = list((tmp_path / "model").rglob("*.pt"))
    assert len(files) == 2
    for path in files:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as scratch:
        for format_name in FORMATS:
            print(format_name, dict(flip_all(Path(scratch, format_name), format_name, int(sys.argv[1]), 7)), flush=True)
            if format_name != "megatron-ranks":
                counts = flip_all(
                    Path(scratch, f"{format_name}.metadata"), format_name, int(sys.argv[1]), 8, only=".metadata"
                )
                print(f"{format_name}, .metadata", dict(counts), flush=True)
