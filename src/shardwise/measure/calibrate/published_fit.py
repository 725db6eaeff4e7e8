"""Fit of the constants to the published runs, its folds and their prediction intervals, and its TOML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from shardwise.hardware.calibration_constants import MODEL_KINDS
from shardwise.hardware.published_constants import spread_class
from shardwise.measure.calibrate.constant_fit import (
    Array,
    ConstantFit,
    FitEvidence,
    FoldMember,
    cross_validate,
    fit_constants,
    initial_fit,
)
from shardwise.measure.calibrate.fold_intervals import FOLD_OF_SPREAD, FoldIntervals
from shardwise.measure.calibrate.layout_ranking import (
    RankingStatistics,
    half_of_study,
    num_groups,
    rank_layouts,
    time_per_token,
)
from shardwise.measure.calibrate.observations import Observation, run_observation
from shardwise.measure.calibrate.prediction_errors import ErrorStatistics, EvaluatedRun, error_statistics, predict_rows
from shardwise.measure.calibrate.published_runs.prediction_from_row import RunCase
from shardwise.measure.calibrate.published_runs.run_table import RunRow, engine_rows, layout_rows, published_rows
from shardwise.values import InputError, Progress, ignore_progress

FEWEST_RUNS = 20  # for folds
# Constants are fitted to every third row of their half of the study of layouts: many are alike, and each must be priced.
STUDY_STEP = 3


@dataclass(frozen=True)
class PublishedFit:
    """Runs that count, the fit to their observations (and to others), and predicted seconds by fold, [draw, run]."""

    judged: Sequence[EvaluatedRun]
    evidence: FitEvidence
    folds: Mapping[str, Array]

    @property
    def members(self) -> Sequence[FoldMember]:
        return self.evidence.members

    @property
    def fitted(self) -> ConstantFit:
        return self.evidence.fitted

    @cached_property
    def measured(self) -> Array:
        return np.array([member.observation.measured_s for member in self.members])

    @cached_property
    def weights(self) -> Array:
        return np.array([member.observation.weight for member in self.members])

    @cached_property
    def in_sample(self) -> Array:
        """Predicted seconds of the fit to everything, [1, run]."""
        return np.asarray(np.exp(self.fitted.log_times[: len(self.members)]))[None]

    @cached_property
    def kinds(self) -> Array:
        return np.array([MODEL_KINDS[_is_moe(run)] for run in self.judged])

    @cached_property
    def intervals(self) -> FoldIntervals:
        """90% prediction intervals that the folds give, and which runs are inside."""
        return FoldIntervals(
            members=self.members, kinds=self.kinds, measured_s=self.measured, seconds_by_fold=self.folds
        )


def fit_published(
    rows: Sequence[RunRow] | None = None, progress: Progress = ignore_progress, *, fixed: Collection[str] = ()
) -> PublishedFit:
    """Fit the constants to all rows that count, and cross-validate; constants named in `fixed` stay at their priors.

    Without `rows`: the published runs of the package, half of the study of layouts (`study_observations`), and runs of `train`
    (`engine_observations`).

    Raises `InputError` if there are too few runs for folds.
    """
    scored_runs = list(_scored_runs(published_rows() if rows is None else rows, progress))
    members = [
        FoldMember(observation=observation, family=run.row.family, model=repr(replace(case.architecture, name="")))
        for run, case, observation in scored_runs
    ]
    labs = {member.lab for member in members}
    if len(members) < FEWEST_RUNS or len(labs) < 2:
        raise InputError(
            f"--folds: found {len(members)} runs of {len(labs)} labs that count and have a measured time; at least {FEWEST_RUNS} "
            "runs of two labs are required, leave --chip and --source out or give more rows"
        )
    progress(f"fitting constants to {len(members)} runs")
    always_fitted = [*study_observations(), *engine_observations()] if rows is None else []
    observations = [*(member.observation for member in members), *always_fitted]
    evidence = FitEvidence(
        members=members,
        always_fitted=always_fitted,
        fitted=fit_constants(observations, initial_fit(observations).with_fixed(fixed)),
    )
    return PublishedFit([run for run, _, _ in scored_runs], evidence, cross_validate(evidence, progress))


def _scored_runs(
    rows: Sequence[RunRow], progress: Progress = ignore_progress
) -> Iterator[tuple[EvaluatedRun, RunCase, Observation]]:
    """Yield the rows that count and have a measured time, with their cases and observations."""
    for run in predict_rows(rows, progress=progress):
        if run.scored and run.prediction and run.row.step_time_s:
            case = run.prediction.case
            yield run, case, run_observation(case, run.row.step_time_s, run.weight)


def study_observations() -> list[Observation]:
    """Return the half of the study of layouts that constants are fitted to, with the weight of its number of groups."""
    rows = half_of_study(layout_rows(), fitted=True)
    observations = [observation for _, _, observation in _scored_runs(rows[::STUDY_STEP])]
    return [replace(observation, weight=num_groups(rows) / len(observations)) for observation in observations]


def engine_observations() -> list[Observation]:
    """Return the runs of this package's own engine, of which no published run is."""
    return [observation for _, _, observation in _scored_runs(engine_rows())]


def _is_moe(run: EvaluatedRun) -> bool:
    return bool(run.prediction and run.prediction.case.architecture.num_experts)


def _is_dense(run: EvaluatedRun, chips: str, dtypes: Callable[[str], bool] = lambda dtype: True) -> bool:
    return not _is_moe(run) and run.row.cell("chip").startswith(chips) and dtypes(run.row.cell("dtype"))


# Strata of the error report.
STRATA: Mapping[str, Callable[[EvaluatedRun], bool]] = {
    "all": lambda run: True,
    "dense": lambda run: not _is_moe(run),
    "MoE": _is_moe,
    "dense A100": lambda run: _is_dense(run, "A100"),
    "dense H100, 16 bits": lambda run: _is_dense(run, "H100", lambda dtype: "fp8" not in dtype),
    "dense H100, fp8": lambda run: _is_dense(run, "H100", lambda dtype: "fp8" in dtype),
    "dense Blackwell": lambda run: not _is_moe(run) and "B200" in run.row.cell("chip"),
    "TPU": lambda run: run.row.cell("chip").startswith("TPU"),
    "recompute not stated": lambda run: not run.row.cell("recompute"),
}


def fold_statistics(fit: PublishedFit, fold: str, stratum: Callable[[EvaluatedRun], bool]) -> ErrorStatistics | None:
    """Return the errors of a fold's predictions in a stratum, or of the fit itself ("fitted"); None if it is empty."""
    seconds = fit.in_sample if fold == "fitted" else fit.folds[fold]
    chosen = np.array([stratum(run) for run in fit.judged])
    errors = [
        (float(draw[i] / fit.measured[i] - 1.0), float(fit.weights[i]))
        for draw in seconds
        for i in np.flatnonzero(chosen & ~np.isnan(draw))
    ]
    if not errors:
        return None
    coverage = fit.intervals.coverage(fold, chosen) if fold in fit.folds else None
    return replace(error_statistics(errors), coverage=coverage)


def fold_ranking(fit: PublishedFit, seconds: Array) -> RankingStatistics | None:
    """Return how a fold's first draw orders layouts; None if there is no pair to order."""
    first = seconds[0]
    return rank_layouts(
        [
            time_per_token(run.row, float(fit.measured[i]), float(first[i]))
            for i, run in enumerate(fit.judged)
            if not np.isnan(first[i])
        ]
    )


def repeat_noise(fit: PublishedFit) -> dict[str, ErrorStatistics]:
    """Return by kind of model the errors of repeated runs around their median, a bound for any prediction."""
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(fit.judged):
        groups.setdefault(run.row.dup_group, []).append(i)
    errors: dict[str, list[tuple[float, float]]] = {}
    for group in (members for members in groups.values() if len(members) > 1):
        median_s = float(np.median(fit.measured[group]))
        errors.setdefault(fit.kinds[group[0]], []).extend(
            (median_s / float(fit.measured[i]) - 1.0, float(fit.weights[i])) for i in group
        )
    return {kind: error_statistics(kind_errors) for kind, kind_errors in sorted(errors.items())}


CONSTANTS_FILE = Path(__file__).parents[2] / "hardware" / "catalog" / "published_constants.toml"


def format_constants(fit: PublishedFit) -> str:
    """Return the constants by chip and stack with their deviations, and the spread of predictions, as TOML."""
    deviations = fit.fitted.deviations(np.array([observation.weight for observation in fit.evidence.observations]))
    lines = [
        "# Made by benchmarks/published.py --write; hardware/calibration_constants.py says what each constant means.",
        f'source = "fitted to {len(fit.members)} published runs of quality A and A- (calibrate/published_runs/runs.csv), each '
        'weighted 1/duplicates, half of a study of layouts (layouts.csv) and runs of `train` (engine_runs.csv)"',
    ]
    lines += [
        "",
        "# 90% prediction intervals, as factors on a prediction, from folds: of all, by chips and stacks.",
    ]
    for name, fold in FOLD_OF_SPREAD.items():
        for kind, spread in fit.intervals.spread(fold).items():
            lines += [
                f'spread.{name}.{kind}."{spread_class(*error_class)}" = [{low:.3f}, {high:.3f}]'
                for error_class in sorted(spread.scales) for low, high in [spread.interval(error_class)]
            ]  # fmt: skip
    lines += ["", "# Runs by stack, chip and kind of model."]
    runs = Counter(
        (member.observation.stack.name, member.observation.chip, kind)
        for member, kind in zip(fit.members, fit.kinds, strict=True)
    )
    lines += [f'runs."{stack}"."{chip}".{kind} = {count}' for (stack, chip, kind), count in sorted(runs.items())]
    owners = sorted({owner for owner, _ in fit.fitted.keys})
    for owner in owners:
        group, _, name = owner.partition(" ")
        owner_constants = [
            (key, sigma) for key, sigma in zip(fit.fitted.keys, deviations, strict=True) if key[0] == owner
        ]
        lines += ["", f'[{group}s."{name}"]']
        lines += [f"{key[1]} = {fit.fitted.value(key):.4g}" for key, _ in owner_constants]
        pairs = ", ".join(f"{key[1]} = {deviation:.2g}" for key, deviation in owner_constants)
        lines += ["# standard deviations on the line without bounds", f"deviations = {{ {pairs} }}"]
    return "\n".join(lines) + "\n"


def write_constants(text: str) -> None:
    """Replace the constants file of the package."""
    CONSTANTS_FILE.write_text(text, encoding="utf-8")
