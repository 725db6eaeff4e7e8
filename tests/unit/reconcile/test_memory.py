"""Peak memory of the published runs: instruments, what stacks keep, and errors of the predictions.

Thresholds only ever get tighter.
"""

from __future__ import annotations

import pytest

from shardwise.measure.calibrate.prediction_errors import (
    EvaluatedRun,
    count_refuted_fits,
    memory_error_tables,
    predict_rows,
)
from shardwise.measure.calibrate.published_runs.prediction_from_row import read_case
from shardwise.measure.calibrate.published_runs.run_table import (
    PROCESS_BYTES,
    SLACK,
    RowCells,
    find_instrument,
    instrument_reading,
    published_rows,
)
from shardwise.price.device_memory import TIGHT_MARGIN

TERMS = {"parameters": 30e9, "logits": 14e9, "runtime": 1.5e9}


@pytest.fixture(scope="module")
def evaluated_runs() -> tuple[EvaluatedRun, ...]:
    return predict_rows(published_rows())


@pytest.mark.parametrize(
    ("stratum", "value", "mean", "p90"),
    [
        ("measured", "allocated", 0.016, 0.053), ("measured", "nvidia-smi", 0.047, 0.086), ("source", "torchtitan", 0.045, 0.106),
        ("source", "simumax-b200", 0.016, 0.053), ("measured", "reserved", 0.070, 0.108), ("overall", "all", 0.046, 0.090),
    ],
)  # fmt: skip
def test_errors_of_peaks_stay_below_thresholds(
    evaluated_runs: tuple[EvaluatedRun, ...], stratum: str, value: str, mean: float, p90: float
) -> None:
    errors = memory_error_tables(evaluated_runs)[stratum][value]
    assert errors.mean <= mean
    assert errors.p90 <= p90


def test_peaks_of_dense_models_by_allocated_bytes_are_within_a_hundredth(
    evaluated_runs: tuple[EvaluatedRun, ...],
) -> None:
    """SimuMax's runs of Llama, at four splits of two widths: only the loss's bytes per logit are fitted to these runs."""
    errors = [
        run.memory_error
        for run in evaluated_runs
        if run.row.family == "simumax-b200" and "llama" in run.row.cell("model")
    ]
    assert len(errors) == 24
    assert max(abs(error or 0.0) for error in errors) < 0.01


def test_almost_every_completed_run_fits_by_its_prediction(evaluated_runs: tuple[EvaluatedRun, ...]) -> None:
    stated, over, far = count_refuted_fits(evaluated_runs)
    assert stated >= 536
    assert over <= 8  # MaxText on TPU v6e, whose recompute policies are priced too large
    assert far <= 6
    scored = [run for run in evaluated_runs if run.scored and run.prediction]
    assert {
        run.row.cell("chip") for run in scored if run.prediction and run.prediction.estimate.verdict == "does not fit"
    } == {"TPU-v6e"}
    for runs in (scored, [run for run in scored if run.row.cell("recompute")]):
        tight = sum(run.prediction.estimate.verdict == "tight" for run in runs if run.prediction)
        assert tight <= 0.05 * len(runs)


def test_a_twentieth_of_the_peaks_exceeds_predictions_by_more_than_the_tight_margin(
    evaluated_runs: tuple[EvaluatedRun, ...],
) -> None:
    """The source of `TIGHT_MARGIN`."""
    errors = sorted(run.memory_error for run in evaluated_runs if run.scored and run.memory_error is not None)
    assert len(errors) == 159
    assert -TIGHT_MARGIN < errors[len(errors) // 20] < -0.8 * TIGHT_MARGIN


@pytest.mark.parametrize(
    ("text", "name", "read"),
    [
        ("max allocated over ranks GiB", "allocated", 44e9),
        ("max_memory_reserved worst rank GiB", "reserved", 44e9 * (1 + SLACK)),
        ("max over first/last nodes GB (nvidia-smi style)", "nvidia-smi", 44e9 * (1 + SLACK) + PROCESS_BYTES),
        ("", "not stated", 45.5e9),
        ("with Liger (99 GiB without) GiB", "reserved", 31e9 * (1 + SLACK)),
    ],
)
def test_values_of_each_instrument(text: str, name: str, read: float) -> None:
    assert find_instrument(text).name == name
    assert instrument_reading(TERMS, "unfused", text) == pytest.approx(read)


@pytest.mark.parametrize(
    ("row", "loss"),
    [
        ("mosaicml-mpt-017", "streamed"), ("maxtext-tpu-v5e-016", "streamed"), ("simumax-b200-016", "fused"),
        ("mbridge-skills-007", "fused"), ("torchtitan-016", "unfused"),
        ("torchtitan-009", "unfused_parallel"), ("bigscience-bloom-a100-020", "unfused"),
    ],
)  # fmt: skip
def test_kinds_of_loss_follow_the_stack(row: str, loss: str) -> None:
    inputs = next(published.inputs for published in published_rows() if published.id == row)
    assert read_case(RowCells(dict(inputs))).job.loss == loss
