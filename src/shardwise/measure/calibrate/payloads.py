"""JSON of `shardwise calibrate` and `shardwise validate`: predictions compared with measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.hardware.published_constants import spread_class
from shardwise.layout import LayoutFacts
from shardwise.measure.calibrate.cluster_calibration import ClusterCalibration, ConstantShift, Residual, UserClusterFit
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
    count_tight_fits,
    error_tables,
    memory_error_tables,
)
from shardwise.measure.calibrate.published_fit import STRATA, PublishedFit, fold_ranking, fold_statistics, repeat_noise
from shardwise.measure.calibrate.published_runs.run_table import unreadable_cells
from shardwise.measure.calibrate.validation import EvaluatedRuns, RankedLayouts
from shardwise.values import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedClusterRecord(Payload):
    """Calibrated cluster: its name, chip and size."""

    name: str
    chip: str
    num_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FitErrorsRecord(Payload):
    """Errors of the predictions before and after the fit; null where there is nothing to compare."""

    count: int
    before: ErrorStatistics | None
    after: ErrorStatistics | None

    @classmethod
    def of(cls, fit: UserClusterFit, *, benches: bool) -> FitErrorsRecord:
        """Return the record of a fit's runs, or of its micro-benchmarks."""
        return cls(
            count=len(fit.benches if benches else fit.runs),
            before=fit.errors(False, benches=benches), after=fit.errors(True, benches=benches),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord(Payload):
    """Constants of a cluster and its stack, before and after a fit to runs and micro-benchmarks."""

    SCHEMA = "shardwise.calibrate/1"
    cluster: CalibratedClusterRecord
    stack: str
    source: str
    constants: Mapping[str, ConstantShift]
    runs: FitErrorsRecord
    benches: FitErrorsRecord
    residuals: Sequence[Residual]
    spread: Mapping[str, tuple[float, float]]
    left_aside: Mapping[str, int]

    @classmethod
    def of(cls, calibration: ClusterCalibration) -> CalibrationRecord:
        """Return the record of a calibration."""
        fit, nominal = calibration.fit, calibration.fit.user_cluster.nominal
        return cls.from_attributes(
            calibration, fit, stack=fit.stack.name, left_aside=fit.skipped,
            cluster=CalibratedClusterRecord(
                name=calibration.name, chip=nominal.chip.name, num_devices=nominal.num_devices
            ),
            constants={shift.name: shift for shift in fit.constants},
            runs=FitErrorsRecord.of(fit, benches=False), benches=FitErrorsRecord.of(fit, benches=True),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRowRecord(Payload):
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
    approximations: Sequence[str]

    @classmethod
    def of(cls, run: EvaluatedRun) -> PredictedRowRecord:
        """Return the record of a row."""
        estimate, case = (run.prediction.estimate, run.prediction.case) if run.prediction else (None, None)
        return cls.from_attributes(
            run, estimate, id=run.row.id, predicted_step_time_s=estimate.step_time_s if estimate else None,
            skipped=str(run.skipped) if run.skipped else None,
            measured_step_time_s=run.row.step_time_s, measured_peak_memory_gb=run.row.peak_memory_gb,
            layout=LayoutFacts.of(case.layout, case.architecture, case.job, case.cluster.topology) if case else None,
            approximations=case.approximations if case else (),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RefutedFitsRecord(Payload):
    """Runs that say what they recompute, and how many of them the memory model says would not fit, or tightly."""

    stated: int
    would_not_fit: int
    by_over_a_tenth: int
    tight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedRowsRecord(Payload):
    """Rows without a prediction for one reason, and how many of them would count."""

    rows: int
    scored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationRecord(Payload):
    """Predictions of published runs; `summary` has errors of step times by group and value."""

    SCHEMA = "shardwise.validate/2"
    rows: Sequence[PredictedRowRecord]
    summary: Mapping[str, Mapping[str, ErrorStatistics]]
    memory_summary: Mapping[str, Mapping[str, ErrorStatistics]]
    fits: RefutedFitsRecord
    skipped: Mapping[str, SkippedRowsRecord]
    unreadable: Sequence[Sequence[str]]

    @classmethod
    def of(cls, evaluated: EvaluatedRuns) -> ValidationRecord:
        """Return the record of predictions."""
        runs = evaluated.runs
        stated, would_not_fit, by_over_a_tenth = count_refuted_fits(runs)
        return cls(
            rows=[PredictedRowRecord.of(run) for run in runs],
            summary=error_tables(runs), memory_summary=memory_error_tables(runs),
            fits=RefutedFitsRecord(
                stated=stated, would_not_fit=would_not_fit, by_over_a_tenth=by_over_a_tenth, tight=count_tight_fits(runs)
            ),
            skipped={kind: SkippedRowsRecord(rows=rows, scored=scored) for kind, (rows, scored) in count_skipped(runs).items()},
            unreadable=list(unreadable_cells(run.row for run in runs)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldRowRecord(Payload):
    """A run: measured, and predicted by the fit to all and by that of each fold which leaves it out (null: it does not)."""

    id: str
    measured_step_time_s: float
    fitted_step_time_s: float | None
    model_step_time_s: float | None
    source_step_time_s: float | None
    lab_step_time_s: float | None
    three_step_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldsRecord(Payload):
    """Errors of runs that were left out of the fit, by fold and stratum; spread, coverage and ranking by fold.

    `spread`: 90% intervals as factors on a prediction, by fold, kind of model and class (all, a generation of chips, a stack on
    it); of the summary `coverage` is the share of runs inside those that the other groups give.
    """

    SCHEMA = "shardwise.validate.folds/2"
    rows: Sequence[FoldRowRecord]
    summary: Mapping[str, Mapping[str, ErrorStatistics]]
    spread: Mapping[str, Mapping[str, Mapping[str, tuple[float, float]]]]
    coverage: Mapping[str, float]
    ranking: Mapping[str, RankingStatistics]
    noise: Mapping[str, ErrorStatistics]

    @classmethod
    def of(cls, fit: PublishedFit) -> FoldsRecord:
        """Return the record of a fit to published runs."""
        seconds = {"fitted": fit.in_sample, **fit.folds}
        rankings = {fold: fold_ranking(fit, draws) for fold, draws in seconds.items()}
        return cls(
            rows=[
                FoldRowRecord(
                    id=run.row.id, measured_step_time_s=float(fit.measured[i]),
                    **{f"{fold}_step_time_s": _number_or_none(float(draws[0][i])) for fold, draws in seconds.items()},
                )
                for i, run in enumerate(fit.judged)
            ],
            summary={
                fold: {
                    name: statistics for name, stratum in STRATA.items()
                    if (statistics := fold_statistics(fit, fold, stratum)) is not None
                }
                for fold in seconds
            },
            spread={
                fold: {
                    kind: {spread_class(*name): spread.interval(name) for name in sorted(spread.scales)}
                    for kind, spread in fit.intervals.spread(fold).items()
                }
                for fold in fit.folds
            },
            coverage={fold: share for fold in fit.folds if (share := fit.intervals.coverage(fold)) is not None},
            ranking={fold: ranking for fold, ranking in rankings.items() if ranking is not None}, noise=repeat_noise(fit),
        )  # fmt: skip


def _number_or_none(value: float) -> float | None:
    return None if np.isnan(value) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGroupRecord(Payload):
    """Layouts of one model on one machine: seconds by row, the fastest row, the one that is predicted to be, and the regret."""

    of: str
    key: Mapping[str, str]
    layouts: int
    best: str
    pick: str
    regret: float
    measured_s: Mapping[str, float]
    predicted_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayoutsRecord(Payload):
    """Ranking of layouts by predictions: statistics over all groups, and each group."""

    SCHEMA = "shardwise.validate.groups/1"
    key: Sequence[str]
    fold: str
    fewest_layouts: int
    apart: float
    summary: Mapping[str, ChoiceStatistics]
    groups: Sequence[LayoutGroupRecord]

    @classmethod
    def of(cls, ranked: RankedLayouts) -> RankedLayoutsRecord:
        """Return the record of ranked layouts."""
        groups_by_set = ranked.groups_by_set
        return cls(
            key=KEY_COLUMNS, fold="fitted", fewest_layouts=FEWEST_LAYOUTS, apart=LEAST_DIFFERENCE,
            summary={
                name: statistics for name, groups in groups_by_set.items() if (statistics := choice_statistics(groups))
            },
            groups=[
                LayoutGroupRecord.from_attributes(
                    group, of=name, key=dict(zip(KEY_COLUMNS, group.key, strict=True)), layouts=len(group.measured_s)
                )
                for name, groups in groups_by_set.items() for group in groups
            ],
        )  # fmt: skip
