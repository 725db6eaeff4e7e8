"""Checkpoints of frameworks are read however they are split; untrusted files are read as data, and refused in one line."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conversion.random_models import random_weights
from harness import run_processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardwise.interop.frameworks.megatron.weight_names import RELEASE_FOLDER
from shardwise.interop.frameworks.torchtitan.models import torchtitan_model
from shardwise.interop.weights.convert import WEIGHT_FORMATS, ConvertOptions, open_stored_model
from shardwise.interop.weights.megatron_rank_files import RANK_FILE, RankDegrees
from shardwise.interop.weights.stored_model import boxes_of_weights
from shardwise.interop.weights.stored_slices import WeightSource, list_slices, output_chunks
from shardwise.model.architecture import Architecture
from shardwise.run.checkpoints.dcp_reader import METADATA_FILE
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.values.errors import InputError

MODEL = Architecture(
    name="small", num_layers=4, d_model=12, d_ff=20, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=31, num_experts=4,
    experts_per_token=2, qk_norm=True,
)  # fmt: skip
WEIGHTS = random_weights(MODEL, 1)
EVIL = ("evil", Path("/tmp/shardwise-evil"))


def write(name: str, folder: Path, choices: ConvertOptions | None = None) -> None:
    WEIGHT_FORMATS[name].write(
        folder, WeightSource(MODEL, boxes_of_weights(WEIGHTS), torch.float32), choices or ConvertOptions()
    )


def require_read(folder: Path) -> None:
    weights = open_stored_model(folder, MODEL).weights()
    assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in WEIGHTS.tensors.items())


def save_sharded(folder: str) -> None:
    """A state of torchtitan as FSDP's ranks save it: rows of each tensor on each rank, uneven ones too, beside an optimizer."""
    source = WeightSource(MODEL, boxes_of_weights(random_weights(MODEL, 1)), torch.float32)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state: dict[str, Any] = {}
    for entry in output_chunks(source, list_slices(MODEL, torchtitan_model(MODEL).weight_table)):
        whole = state.setdefault(entry.name, torch.zeros(entry.tensor_shape))
        whole[entry.box.slices] = entry.assemble_values(source.read)
    sharded = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    moments = {f"state.{name}.exp_avg": torch.ones(3) for name in sharded}
    dcp.save({**sharded, "optimizer": moments, "train_state": {"step": 7}}, checkpoint_id=folder)


@pytest.mark.parametrize("ranks", [1, 3])
def test_checkpoints_of_several_torchtitan_ranks_are_read(ranks: int, tmp_path: Path) -> None:
    run_processes(save_sharded, ranks, str(tmp_path))
    assert len(list(tmp_path.glob("*.distcp"))) == ranks
    require_read(tmp_path)


def test_virtual_stages_of_megatron(tmp_path: Path) -> None:
    """Two ranks with two virtual stages each: the second rank has the second layer and the fourth."""
    write("megatron-ranks", tmp_path / "four", ConvertOptions(degrees=RankDegrees(pp=4, divisible=1)))
    for rank in range(2):
        stages = [
            torch.load(tmp_path / "four" / RELEASE_FOLDER / f"mp_rank_00_{rank + 2 * chunk:03d}" / RANK_FILE)["model"]
            for chunk in range(2)
        ]
        path = tmp_path / "two" / "iter_0000005" / f"mp_rank_00_{rank:03d}" / RANK_FILE
        path.parent.mkdir(parents=True)
        torch.save({"model0": stages[0], "model1": stages[1], "args": None, "iteration": 5}, path)
    (tmp_path / "two" / "latest_checkpointed_iteration.txt").write_text("5")
    require_read(tmp_path / "two")
    require_read(tmp_path / "two" / "iter_0000005")


@pytest.mark.parametrize("degrees", [{}, {"ep": 2}, {"pp": 2}, {"tp": 2}, {"pp": 2, "ep": 2}])
def test_numbers_of_files_are_told_apart(degrees: dict[str, int], tmp_path: Path) -> None:
    """The single number after the one along tp is along pp or ep."""
    write(
        "megatron-ranks", tmp_path, ConvertOptions(degrees=RankDegrees(**degrees, divisible=8), implementation="local")
    )
    require_read(tmp_path)
    missing = max((tmp_path / RELEASE_FOLDER).iterdir())
    if degrees:
        (missing / RANK_FILE).unlink()
        with pytest.raises(InputError, match=r"lacks mp_rank_|has shape"):
            require_read(tmp_path)


class Evil:
    """What runs a command when it is unpickled by `pickle`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {EVIL[1]}",)


@pytest.fixture
def _no_evil() -> Any:
    EVIL[1].unlink(missing_ok=True)
    yield
    assert not EVIL[1].exists(), "a file of a stranger has run a command"


@pytest.mark.usefixtures("_no_evil")
def test_nothing_of_a_file_is_run(tmp_path: Path) -> None:
    write("megatron-ranks", tmp_path / "ranks", ConvertOptions(implementation="local"))
    path = tmp_path / "ranks" / RELEASE_FOLDER / "mp_rank_00" / RANK_FILE
    content = torch.load(path)
    torch.save({**content, "args": Evil(), "rng_state": [Evil()]}, path)
    require_read(tmp_path / "ranks")
    write("torchtitan", tmp_path / "titan")
    metadata = pickle.loads((tmp_path / "titan" / METADATA_FILE).read_bytes())
    metadata.planner_data["evil"] = Evil()
    (tmp_path / "titan" / METADATA_FILE).write_bytes(pickle.dumps(metadata))
    require_read(tmp_path / "titan")


def test_changed_files_are_refused(tmp_path: Path) -> None:
    write("torchtitan", tmp_path)
    part = max(tmp_path.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2] + b"\0" * (len(content) // 2))
    with pytest.raises(InputError, match=r"cannot read .*distcp"):
        require_read(tmp_path)
    (tmp_path / METADATA_FILE).write_bytes(b"no pickle")
    with pytest.raises(InputError, match=r"cannot read .*\.metadata"):
        require_read(tmp_path)
    outside = pickle.dumps({"a": 1})
    (tmp_path / METADATA_FILE).write_bytes(outside)
    with pytest.raises(InputError, match=r"cannot read .*\.metadata"):
        require_read(tmp_path)


@pytest.mark.parametrize("name", ["torchtitan", "megatron", "megatron-ranks"])
def test_another_model_is_refused(name: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    for field, value, message in (
        ("num_layers", 5, "lacks|has shape|has 0 of the 12 elements of layers.4.attention_norm_weight"),
        ("num_layers", 3, "has, besides what the given model says|has shape"),
        ("d_ff", 24, "has shape"),
        (
            "vocab_size",
            200,
            "has shape|has 1,536 of the 2,400 elements of embedding.embedding that the given model has",
        ),
    ):
        with pytest.raises(InputError, match=message):
            open_stored_model(tmp_path, replace(MODEL, **{field: value}))


def test_weights_of_one_device_are_the_whole(tmp_path: Path) -> None:
    """`StoredModel.weights` computes what the written weights compute."""
    write("megatron", tmp_path)
    ids = torch.arange(8).view(1, 8)
    weights: ModelWeights = open_stored_model(tmp_path, MODEL).weights()
    assert torch.equal(weights.logits(ids), WEIGHTS.logits(ids))
