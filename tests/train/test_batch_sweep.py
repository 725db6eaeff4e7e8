"""A sweep over batch sizes: which runs it makes, what it writes, and how it resumes after any end."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from json_schemas import require_valid
from train.stand_in import write_inputs

from shardwise.batch_size.batch_sweep_fit import NOT_REACHED, BatchRun, read_batch_runs
from shardwise.measure.batch_experiments.batch_sweep import Design, SweepTrial
from shardwise.present.command_line import main
from shardwise.records.step_log import read_log, steps_to_loss

DESIGN = Design(batches=(4096, 1024), plan_batch_tokens=4096, learning_rate=1e-3, num_seeds=3, most_steps=1000)
Cost = Callable[[SweepTrial], float]


def simulate_runs(
    design: Design, cost: Cost, fails: Callable[[SweepTrial], bool] = lambda trial: False
) -> list[BatchRun]:
    """Simulate all runs of a design one after another, where a trial takes the given number of steps."""
    runs: list[BatchRun] = []
    while trials := list(design.next_trials(runs)):
        trial, steps = trials[0], cost(trials[0])
        failed = "diverged" if fails(trial) else NOT_REACHED if steps > trial.most_steps else None
        runs.append(
            BatchRun(batch_tokens=trial.batch_tokens, learning_rate=trial.learning_rate, seed=trial.seed,
                     steps=None if failed else steps, failed=failed)
        )  # fmt: skip
        assert len(runs) < 200
    return runs


def best_at(rate: float) -> Cost:
    """Steps that grow with the distance of the learning rate from the best one of a batch, on the square-root rule."""
    return lambda trial: 100 * (1 + math.log(trial.learning_rate / (rate * math.sqrt(trial.batch_tokens / 4096))) ** 2)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.9, 1.0, 2.0, 4.0])
def test_the_best_learning_rate_lies_between_two_that_were_tried(factor: float) -> None:
    runs = simulate_runs(DESIGN, best_at(1e-3 * factor))
    for batch in DESIGN.batches:
        matching = [run for run in runs if run.batch_tokens == batch]
        rates = sorted({run.learning_rate or 0.0 for run in matching})
        best = min((run for run in matching if run.steps), key=lambda run: run.steps or 0.0).learning_rate
        assert best == pytest.approx(1e-3 * math.sqrt(batch / 4096) * 2 ** round(math.log2(factor)), rel=1e-9)
        assert rates[0] < (best or 0.0) < rates[-1]
        assert sorted(run.seed for run in matching if run.learning_rate == best) == [0, 1, 2]
        assert len(matching) <= 2 + 3 + 3


def test_a_rate_that_needs_more_steps_than_the_best_is_stopped_there() -> None:
    runs = simulate_runs(DESIGN, best_at(1e-3))
    of_small = [run for run in runs if run.batch_tokens == 1024 and run.learning_rate != 5e-4]
    assert len(of_small) == 2
    assert {run.failed for run in of_small} == {NOT_REACHED}


def test_rates_that_fail_are_too_high_and_those_that_never_reach_it_too_low() -> None:
    runs = simulate_runs(DESIGN, lambda trial: 100.0, fails=lambda trial: trial.learning_rate > 1e-4)
    tried = {run.learning_rate for run in runs if run.batch_tokens == 4096}
    assert tried == {1e-3, 5e-4, 2.5e-4, 1.25e-4}, "an eighth of the rule's is the least that is tried"
    slow = simulate_runs(DESIGN, lambda trial: 5000.0 if trial.learning_rate < 3e-3 else 100.0)
    assert 4e-3 in {run.learning_rate for run in slow if run.batch_tokens == 4096 and run.steps}


def test_given_rates_are_tried_and_no_others() -> None:
    design = replace(DESIGN, learning_rates=(1e-3, 3e-3))
    runs = simulate_runs(design, best_at(1e-3))
    assert {run.learning_rate for run in runs} == {1e-3, 3e-3}
    assert sum(run.seed > 0 for run in runs) == 2 * 2


def test_finished_runs_are_not_run_again() -> None:
    runs = simulate_runs(DESIGN, best_at(1e-3))
    for done in range(len(runs)):
        again = list(DESIGN.next_trials(runs[:done]))
        keys = {(run.batch_tokens, run.learning_rate, run.seed) for run in runs[:done]}
        assert again
        assert keys.isdisjoint(tuple(trial.settings.values()) for trial in again)
    assert not list(DESIGN.next_trials(runs))


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    plan, _, data, *_ = write_inputs(tmp_path)
    return ["batch", "sweep", plan, "--data", data, "--out", str(tmp_path / "sweep"), "--batches", "64,128", "--to-loss", "2.9",
            "--learning-rates", "1e-2", "--seeds", "1", "--warmup", "0", "--steps", "400"]  # fmt: skip


@pytest.mark.usefixtures("copied_attempts")
def test_a_sweep_runs_is_stopped_and_goes_on(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep stopped during its first run has the results of an uninterrupted one in the end."""
    first = subprocess.Popen(
        [sys.executable, "-m", "shardwise", *flags, "--processes", "1"], stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "sweep" / "runs" / "batch-64-rate-0.01-seed-0" / "log.jsonl"
    while first.poll() is None and not (log.exists() and read_log(log).steps):
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    with first:
        assert first.stderr is not None
        stderr = first.stderr.read()
    assert first.returncode in (0, 143), stderr
    assert main(flags) == 0
    runs = read_batch_runs(tmp_path / "sweep")
    assert [(run.batch_tokens, run.seed, run.reached) for run in sorted(runs, key=lambda run: run.batch_tokens)] == [
        (64, 0, True), (128, 0, True),
    ]  # fmt: skip
    for run in runs:
        folder = tmp_path / "sweep" / "runs" / f"batch-{run.batch_tokens:.0f}-rate-0.01-seed-0"
        losses = [record.loss for record in read_log(folder / "log.jsonl").steps]
        assert run.steps == steps_to_loss(losses, 2.9)
        assert run.tokens == pytest.approx((run.steps or 0.0) * run.batch_tokens)
        assert not (folder / "checkpoints").exists()
    out = capsys.readouterr().out
    assert "next: shardwise batch fit" in out
    before = (tmp_path / "sweep" / "runs.jsonl").read_bytes()
    assert main([*flags, "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert len(payload["runs"]) == 2
    require_valid(payload)
    assert (tmp_path / "sweep" / "runs.jsonl").read_bytes() == before
    assert main([*flags, "--to-loss", "2.5"]) == 2
    assert "to_loss: found 2.5; the sweep in" in capsys.readouterr().err


@pytest.mark.usefixtures("copied_attempts")
def test_a_run_that_fails_is_a_line_with_its_reason(flags: list[str], tmp_path: Path) -> None:
    spikes = ["recipe.norm_spike=stop", "recipe.spike_window=2", "recipe.spike_deviations=1e-9"]
    assert main([*flags, "--batches", "64", *(word for setting in spikes for word in ("--set", setting))]) == 0
    (line,) = (json.loads(text) for text in (tmp_path / "sweep" / "runs.jsonl").read_text().splitlines())
    assert line["steps"] is line["tokens"] is None
    assert "found a norm of all gradients of" in line["failed"]
    assert (line["batch_tokens"], line["seed"], line["target_loss"]) == (64, 0, 2.9)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (
            ["--batches", "100"],
            "a batch of 100 tokens is not a whole number of sequences of 16; the nearest are 96 and 112",
        ),
        (["--batches", "64:32:x2"], "which goes down"),
        (["--to-loss", "-1"], "to_loss is -1.0"),
        (["--learning-rates", "0"], "learning rate: found 0; a number above 0"),
    ],
)
def test_impossible_sweeps_are_refused_before_any_run(
    flags: list[str], more: list[str], part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, *more]) == 2
    assert part in capsys.readouterr().err
    assert not (tmp_path / "sweep" / "runs.jsonl").exists()


def test_all_missing_flags_are_reported_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = write_inputs(tmp_path)[0]
    assert main(["batch", "sweep", plan]) == 2
    err = capsys.readouterr().err
    for name in ("--batches", "--to-loss", "--data", "--out"):
        assert f"{name}: found none" in err
