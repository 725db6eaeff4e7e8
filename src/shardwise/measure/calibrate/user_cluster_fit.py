"""The constants of a user's own cluster from runs and micro-benchmarks on it, and how sure its predictions are then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwise.hardware.calibration_constants import CONSTANTS, SPREAD_OF, Calibration
from shardwise.hardware.chips import usual_clock
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_files import Own
from shardwise.hardware.published_constants import calibrated, calibration_of, fitted
from shardwise.hardware.stacks import Stack, stack_of_software
from shardwise.measure.calibrate.constant_fit import (
    SIGMA,
    SIGMA_FEW,
    Array,
    Fit,
    evaluated,
    fit,
    left_out_residuals,
    start,
)
from shardwise.measure.calibrate.observations import Bench, Machine, Observation, read_benches, weighted
from shardwise.measure.calibrate.prediction_errors import ErrorStatistics, statistics
from shardwise.measure.calibrate.published_fit import TAILS
from shardwise.measure.calibrate.published_runs.run_table import Row
from shardwise.measure.calibrate.user_runs import Run, Usable, own_runs
from shardwise.values.errors import InputError
from shardwise.values.progress import Progress, silent

FEW = 30  # runs, below which each is fitted loosely
UNIDENTIFIED = 0.8  # of the prior's deviation: what measurements leave that wide is still the prior
# Runs from which the spread that held-out labs showed with three runs given is taken, and from which the user's own is.
SOME, MANY = 3, 10
NARROWEST = 0.03  # two runs of the same job differ by 2 to 5%
TOO_SHORT = "of the micro-benchmarks: shorter than a few launches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
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
class OwnFit:
    """A user's own cluster under a stack, what was measured on it, and the constants that agree best with that."""

    own: Own
    stack: Stack
    runs: Sequence[Run]
    benches: Sequence[Bench]
    aside: Counter[str]
    sigma: float
    begin: Fit
    found: Fit

    @property
    def measured(self) -> list[Run | Bench]:
        """Runs, and then micro-benchmarks: the order of what was fitted."""
        return [*self.runs, *self.benches]

    @cached_property
    def constants(self) -> tuple[Moved, ...]:
        """Each constant before and after."""
        weights = np.array([one.observation.weight for one in self.measured])
        deviations = dict(zip(self.found.keys, self.found.deviations(weights, sigma=self.sigma), strict=True))
        return tuple(self._moved(key, float(deviations[key])) for key in self._keys())

    def _keys(self) -> list[tuple[str, str]]:
        return sorted(self.found.keys, key=lambda key: list(CONSTANTS).index(key[1]))

    def _moved(self, key: tuple[str, str], deviation: float) -> Moved:
        constant, at = CONSTANTS[key[1]], self.found.keys.index(key)
        free = (self.begin.found[at], self.found.found[at])
        return Moved(
            name=key[1], before=self.begin.value(key), after=self.found.value(key),
            before_deviation=constant.slope(free[0]) * constant.width,
            after_deviation=constant.slope(free[1]) * deviation,
            moved=float(free[1] - free[0]) / constant.width, left=deviation / constant.width,
        )  # fmt: skip

    @cached_property
    def residuals(self) -> tuple[Residual, ...]:
        """Predicted against measured, the largest first."""
        kinds = [*(one.kind for one in self.runs), *("bench" for _ in self.benches)]
        times = zip(np.exp(self.begin.rows), np.exp(self.found.rows), strict=True)
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
        return statistics(chosen) if chosen else None

    @cached_property
    def spread(self) -> Mapping[str, tuple[float, float]]:
        """By kind of model the ends of the 90% prediction interval, as factors on a prediction.

        With fewer than `SOME` runs of a kind as without: what the published runs show of the stack. With fewer than `MANY` the
        narrower of that and what they show of labs that three runs were given of: knowing more makes nothing less sure. Then
        the runs themselves say it, each predicted from the others, for a fit follows what it was fitted to.
        Between the 5th and 95th percentiles of a few such errors a new one lies less than nine times of ten: (n + 5)/n as wide
        covers 89% of new ones where they are normal, for ten as for a hundred. Never narrower than `NARROWEST`, by which the
        same job differs from day to day.
        """
        shipped = calibration_of(self._chip, self.stack).spread
        residuals = left_out_residuals(self._observations, self.found, sigma=self.sigma)[: len(self.runs)]
        found = {}
        for kind in SPREAD_OF:
            weights = np.array([one.observation.weight * (one.kind == kind) for one in self.runs])
            found[kind] = _spread(shipped[kind], kind, residuals, weights)
        return found

    @property
    def _observations(self) -> list[Observation]:
        return [one.observation for one in self.measured]

    @property
    def _chip(self) -> str:
        return self.own.nominal.chip.catalogued

    def calibration(self, source: str) -> Calibration:
        """What was found, with the clock and the facts about the stack that it was found at."""
        shipped = calibration_of(self._chip, self.stack)
        return replace(
            shipped, constants={one.name: one.after for one in self.constants}, spread=self.spread, source=source,
            spread_notes={}, clock=usual_clock(self.own.nominal.chip),
        )  # fmt: skip

    def cluster(self, source: str) -> Cluster:
        """The cluster that predictions are then made on."""
        return calibrated(self.own.nominal, self.calibration(source))


def _spread(shipped: tuple[float, float], kind: str, residuals: Array, weights: Array) -> tuple[float, float]:
    count = float(weights.sum())
    if count < SOME:
        return shipped
    if count < MANY:
        given = tuple(map(float, fitted()["spread"]["calibrated"][kind]))
        low, high = min(shipped, given, key=lambda pair: pair[1] / pair[0])
        own = np.exp(residuals[weights > 0])  # no narrower than what was seen here
        return min(low, float(own.min())), max(high, float(own.max()))
    low, high = np.exp(_percentiles(residuals[weights > 0], weights[weights > 0]) * (count + 5.0) / count)
    return min(float(low), 1.0 - NARROWEST), max(float(high), 1.0 + NARROWEST)


def _percentiles(values: Array, weights: Array) -> Array:
    """The weighted 5th and 95th percentiles, straight lines between the values: of a few the outermost is too far out."""
    order = np.argsort(values)
    middles = np.cumsum(weights[order]) - weights[order] / 2.0
    return np.interp(TAILS, (middles - middles[0]) / (middles[-1] - middles[0]), values[order])


def fit_own(
    own: Own, rows: Sequence[Row], bench: str | None, stack: Stack | None = None,
    progress: Progress = silent, *, logged: Sequence[Usable] = (),
) -> OwnFit:  # fmt: skip
    """Fit the constants to rows, to runs by their logs and to a file of micro-benchmarks, from where published runs leave them.

    Raises `InputError` where nothing of either can be used.
    """
    runs, found_stack, aside = own_runs(rows, own, stack, logged)
    stack = found_stack or stack or stack_of_software("")
    progress(f"{len(runs)} runs read")
    machine = Machine(cluster=own.nominal, stack=stack, clock=usual_clock(own.nominal.chip))
    benches = read_benches(bench, machine) if bench is not None else ()
    aside[TOO_SHORT] += sum(one.too_short for one in benches)
    sigma = SIGMA_FEW if sum(one.observation.weight for one in runs) < FEW else SIGMA
    benches = tuple(weighted(one, sigma) for one in benches if not one.too_short)
    progress(f"fitting constants to {len(runs)} runs and {len(benches)} micro-benchmarks")
    aside += Counter()  # without the reasons that nothing had
    if not runs and not benches:
        raise InputError(_nothing(own, aside))
    observations = [*(one.observation for one in runs), *(one.observation for one in benches)]
    expected = calibration_of(own.nominal.chip.catalogued, stack).constants
    begin = start(observations, {key: expected[key[1]] for key in observations[0].names})
    begin = evaluated(observations, begin)
    found = fit(observations, begin, sigma=sigma)
    return OwnFit(own=own, stack=stack, runs=runs, benches=benches, aside=aside, sigma=sigma, begin=begin, found=found)


def _nothing(own: Own, aside: Counter[str]) -> str:
    reasons = "; ".join(f"{count} {reason}" for reason, count in aside.most_common()) or "no lines"
    chip = own.nominal.chip.catalogued
    return (
        f"calibrate: nothing measured that can be used ({reasons}); a run on {chip} with a step time and a stated layout, or a "
        "micro-benchmark, is required"
    )
