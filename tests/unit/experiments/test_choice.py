"""Choice of runs: the best of a sweep is reached after few runs, and no skipped configuration is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from shardwise.measure.calibrate.logged_runs import read_run_rows
from shardwise.measure.experiments.calibration_rows import write_calibration_rows
from shardwise.measure.experiments.candidates import Candidate, list_candidates
from shardwise.measure.experiments.expected_information import CANNOT_WIN, NO_MEMORY, ExpectedInformation
from shardwise.measure.experiments.grid_file import ExperimentBudget, ExperimentGrid, read_grid
from shardwise.measure.experiments.ledger import LedgerContent, LedgerRow
from shardwise.measure.experiments.ledger_lines import LedgerLine, RunMeasurement, RunPrediction
from shardwise.measure.experiments.ledger_summary import best_row, interval_coverage
from shardwise.measure.experiments.renewed_predictions import LogStep, StepTerms, renew_predictions
from shardwise.values import InputError

GRID = """
target = "megatron"
steps = 20
[problem]
model = "llama-3-8b"
cluster = "h100:16"
batch_tokens = "512Ki"
seq_len = 4096
stack = "megatron"
[layouts]
top = 60
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> ExperimentGrid:
    path = tmp_path_factory.mktemp("grid") / "grid.toml"
    path.write_text(GRID, encoding="utf-8")
    return read_grid(path)


@pytest.fixture(scope="module")
def candidates(grid: ExperimentGrid) -> dict[str, Candidate]:
    return list_candidates(grid)


def true_steps(candidates: Mapping[str, Candidate], seed: int, noise: float) -> dict[str, float]:
    """Seconds of every step: a common factor for all, and a separate factor for each term."""
    chance, factors = np.random.default_rng(seed), dict[str, float]()
    common = chance.normal(0.0, 0.1)
    return {
        name: math.exp(common + chance.normal(0.0, noise))
        * sum(
            seconds * factors.setdefault(term, math.exp(chance.normal(0.0, 0.12)))
            for term, seconds in candidate.step_terms.items()
        )
        for name, candidate in candidates.items()
    }


def play(
    chooser: ExpectedInformation,
    candidates: Mapping[str, Candidate],
    truth: Mapping[str, float],
    *,
    memory_is_enough: bool = False,
) -> tuple[dict[str, LedgerRow], list[str]]:
    """Run the chosen configurations, one after the other, until none remains."""
    content, order = LedgerContent({}, []), list[str]()
    for name, candidate in candidates.items():
        content.add(
            LedgerLine(
                fingerprint=name,
                state="predicted",
                configuration=candidate.configuration,
                prediction=candidate.predict(),
            )
        )
    while True:
        for line in chooser.review(content.rows):
            content.add(line)
        if not (waiting := chooser.order(content.rows)):
            return content.rows, order
        name = waiting[0].configuration.fingerprint
        order.append(name)
        content.add(LedgerLine(fingerprint=name, state="pending", attempt=1, prediction=waiting[0].prediction))
        fits = memory_is_enough or fitting(candidates[name])
        measured = RunMeasurement(step_time_s=truth[name]) if fits else None
        content.add(
            LedgerLine(
                fingerprint=name, state="done" if fits else "out of memory", attempt=1, seconds=60 + 20 * truth[name],
                measurement=measured,
            )
        )  # fmt: skip


def fitting(candidate: Candidate) -> bool:
    prediction = candidate.predict()
    return prediction is not None and prediction.fits != "does not fit"


@pytest.mark.parametrize("seed", range(6))
def test_the_best_is_reached_within_a_quarter_of_the_runs_and_no_skipped_configuration_beats_it(
    grid: ExperimentGrid, candidates: dict[str, Candidate], seed: int
) -> None:
    truth = true_steps(candidates, seed, noise=0.02)
    chooser = ExpectedInformation(candidates, grid.budget, {"steps": 20})
    rows, order = play(chooser, candidates, truth)
    possible = [name for name, candidate in candidates.items() if fitting(candidate)]
    best = best_row(rows.values())
    assert best is not None
    assert best.measurement is not None
    assert order.index(best.configuration.fingerprint) + 1 <= 0.25 * len(possible)
    assert len(order) <= 0.3 * len(possible)
    assert best.measurement.step_time_s <= 1.02 * min(truth[name] for name in possible)
    coverage = interval_coverage(rows.values())
    assert coverage.num_inside >= 0.8 * coverage.num_runs
    skipped = [name for name in possible if rows[name].state == "skipped"]
    inside = [
        low <= truth[name] <= high
        for name in skipped
        if (prediction := rows[name].prediction) and (low := prediction.ends[0]) and (high := prediction.ends[1])
    ]
    assert np.mean(inside) >= 0.85


def test_configurations_beyond_memory_are_recorded_and_the_nearest_are_run(
    grid: ExperimentGrid, candidates: dict[str, Candidate]
) -> None:
    truth = true_steps(candidates, 0, noise=0.0)
    rows, order = play(ExpectedInformation(candidates, grid.budget, {"steps": 20}, 3), candidates, truth)
    beyond = [name for name, candidate in candidates.items() if not fitting(candidate)]
    tested = [name for name in order if name in beyond]
    assert len(tested) == 3
    excess = {name: (p.memory_bytes or 0.0) for name in beyond if (p := candidates[name].predict())}
    assert sorted(tested) == sorted(sorted(beyond, key=lambda name: excess[name])[:3])
    skipped = [rows[name] for name in beyond if name not in tested]
    assert {(row.state, row.line.cause) for row in skipped} == {("skipped", NO_MEMORY)}
    assert all("GB of" in row.line.reason for row in skipped)


def test_a_sample_that_runs_refutes_the_memory_claim_for_smaller_configurations(
    grid: ExperimentGrid, candidates: dict[str, Candidate]
) -> None:
    truth = true_steps(candidates, 0, noise=0.0)
    chooser = ExpectedInformation(candidates, grid.budget, {"steps": 20}, 3)
    rows, _ = play(chooser, candidates, truth, memory_is_enough=True)
    done = [name for name in rows if rows[name].state == "done" and not fitting(candidates[name])]
    largest_bytes = max((p.memory_bytes or 0.0) for name in done if (p := candidates[name].predict()))
    for name, candidate in candidates.items():
        prediction = candidate.predict()
        assert prediction is not None
        if prediction.memory_bytes is not None and prediction.memory_bytes <= largest_bytes:
            assert rows[name].line.cause != NO_MEMORY


def test_a_skipped_configuration_states_the_step_time_to_beat(
    grid: ExperimentGrid, candidates: dict[str, Candidate]
) -> None:
    rows, _ = play(
        ExpectedInformation(candidates, grid.budget, {"steps": 20}), candidates, true_steps(candidates, 1, 0.0)
    )
    best = best_row(rows.values())
    skipped = [row for row in rows.values() if row.line.cause == CANNOT_WIN]
    assert skipped
    assert best is not None
    assert best.measurement is not None
    for row in skipped:
        assert row.prediction is not None
        assert row.line.bound_s is not None
        assert row.prediction.ends[0] >= row.line.bound_s >= best.measurement.step_time_s


def test_a_budget_ends_the_sweep(candidates: dict[str, Candidate]) -> None:
    truth = true_steps(candidates, 0, noise=0.02)
    rows, order = play(ExpectedInformation(candidates, ExperimentBudget(runs=3), {"steps": 20}, 0), candidates, truth)
    assert len(order) == 3
    assert any(row.state == "predicted" for row in rows.values())
    prediction = candidates[order[0]].predict()
    assert prediction is not None
    hours = (60 + 20 * 1.1 * prediction.step_time_s) * 16 / 3600
    _, order = play(
        ExpectedInformation(candidates, ExperimentBudget(device_hours=hours), {"steps": 20}, 0), candidates, truth
    )
    assert len(order) == 1


def test_an_updated_prediction_equals_the_regression_in_closed_form() -> None:
    """One feature and one run: the posterior of a normal mean."""
    first = StepTerms(prediction=RunPrediction(step_time_s=1.0, interval90=(0.8, 1.25)), time={"forward": 1.0})
    (before,) = renew_predictions([first], [])
    deviation = math.log(1.25 / 0.8) / (2 * 1.6449)
    assert (before.mean, before.deviation) == (pytest.approx(0.0, abs=1e-12), pytest.approx(deviation, rel=1e-3))
    (after,) = renew_predictions([first], [(0, 1.05)])
    noise_variance, shared_variance = 0.1 * deviation**2, 0.9 * deviation**2
    gain = shared_variance / (shared_variance + max(noise_variance, (0.03 / 1.6449) ** 2))
    assert after.mean == pytest.approx(gain * math.log(1.05), rel=1e-6)
    assert after.deviation < before.deviation


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 0.1), (-0.2, 0.05), (0.3, 0.2)])
def test_the_expected_improvement_equals_the_mean_of_draws(mean: float, deviation: float) -> None:
    draws = np.random.default_rng(0).normal(mean, deviation, 400_000)
    expected = float(np.mean(np.maximum(-draws, 0.0)))
    assert LogStep(mean=mean, deviation=deviation).expected_improvement(1.0) == pytest.approx(
        expected, rel=0.03, abs=1e-4
    )


def test_measured_runs_are_rows_for_a_calibration(
    grid: ExperimentGrid, candidates: dict[str, Candidate], tmp_path: Path
) -> None:
    truth = true_steps(candidates, 2, noise=0.0)
    rows, _ = play(ExpectedInformation(candidates, grid.budget, {"steps": 20}, 0), candidates, truth)
    done = {name for name, row in rows.items() if row.state == "done"}
    assert write_calibration_rows(tmp_path / "ledger.jsonl", rows, candidates) == len(done) > 0
    (tmp_path / "nothing.jsonl").touch()
    with pytest.raises(InputError, match=r"--runs: .*nothing\.jsonl has no measured run as a row"):
        read_run_rows(tmp_path / "nothing.jsonl", "--runs")
    (tmp_path / "ledger.jsonl").touch()
    written = read_run_rows(tmp_path / "ledger.jsonl", "--runs")
    assert {row.id for row in written} == done
    for row in written:
        assert row.step_time_s == pytest.approx(truth[row.id], rel=1e-8)
