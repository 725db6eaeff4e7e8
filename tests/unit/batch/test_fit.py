"""The fit of S_min and E_min recovers the constants from which synthetic runs were generated."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from shardwise.batch_size.batch_sweep_fit import RUNS_FILE, BatchRun, fit_tradeoff, read_batch_runs, select_best_runs
from shardwise.batch_size.tradeoff import BatchTradeoff
from shardwise.values.errors import InputError

LAW = BatchTradeoff(min_steps=500.0, noise_tokens=3e4)
BATCHES = [4096 * 2**i for i in range(7)]


def runs(scatter: float, seed: int, seeds: int = 3) -> list[BatchRun]:
    random = np.random.default_rng(seed)
    return [
        BatchRun(batch_tokens=batch, seed=index, steps=LAW.steps(batch) * math.exp(scatter * random.normal()))
        for batch in BATCHES
        for index in range(seeds)
    ]


def test_the_fit_recovers_the_law_from_points_without_scatter() -> None:
    fit = fit_tradeoff(runs(0.0, 0), num_bootstrap=5)
    assert (fit.tradeoff.min_steps, fit.tradeoff.noise_tokens) == pytest.approx((500, 3e4), rel=1e-6)
    assert fit.rms_residual < 1e-6
    assert fit.within


def test_intervals_cover_the_true_values_at_their_nominal_rate() -> None:
    """30 sweeps at a scatter of 5%: 27 are expected to cover; fewer than 21 would occur once in a thousand times at 90%."""
    fits = [fit_tradeoff(runs(0.05, seed), num_bootstrap=100) for seed in range(30)]
    for name, truth in (("critical_batch", 3e4), ("min_steps", 500.0), ("min_tokens", 1.5e7)):
        is_covered = [low <= truth <= high for low, high in (getattr(fit, f"{name}_interval90") for fit in fits)]
        assert sum(is_covered) >= 21, name


def test_an_outlier_seed_barely_moves_the_fit() -> None:
    good = runs(0.02, 1)
    wrong = [*good[:-1], BatchRun(batch_tokens=BATCHES[-1], seed=2, steps=3 * LAW.steps(BATCHES[-1]))]
    fit = fit_tradeoff(wrong, num_bootstrap=5)
    assert fit.tradeoff.min_steps == pytest.approx(fit_tradeoff(good, num_bootstrap=5).tradeoff.min_steps, rel=0.05)
    plain = np.polyfit([1 / run.batch_tokens for run in wrong], [run.steps or 0 for run in wrong], 1)[1]
    assert abs(fit.tradeoff.min_steps - 500) < abs(plain - 500) / 3


def test_the_best_learning_rate_of_each_batch_counts() -> None:
    tuned = [BatchRun(batch_tokens=batch, steps=LAW.steps(batch), learning_rate=1e-3) for batch in BATCHES]
    slow = [BatchRun(batch_tokens=batch, steps=2 * LAW.steps(batch), learning_rate=1e-4) for batch in BATCHES]
    lost = [BatchRun(batch_tokens=batch, steps=None, learning_rate=1e-1, failed="diverged") for batch in BATCHES]
    assert [run.learning_rate for run in select_best_runs((*slow, *lost, *tuned))] == [1e-3] * len(BATCHES)
    assert fit_tradeoff([*slow, *lost, *tuned], num_bootstrap=5).tradeoff.min_steps == pytest.approx(500)


def test_a_critical_batch_beyond_the_runs_is_reported() -> None:
    fit = fit_tradeoff([run for run in runs(0.0, 0) if run.batch_tokens < 3e4], num_bootstrap=5)
    assert not fit.within
    assert fit.tradeoff.critical_batch_tokens == pytest.approx(3e4, rel=1e-3)


def test_a_folder_and_a_table_give_the_same_runs(tmp_path: Path) -> None:
    lines = [{"batch_tokens": 8, "learning_rate": 1e-3, "seed": 1, "steps": 20, "tokens": 160, "loss": 4.1, "target_loss": 4.2,
              "failed": None},
             {"batch_tokens": 16, "learning_rate": 1e-3, "seed": 1, "steps": None, "tokens": None, "loss": 9.0,
              "target_loss": 4.2, "failed": "diverged at step 7"}]  # fmt: skip
    (tmp_path / RUNS_FILE).write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    first, second = read_batch_runs(tmp_path)
    assert (first.batch_tokens, first.steps, first.seed, first.target_loss, first.failed) == (8, 20, 1, 4.2, None)
    assert (second.steps, second.failed) == (None, "diverged at step 7")
    (tmp_path / "runs.csv").write_text("batch_tokens,steps,seed\n8,20,1\n16,,1\n", encoding="utf-8")
    first, second = read_batch_runs(tmp_path / "runs.csv")
    assert (first.batch_tokens, first.steps, first.seed) == (8, 20, 1)
    assert (second.steps, second.failed) == (None, "the loss was not reached")


@pytest.mark.parametrize(
    ("name", "text", "problems"),
    [
        ("runs.csv", "batch,steps\n8,20\n", ["batch_tokens and steps are required"]),
        ("runs.csv", "batch_tokens,steps\n", ["found no runs"]),
        ("runs.csv", "batch_tokens,steps,seed\n-8,20,1\n8,many,x\n",
         ["2: batch_tokens is '-8'", "steps is 'many'", "seed is 'x'"]),
        (RUNS_FILE, "[1]\nnothing\n", ["1: found '[1]'", "2: found 'nothing'; a JSON object is required"]),
        (RUNS_FILE, '{"batch_tokens": true, "steps": 3}', ["batch_tokens is True"]),
    ],
)  # fmt: skip
def test_every_wrong_line_is_named(tmp_path: Path, name: str, text: str, problems: list[str]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as raised:
        read_batch_runs(tmp_path / name)
    for problem in problems:
        assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ([BatchRun(batch_tokens=8, steps=20), BatchRun(batch_tokens=16, steps=15)], "at least 3 batches"),
        ([BatchRun(batch_tokens=b, steps=None) for b in (8, 16, 32)], "batches of none"),
        ([BatchRun(batch_tokens=b, steps=b) for b in (8, 16, 32)], "is the learning rate of each batch tuned"),
        ([BatchRun(batch_tokens=b, steps=64 / b, target_loss=b) for b in (8, 16, 32)], "one loss is required"),
    ],
)
def test_runs_without_a_fit_are_refused(wrong: list[BatchRun], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        fit_tradeoff(wrong)


def test_a_missing_folder_is_refused() -> None:
    with pytest.raises(InputError, match=r"the folder of a sweep with a runs\.jsonl"):
        read_batch_runs("nowhere")
