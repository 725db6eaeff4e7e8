"""JSON of `shardwise calibrate` and `shardwise validate`: predictions compared with measured runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
from typing_extensions import TypedDict

from shardwise.layout import LayoutFacts
from shardwise.measure.calibrate.cluster_calibration import ClusterCalibration
from shardwise.measure.calibrate.layout_ranking import (
    FEWEST_LAYOUTS,
    KEY_COLUMNS,
    LEAST_DIFFERENCE,
    ChoiceStatistics,
    RankingStatistics,
    choice_statistics,
)
from shardwise.measure.calibrate.prediction_errors import (
    ErrorStatistics,
    EvaluatedRun,
    count_refuted_fits,
    count_skipped,
    error_tables,
    memory_error_tables,
)
from shardwise.measure.calibrate.published_fit import STRATA, PublishedFit, fold_ranking, fold_statistics, repeat_noise
from shardwise.measure.calibrate.published_runs.prediction_from_row import Prediction
from shardwise.measure.calibrate.published_runs.run_table import unreadable_cells
from shardwise.measure.calibrate.user_cluster_fit import ConstantShift, Residual, UserClusterFit
from shardwise.measure.calibrate.validation import EvaluatedRuns, RankedLayouts
from shardwise.values import MergedFields

CALIBRATE_SCHEMA = "shardwise.calibrate/1"
VALIDATE_SCHEMA = "shardwise.validate/2"


class CalibratedCluster(TypedDict):
    """The cluster that was calibrated."""

    name: str
    chip: str
    num_devices: int


class ConstantShiftProperties(TypedDict):
    """Verdict on a constant: whether the measurements identify it."""

    identified: bool


class ErrorsPayload(TypedDict):
    """Errors of the predictions before and after the fit; null where there is nothing to compare."""

    count: int
    before: ErrorStatistics | None
    after: ErrorStatistics | None


class CalibratePayload(TypedDict):
    """Constants of a cluster and its stack, before and after a fit to runs and micro-benchmarks."""

    schema: Literal["shardwise.calibrate/1"]
    cluster: CalibratedCluster
    stack: str
    source: str
    constants: dict[str, Annotated[dict[str, Any], MergedFields(ConstantShift, ConstantShiftProperties)]]
    runs: ErrorsPayload
    benches: ErrorsPayload
    residuals: list[Residual]
    spread: dict[str, tuple[float, float]]
    left_aside: dict[str, int]


class PredictedRow(TypedDict):
    """A published run: measured and predicted, or why there is no prediction (`skipped`)."""

    id: str
    predicted_step_time_s: float | None
    interval90: tuple[float, float] | None
    predicted_peak_memory_gb: float | None
    skipped: str | None
    measured_step_time_s: float | None
    measured_peak_memory_gb: float | None
    scored: bool
    weight: float
    layout: LayoutFacts | None
    approximations: list[str]


class FitsPayload(TypedDict):
    """Runs that say what they recompute, and how many of them the memory model says would not fit."""

    stated: int
    would_not_fit: int
    by_over_a_tenth: int


class SkippedPayload(TypedDict):
    """Rows without a prediction for one reason, and how many of them would count."""

    rows: int
    scored: int


class ValidatePayload(TypedDict):
    """Predictions of published runs; `summary` has errors of step times by group and value."""

    schema: Literal["shardwise.validate/2"]
    rows: list[PredictedRow]
    summary: dict[str, dict[str, ErrorStatistics]]
    memory_summary: dict[str, dict[str, ErrorStatistics]]
    fits: FitsPayload
    skipped: dict[str, SkippedPayload]
    unreadable: list[list[str]]


def calibrate_payload(calibration: ClusterCalibration) -> dict[str, Any]:
    """Return the JSON of `shardwise calibrate --json`."""
    fit = calibration.fit
    return {
        "schema": CALIBRATE_SCHEMA,
        "cluster": {
            "name": calibration.name,
            "chip": fit.user_cluster.nominal.chip.name,
            "num_devices": fit.user_cluster.nominal.num_devices,
        },
        "stack": fit.stack.name,
        "source": calibration.source,
        "constants": {shift.name: {**asdict(shift), "identified": shift.identified} for shift in fit.constants},
        "runs": _errors_payload(fit, benches=False),
        "benches": _errors_payload(fit, benches=True),
        "residuals": [asdict(residual) for residual in fit.residuals],
        "spread": {kind: list(pair) for kind, pair in fit.spread.items()},
        "left_aside": dict(fit.skipped),
    }


def _errors_payload(fit: UserClusterFit, *, benches: bool) -> dict[str, Any]:
    statistics_by_time = {"before": fit.errors(False, benches=benches), "after": fit.errors(True, benches=benches)}
    return {
        "count": len(fit.benches if benches else fit.runs),
        **{when: asdict(statistics) if statistics else None for when, statistics in statistics_by_time.items()},
    }


def validate_payload(evaluated: EvaluatedRuns) -> dict[str, Any]:
    """Return the JSON of `shardwise validate --json`: predictions of published runs and their errors."""
    runs = evaluated.runs

    def tables(nested: Mapping[str, Mapping[str, ErrorStatistics]]) -> dict[str, Any]:
        return {name: {value: asdict(errors) for value, errors in table.items()} for name, table in nested.items()}

    return {
        "schema": VALIDATE_SCHEMA,
        "rows": [_row_payload(run) for run in runs],
        "summary": tables(error_tables(runs)),
        "memory_summary": tables(memory_error_tables(runs)),
        "fits": dict(zip(("stated", "would_not_fit", "by_over_a_tenth"), count_refuted_fits(runs), strict=True)),
        "skipped": {kind: {"rows": rows, "scored": scored} for kind, (rows, scored) in count_skipped(runs).items()},
        "unreadable": [list(cell) for cell in unreadable_cells(run.row for run in runs)],
    }


def _row_payload(run: EvaluatedRun) -> dict[str, Any]:
    prediction = run.prediction
    estimate = prediction.estimate if prediction else None
    return {
        "id": run.row.id, "predicted_step_time_s": estimate.step_time_s if estimate else None,
        "interval90": list(estimate.interval90) if estimate and estimate.interval90 else None,
        "predicted_peak_memory_gb": run.predicted_peak_memory_gb, "skipped": str(run.skipped) if run.skipped else None,
        "measured_step_time_s": run.row.step_time_s, "measured_peak_memory_gb": run.row.peak_memory_gb,
        "scored": run.scored, "weight": run.weight, "layout": _layout_payload(prediction) if prediction else None,
        "approximations": list(prediction.case.approximations) if prediction else [],
    }  # fmt: skip


def _layout_payload(prediction: Prediction) -> LayoutFacts:
    case = prediction.case
    return LayoutFacts.of(case.layout, case.architecture, case.job, case.cluster.topology)


FOLDS_SCHEMA = "shardwise.validate.folds/1"


class FoldRow(TypedDict):
    """A run: measured, and predicted by the fit to all and by that of each fold which leaves it out (null: it does not)."""

    id: str
    measured_step_time_s: float
    fitted_step_time_s: float | None
    model_step_time_s: float | None
    source_step_time_s: float | None
    lab_step_time_s: float | None
    three_step_time_s: float | None


class FoldsPayload(TypedDict):
    """Errors of runs that were left out of the fit, by fold and stratum; spread, coverage and ranking by fold."""

    schema: Literal["shardwise.validate.folds/1"]
    rows: list[FoldRow]
    summary: dict[str, dict[str, ErrorStatistics]]
    spread: dict[str, dict[str, tuple[float, float]]]
    coverage: dict[str, float]
    ranking: dict[str, RankingStatistics]
    noise: dict[str, ErrorStatistics]


def fold_payload(fit: PublishedFit) -> dict[str, Any]:
    """Return the JSON of `shardwise validate --folds --json`."""
    seconds = {"fitted": fit.in_sample, **fit.folds}
    return {
        "schema": FOLDS_SCHEMA,
        "rows": [
            {
                "id": run.row.id,
                "measured_step_time_s": float(fit.measured[i]),
                **{f"{fold}_step_time_s": _number_or_none(float(draws[0][i])) for fold, draws in seconds.items()},
            }
            for i, run in enumerate(fit.judged)
        ],
        "summary": {
            fold: {
                name: asdict(statistics)
                for name, stratum in STRATA.items()
                if (statistics := fold_statistics(fit, draws, stratum)) is not None
            }
            for fold, draws in seconds.items()
        },
        "spread": {fold: fit.spread(fold) for fold in fit.folds},
        "coverage": {fold: fit.coverage(fold) for fold in fit.folds},
        "ranking": {
            fold: asdict(ranking)
            for fold, draws in seconds.items()
            if (ranking := fold_ranking(fit, draws)) is not None
        },
        "noise": {kind: asdict(statistics) for kind, statistics in repeat_noise(fit).items()},
    }


def _number_or_none(value: float) -> float | None:
    return None if np.isnan(value) else value


GROUPS_SCHEMA = "shardwise.validate.groups/1"


class LayoutGroupPayload(TypedDict):
    """Layouts of one model on one machine: seconds by row, the fastest row, the one that is predicted to be, and the regret."""

    of: str
    key: dict[str, str]
    layouts: int
    best: str
    pick: str
    regret: float
    measured_s: dict[str, float]
    predicted_s: dict[str, float]


class LayoutGroupsPayload(TypedDict):
    """How well layouts are ranked, over all groups and for each."""

    schema: Literal["shardwise.validate.groups/1"]
    key: list[str]
    fold: str
    fewest_layouts: int
    apart: float
    summary: dict[str, ChoiceStatistics]
    groups: list[LayoutGroupPayload]


def groups_payload(ranked: RankedLayouts) -> dict[str, Any]:
    """Return the JSON of `shardwise validate --groups --json`."""
    groups_by_set = ranked.groups_by_set
    return {
        "schema": GROUPS_SCHEMA, "key": list(KEY_COLUMNS), "fold": "fitted", "fewest_layouts": FEWEST_LAYOUTS,
        "apart": LEAST_DIFFERENCE,
        "summary": {
            name: asdict(statistics)
            for name, groups in groups_by_set.items() if (statistics := choice_statistics(groups))
        },
        "groups": [
            {
                "of": name, "key": dict(zip(KEY_COLUMNS, group.key, strict=True)), "layouts": len(group.measured_s),
                "best": group.best, "pick": group.pick, "regret": group.regret,
                "measured_s": group.measured_s, "predicted_s": group.predicted_s,
            }
            for name, groups in groups_by_set.items() for group in groups
        ],
    }  # fmt: skip
