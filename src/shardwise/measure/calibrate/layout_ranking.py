"""Ranking of layouts by predictions, compared with measurements: runs of one model on one machine with one stack.

Errors of single runs do not show this, because people publish the layout that they chose. There are two groupings.
`rank_layouts` compares the time per token of all runs of a source with the same `RANKED_COLUMNS`. `group_layouts`
compares runs that differ in their layout alone (`LAYOUT_GROUP_COLUMNS`): the same source, software, model, chip, number
of devices, sequence, batch and precision, and at least `FEWEST_LAYOUTS` layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from shardwise.measure.calibrate.prediction_errors import EvaluatedRun, predict_rows
from shardwise.measure.calibrate.published_runs.run_table import RunRow, layout_rows, published_rows
from shardwise.values import Progress, ignore_progress

LEAST_DIFFERENCE = 0.1  # smaller differences of measured times are noise
RANKED_COLUMNS = ("software", "model", "chip", "n_devices", "seq_len", "dtype", "task")
T = TypeVar("T")


def row_key(row: RunRow, columns: Sequence[str]) -> tuple[str, ...]:
    """Return what rows of a group have in common: their source and the given columns."""
    return (row.family, *(row.cell(column) for column in columns))


def group_rows(
    items: Iterable[T], row: Callable[[T], RunRow], columns: Sequence[str]
) -> dict[tuple[str, ...], list[T]]:
    """Group items by source and columns of their rows; of each configuration the first is kept."""
    groups: dict[tuple[str, ...], dict[str, T]] = {}
    for item in items:
        groups.setdefault(row_key(row(item), columns), {}).setdefault(row(item).dup_group, item)
    return {key: list(members.values()) for key, members in groups.items()}


def count_ordered_pairs(seconds: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Return the number of pairs of (measured, predicted) seconds whose measured times differ by over
    `LEAST_DIFFERENCE`, and the number of them that are ordered correctly."""
    pairs = [sorted(pair) for pair in combinations(seconds, 2)]
    apart = [(fast, slow) for fast, slow in pairs if slow[0] > fast[0] * (1 + LEAST_DIFFERENCE)]
    return len(apart), sum(fast[1] < slow[1] for fast, slow in apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingStatistics:
    """`ordered`: share of pairs that differ by over a tenth that are ordered correctly; `lost`: throughput given up on average
    by taking the layout that is predicted to be the fastest, and at most."""

    num_groups: int
    num_pairs: int
    ordered: float
    lost: float
    most_lost: float


@dataclass(frozen=True, slots=True)
class TimedLayout:
    """A run with its measured and predicted seconds per token."""

    row: RunRow
    measured_s: float
    predicted_s: float


def time_per_token(row: RunRow, measured_s: float, predicted_s: float) -> TimedLayout:
    """Divide step times by the tokens of the step, as far as the row states them."""
    tokens = float(row.cell("global_batch") or 1) * float(row.cell("seq_len") or 1)
    return TimedLayout(row, measured_s / tokens, predicted_s / tokens)


def rank_layouts(runs: Sequence[TimedLayout]) -> RankingStatistics | None:
    """Return the ranking over all groups of two runs or more; None if no pair differs enough."""
    groups = _ranked_groups(runs)
    counts = [count_ordered_pairs([(run.measured_s, run.predicted_s) for run in group]) for group in groups]
    pairs, ordered = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    if not pairs:
        return None
    lost = [_lost_share(group) for group in groups]
    return RankingStatistics(
        num_groups=len(groups), num_pairs=pairs, ordered=ordered / pairs, lost=sum(lost) / len(lost),
        most_lost=max(lost),
    )  # fmt: skip


def ordered_share_by_lead(runs: Sequence[TimedLayout], leads: Sequence[float]) -> list[tuple[int, float]]:
    """Return by class of predicted lead the number of pairs, and the share whose predicted faster run was faster.
    `leads` are the lower ends of the classes, ascending from 0; the last class is open."""
    num_pairs, ordered = [0] * len(leads), [0] * len(leads)
    for group in _ranked_groups(runs):
        for pair in combinations(group, 2):
            fast, slow = sorted(pair, key=lambda run: run.predicted_s)
            lead = slow.predicted_s / fast.predicted_s - 1
            class_index = max(index for index, lower_end in enumerate(leads) if lead >= lower_end)
            num_pairs[class_index] += 1
            ordered[class_index] += fast.measured_s < slow.measured_s
    return [(count, hits / count if count else 0.0) for count, hits in zip(num_pairs, ordered, strict=True)]


def _ranked_groups(runs: Sequence[TimedLayout]) -> list[list[TimedLayout]]:
    """Return the groups of two runs or more with the same source and `RANKED_COLUMNS`."""
    return [group for group in group_rows(runs, lambda run: run.row, RANKED_COLUMNS).values() if len(group) > 1]


def _lost_share(group: Sequence[TimedLayout]) -> float:
    best = min(run.measured_s for run in group)
    return 1.0 - best / min(group, key=lambda run: run.predicted_s).measured_s


LAYOUT_GROUP_COLUMNS = ("software", "model", "chip", "n_devices", "seq_len", "global_batch", "dtype")
KEY_COLUMNS = ("family", *LAYOUT_GROUP_COLUMNS)
FEWEST_LAYOUTS = 3  # layouts of a group
# The halves of the study of layouts: constants are fitted to the groups of the first, the second is never fitted.
FITTED_HALF, HELD_OUT_HALF = "layouts, fitted half", "layouts, left out"
PUBLISHED_RUNS = "published runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutGroup:
    """Measured and predicted seconds of a group by the name of the row."""

    key: tuple[str, ...]
    measured_s: dict[str, float]
    predicted_s: dict[str, float]

    @property
    def pick(self) -> str:
        """Row that is predicted to be the fastest."""
        return min(self.predicted_s, key=lambda row: self.predicted_s[row])

    @property
    def best(self) -> str:
        """Row that was measured to be the fastest."""
        return min(self.measured_s, key=lambda row: self.measured_s[row])

    @property
    def regret(self) -> float:
        """Measured time of the pick over that of the best, less 1."""
        return self.measured_s[self.pick] / self.measured_s[self.best] - 1.0

    @property
    def pairs(self) -> tuple[int, int]:
        """Number of pairs whose times differ by over a tenth, and number of these that are ordered correctly."""
        return count_ordered_pairs([(seconds, self.predicted_s[row]) for row, seconds in self.measured_s.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceStatistics:
    """Statistics of the ranking of layouts over groups: shares and ratios."""

    num_groups: int
    num_pairs: int
    ordered: float
    picked: int
    mean_regret: float
    worst_regret: float


def choice_statistics(groups: Sequence[LayoutGroup]) -> ChoiceStatistics | None:
    """Return ranking statistics over groups, or None if no two times differ by over a tenth."""
    pairs = [group.pairs for group in groups]
    apart = sum(count for count, _ in pairs)
    if not apart:
        return None
    regrets = [group.regret for group in groups]
    return ChoiceStatistics(
        num_groups=len(groups), num_pairs=apart, ordered=sum(ordered for _, ordered in pairs) / apart,
        picked=sum(group.regret == 0.0 for group in groups), mean_regret=sum(regrets) / len(regrets),
        worst_regret=max(regrets),
    )  # fmt: skip


def group_layouts(runs: Sequence[EvaluatedRun]) -> list[LayoutGroup]:
    """Group the rows that count; of several rows of one configuration the first is kept."""
    scored = (run for run in runs if run.scored and run.error is not None)
    groups = group_rows(scored, lambda run: run.row, LAYOUT_GROUP_COLUMNS)
    return [_layout_group(key, members) for key, members in sorted(groups.items()) if len(members) >= FEWEST_LAYOUTS]


def _layout_group(key: tuple[str, ...], runs: Sequence[EvaluatedRun]) -> LayoutGroup:
    measured = {run.row.id: run.row.step_time_s or 0.0 for run in runs}
    predicted = {run.row.id: run.prediction.estimate.step_time_s for run in runs if run.prediction}
    return LayoutGroup(key=key, measured_s=measured, predicted_s=predicted)


def half_of_study(rows: Sequence[RunRow], *, fitted: bool) -> list[RunRow]:
    """Return the rows of every other group of the study of layouts, in the order of their keys."""
    keys = sorted({row_key(row, LAYOUT_GROUP_COLUMNS) for row in rows})
    half_keys = set(keys[0 if fitted else 1 :: 2])
    return [row for row in rows if row_key(row, LAYOUT_GROUP_COLUMNS) in half_keys]


def num_groups(rows: Sequence[RunRow]) -> int:
    """Return the number of groups of the rows."""
    return len({row_key(row, LAYOUT_GROUP_COLUMNS) for row in rows})


def published_groups(progress: Progress = ignore_progress) -> dict[str, list[LayoutGroup]]:
    """Return the groups of the published runs, and of both halves of the study of layouts."""
    study = layout_rows()
    sets = {
        PUBLISHED_RUNS: published_rows(),
        FITTED_HALF: half_of_study(study, fitted=True),
        HELD_OUT_HALF: half_of_study(study, fitted=False),
    }
    return {name: group_layouts(predict_rows(rows, progress=progress)) for name, rows in sets.items()}
