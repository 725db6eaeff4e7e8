"""Writers of all formats: what they hold at a time, what they leave when they are killed, and what they say of a full disk."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conversion.random_models import random_weights
from train.writers import Alive, Killed, dies, save_in_parts

from shardwise.interop.weights.convert import WEIGHT_FORMATS, ConvertOptions, detect_format
from shardwise.interop.weights.dcp_folder import torch_save
from shardwise.interop.weights.megatron_rank_files import RankDegrees
from shardwise.interop.weights.replace_model_folder import DRAFT_FOLDER
from shardwise.interop.weights.stored_model import boxes_of_checkpoint, boxes_of_weights
from shardwise.interop.weights.stored_slices import WeightSource
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import SIGMOID, Gating, Numerics
from shardwise.run.checkpoints.reader import OpenCheckpoint
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.values.boxes import Box
from shardwise.values.errors import InputError

OTHERS = [name for name in WEIGHT_FORMATS if name != "huggingface"]  # whose writer has tests of its own
SIZES: dict[str, Any] = {
    "num_layers": 5, "d_model": 16, "d_ff": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 500,
}  # fmt: skip
ROUTED = Architecture(
    name="small", **SIZES, num_experts=4, experts_per_token=2, qk_norm=True,
    numerics=Numerics(normalised_gates=True),
)  # fmt: skip
PLAIN = Architecture(name="plain", **SIZES)
CHOICES = ConvertOptions(seq_len=8, degrees=RankDegrees(tp=2, pp=5, divisible=8))


def open_checkpoint(folder: Path, weights: ModelWeights) -> WeightSource:
    """A checkpoint of which each parameter lies in several parts, as it is read."""
    architecture = weights.architecture
    read, dtype = boxes_of_checkpoint(save_in_parts(folder, weights, {}), architecture)
    return WeightSource(architecture, read, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OTHERS)
def test_writing_holds_at_most_two_tensors(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = random_weights(PLAIN, 1)
    model, count, read = open_checkpoint(tmp_path / "run", weights)._replace(dtype=dtype), [0], OpenCheckpoint.read

    def counted(self: OpenCheckpoint, name: str, shape: tuple[int, ...], box: Box) -> torch.Tensor:
        values = read(self, name, shape, box)
        count[0] += values.nbytes
        return values

    monkeypatch.setattr(OpenCheckpoint, "read", counted)
    with Alive() as alive:
        WEIGHT_FORMATS[name].write(tmp_path / "out", model, CHOICES)
    whole = sum(tensor.nbytes for tensor in weights.tensors.values())
    largest = max(tensor.nbytes for tensor in weights.tensors.values())
    assert largest < whole / 3
    assert alive.peak_bytes <= 2 * largest, "a tensor as it is read and as the file has it"
    again = count[0] - whole
    norms = sum(tensor.nbytes for parameter, tensor in weights.tensors.items() if "norm" in parameter)
    assert 0 <= again <= norms, (
        "every element is read once, but for norms, which are small and which several ranks have"
    )


@pytest.mark.thinned(2)
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "unlink", "rmtree"])
@pytest.mark.parametrize("name", OTHERS)
def test_a_writer_that_is_killed_leaves_nothing_that_reads_as_complete(
    name: str, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model before, the new one, or none: in a folder that had a model, at every call of a kind that there is."""
    old, new = random_weights(PLAIN, 1), random_weights(PLAIN, 2)
    where: dict[str, tuple[Any, str]] = {
        "write": (torch, "save"), "fsync": (os, "fsync"), "rename": (Path, "rename"), "unlink": (Path, "unlink"),
        "rmtree": (shutil, "rmtree"),
    }  # fmt: skip
    out, outcomes, num_calls = tmp_path / "out", set(), 0
    while True:
        write(name, out, old)
        with monkeypatch.context() as patch:
            dies(patch, *where[call], num_calls)
            if call != "rmtree":
                patch.setattr(shutil, "rmtree", removed_but_drafts)
            try:
                write(name, out, new)
            except Killed:
                outcomes.add(model_stored_in(name, out, {"old": old, "new": new}))
            else:
                break
        num_calls += 1
    assert outcomes <= {"old", "none", "new"}
    write(name, out, new)
    assert model_stored_in(name, out, {"new": new}) == "new"
    assert not (out / DRAFT_FOLDER).exists(), "no litter"


def removed_but_drafts(path: Path, plain: Callable[[Path], object] = shutil.rmtree, **more: Any) -> None:
    """A process that is killed removes no draft."""
    if Path(path).name != DRAFT_FOLDER:
        plain(path)


def write(name: str, folder: Path, weights: ModelWeights) -> None:
    WEIGHT_FORMATS[name].write(
        folder, WeightSource(weights.architecture, boxes_of_weights(weights), torch.float32), CHOICES
    )


def model_stored_in(name: str, folder: Path, models: dict[str, ModelWeights]) -> str:
    """Which of some models a folder reads as."""
    if not WEIGHT_FORMATS[name].matches(folder):
        with pytest.raises(InputError, match="found none of"):
            detect_format(folder, "--from")
        return "none"
    stored = WEIGHT_FORMATS[name].read(folder, PLAIN).weights().tensors
    (same,) = (
        key
        for key, model in models.items()
        if all(torch.equal(stored[n], tensor) for n, tensor in model.tensors.items())
    )
    return same


FULL = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.path.insert(0, sys.argv[2])
from conversion.test_writing import PLAIN, random_weights, write
from shardwise.values.errors import InputError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), int(sys.argv[3])))
for name in ("torchtitan", "megatron", "megatron-ranks"):
    try:
        write(name, Path(sys.argv[1], name), random_weights(PLAIN, 1))
    except InputError as error:
        print(name, list(Path(sys.argv[1], name).iterdir()), error)
"""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("limit", [100, 3_000, 20_000])
def test_a_full_disk_is_reported(limit: int, tmp_path: Path) -> None:
    """PyTorch's writer of files would end the process: files of at most so many bytes stand for the disk."""
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), tests, str(limit)],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line, name in zip(done.stdout.splitlines(), ("torchtitan", "megatron", "megatron-ranks"), strict=True):
        assert re.fullmatch(rf"{name} \[\] model: cannot write to .*{name}: File too large; a folder with room.*", line)


BY_SIGMOID = Gating(scores=SIGMOID)
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "biases in torchtitan": (
        "torchtitan", {"bias": ("qkv",)},
        r"no model of torchtitan 0.3.0 computes it\nllama3: bias is \('qkv',\); \(\) is required\nqwen3: .*\ndeepseek_v3: ",
    ),
    "experts alone": ("torchtitan", {"num_experts": 2, "experts_per_token": 1}, "qwen3: qk_norm is False; True"),
    "a window": ("torchtitan", {"sliding_window": 4}, "llama3: sliding_window is 4; None is required"),
    "caps": ("megatron", {"numerics": Numerics(logit_cap=3.0)}, r"numerics.logit_cap is 3.0; None is required"),
    "another MLP": ("megatron", {"mlp": "geglu"}, "mlp is 'geglu'; 'swiglu' or 'gelu' or 'clamped_swiglu' is required"),
    "norms behind": ("megatron", {"post_norms": True}, "post_norms is True; False is required"),
    "some biases": ("megatron", {"bias": ("mlp",)}, "projections have biases, but not all of them"),
    "a norm without a bias": ("megatron", {"norm": "layer"}, "norms have a bias where they are of kind layer"),
    "further tokens": ("megatron", {"num_predict_layers": 1}, "num_predict_layers is 1; 0 is required"),
    "one expert": (
        "megatron", {"num_experts": 2, "experts_per_token": 1, "numerics": Numerics(gating=BY_SIGMOID)}, "gates are divided",
    ),
    "degrees": ("megatron-ranks", {"num_kv_heads": 1}, "--tp: found 2; a divisor of num_kv_heads = 1 of plain is required"),
    "stages": ("megatron-ranks", {"num_layers": 4}, "--pp: found 5; a divisor of num_layers = 4 of plain is required"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_a_format_cannot_hold_are_refused(case: str, tmp_path: Path) -> None:
    name, fields, reason = REFUSED[case]
    model = Architecture(**{**SIZES, "name": "plain", **fields})
    with pytest.raises(InputError, match=reason):
        write(name, tmp_path / "out", random_weights(model, 1))
    assert not (tmp_path / "out").exists()


def test_biases_that_a_router_would_lose_are_refused(tmp_path: Path) -> None:
    biased = ModelWeights(ROUTED, random_weights(ROUTED, 1).tensors, {"layers.1.balance_bias": torch.ones(4)})
    for name in ("megatron", "megatron-ranks"):
        with pytest.raises(InputError, match=r"layers.1.balance_bias, which its experts are chosen by, has no place"):
            write(name, tmp_path, biased)
    write("torchtitan", tmp_path, biased)
    assert torch.equal(WEIGHT_FORMATS["torchtitan"].read(tmp_path, ROUTED).bias("layers.1.balance_bias"), torch.ones(4))


@pytest.mark.parametrize("name", OTHERS)
def test_an_unwritable_folder_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*: Not a directory; a folder with room"):
        write(name, tmp_path / "file", random_weights(PLAIN, 1))


def test_what_torch_saves_on_a_full_disk_is_an_error_of_the_disk() -> None:
    """PyTorch's own writer ends the process: what is written goes on to nowhere, and the first fault is raised behind it."""

    class Full(io.BytesIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left on device"):
        torch_save({"steps": 3}, Full())
    whole = io.BytesIO()
    torch_save({"steps": 3}, whole)
    assert torch.load(io.BytesIO(whole.getvalue()), weights_only=True) == {"steps": 3}
