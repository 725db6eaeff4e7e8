"""The constants of a user's own cluster from runs and micro-benchmarks on it, and how sure its predictions are then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwise.hardware.calibration_constants import CONSTANTS, MODEL_KINDS, Calibration
from shardwise.hardware.chips import relative_clock
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_files import MeasuredCluster
from shardwise.hardware.published_constants import load_published_fit, published_calibration, with_calibration
from shardwise.hardware.stacks import Stack, match_stack
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
from shardwise.measure.calibrate.observations import (
    BenchmarkLine,
    BenchmarkTarget,
    Observation,
    read_benchmark_lines,
    with_weight,
)
from shardwise.measure.calibrate.prediction_errors import ErrorStatistics, error_statistics
from shardwise.measure.calibrate.published_fit import TAILS
from shardwise.measure.calibrate.published_runs.run_table import RunRow
from shardwise.measure.calibrate.user_runs import CalibrationRun, PricedRun, select_runs
from shardwise.values.errors import InputError
from shardwise.values.progress import Progress, ignore_progress

FEW_RUNS = 30  # runs, below which each is fitted loosely
UNIDENTIFIED = 0.8  # of the prior's deviation: what measurements leave that wide is still the prior
# Runs from which the spread that held-out labs showed with three runs given is taken, and from which the user's own is.
RUNS_FOR_LAB_SPREAD, RUNS_FOR_OWN_SPREAD = 3, 10
NARROWEST_SPREAD = 0.03  # two runs of the same job differ by 2 to 5%
TOO_SHORT = "of the micro-benchmarks: shorter than a few launches"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantShift:
    """A constant before and after, with standard deviations of both, in units of the constant.

    `moved`: how far, in widths of its prior. `left`: the deviation after over that of the prior, on the line without bounds.
    """

    name: str
    before: float
    after: float
    before_deviation: float
    after_deviation: float
    moved: float
    left: float

    @property
    def identified(self) -> bool:
        """Whether the measurements say more about it than was expected beforehand."""
        return self.left <= UNIDENTIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Seconds that were measured, and predicted before and after; `weight` of it in the mean errors of its `kind`."""

    id: str
    kind: str
    measured_s: float
    before_s: float
    after_s: float
    weight: float

    def error(self, after: bool = True) -> float:
        """Predicted over measured, less 1."""
        return (self.after_s if after else self.before_s) / self.measured_s - 1.0


@dataclass(frozen=True, kw_only=True)
class UserClusterFit:
    """A user's own cluster under a stack, what was measured on it, and the constants that agree best with that."""

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
        """Runs, and then micro-benchmarks: the order of what was fitted."""
        return [*self.runs, *self.benches]

    @cached_property
    def constants(self) -> tuple[ConstantShift, ...]:
        """Each constant before and after."""
        weights = np.array([one.observation.weight for one in self.measured])
        deviations = dict(zip(self.fitted.keys, self.fitted.deviations(weights, sigma=self.sigma), strict=True))
        return tuple(self._shift(key, float(deviations[key])) for key in self._keys())

    def _keys(self) -> list[tuple[str, str]]:
        return sorted(self.fitted.keys, key=lambda key: list(CONSTANTS).index(key[1]))

    def _shift(self, key: tuple[str, str], deviation: float) -> ConstantShift:
        constant, at = CONSTANTS[key[1]], self.fitted.keys.index(key)
        free = (self.initial.point[at], self.fitted.point[at])
        return ConstantShift(
            name=key[1], before=self.initial.value(key), after=self.fitted.value(key),
            before_deviation=constant.derivative(free[0]) * constant.width,
            after_deviation=constant.derivative(free[1]) * deviation,
            moved=float(free[1] - free[0]) / constant.width, left=deviation / constant.width,
        )  # fmt: skip

    @cached_property
    def residuals(self) -> tuple[Residual, ...]:
        """Predicted against measured, the largest first."""
        kinds = [*(one.kind for one in self.runs), *("bench" for _ in self.benches)]
        times = zip(np.exp(self.initial.log_times), np.exp(self.fitted.log_times), strict=True)
        found = [
            Residual(
                id=one.id, kind=kind, measured_s=one.observation.measured_s, before_s=float(before), after_s=float(after),
                weight=one.observation.weight if kind != "bench" else 1.0,
            )
            for one, kind, (before, after) in zip(self.measured, kinds, times, strict=True)
        ]  # fmt: skip
        return tuple(sorted(found, key=lambda one: -abs(one.error())))

    def errors(self, after: bool, *, benches: bool = False) -> ErrorStatistics | None:
        """Errors of runs, or of micro-benchmarks; None where there are none."""
        chosen = [(one.error(after), one.weight) for one in self.residuals if (one.kind == "bench") is benches]
        return error_statistics(chosen) if chosen else None

    @cached_property
    def spread(self) -> Mapping[str, tuple[float, float]]:
        """By kind of model the ends of the 90% prediction interval, as factors on a prediction.

        With fewer than `RUNS_FOR_LAB_SPREAD` runs of a kind as without: what the published runs show of the stack. With fewer
        than `RUNS_FOR_OWN_SPREAD` the narrower of that and what they show of labs that three runs were given of: knowing more
        makes nothing less sure. Then the runs themselves say it, each predicted from the others, for a fit follows what it was
        fitted to.
        Between the 5th and 95th percentiles of a few such errors a new one lies less than nine times of ten: (n + 5)/n as wide
        covers 89% of new ones where they are normal, for ten as for a hundred. Never narrower than `NARROWEST_SPREAD`, by which
        the same job differs from day to day.
        """
        shipped = published_calibration(self._chip, self.stack).spread
        residuals = left_out_residuals(self._observations, self.fitted, sigma=self.sigma)[: len(self.runs)]
        found = {}
        for kind in MODEL_KINDS:
            weights = np.array([one.observation.weight * (one.kind == kind) for one in self.runs])
            found[kind] = _spread_of_kind(shipped[kind], kind, residuals, weights)
        return found

    @property
    def _observations(self) -> list[Observation]:
        return [one.observation for one in self.measured]

    @property
    def _chip(self) -> str:
        return self.user_cluster.nominal.chip.catalog_name

    def calibration(self, source: str) -> Calibration:
        """What was found, with the clock and the facts about the stack that it was found at."""
        shipped = published_calibration(self._chip, self.stack)
        return replace(
            shipped, constants={one.name: one.after for one in self.constants}, spread=self.spread, source=source,
            spread_notes={}, clock=relative_clock(self.user_cluster.nominal.chip),
        )  # fmt: skip

    def cluster(self, source: str) -> Cluster:
        """The cluster that predictions are then made on."""
        return with_calibration(self.user_cluster.nominal, self.calibration(source))


def _spread_of_kind(shipped: tuple[float, float], kind: str, residuals: Array, weights: Array) -> tuple[float, float]:
    count = float(weights.sum())
    if count < RUNS_FOR_LAB_SPREAD:
        return shipped
    if count < RUNS_FOR_OWN_SPREAD:
        given = tuple(map(float, load_published_fit()["spread"]["calibrated"][kind]))
        low, high = min(shipped, given, key=lambda pair: pair[1] / pair[0])
        own = np.exp(residuals[weights > 0])  # no narrower than what was seen here
        return min(low, float(own.min())), max(high, float(own.max()))
    low, high = np.exp(_percentiles(residuals[weights > 0], weights[weights > 0]) * (count + 5.0) / count)
    return min(float(low), 1.0 - NARROWEST_SPREAD), max(float(high), 1.0 + NARROWEST_SPREAD)


def _percentiles(values: Array, weights: Array) -> Array:
    """The weighted 5th and 95th percentiles, straight lines between the values: of a few the outermost is too far out."""
    order = np.argsort(values)
    middles = np.cumsum(weights[order]) - weights[order] / 2.0
    return np.interp(TAILS, (middles - middles[0]) / (middles[-1] - middles[0]), values[order])


def fit_user_cluster(
    own: MeasuredCluster, rows: Sequence[RunRow], bench: str | None, stack: Stack | None = None,
    progress: Progress = ignore_progress, *, logged: Sequence[PricedRun] = (),
) -> UserClusterFit:  # fmt: skip
    """Fit the constants to rows, to runs by their logs and to a file of micro-benchmarks, from where published runs leave them.

    Raises `InputError` where nothing of either can be used.
    """
    runs, found_stack, aside = select_runs(rows, own, stack, logged)
    stack = found_stack or stack or match_stack("")
    progress(f"{len(runs)} runs read")
    machine = BenchmarkTarget(cluster=own.nominal, stack=stack, clock=relative_clock(own.nominal.chip))
    benches = read_benchmark_lines(bench, machine) if bench is not None else ()
    aside[TOO_SHORT] += sum(one.too_short for one in benches)
    sigma = SIGMA_FEW if sum(one.observation.weight for one in runs) < FEW_RUNS else SIGMA
    benches = tuple(with_weight(one, sigma) for one in benches if not one.too_short)
    progress(f"fitting constants to {len(runs)} runs and {len(benches)} micro-benchmarks")
    aside += Counter()  # without the reasons that nothing had
    if not runs and not benches:
        raise InputError(_nothing_usable_message(own, aside))
    observations = [*(one.observation for one in runs), *(one.observation for one in benches)]
    expected = published_calibration(own.nominal.chip.catalog_name, stack).constants
    begin = initial_fit(observations, {key: expected[key[1]] for key in observations[0].names})
    begin = linearise(observations, begin)
    found = fit_constants(observations, begin, sigma=sigma)
    return UserClusterFit(
        user_cluster=own,
        stack=stack,
        runs=runs,
        benches=benches,
        skipped=aside,
        sigma=sigma,
        initial=begin,
        fitted=found,
    )


def _nothing_usable_message(own: MeasuredCluster, aside: Counter[str]) -> str:
    reasons = "; ".join(f"{count} {reason}" for reason, count in aside.most_common()) or "no lines"
    chip = own.nominal.chip.catalog_name
    return (
        f"calibrate: nothing measured that can be used ({reasons}); a run on {chip} with a step time and a stated layout, or a "
        "micro-benchmark, is required"
    )
