"""`shardwise train` as a user meets it, around a small trainer."""

from __future__ import annotations

import argparse
import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from train import stand_in
from train.stand_in import small_plan, write_inputs

from shardwise import train
from shardwise.present.command_line import main
from shardwise.present.verb import read_arguments
from shardwise.present.verbs.training import train as verbs_train
from shardwise.run import launcher
from shardwise.run.trainer.flags import build_parser as rank_parser
from shardwise.run.trainer.flags import to_command_line
from shardwise.train import main as module_main
from shardwise.values.errors import InputError


@pytest.fixture(autouse=True)
def _small_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "build_components", stand_in.parts)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["train", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_report_has_steps_losses_and_the_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, *write_inputs(tmp_path), "--steps", "5")
    assert code == 0
    assert out.startswith("5 steps, 640 tokens in ")
    assert "3.4657 nats per token at first" in out  # ln 32
    assert "above how often each token comes alone: 1.0000 nats per token" in out
    assert str(tmp_path / "run" / "log.jsonl") in out
    assert "MFU n/a: local has no sourced fp32 peak" in err


def test_the_summary_as_json_is_alone_on_the_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, out, _ = run(capsys, *write_inputs(tmp_path), "--steps", "2", "--json")
    assert json.loads(out) == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_plan_of_several_devices_starts_a_process_for_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = launcher.run_ranks
    monkeypatch.setattr("shardwise.train.run_ranks", lambda words, ranks: original(words, ranks, "train.stand_in"))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(Path(__file__).parents[1]), *sys.path]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    flags = write_inputs(tmp_path, small_plan(2))
    code, out, _ = run(capsys, *flags, "--steps", "3", "--json")
    assert code == 0
    assert json.loads(out)["num_tokens"] == 3 * 8 * stand_in.SEQ_LEN
    monkeypatch.setenv("STAND_IN_REFUSES", "1")
    with pytest.raises(SystemExit) as caught:  # the rank has said why
        run(capsys, *flags, "--steps", "3", "--force")
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--data", "none", "--out", "run", "--steps", "2"], "none/index.json: cannot read"),
        (["--data", "data", "--out", "data", "--steps", "2"], "data holds other files"),
        (["--data", "data", "--out", "plan.json", "--steps", "2"], "plan.json is a file"),
        (["--data", "data", "--out", "run", "--steps", "2", "--set", "job.seq_len=4"], "recipe.NAME=VALUE is required"),
        (["--data", "data", "--out", "run", "--steps", "x", "--seed", "y"], "--seed: found 'y'"),
    ],
)
def test_wrong_input_starts_no_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], part: str
) -> None:
    write_inputs(tmp_path, small_plan(2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardwise.train.run_ranks", lambda *arguments: pytest.fail("started"))
    code, out, err = run(capsys, "plan.json", *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert part in err
    assert not (tmp_path / "run").exists()


def test_a_plan_that_needs_more_memory_than_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = small_plan(batch_seqs=64, micro_batch_seqs=64)
    monkeypatch.setattr("shardwise.run.machine_resources.host_bytes", lambda: int(0.9 * plan.estimate.memory_bytes))
    code, _, err = run(capsys, *write_inputs(tmp_path, plan), "--steps", "2")
    assert code == 3
    assert "error: the plan takes " in err
    assert "plan again with --pin " in err


def test_a_missing_pytorch_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "torch" else find_spec(name, *more)
    )
    code, _, err = run(capsys, *write_inputs(tmp_path), "--steps", "2")
    assert code == 2
    assert err == 'error: train: PyTorch is not installed; pip install "shardwise[train]"\n'


def test_ctrl_c_ends_any_verb_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*operands: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.price.problem.load_model", interrupted)
    code = main(["estimate", "gpt-2", "h100:8", "--batch-tokens", "1Mi", "--seq-len", "1024", "--layout", "fsdp=8"])
    shown = capsys.readouterr()
    assert (code, shown.out, shown.err) == (130, "", "stopped\n")


def test_the_module_has_the_verbs_flags_and_does_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = [*write_inputs(tmp_path), "--steps", "3", "--set", "recipe.beta1=0.8", "--set=recipe.beta2=0.9", "--seed=3",
             "--learning-rate=1e-3"]  # fmt: skip
    module = vars(rank_parser().parse_args(flags))
    started = []

    def start(arguments: argparse.Namespace) -> None:
        started.append(vars(arguments))
        raise InputError("started")

    with monkeypatch.context() as patched:
        patched.setattr(train, "start_run", start)
        assert run(capsys, *flags) == (2, "", "error: started\n")
    assert started == [module]
    assert set(read_arguments(verbs_train)) == {*module, "initial"} - {"from"}, "each flag of a rank is one of the verb"
    again = rank_parser().parse_args(to_command_line(rank_parser().parse_args(flags)))
    assert vars(again) == module, "the ranks get what the launcher was given"
    assert module_main([*flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3
    assert module_main(flags) == 2
    assert "holds a run" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [True, False])
def test_under_torchrun_the_first_rank_prints_the_summary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, as_json: bool
) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
    }
    for name, value in {**environment, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    flags = [*write_inputs(tmp_path), "--steps", "2"]
    assert module_main([*flags, *(["--json"] if as_json else [])]) == 0
    out = capsys.readouterr().out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert json.loads(out) == summary if as_json else out.startswith("2 steps, 256 tokens in ")
    assert module_main(flags) == 2
    assert capsys.readouterr().out == ""


def test_module_reports_wrong_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.train", "none.json", "--data", "data", "--out", "run", "--steps", "1"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: plan file: cannot read none.json: No such file or directory\n"
