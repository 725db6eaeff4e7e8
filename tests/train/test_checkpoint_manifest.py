"""Contents of checkpoint.json, how damage of it is found, and that a forged one is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.run.checkpoints import Checkpointer, TensorShard, load, load_tensors
from shardwise.run.faults.rank_status import first_line
from shardwise.values.durable_files import DamagedFileError, FileChecksum, add_checksum, checksum_file
from shardwise.values.errors import InputError

OLDER = (
    Path(__file__).parent / "checkpoint-1" / "step-00000040"
)  # of two ranks, by torch.distributed.checkpoint of 2.13


def state() -> dict[str, Any]:
    matrix = torch.arange(6.0).view(2, 3)
    return {
        "model.a": TensorShard((2, 3), (0, 0), matrix),
        "model.b": TensorShard((3,), (0,), torch.arange(3)),
        "step": 7,
    }


def save_state(folder: Path) -> Path:
    with Checkpointer(folder, keep=1) as writer:
        writer.save(7, state())
    return folder / "step-00000007"


def change(path: Path, edit: Callable[[dict[str, Any]], object], seal: bool = True) -> None:
    """Edit checkpoint.json; `seal` recomputes its checksum, as a forger would."""
    manifest = path / "checkpoint.json"
    payload = json.loads(manifest.read_text())
    edit(payload)
    if seal:
        payload = add_checksum({key: value for key, value in payload.items() if key != "crc32"})
    manifest.write_text(json.dumps(payload))


def test_the_manifest_says_where_every_box_lies(tmp_path: Path) -> None:
    path = save_state(tmp_path)
    payload = json.loads((path / "checkpoint.json").read_text())
    file = checksum_file(path / "rank-00000.bin")
    assert payload == add_checksum(
        {
            "schema": "shardwise.checkpoint/2",
            "step": 7,
            "values": {"step": 7},
            "tensors": {
                "model.a": {
                    "shape": [2, 3],
                    "dtype": "float32",
                    "parts": [{"offsets": [0, 0], "lengths": [2, 3], "file": "rank-00000.bin", "start": 0}],
                },
                "model.b": {
                    "shape": [3],
                    "dtype": "int64",
                    "parts": [{"offsets": [0], "lengths": [3], "file": "rank-00000.bin", "start": 64}],
                },
            },
            "files": {"rank-00000.bin": {"bytes": 88, "crc32": file.crc32}},
        }
    )
    content = (path / "rank-00000.bin").read_bytes()
    assert torch.frombuffer(bytearray(content[:24]), dtype=torch.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.frombuffer(bytearray(content[64:]), dtype=torch.int64).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "edit",
    [
        lambda payload: payload.update(step=8),
        lambda payload: payload["values"].update(step=8),
        lambda payload: payload["tensors"]["model.a"]["parts"][0].update(start=64),
        lambda payload: payload.pop("crc32"),
    ],
)
def test_a_manifest_that_has_changed_is_damaged(tmp_path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = save_state(tmp_path)
    change(path, edit, seal=False)
    with pytest.raises(DamagedFileError, match=r"checkpoint\.json (is damaged|has no CRC-32)"):
        load(path, state())


def first_part(payload: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = payload["tensors"]["model.a"]["parts"][0]
    return part


def rename_file(payload: dict[str, Any], name: str) -> None:
    payload["files"] = {name: payload["files"].pop("rank-00000.bin")}
    for tensor in payload["tensors"].values():
        tensor["parts"][0]["file"] = name


STRANGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a file elsewhere": (
        lambda payload: rename_file(payload, "../../secret.bin"),
        "a file is called '../../secret.bin'",
    ),
    "an absolute path": (lambda payload: rename_file(payload, "/etc/passwd"), "a file is called '/etc/passwd'"),
    "a part of no file": (
        lambda payload: first_part(payload).update(file="rank-00001.bin"),
        "at byte 0 of 'rank-00001.bin'",
    ),
    "a part behind the end": (lambda payload: first_part(payload).update(start=128), "at byte 128"),
    "a part before the start": (lambda payload: first_part(payload).update(start=-64), "at byte -64"),
    "a part in between": (lambda payload: first_part(payload).update(start=1), "at byte 1"),
    "no format": (lambda payload: payload["tensors"]["model.a"].update(dtype="load"), "the format 'load'"),
    "a hole": (lambda payload: first_part(payload).update(lengths=[2, 2]), "model.a has 4 of 6 elements"),
    "a larger box": (lambda payload: first_part(payload).update(lengths=[2, 2**40]), "a box outside the shape"),
    "other dims": (lambda payload: first_part(payload).update(offsets=[0, 0, 0]), r"parts of \[3\] dims"),
    "a part twice": (
        lambda payload: payload["tensors"]["model.a"]["parts"].append(first_part(payload)),
        "boxes that overlap",
    ),
    "a shape of no file": (lambda payload: payload["tensors"]["model.a"].update(shape=[2**40, 3]), "of 3,298"),
    "text for a number": (lambda payload: first_part(payload).update(start="x"), "start: found 'x'"),
}


@pytest.mark.parametrize("contradiction", STRANGE)
def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path, contradiction: str) -> None:
    path = save_state(tmp_path)
    edit, fault = STRANGE[contradiction]
    change(path, edit)
    with pytest.raises(DamagedFileError, match=fault):
        load_tensors(path)


def older() -> dict[str, Any]:
    """The state of the older checkpoint, not filled."""
    return {
        "model.layers.0.wq": TensorShard((4, 6), (0, 0), torch.zeros(4, 6, dtype=torch.bfloat16)),
        "exp_avg.layers.0.wq": TensorShard((24,), (0,), torch.zeros(24)),
        "buffer.counts": TensorShard((5,), (0,), torch.zeros(5, dtype=torch.int64)),
        "step": 0,
        "order": None,
    }


def test_a_checkpoint_of_the_older_schema_is_read() -> None:
    target = older()
    assert load(OLDER, target) == {"step": 40, "order": {"next": [3, 4]}}
    expected = (torch.arange(24, dtype=torch.float64) / 7).sin().mul(300)
    assert torch.equal(target["model.layers.0.wq"].values, expected.to(torch.bfloat16).view(4, 6))
    assert torch.equal(target["exp_avg.layers.0.wq"].values, expected.float())
    assert target["buffer.counts"].values.tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(load_tensors(OLDER)["layers.0.wq"], expected.to(torch.bfloat16))


class Stranger:
    """A pickle that makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def forge_checkpoint(folder: Path, name: str, content: bytes) -> Path:
    """Return the older checkpoint with a forged file in it and matching checksums."""
    path = folder / OLDER.name
    shutil.copytree(OLDER, path)
    (path / name).write_bytes(content)
    checksum: FileChecksum = checksum_file(path / name)
    manifest = json.loads((path / "checkpoint.json").read_text())
    manifest["files"][name] = {"bytes": checksum.bytes, "crc32": checksum.crc32}
    (path / "checkpoint.json").write_text(json.dumps(manifest))
    return path


def test_a_forged_metadata_file_runs_no_code(tmp_path: Path) -> None:
    created = tmp_path / "made"
    path = forge_checkpoint(tmp_path, ".metadata", pickle.dumps({"state_dict_metadata": Stranger(created)}))
    with pytest.raises(
        InputError, match=r"\.metadata is not what was written: it asks for posix\.mkdir, which no checkpoint needs"
    ):
        load(path, older())
    assert not created.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert created.exists(), "an ordinary reader runs it"


def test_a_forged_element_file_runs_no_code(tmp_path: Path) -> None:
    created = tmp_path / "made"
    whole_file = (OLDER / "__0_0.distcp").read_bytes()
    content = pickle.dumps(Stranger(created), protocol=2)
    path = forge_checkpoint(tmp_path, "__0_0.distcp", content + whole_file[len(content) :])
    with pytest.raises(InputError, match=r"__0_0\.distcp is not what was written"):
        load(path, older())
    assert not created.exists()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"no pickle", "is not what was written"),
        (pickle.dumps({"a": 1}), "is not what was written"),
        (pickle.dumps(Stranger), "it asks for "),
        (b"cbuiltins\neval\n(S'1'\ntR.", "it asks for builtins.eval"),
        (b"\x80\x04\x8c\x05torch\x8c\x04load\x93.", r"it asks for torch\.load"),
    ],
)
def test_changed_metadata_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    with pytest.raises(DamagedFileError, match=fault):
        load(forge_checkpoint(tmp_path, ".metadata", content), older())


def test_files_of_an_older_manifest_lie_beside_it(tmp_path: Path) -> None:
    path = forge_checkpoint(tmp_path, ".metadata", (OLDER / ".metadata").read_bytes())
    change(path, lambda payload: payload["files"].update({"../x": {"bytes": 1, "crc32": 1}}), seal=False)
    with pytest.raises(DamagedFileError, match=r"a file is called '\.\./x'"):
        load(path, older())


def test_an_error_without_text_is_named_by_its_type() -> None:
    assert first_line(EOFError()) == "EOFError"
    assert first_line(RuntimeError("\nfailed in\nfile.cpp")) == "failed in"
