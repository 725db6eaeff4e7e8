"""Verbs on files that cannot be read, or are not what they seem: an error of a line, exit code 2, within seconds."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.interop.weights.convert import convert
from shardwise.present.command_line import main
from shardwise.search import dump_plan
from shardwise.values import InputError

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error of a verb that must end with exit code 2."""
    code = main(list(arguments))
    output = capsys.readouterr()
    assert (code, output.out) == (2, ""), output
    return output.err


@pytest.fixture
def pipe(tmp_path: Path) -> str:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return str(path)


VERBS: dict[str, Callable[[str], list[str]]] = {
    "validate": lambda path: ["validate", "--rows", path],
    "explain": lambda path: ["explain", path],
    "read": lambda path: ["read", path, "--cluster", "h100:8"],
    "plan": lambda path: ["plan", "gpt-2", f"{path}.toml"],
    "schedule": lambda path: ["schedule", f"{path}.csv"],
    "calibrate": lambda path: ["calibrate", "h100:8", "--runs", path],
    "bench": lambda path: ["calibrate", "h100:8", "--bench", path],
    "tokenize": lambda path: ["tokenize", path, "--out", f"{path}.out", "--tokenizer", path],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_in_place_of_a_file(
    verb: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ending in ("", ".toml", ".csv"):
        path = tmp_path / f"file{ending}"
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    error = refused(capsys, *VERBS[verb](str(tmp_path / "file")))
    assert "a regular file is required" in error


def test_the_log_of_a_run_may_come_through_a_pipe_but_not_from_nowhere(
    pipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.values.input_files.PIPE_WAIT_S", 0.1)
    run = ("--model", "gpt-2", "--cluster", "h100:8", "--seq-len", "1024")
    assert "sent nothing" in refused(capsys, "mfu", pipe, *run)
    assert "it is a device" in refused(capsys, "mfu", "/dev/zero", *run)


def folder(tmp_path: Path, config: Any) -> Path:
    (tmp_path / "model").mkdir(exist_ok=True)
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    (tmp_path / "model" / "config.json").write_bytes(text)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_layers is 1,000,000,000; at most 10,000"),
        ({"num_hidden_layers": int("9" * 400)}, "an integer of 400 digits"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a finite number above 0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1; a finite number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; a finite number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta = inf; a number above 0"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings is 'x'; a whole number above 0"),
        ({"max_position_embeddings": -4}, "max_position_embeddings is -4; a whole number above 0"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; true or false"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; an object"),
    ],
    ids=str,
)
def test_values_of_a_config_have_ranges(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = folder(tmp_path, CONFIG | changes)
    with pytest.raises(InputError, match=words):
        convert(path, "torchtitan", tmp_path / "out")
    with pytest.raises(InputError, match=words):
        sw.load_model(str(path))


@pytest.mark.parametrize(
    ("config", "words"),
    [(b"\xff\xfe", "is not text"), (b"{", "is not JSON"), (b"[" * 10**5, "is not JSON"), (b"[1]", "holds a list")],
)
def test_a_config_that_cannot_be_read(
    config: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path, config)
    assert words in refused(capsys, "convert", str(path), "--to", "torchtitan", "--out", str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, "has the weight_map None"), ({"weight_map": []}, r"weight_map \[\]"), ({"weight_map": {"a": 3}}, "a tensor in 3"),
        ({"weight_map": {"a": "../b"}}, "a tensor in '../b'"), ({"weight_map": {"a": "b"}}, "cannot read .*model/b"),
        ([], "holds a list"),
    ],
    ids=str,
)  # fmt: skip
def test_an_index_of_weights_that_is_damaged(index: Any, words: str, tmp_path: Path) -> None:
    path = folder(tmp_path, CONFIG)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=words):
        convert(path, "torchtitan", tmp_path / "out")


def test_weights_that_are_a_pipe(tmp_path: Path) -> None:
    path = folder(tmp_path, CONFIG)
    os.mkfifo(path / "model.safetensors")
    with pytest.raises(InputError, match="it is a named pipe"):
        convert(path, "torchtitan", tmp_path / "out")


@pytest.mark.parametrize("tracker", [b"\xff", b"", b"../..", b"9" * 400, b"x" * 5000, "٣".encode()])
def test_a_tracker_that_is_damaged(tracker: bytes, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(tracker)
    with pytest.raises(
        InputError, match=r"latest_checkpointed_iteration.txt.*the number of an iteration, or 'release'"
    ):
        convert(tmp_path, "torchtitan", tmp_path / "out", model="gpt-2")


@pytest.mark.parametrize("kind", [[], {}, None, 3, "mesh"])
def test_a_plan_whose_topology_has_no_kind(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    dump_plan(sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024), path)
    plan = json.loads(path.read_text())
    plan["cluster"]["topology"]["kind"] = kind
    path.write_text(json.dumps(plan))
    assert f"cluster.topology: found kind {kind!r}; one of" in refused(capsys, "explain", str(path))
