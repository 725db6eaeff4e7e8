"""The fit to the published runs, its folds and the prediction intervals that these show; the file of constants that it writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from shardwise.hardware.calibration_constants import MODEL_KINDS
from shardwise.measure.calibrate.constant_fit import Array, ConstantFit, fit_constants, initial_fit
from shardwise.measure.calibrate.cross_validation import FitEvidence, FoldMember, cross_validate, fold_groups, group_key
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
from shardwise.measure.calibrate.published_runs.run_table import RunRow, layout_rows, published_rows
from shardwise.values.errors import InputError
from shardwise.values.progress import Progress, ignore_progress

# What a fold stands for in the spread of a prediction.
FOLD_OF_SPREAD = {"known": "model", "unknown": "lab", "calibrated": "three"}
TAILS = (0.05, 0.95)
FEWEST_RUNS = 20  # runs that folds are made of
# Every so many of the rows of the study of layouts that constants are fitted to, of which many are alike: fewer to price.
STUDY_STEP = 3


@dataclass(frozen=True)
class PublishedFit:
    """Judged rows that count, what was fitted to their observations (and to others), and predictions by kind of fold."""

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
        return np.array([one.observation.measured_s for one in self.members])

    @cached_property
    def weights(self) -> Array:
        return np.array([one.observation.weight for one in self.members])

    @cached_property
    def in_sample(self) -> Array:
        """Seconds predicted where everything was fitted."""
        return np.asarray(np.exp(self.fitted.log_times[: len(self.members)]))[None]

    def spread(self, fold: str) -> dict[str, tuple[float, float]]:
        """By kind of model the ends of the 90% prediction interval of a fold, as factors on a prediction."""
        ratios = self.measured / self.folds[fold]
        groups = self.num_groups(fold)
        return {
            kind: widen_interval(weighted_interval(ratios, self.weights * (self.kinds == kind)), groups)
            for kind in MODEL_KINDS
        }

    def num_groups(self, fold: str) -> int:
        """How many stacks with a model, sources or labs a fold's predictions are of."""
        return len(set(map(group_key(fold), self.members)))

    @cached_property
    def kinds(self) -> Array:
        return np.array([MODEL_KINDS[_is_moe(one)] for one in self.judged])

    def coverage(self, fold: str) -> float:
        """Share of a fold's runs inside the interval that the rest of the folds gives."""
        seconds = self.folds[fold]
        ratios = self.measured / seconds
        inside = np.zeros(ratios.shape)
        for draw, own in enumerate(ratios):
            for group in fold_groups(self.members, fold, draw):
                rest = self.weights.copy()
                rest[group] = 0.0
                for kind in MODEL_KINDS:
                    low, high = widen_interval(
                        weighted_interval(own, rest * (self.kinds == kind)), self.num_groups(fold)
                    )
                    inside[draw, group] += ((own >= low) & (own <= high) & (self.kinds == kind))[group]
        there = ~np.isnan(seconds)
        return float(np.average(inside[there], weights=np.broadcast_to(self.weights, there.shape)[there]))


def weighted_interval(ratios: Array, weights: Array) -> tuple[float, float]:
    """The weighted 5th and 95th percentiles of some ratios, with 1 between them."""
    weights = np.broadcast_to(weights, ratios.shape)
    there = ~np.isnan(ratios) & (weights > 0)
    weights = weights[there]
    order = np.argsort(ratios[there])
    values, shares = ratios[there][order], np.cumsum(weights[order])
    low, high = (float(values[np.searchsorted(shares, tail * shares[-1])]) for tail in TAILS)
    return min(low, 1.0), max(high, 1.0)


def widen_interval(pair: tuple[float, float], num_groups: int) -> tuple[float, float]:
    """An interval for one group more, from so many: wider by 1 + 3/n, for runs of a group are wrong together.

    The 3 was chosen so that intervals from the other labs and sources cover 90% of the runs of one that is left out.
    """
    low, high = (limit ** (1.0 + 3.0 / num_groups) for limit in pair)
    return low, high


def fit_published(
    rows: Sequence[RunRow] | None = None,
    progress: Progress = ignore_progress,
    *,
    held: Collection[str] = (),
) -> PublishedFit:
    """Fit to all rows that count, and cross-validate; the constants in `held` stay where they are expected.

    Without `rows` those of the package, beside half of the study of layouts (`study_observations`).

    Raises `InputError` where there are too few runs for folds.
    """
    counted = list(_scored_runs(published_rows() if rows is None else rows, progress))
    members = [
        FoldMember(observation=seen, family=one.row.family, model=repr(replace(case.architecture, name="")))
        for one, case, seen in counted
    ]
    labs = {one.lab for one in members}
    if len(members) < FEWEST_RUNS or len(labs) < 2:
        raise InputError(
            f"--folds: found {len(members)} runs of {len(labs)} labs that count and have a measured time; at least {FEWEST_RUNS} "
            "runs of two labs are required, leave --chip and --source out or give more rows"
        )
    progress(f"fitting constants to {len(members)} runs")
    always = study_observations() if rows is None else []
    observations = [*(one.observation for one in members), *always]
    evidence = FitEvidence(
        members=members,
        always_fitted=always,
        fitted=fit_constants(observations, initial_fit(observations).with_fixed(held)),
    )
    return PublishedFit([one for one, _, _ in counted], evidence, cross_validate(evidence, progress))


def _scored_runs(
    rows: Sequence[RunRow], progress: Progress = ignore_progress
) -> Iterator[tuple[EvaluatedRun, RunCase, Observation]]:
    """Rows that count and have a measured time, judged, with their cases, as observations."""
    for one in predict_rows(rows, progress=progress):
        if one.scored and one.prediction and one.row.step_time_s:
            case = one.prediction.case
            yield one, case, run_observation(case, one.row.step_time_s, one.weight)


def study_observations() -> list[Observation]:
    """The half of the study of layouts that constants may be fitted to: together as many runs as it has groups."""
    rows = half_of_study(layout_rows(), fitted=True)
    chosen = [seen for _, _, seen in _scored_runs(rows[::STUDY_STEP])]
    return [replace(seen, weight=num_groups(rows) / len(chosen)) for seen in chosen]


def _is_moe(one: EvaluatedRun) -> bool:
    return bool(one.prediction and one.prediction.case.architecture.num_experts)


def _is_dense(one: EvaluatedRun, chips: str, dtypes: Callable[[str], bool] = lambda dtype: True) -> bool:
    return not _is_moe(one) and one.row.cell("chip").startswith(chips) and dtypes(one.row.cell("dtype"))


# What the errors are reported of.
STRATA: Mapping[str, Callable[[EvaluatedRun], bool]] = {
    "all": lambda one: True,
    "dense": lambda one: not _is_moe(one),
    "MoE": _is_moe,
    "dense A100": lambda one: _is_dense(one, "A100"),
    "dense H100, 16 bits": lambda one: _is_dense(one, "H100", lambda dtype: "fp8" not in dtype),
    "dense H100, fp8": lambda one: _is_dense(one, "H100", lambda dtype: "fp8" in dtype),
    "dense Blackwell": lambda one: not _is_moe(one) and "B200" in one.row.cell("chip"),
    "TPU": lambda one: one.row.cell("chip").startswith("TPU"),
    "recompute not stated": lambda one: not one.row.cell("recompute"),
}


def fold_statistics(
    found: PublishedFit, seconds: Array, stratum: Callable[[EvaluatedRun], bool]
) -> ErrorStatistics | None:
    """Errors of a fold's predictions in a stratum; None where it has none."""
    errors = [
        (float(draw[i] / found.measured[i] - 1.0), float(found.weights[i]))
        for draw in seconds
        for i, one in enumerate(found.judged)
        if stratum(one) and not np.isnan(draw[i])
    ]
    return error_statistics(errors) if errors else None


def fold_ranking(found: PublishedFit, seconds: Array) -> RankingStatistics | None:
    """How a fold's predictions order layouts; of several draws the first."""
    first = seconds[0]
    return rank_layouts(
        [
            time_per_token(one.row, float(found.measured[i]), float(first[i]))
            for i, one in enumerate(found.judged)
            if not np.isnan(first[i])
        ]
    )


def repeat_noise(found: PublishedFit) -> dict[str, ErrorStatistics]:
    """By kind of model how far runs of the same configuration lie from their median: what no prediction can do better."""
    groups: dict[str, list[int]] = {}
    for i, one in enumerate(found.judged):
        groups.setdefault(one.row.dup_group, []).append(i)
    errors: dict[str, list[tuple[float, float]]] = {}
    for group in (members for members in groups.values() if len(members) > 1):
        middle = float(np.median(found.measured[group]))
        errors.setdefault(found.kinds[group[0]], []).extend(
            (middle / float(found.measured[i]) - 1.0, float(found.weights[i])) for i in group
        )
    return {kind: error_statistics(found) for kind, found in sorted(errors.items())}


def fold_report(found: PublishedFit) -> str:
    """A table of errors by fold and stratum, with the coverage of the intervals, the ranking of layouts, and the noise."""
    titles = {
        "fitted": "in sample", "model": "stack and chip known, model new", "source": "source and stack new",
        "lab": "lab and stack new",
        "three": "source and stack new, three of its runs given",
    }  # fmt: skip
    lines = []
    for fold, title in titles.items():
        seconds = found.in_sample if fold == "fitted" else found.folds[fold]
        lines.append(
            f"{title:<46}" + "".join(f"{name:>8}" for name in ("rows", "mean", "median", "p90", "worst", "bias"))
        )
        for name, stratum in STRATA.items():
            one = fold_statistics(found, seconds, stratum)
            if one:
                shares = "".join(f"{share:>8.1%}" for share in (one.mean, one.median, one.p90, one.worst))
                lines.append(f"  {name:<44}{one.num_rows:>8}{shares}{one.bias:>+8.1%}")
        if fold != "fitted":
            spread = found.spread(fold)
            shown = ", ".join(f"{kind} {low:.2f} to {high:.2f}" for kind, (low, high) in spread.items())
            lines.append(f"  90% intervals: {shown} times the prediction; coverage {found.coverage(fold):.1%}")
        ranks = fold_ranking(found, seconds)
        if ranks:
            lines.append(
                f"  layouts of one model on one machine that differ by over 10%: {ranks.ordered:.1%} of {ranks.num_pairs} pairs "
                f"ordered correctly;\n  taking the predicted best loses {ranks.lost:.1%} of the throughput on average "
                f"({ranks.num_groups} groups), {ranks.most_lost:.0%} at most"
            )
        lines.append("")
    lines.append("repeated runs of one configuration, around their median (different releases, different days)")
    lines += [
        f"  {kind:<44}{one.num_rows:>8}{one.mean:>8.1%}{one.median:>8.1%}{one.p90:>8.1%}{one.worst:>8.1%}"
        for kind, one in repeat_noise(found).items()
    ]
    return "\n".join(lines).rstrip()


CONSTANTS_FILE = Path(__file__).parents[2] / "hardware" / "catalog" / "published_constants.toml"


def format_constants(found: PublishedFit) -> str:
    """The constants by chip and stack with their deviations, and the spread of predictions, as TOML."""
    deviations = found.fitted.deviations(np.array([one.weight for one in found.evidence.observations]))
    lines = [
        "# Made by benchmarks/published.py --write; hardware/calibration_constants.py says what each constant means.",
        f'source = "fitted to {len(found.members)} published runs of quality A and A- (calibrate/published_runs/runs.csv), each '
        'weighted 1/duplicates, beside half of a study of layouts (layouts.csv)"',
    ]
    lines += ["", "# 90% prediction interval, as factors on a prediction, from folds."]
    for name, fold in FOLD_OF_SPREAD.items():
        pairs = ", ".join(f"{kind} = [{low:.3f}, {high:.3f}]" for kind, (low, high) in found.spread(fold).items())
        lines.append(f"spread.{name} = {{ {pairs} }}")
    lines += ["", "# Runs by stack, chip and kind of model."]
    runs = Counter(
        (one.observation.stack.name, one.observation.chip, kind)
        for one, kind in zip(found.members, found.kinds, strict=True)
    )
    lines += [f'runs."{stack}"."{chip}".{kind} = {count}' for (stack, chip, kind), count in sorted(runs.items())]
    owners = sorted({who for who, _ in found.fitted.keys})
    for owner in owners:
        group, _, name = owner.partition(" ")
        own = [(key, d) for key, d in zip(found.fitted.keys, deviations, strict=True) if key[0] == owner]
        lines += ["", f'[{group}s."{name}"]', *(f"{key[1]} = {found.fitted.value(key):.4g}" for key, _ in own)]
        pairs = ", ".join(f"{key[1]} = {deviation:.2g}" for key, deviation in own)
        lines += ["# standard deviations on the line without bounds", f"deviations = {{ {pairs} }}"]
    return "\n".join(lines) + "\n"


def write_constants(text: str) -> None:
    """Replace the constants that the package comes with."""
    CONSTANTS_FILE.write_text(text, encoding="utf-8")
