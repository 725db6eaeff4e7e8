"""Whether predictions order layouts as measurements do: runs of one model on one machine by one stack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from shardwise.calibrate.published_runs.rows import Row

APART = 0.1  # pairs whose measured times differ by less are a matter of noise
SAME = ("software", "model", "chip", "n_devices", "seq_len", "dtype", "task")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """`ordered`: share of pairs that differ by over a tenth that are ordered rightly; `lost`: throughput given up on average
    by taking the layout that is predicted to be the fastest, and at most."""

    num_groups: int
    num_pairs: int
    ordered: float
    lost: float
    most_lost: float


@dataclass(frozen=True, slots=True)
class Timed:
    """A run's measured and predicted seconds for a token."""

    row: Row
    measured_s: float
    predicted_s: float


def timed(row: Row, measured_s: float, predicted_s: float) -> Timed:
    """Step times over the tokens of the step, as far as the row says how many."""
    tokens = float(row.cell("global_batch") or 1) * float(row.cell("seq_len") or 1)
    return Timed(row, measured_s / tokens, predicted_s / tokens)


def ranking(runs: Sequence[Timed]) -> Ranking | None:
    """The ranking over all groups of two runs or more; None where there is no pair."""
    found = list(_groups(runs))
    pairs = [pair for group in found for pair in combinations(group, 2) if _apart(*pair)]
    if not pairs:
        return None
    right = sum((a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s) for a, b in pairs)
    lost = [_lost(group) for group in found]
    return Ranking(
        num_groups=len(found), num_pairs=len(pairs), ordered=right / len(pairs), lost=sum(lost) / len(lost),
        most_lost=max(lost),
    )  # fmt: skip


def right_by_lead(runs: Sequence[Timed], leads: Sequence[float]) -> list[tuple[int, float]]:
    """Of pairs by the predicted lead of the faster one: their number, and the share of which it was measured to be faster.

    `leads` are the lower ends of the classes, ascending from 0; the last one is open.
    """
    counted, right = [0] * len(leads), [0] * len(leads)
    for group in _groups(runs):
        for pair in combinations(group, 2):
            fast, slow = sorted(pair, key=lambda run: run.predicted_s)
            lead = slow.predicted_s / fast.predicted_s - 1
            place = max(index for index, least in enumerate(leads) if lead >= least)
            counted[place] += 1
            right[place] += fast.measured_s < slow.measured_s
    return [(count, good / count if count else 0.0) for count, good in zip(counted, right, strict=True)]


def _groups(runs: Sequence[Timed]) -> Iterator[list[Timed]]:
    """Runs of one model on one machine by one stack, one of each configuration."""
    groups: dict[tuple[str, ...], dict[str, Timed]] = {}
    for run in runs:
        key = (run.row.family, *(run.row.cell(column) for column in SAME))
        groups.setdefault(key, {}).setdefault(run.row.dup_group, run)
    yield from (list(group.values()) for group in groups.values() if len(group) > 1)


def _apart(one: Timed, other: Timed) -> bool:
    low, high = sorted((one.measured_s, other.measured_s))
    return high > low * (1 + APART)


def _lost(group: Sequence[Timed]) -> float:
    best = min(run.measured_s for run in group)
    return 1.0 - best / min(group, key=lambda run: run.predicted_s).measured_s
