"""Branches of a checkpoint for several batch sizes: their data, how they resume, fail and are refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from json_schemas import require_valid
from train.stand_in import SEQ_LEN, small_plan, write_inputs

from shardwise.batch_size.branch_losses import read_branches
from shardwise.present.command_line import main
from shardwise.records.step_log import StepLog, read_log
from shardwise.search.plan_file import dump_plan

BATCH, WINDOW, STEPS = 4 * SEQ_LEN, 16 * 8 * SEQ_LEN, 6


def trained(place: Path, *more: str) -> Path:
    """A run of six steps with a learning rate that falls."""
    plan, *flags = write_inputs(place)
    dump_plan(small_plan(batch_seqs=4, micro_batch_seqs=2), place / "plan.json")
    assert main(["train", plan, *flags, "--steps", str(STEPS), "--learning-rate", "1e-2", *more]) == 0
    return place / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run, which was to end at a loss that its branches pass as well, and kept the checkpoint of its fourth step."""
    more = ["--schedule", "cosine", "--to-loss", "9", "--set", "recipe.batch_ramp=0:2,3:4", "--checkpoint-every", "4"]
    return trained(tmp_path_factory.mktemp("branch"), *more)


def flags_of(run: Path, out: Path) -> list[str]:
    return ["batch", "branch", str(run), "--batches", "32,64,128", "--tokens", str(WINDOW), "--out", str(out)]


def log_of(out: Path, batch: int) -> StepLog:
    return read_log(out / "runs" / f"batch-{batch}" / "log.jsonl")


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.usefixtures("copied_attempts")
def test_the_branch_of_the_runs_own_batch_is_the_run_that_goes_on(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit; other branches scale the learning rate by the square root of the ratio of batches. The run's own
    files do not change.
    """
    before, out = contents(run), tmp_path / "branches"
    assert main([*flags_of(run, out), "--plot", str(tmp_path / "branches.svg"), "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    require_valid(payload)
    assert contents(run) == before
    shutil.copytree(run, tmp_path / "goes-on")
    rate = 1e-3  # a tenth of the highest, where a cosine ends
    same = f"--data {run.parent / 'data'} --out {tmp_path / 'goes-on'} --resume --schedule constant --to-loss 1e-9"
    more = f"--learning-rate {rate} --steps {STEPS + WINDOW // BATCH}"
    assert main(["train", str(run.parent / "plan.json"), *same.split(), *more.split()]) == 0
    reference = read_log(tmp_path / "goes-on" / "log.jsonl")
    log = log_of(out, BATCH)
    assert [record.loss for record in log.steps] == [record.loss for record in reference.steps][STEPS:]
    last = STEPS + WINDOW // BATCH
    assert log.validation[last] == reference.validation[last]
    branches = {branch.batch_tokens: branch for branch in read_branches(out)}
    assert sorted(branches) == [32, 64, 128]
    assert branches[64].held_out_loss == log.validation[last]
    for batch in (32, 64, 128):
        records = log_of(out, batch).steps
        assert [record.num_tokens for record in records] == [batch] * (WINDOW // batch)
        expected = [rate * (batch / BATCH) ** 0.5] * len(records)
        assert [record.learning_rate for record in records] == pytest.approx(expected, rel=1e-12)
    assert [branch["steps"] for branch in payload["branches"]] == [64, 32, 16]
    assert (payload["step"], payload["batch_tokens"], payload["window_tokens"]) == (STEPS, BATCH, WINDOW)
    picture = (tmp_path / "branches.svg").read_text(encoding="utf-8")
    assert "Branches of step 6" in picture
    assert "best of smaller batches + 0.01" in picture
    _made_branches_are_read_again(out, payload, capsys)


def _made_branches_are_read_again(out: Path, payload: object, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["batch", "branch", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == payload
    assert main(["batch", "branch", str(out), "--tolerance", "100"]) == 0
    assert "note: the largest batch is within the tolerance" in capsys.readouterr().out
    assert main(["batch", "branch", str(out), "--tokens", "64Ki"]) == 2
    assert f"--tokens: {out} holds branches that were made; leave out" in capsys.readouterr().err


@pytest.mark.usefixtures("copied_attempts")
def test_branches_take_the_same_samples(tmp_path: Path) -> None:
    """Without a learning rate worth the name the loss of a batch is the mean of those of the smaller batches in it."""
    run, out = trained(tmp_path, "--learning-rate", "1e-30"), tmp_path / "branches"
    assert main([*flags_of(run, out), "--batches", "128"]) == 0
    small, large = ([record.loss for record in log_of(out, batch).steps] for batch in (64, 128))
    means = [(a + b) / 2 for a, b in zip(small[::2], small[1::2], strict=True)]
    assert large == pytest.approx(means, rel=1e-6)
    assert len(set(large)) > 10


@pytest.mark.usefixtures("copied_attempts")
def test_branches_are_stopped_and_go_on(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From an older checkpoint, whose learning rate is that of its step; more batches may be added to those that were made."""
    out = tmp_path / "branches"
    flags = [*flags_of(run, out), "--batches", "64", "--step", "4", "--processes", "1"]
    first = subprocess.Popen(
        [sys.executable, "-m", "shardwise", *flags, "--batches", "128"], stderr=subprocess.PIPE, text=True
    )
    log = out / "runs" / "batch-64" / "log.jsonl"
    while first.poll() is None and not (log.exists() and read_log(log).steps):
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    with first:
        assert first.stderr is not None
        stderr = first.stderr.read()
    assert first.returncode in (0, 143), stderr
    assert main([*flags, "--batches", "128"]) == 0
    assert sorted(branch.batch_tokens for branch in read_branches(out)) == [64, 128]
    assert [record.step for record in log_of(out, 64).steps] == list(range(5, 5 + WINDOW // BATCH))
    rate = 1e-2 * (0.1 + 0.9 * 0.5 * (1 - 0.8090169943749475))  # of a cosine, 4/5 of its way: cos 144 degrees
    assert log_of(out, 64).steps[0].learning_rate == pytest.approx(rate, rel=1e-12)
    capsys.readouterr()
    assert main([*flags, "--tokens", str(2 * WINDOW)]) == 2
    assert "window_tokens: found 4096; the branch in" in capsys.readouterr().err
    shutil.copytree(run, tmp_path / "copy")
    again = [str(tmp_path / "copy") if word == str(run) else word for word in flags]
    assert main(again) == 2
    assert f"run: found {tmp_path / 'copy'}; the branch in" in capsys.readouterr().err


@pytest.mark.usefixtures("copied_attempts")
def test_a_branch_that_fails_is_a_line_with_its_reason(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}" / "rank-00000.bin"
    values = bytearray(damaged.read_bytes())
    values[len(values) // 2] ^= 1
    damaged.write_bytes(values)
    out = tmp_path / "branches"
    assert main([*flags_of(tmp_path / "run", out), "--batches", "64", "--data", str(run.parent / "data")]) == 2
    assert "found 0 that came to the end of the window; at least 2 are required" in capsys.readouterr().err
    (branch,) = read_branches(out)
    assert branch.loss is None
    assert "rank-00000.bin" in (branch.failed or "")


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (
            ["--batches", "40"],
            "--batches 40: --batch-schedule: a batch of 40 tokens is not a whole number of sequences of 16",
        ),
        (["--tokens", "1024"], "--tokens: found 1,024, 8 steps of the largest batch, 128 tokens; at least 16"),
        (["--tokens", "many"], "--tokens"),
        (["--step", "5"], "found no checkpoint of step 5"),
        (["--batches", "64:32:x2"], "which goes down"),
        (["--tolerance", "0"], "--tolerance: found 0"),
        (["--data", "nowhere"], "nowhere"),
        (["--to-loss", "3"], "--to-loss: not of `batch branch`; leave out, or `shardwise batch sweep` is required"),
    ],
)
def test_impossible_branches_are_refused_before_any_run(
    run: Path, more: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags_of(run, tmp_path / "branches"), *more]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "branches").exists()


def test_all_missing_flags_are_reported_together(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "branch", str(run)]) == 2
    err = capsys.readouterr().err
    for name in ("--batches", "--tokens", "--out"):
        assert f"{name}: found none" in err
    assert main(flags_of(tmp_path, tmp_path / "branches")) == 2
    assert f"{tmp_path} holds no run" in capsys.readouterr().err
