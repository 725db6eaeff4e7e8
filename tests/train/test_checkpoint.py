"""Checkpoints of one process: what is kept, what is refused with which message, and the export to Hugging Face."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.interop.weights import load_hf, save_hf
from shardwise.model.architecture import Architecture
from shardwise.run.checkpoints import (
    Checkpointer,
    TensorShard,
    latest,
    load,
    load_tensors,
    reader,
    step_folders,
    writer,
)
from shardwise.run.engine.model_builder import ModelWeights, initial_weights
from shardwise.step.rank_program import parameter_shapes
from shardwise.values.durable_files import DamagedFileError, add_checksum
from shardwise.values.errors import InputError

DAMAGED = "what was written is required: remove the folder, and the checkpoint before it is the latest"
FIX = "load it with the plan and the optimizer that it was saved with"


def piece(*values: float, dtype: torch.dtype = torch.float32) -> TensorShard:
    return TensorShard((len(values),), (0,), torch.tensor(values, dtype=dtype))


def state(start: float = 1.0) -> dict[str, Any]:
    return {"model.a": piece(start, 2.0), "exp_avg.a": piece(3.0, 4.0, dtype=torch.bfloat16), "step": 7}


def save(folder: Path, *steps: int, keep: int = 2) -> Path:
    """The path of the last of `steps`; each has its step as the first element of its weights."""
    with Checkpointer(folder, keep=keep) as writer:
        for step in steps:
            writer.save(step, state(float(step)))
    return folder / f"step-{steps[-1]:08d}"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refusal(path: Path, state: dict[str, Any]) -> list[str]:
    """Return the lines of `load`'s error, and require that no buffer was changed."""
    before = {name: value.values.clone() for name, value in state.items() if isinstance(value, TensorShard)}
    with pytest.raises(InputError) as error:
        load(path, state)
    assert all(torch.equal(state[name].values, values) for name, values in before.items())
    return str(error.value).split("\n")


def test_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 30, 4, keep=2)
    assert names(tmp_path) == {"step-00000004", "step-00000030"}
    assert latest(tmp_path) == tmp_path / "step-00000030"


def test_checkpoints_of_every_nth_step_are_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2, keep_every=30) as checkpoints:
        for step in range(10, 110, 10):
            checkpoints.save(step, {"step": step})
        saved = checkpoints.finished()
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [30, 60, 90, 100]
    assert [record.step for record in saved] == list(range(10, 110, 10))
    assert all(0 < record.write_s <= record.stall_s for record in saved), (
        "a save that is waited for holds the training up all the while"
    )


def test_background_save_stalls_only_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds to write are those of the thread that writes, the stall is the copy."""
    go, finish = threading.Event(), writer._publish_manifest
    monkeypatch.setattr(writer, "_publish_manifest", lambda *arguments: (go.wait(), finish(*arguments)))
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.start(1, {"w": TensorShard((1000,), (0,), torch.zeros(1000)), "step": 1})
        assert checkpoints.finished() == []
        time.sleep(0.2)
        go.set()
        checkpoints.wait()
        (saved,) = checkpoints.finished()
    assert saved.write_s > 0.2 > saved.stall_s
    assert saved.num_bytes == 4000


def test_the_last_written_checkpoint_is_kept_even_if_not_newest(tmp_path: Path) -> None:
    save(tmp_path, 8, 9, 5, keep=2)
    assert names(tmp_path) == {"step-00000005", "step-00000008", "step-00000009"}


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    assert latest(tmp_path / "none") is None
    save(tmp_path, 99_999_999, 100_000_000)
    assert latest(tmp_path) == tmp_path / "step-100000000"


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=3) as writer:
        writer.save(5, state(1.0))
        writer.save(5, state(2.0))
    assert names(tmp_path) == {"step-00000005"}
    assert load_tensors(tmp_path / "step-00000005")["a"].tolist() == [2.0, 2.0]


def test_an_interrupted_replacement_restores_the_old_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    hidden = path.rename(tmp_path / ".step-00000005.replaced")
    assert latest(tmp_path) == hidden
    assert load(hidden, state()) == {"step": 7}
    shutil.copytree(hidden, path)
    assert latest(tmp_path) == path  # killed after the other had its name
    shutil.rmtree(path)
    save(tmp_path, 6)
    assert names(tmp_path) == {"step-00000005", "step-00000006"}
    assert load_tensors(path)["a"].tolist() == [5.0, 2.0]


def test_one_save_is_under_way_at_most(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=5) as writer:
        writer.start(1, state(1.0))
        writer.start(2, state(2.0))
        assert (tmp_path / "step-00000001").exists()
    assert [load_tensors(tmp_path / f"step-0000000{step}")["a"].tolist() for step in (1, 2)] == [[1.0, 2.0], [2.0, 2.0]]


def test_only_complete_checkpoints_are_latest_and_drafts_are_removed(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    for name in (".step-00000004.writing", ".step-00000002.removed", "step-00000009", "step-7", ".step-notes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    assert latest(tmp_path) == path
    save(tmp_path, 4)
    assert names(tmp_path) == {"step-00000003", "step-00000004", "step-00000009", "step-7", ".step-notes"}


@pytest.mark.parametrize("place", ["write_manifest", "publish_draft", "write_shards"])
def test_a_writer_that_fails_leaves_latest_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = save(tmp_path, 3)

    def failing(*arguments: Any) -> None:
        raise RuntimeError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(writer, place, failing)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            save(tmp_path, 4)
    assert latest(tmp_path) == path
    save(tmp_path, 4)
    assert names(tmp_path) == {"step-00000003", "step-00000004"}


def test_the_draft_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, set[str]]] = []
    monkeypatch.setattr(step_folders, "sync_folder", lambda folder: synced.append((folder, names(folder))))
    save(tmp_path, 3)
    draft = (tmp_path / ".step-00000003.writing", {"rank-00000.bin", "checkpoint.json"})
    assert synced == [draft, (tmp_path, {"step-00000003"})]


def test_names_sizes_and_formats_must_agree(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    assert refusal(path, state() | {"model.b": piece(1.0), "rate": 0.5}) == [
        f"checkpoint: {path} lacks 1 tensors: model.b; the same names are required: {FIX}",
    ]
    assert refusal(path, {"model.a": piece(0.0, 0.0), "step": 0}) == [
        f"checkpoint: {path} has, besides those of this run, 1 tensors: exp_avg.a; the same names are required: {FIX}",
    ]
    assert refusal(path, state() | {"model.a": piece(0.0), "exp_avg.a": piece(0.0, 0.0)}) == [
        f"checkpoint: {path} has [2] of float32 as model.a; [1] of float32 is required: {FIX}",
        f"checkpoint: {path} has [2] of bfloat16 as exp_avg.a; [2] of float32 is required: {FIX}",
    ]
    assert refusal(path, state() | {"rate": 0.5}) == [
        f"checkpoint: {path} lacks 1 values: rate; the same names are required: {FIX}",
    ]


def test_many_differences_are_shortened_to_the_first(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=1) as writer:
        writer.save(1, {f"model.{number}": piece(1.0) for number in range(9)})
    path = tmp_path / "step-00000001"
    problems = refusal(path, {f"model.{number}": piece(1.0, 2.0) for number in range(9)})
    assert problems[-1] == f"checkpoint: {path} differs in 5 more tensors"
    assert len(problems) == 5
    (lacks, more) = refusal(path, {f"master.{number}": piece(1.0) for number in range(9)})
    assert "lacks 9 tensors: master.0, master.1, master.2, master.3, ...;" in lacks
    assert "has, besides those of this run, 9 tensors: model.0, model.1, model.2, model.3, ...;" in more


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (flip, r"is damaged \(CRC-32 mismatch\)"),
        (truncate, r"has [\d,]+ bytes of [\d,]+"),
        (Path.unlink, "is missing"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[Path], None], fault: str) -> None:
    path = save(tmp_path, 3)
    damage(path / "rank-00000.bin")
    (text,) = refusal(path, state())
    assert re.fullmatch(f"checkpoint: {re.escape(str(path / 'rank-00000.bin'))} {fault}; {DAMAGED}", text)
    with pytest.raises(InputError, match=fault):
        load_tensors(path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    manifest = tmp_path / "checkpoint.json"
    unread = f"checkpoint: cannot read {manifest}: %s; a folder step-... that a run has written is required"
    assert refusal(tmp_path, state()) == [unread % "No such file or directory"]
    manifest.write_text("{")
    (text,) = refusal(tmp_path, state())
    assert text.startswith(f"checkpoint: {manifest} is not JSON: ")
    assert text.endswith(DAMAGED)
    for content, schema in (({"schema": "shardwise.tokens/1"}, "'shardwise.tokens/1'"), ({}, "'None'")):
        manifest.write_text(json.dumps(content))
        (text,) = refusal(tmp_path, state())
        assert text.startswith(
            f"checkpoint: {manifest}: found schema {schema}; shardwise.checkpoint/2 or shardwise.checkpoint/1 is required: "
        )
    manifest.write_text("[1]")
    assert refusal(tmp_path, state()) == [f"checkpoint: {manifest} holds a list; {DAMAGED}"]
    manifest.write_text(
        json.dumps(add_checksum({"schema": "shardwise.checkpoint/2", "step": 3, "values": {}, "files": {"a": 5}}))
    )
    assert any("files.a: found 5; " in text for text in refusal(tmp_path, state()))


def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        InputError, match=r"File exists.*; a folder with room, and the permission to write in it, are required"
    ):
        save(tmp_path / "file", 1)
    with pytest.raises(InputError, match="keep is 0; at least 1 is required"):
        Checkpointer(tmp_path, keep=0)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, float("nan"), float("inf"), torch.zeros(2), {"a": {1, 2}}])
def test_values_that_would_not_come_back_are_refused(tmp_path: Path, value: Any) -> None:
    with (
        Checkpointer(tmp_path, keep=1) as writer,
        pytest.raises(ValueError, match=r"rate is .* that JSON keeps as it is"),
    ):
        writer.start(1, {"model.a": piece(1.0), "rate": value})


@pytest.mark.parametrize(
    ("shape", "offsets", "piece_shape"),
    [
        ((4,), (2,), (3,)),
        ((4,), (-1,), (2,)),
        ((4,), (0,), (2, 2)),
        ((4, 3), (0, 2), (4, 2)),
        ((4, 3), (11,), (2,)),
        ((4, 3, 2), (0, 0), (1, 1)),
    ],
)
def test_pieces_lie_inside_their_tensor(
    shape: tuple[int, ...], offsets: tuple[int, ...], piece_shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="required"):
        TensorShard(shape, offsets, torch.zeros(piece_shape))


def test_a_hole_is_refused(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path, keep=1) as writer,
        pytest.raises(ValueError, match=r"the ranks together hold 3 of 4 elements; each"),
    ):
        writer.save(1, {"a": TensorShard((4,), (0,), torch.zeros(3))})
    assert latest(tmp_path) is None


def test_views_of_a_flat_buffer_are_written_alone_and_filled_in_place(tmp_path: Path) -> None:
    flat = torch.arange(1e6)
    with Checkpointer(tmp_path, keep=1) as writer:
        writer.save(1, {"model.a": TensorShard((3,), (0,), flat[7:10])})
        assert (tmp_path / "step-00000001" / "rank-00000.bin").stat().st_size < 10_000
        flat.zero_()
        assert writer.load(tmp_path / "step-00000001", {"model.a": TensorShard((3,), (0,), flat[2:5])}) == {}
    assert flat[:6].tolist() == [0.0, 0.0, 7.0, 8.0, 9.0, 0.0]


def test_weights_of_a_checkpoint_as_a_model_of_transformers(tmp_path: Path) -> None:
    architecture = Architecture(
        name="small", d_model=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=12, vocab_size=11
    )  # fmt: skip
    weights = initial_weights(architecture, seed=1)
    pieces = {
        f"{kind}.{name}": TensorShard((tensor.numel(),), (0,), tensor.flatten() + shift)
        for kind, shift in (("model", 0.0), ("exp_avg", 1.0))
        for name, tensor in weights.tensors.items()
    }
    with Checkpointer(tmp_path, keep=1) as writer:
        writer.save(1, pieces)
    tensors, shapes = load_tensors(tmp_path / "step-00000001"), parameter_shapes(architecture)
    assert tensors.keys() == shapes.keys()
    save_hf(
        ModelWeights(architecture, {name: tensors[name].view(shape) for name, shape in shapes.items()}),
        tmp_path / "hf",
        seq_len=16,
    )
    again = load_hf(tmp_path / "hf").tensors
    assert again.keys() == weights.tensors.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.tensors.items())
    with pytest.raises(InputError, match=r"no tensor of .* begins with 'master\.'; found exp_avg"):
        load_tensors(tmp_path / "step-00000001", "master.")


def restore_latest(folder: Path) -> tuple[int | None, dict[str, Any], dict[int, str]]:
    """Return the step and state that a run resumes from, and the messages about damaged checkpoints."""
    target = state(0.0)
    with Checkpointer(folder, keep=3) as reader:
        result = reader.restore(target)
    return (None, target, {}) if result is None else (result.step, target, dict(result.damaged))


def no_manifest(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def half_a_manifest(path: Path) -> None:
    truncate(path / "checkpoint.json")


def another_step(path: Path) -> None:
    manifest = path / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"step": 7', '"step": 8'))


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda path: flip(path / "rank-00000.bin"), "rank-00000.bin is damaged"),
        (lambda path: (path / "rank-00000.bin").unlink(), "rank-00000.bin is missing"),
        (no_manifest, "cannot read .*checkpoint.json"),
        (half_a_manifest, "checkpoint.json is not JSON"),
        (another_step, "checkpoint.json is damaged"),
    ],
)
def test_restore_takes_the_newest_undamaged_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None], fault: str
) -> None:
    path = save(tmp_path, 10, 20, 30, keep=3)
    damage(path)
    step, target, damaged = restore_latest(tmp_path)
    assert (step, target["model.a"].values.tolist()) == (20, [20.0, 2.0])
    assert list(damaged) == [30]
    assert re.search(fault, damaged[30])
    assert names(tmp_path) == {"step-00000010", "step-00000020", "step-00000030.damaged"}
    assert restore_latest(tmp_path)[::2] == (20, {}), "it is set aside, and not met again"
    save(tmp_path, 30, keep=3)
    assert restore_latest(tmp_path)[0] == 30


def test_without_any_checkpoint_that_can_be_read_nothing_is_begun(tmp_path: Path) -> None:
    assert restore_latest(tmp_path)[0] is None
    save(tmp_path, 10, 20)
    for name in ("step-00000010", "step-00000020"):
        flip(tmp_path / name / "rank-00000.bin")
    with pytest.raises(
        DamagedFileError, match=r"step-00000020.*\n.*step-00000010.*\nno checkpoint of the run can be read"
    ):
        restore_latest(tmp_path)
    assert names(tmp_path) == {"step-00000010", "step-00000020"}


def test_a_checkpoint_of_another_run_is_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    with Checkpointer(tmp_path, keep=2) as reader, pytest.raises(InputError, match=r"lacks 1 tensors: model\.b"):
        reader.restore(state() | {"model.b": piece(1.0)})


@pytest.mark.parametrize("place", ["write_manifest", "publish_draft", "create_draft"])
def test_a_full_disk_is_reported_and_keeps_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    save(tmp_path, 3)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, place, full)
    with pytest.raises(InputError) as error:
        save(tmp_path, 4)
    assert str(error.value) == (
        f"checkpoint: {tmp_path}: No space left on device; a folder with room, and the permission to write in it, are required: "
        "the latest checkpoint is step-00000003"
    )
    assert names(tmp_path) == {"step-00000003"}


def test_errors_while_reading_are_raised_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)

    def failing(*arguments: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(reader, "_copy_overlap", failing)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        load(path, state())
