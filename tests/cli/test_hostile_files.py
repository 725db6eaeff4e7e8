"""Verbs on unreadable or malformed files: a one-line error with exit code 2 within seconds."""

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
from shardwise.records.step_log import read_log
from shardwise.search import dump_plan
from shardwise.values import InputError

CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip


def require_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the error of a verb that must end with exit code 2."""
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
def test_a_pipe_or_a_device_is_refused_as_a_file(
    verb: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for ending in ("", ".toml", ".csv"):
        path = tmp_path / f"file{ending}"
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    error = require_refusal(capsys, *VERBS[verb](str(tmp_path / "file")))
    assert "a regular file is required" in error


def test_the_log_of_a_run_may_come_through_a_pipe_but_not_from_nowhere(
    pipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.values.input_files.PIPE_WAIT_S", 0.1)
    run = ("--model", "gpt-2", "--cluster", "h100:8", "--seq-len", "1024")
    assert "sent nothing" in require_refusal(capsys, "mfu", pipe, *run)
    assert "it is a device" in require_refusal(capsys, "mfu", "/dev/zero", *run)


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
    assert words in require_refusal(capsys, "convert", str(path), "--to", "torchtitan", "--out", str(tmp_path / "out"))


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
    assert f"cluster.topology: found kind {kind!r}; one of" in require_refusal(capsys, "explain", str(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "schedule interleaved --stages 1e308 --micro-batches 16 --virtual-stages 2",
            "a whole number of at most 1e+18",
        ),
        ("schedule 1f1b --stages 1e9 --micro-batches 8", "at most 300,000 passes"),
        ("schedule interleaved --stages 4 --micro-batches 16 --virtual-stages 1000000000", "at most 300,000 passes"),
        (f"mfu {'a' * 5000} --model gpt-2 --cluster h100:8", "File name too long"),
    ],
    ids=["stages", "passes", "virtual stages", "name"],
)
def test_words_that_no_verb_accepts_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in require_refusal(capsys, *words.split())


def test_completion_of_an_invalid_line_exits_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash", "bash"]) == 0
    capsys.readouterr()


LINE = {
    "step": 1, "loss_metrics/global_avg_loss": 2.5, "grad_norm": "nan", "time_metrics/end_to_end(s)": 0.5, "learning_rate": 1e-3,
    "num_tokens": 64, "num_targets": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": "1"}, "step is '1'; a whole number"), ({"step": 10**30}, "step is 1000"),
        ({"time_metrics/end_to_end(s)": None}, r"end_to_end\(s\) is None; a number"), ({"num_tokens": []}, r"num_tokens is \[\]"),
        ({"time_metrics/end_to_end(s)": -1}, "a time above 0"), ({"loss_scale": "x"}, "loss_scale is 'x'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_line_of_a_log_with_values_of_other_types(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | changes) + "\n")
    with pytest.raises(InputError, match=rf"log.jsonl, line 2: .*{words}.*; a log that a run wrote is required"):
        read_log(path)
    path.write_text(json.dumps(LINE) + "\n")
    assert len(read_log(path).steps) == 1


@pytest.mark.parametrize("seed", ["9" * 5000, "1.5", "x", "--1"])
def test_a_seed_of_a_sweep_that_is_no_number(seed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sweep.csv"
    path.write_text(f"batch_tokens,steps,seed\n256,1000,-3\n512,900,{seed}\n")
    assert "sweep.csv:3: seed is" in require_refusal(capsys, "batch", "fit", str(path))


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("alternatives", 0, "estimate"), 3, "found 3; an object is required"),
        (("estimate", "time", "compute"), 1e300, "found 1e+300; numbers of at most 1e+21 are required"),
        (("estimate", "time", "compute"), float("nan"), "found NaN; a finite number is required"),
    ],
    ids=str,
)
def test_a_plan_with_an_estimate_of_another_kind(
    place: tuple[Any, ...], value: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    dump_plan(sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024), path)
    payload = json.loads(path.read_text())
    part = payload
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    path.write_text(json.dumps(payload))
    assert words in require_refusal(capsys, "explain", str(path))
