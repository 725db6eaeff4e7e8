"""A user's cluster calibrated with runs and micro-benchmarks: constants, the interval of its predictions, and its file."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from shardwise.hardware import (
    CONSTANTS,
    Calibration,
    Cluster,
    MeasuredCluster,
    Stack,
    get_stack,
    load_measured_cluster,
    match_stack,
    published_calibration,
    relative_clock,
    with_calibration,
)
from shardwise.hardware.calibration_constants import MODEL_KINDS
from shardwise.hardware.cluster_files import format_cluster_toml
from shardwise.hardware.published_constants import published_spread
from shardwise.measure.calibrate.constant_fit import (
    SIGMA,
    SIGMA_FEW,
    Array,
    ConstantFit,
    fit_constants,
    initial_fit,
    left_out_residuals,
    linearise,
)
from shardwise.measure.calibrate.logged_runs import read_logged_run, read_run_rows
from shardwise.measure.calibrate.observations import (
    BenchmarkLine,
    BenchmarkTarget,
    Observation,
    read_benchmark_lines,
    with_weight,
)
from shardwise.measure.calibrate.prediction_errors import ErrorStatistics, error_statistics
from shardwise.measure.calibrate.prediction_spread import TAILS
from shardwise.measure.calibrate.published_runs.run_table import RunRow
from shardwise.measure.calibrate.user_runs import CalibrationRun, PricedRun, select_runs
from shardwise.values import InputError, Payload, Progress, argument_label, ignore_progress, pluralize, printed, run_all

FEW_RUNS = 30  # below this number each run is fitted with `SIGMA_FEW`
UNIDENTIFIED = 0.8  # of the prior's deviation: a constant whose deviation stays above it is still its prior
# From 3 runs the spread is that of held-out labs with three runs given, from 10 that of the user's own runs.
RUNS_FOR_LAB_SPREAD, RUNS_FOR_USER_SPREAD = 3, 10
NARROWEST_SPREAD = 0.03  # two runs of the same job differ by 2 to 5%
TOO_SHORT = "of the micro-benchmarks: shorter than a few launches"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantShift(Payload):
    """A constant before and after, with standard deviations of both, in units of the constant. `moved`: how far, in
    widths of its prior. `left`: the deviation after over that of the prior, on the line without bounds."""

    name: str
    before: float
    after: float
    before_deviation: float
    after_deviation: float
    moved: float
    left: float

    @property
    @printed
    def identified(self) -> bool:
        """True if the measurements determine the constant better than its prior."""
        return self.left <= UNIDENTIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Measured seconds, and predicted ones before and after a fit; `weight` is that in the mean errors of its `kind`."""

    id: str
    kind: str
    measured_s: float
    before_s: float
    after_s: float
    weight: float

    def error(self, after: bool = True) -> float:
        """Return predicted over measured seconds, less 1."""
        return (self.after_s if after else self.before_s) / self.measured_s - 1.0


@dataclass(frozen=True, kw_only=True)
class UserClusterFit:
    """A user's cluster under a stack, its measurements, and the constants fitted to them. `sigma` is the deviation of
    log times in the fit; `initial` has the constants of the published runs."""

    user_cluster: MeasuredCluster
    stack: Stack
    runs: Sequence[CalibrationRun]
    benches: Sequence[BenchmarkLine]
    skipped: Counter[str]
    sigma: float
    initial: ConstantFit
    fitted: ConstantFit

    @property
    def measured(self) -> list[CalibrationRun | BenchmarkLine]:
        """Runs and then micro-benchmarks: the order of the fit's observations."""
        return [*self.runs, *self.benches]

    @cached_property
    def constants(self) -> tuple[ConstantShift, ...]:
        """Each constant before and after the fit."""
        weights = np.array([observed.observation.weight for observed in self.measured])
        deviations = dict(zip(self.fitted.keys, self.fitted.deviations(weights, sigma=self.sigma), strict=True))
        return tuple(self._shift(key, float(deviations[key])) for key in self._keys())

    def _keys(self) -> list[tuple[str, str]]:
        return sorted(self.fitted.keys, key=lambda key: list(CONSTANTS).index(key[1]))

    def _shift(self, key: tuple[str, str], deviation: float) -> ConstantShift:
        constant, index = CONSTANTS[key[1]], self.fitted.keys.index(key)
        coordinates = (self.initial.point[index], self.fitted.point[index])
        return ConstantShift(
            name=key[1], before=self.initial.value(key), after=self.fitted.value(key),
            before_deviation=constant.derivative(coordinates[0]) * constant.width,
            after_deviation=constant.derivative(coordinates[1]) * deviation,
            moved=float(coordinates[1] - coordinates[0]) / constant.width, left=deviation / constant.width,
        )  # fmt: skip

    @cached_property
    def residuals(self) -> tuple[Residual, ...]:
        """Predicted against measured seconds, the largest error first."""
        kinds = [*(run.kind for run in self.runs), *("bench" for _ in self.benches)]
        times = zip(np.exp(self.initial.log_times), np.exp(self.fitted.log_times), strict=True)
        residuals = [
            Residual(
                id=observed.id, kind=kind, measured_s=observed.observation.measured_s, before_s=float(before),
                after_s=float(after), weight=observed.observation.weight if kind != "bench" else 1.0,
            )
            for observed, kind, (before, after) in zip(self.measured, kinds, times, strict=True)
        ]  # fmt: skip
        return tuple(sorted(residuals, key=lambda residual: -abs(residual.error())))

    def errors(self, after: bool, *, benches: bool = False) -> ErrorStatistics | None:
        """Return the errors of runs, or of micro-benchmarks; None without any."""
        errors = [(row.error(after), row.weight) for row in self.residuals if (row.kind == "bench") is benches]
        return error_statistics(errors) if errors else None

    @cached_property
    def spread(self) -> Mapping[str, tuple[float, float]]:
        """90% prediction interval by kind of model, as factors on a prediction.

        With fewer than `RUNS_FOR_LAB_SPREAD` runs of a kind: what the published runs show for the stack. With fewer
        than `RUNS_FOR_USER_SPREAD`: the narrower of that and of what held-out labs show once three of their runs are
        given, since more knowledge makes nothing less certain. Beyond: the runs themselves, each predicted from the
        others, because a fit follows what it was fitted to.

        Between the 5th and 95th percentiles of a few errors a new one falls in less than 90% of cases: (n + 5)/n as
        wide covers 89% for normal errors, for ten runs as for a hundred. Never narrower than `NARROWEST_SPREAD`.
        """
        shipped = published_calibration(self._chip, self.stack).spread
        residuals = left_out_residuals(self._observations, self.fitted, sigma=self.sigma)[: len(self.runs)]
        intervals = {}
        for kind in MODEL_KINDS:
            weights = np.array([run.observation.weight * (run.kind == kind) for run in self.runs])
            calibrated = published_spread("calibrated", self._chip, self.stack.name, kind)
            intervals[kind] = _spread_of_kind(shipped[kind], calibrated, residuals, weights)
        return intervals

    @property
    def _observations(self) -> list[Observation]:
        return [observed.observation for observed in self.measured]

    @property
    def _chip(self) -> str:
        return self.user_cluster.nominal.chip.catalog_name

    def calibration(self, source: str) -> Calibration:
        """Return the fitted constants with the clock and the facts about the stack at which they were fitted."""
        shipped = published_calibration(self._chip, self.stack)
        return replace(
            shipped, is_measured=bool(self.benches),
            constants={shift.name: shift.after for shift in self.constants}, spread=self.spread, source=source,
            spread_notes={}, clock=relative_clock(self.user_cluster.nominal.chip),
        )  # fmt: skip

    def cluster(self, source: str) -> Cluster:
        """Return the cluster with its calibration."""
        return with_calibration(self.user_cluster.nominal, self.calibration(source))


def _spread_of_kind(
    shipped: tuple[float, float], calibrated: tuple[float, float], residuals: Array, weights: Array
) -> tuple[float, float]:
    num_runs = float(weights.sum())
    if num_runs < RUNS_FOR_LAB_SPREAD:
        return shipped
    if num_runs < RUNS_FOR_USER_SPREAD:
        low, high = min(shipped, calibrated, key=lambda pair: pair[1] / pair[0])
        measured_ratios = np.exp(residuals[weights > 0])  # the interval contains all runs that were measured here
        return min(low, float(measured_ratios.min())), max(high, float(measured_ratios.max()))
    low, high = np.exp(_percentiles(residuals[weights > 0], weights[weights > 0]) * (num_runs + 5.0) / num_runs)
    return min(float(low), 1.0 - NARROWEST_SPREAD), max(float(high), 1.0 + NARROWEST_SPREAD)


def _percentiles(values: Array, weights: Array) -> Array:
    """Return the weighted 5th and 95th percentiles, linear between values, of which the outermost are too far out."""
    order = np.argsort(values)
    middles = np.cumsum(weights[order]) - weights[order] / 2.0
    return np.interp(TAILS, (middles - middles[0]) / (middles[-1] - middles[0]), values[order])


def fit_user_cluster(
    user_cluster: MeasuredCluster, rows: Sequence[RunRow], bench_path: str | None, stack: Stack | None = None,
    progress: Progress = ignore_progress, *, logged: Sequence[PricedRun] = (),
) -> UserClusterFit:  # fmt: skip
    """Fit the constants to rows, to runs read from logs and to a file of micro-benchmarks; priors from published runs.
    Raises `InputError` if none of them can be used."""
    runs, matched_stack, skipped = select_runs(rows, user_cluster, stack, logged, is_limited=bench_path is None)
    stack = matched_stack or stack or match_stack("")
    progress(f"{len(runs)} runs read")
    target = BenchmarkTarget(cluster=user_cluster.nominal, stack=stack, clock=relative_clock(user_cluster.nominal.chip))
    benches = read_benchmark_lines(bench_path, target) if bench_path is not None else ()
    skipped[TOO_SHORT] += sum(line.too_short for line in benches)
    sigma = SIGMA_FEW if sum(line.observation.weight for line in runs) < FEW_RUNS else SIGMA
    benches = tuple(with_weight(line, sigma) for line in benches if not line.too_short)
    progress(f"fitting constants to {len(runs)} runs and {len(benches)} micro-benchmarks")
    skipped += Counter()  # drops reasons with a count of 0
    if not runs and not benches:
        raise InputError(_nothing_usable_message(user_cluster, skipped))
    observations = [*(run.observation for run in runs), *(line.observation for line in benches)]
    published_constants = published_calibration(user_cluster.nominal.chip.catalog_name, stack).constants
    initial = initial_fit(observations, {key: published_constants[key[1]] for key in observations[0].names})
    initial = linearise(observations, initial)
    fitted = fit_constants(observations, initial, sigma=sigma)
    return UserClusterFit(
        user_cluster=user_cluster, stack=stack, runs=runs, benches=benches, skipped=skipped, sigma=sigma, initial=initial,
        fitted=fitted,
    )  # fmt: skip


def _nothing_usable_message(user_cluster: MeasuredCluster, skipped: Counter[str]) -> str:
    reasons = "; ".join(f"{count} {reason}" for reason, count in skipped.most_common()) or "no lines"
    chip = user_cluster.nominal.chip.catalog_name
    return (
        f"calibrate: nothing measured that can be used ({reasons}); a run on {chip} with a step time and a stated layout, or a "
        "micro-benchmark, is required"
    )


PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementFiles:
    """Files that a cluster is calibrated with.

    `runs` is a CSV file or the ledger of an experiment, `logged_runs` are runs by launch and log, `bench` has micro-benchmarks.
    """

    runs: PathLike | None = None
    logged_runs: Sequence[Sequence[PathLike]] = ()
    bench: PathLike | None = None

    def describe(self, fit: UserClusterFit) -> str:
        """Return what a fit to these files is made of, in words."""
        names = [self.runs] if self.runs is not None else []
        names += [files[-1] for files in self.logged_runs]
        run_files = ", ".join(Path(name).name for name in names)
        parts = [f"{pluralize(len(fit.runs), 'run')} of {run_files}"] if run_files else []
        if self.bench is not None:
            parts.append(f"{pluralize(len(fit.benches), 'micro-benchmark')} of {Path(self.bench).name}")
        return f"fitted to {' and '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCalibration:
    """A fit with the name of the calibrated cluster and what it was fitted to; `out` is the file that was written, if any.

    >>> import shardwise as sw
    >>> import pathlib, tempfile
    >>> bench = pathlib.Path(tempfile.mkdtemp(), "bench.jsonl")
    >>> _ = bench.write_text('{"bench": "memory", "bytes": 4e9, "seconds": 1.6e-3}')
    >>> calibration = sw.calibrate("h100:8", bench=bench)
    >>> calibration.name, calibration.source
    ('h100:8', 'fitted to 1 micro-benchmark of bench.jsonl')
    """

    fit: UserClusterFit
    name: str
    source: str
    out: str | None = None


def calibrate_cluster(
    cluster: PathLike, files: MeasurementFiles, *, stack: str | None = None, name: str | None = None,
    out: PathLike | None = None, progress: Progress = ignore_progress,
) -> ClusterCalibration:  # fmt: skip
    """Fit the constants of a cluster to the measurements, and write it to `out` as a .toml file if that is given.

    Without a `stack` it is the one that most rows name. Raises `InputError` with everything that is wrong.
    """
    if files.runs is None and files.bench is None and not files.logged_runs:
        labels = " nor ".join(argument_label(field) for field in ("runs", "logged_runs", "bench"))
        raise InputError(f"calibrate: found neither {labels}; one of them, or several, is required")
    measured, known_stack, rows, target, logged = run_all(
        lambda: load_measured_cluster(os.fspath(cluster)),
        lambda: get_stack(stack) if stack else None,
        lambda: read_run_rows(files.runs, argument_label("runs")) if files.runs is not None else (),
        lambda: None if out is None else _cluster_file(os.fspath(out)),
        lambda: run_all(*(partial(read_logged_run, run, cluster) for run in files.logged_runs)),
    )
    bench = None if files.bench is None else os.fspath(files.bench)
    fit = fit_user_cluster(measured, rows, bench, known_stack, progress, logged=logged)
    calibration = ClusterCalibration(
        fit=fit, name=name or (target.stem if target else measured.nominal.name), source=files.describe(fit),
        out=None if out is None else os.fspath(out),
    )  # fmt: skip
    if target:
        _write_cluster(target, calibration)
    return calibration


def _cluster_file(text: str) -> Path:
    """Return the file to write. Raises `InputError` for a name that no verb would read as a cluster."""
    if not text.strip().lower().endswith(".toml"):
        raise InputError(
            f"{argument_label('out')}: found {text!r}; a name that ends in .toml is required, such as my-cluster.toml"
        )
    return Path(text.strip())


def _write_cluster(file: Path, calibration: ClusterCalibration) -> None:
    fit = calibration.fit
    remarks = {
        constant.name: f"± {constant.after_deviation:.2g}" + ("" if constant.identified else ", not identified")
        for constant in fit.constants
    }
    nominal = replace(fit.user_cluster.nominal, name=calibration.name)
    measured = fit.calibration(f"{calibration.source}, {date.today()}")
    try:
        file.write_text(format_cluster_toml(nominal, measured, remarks), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{argument_label('out')}: cannot write {file}: {reason}; a path that can be written is required"
        ) from None
