"""Whether predictions order layouts as measurements do: runs of one model on one machine by one stack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from shardwise.calibrate.published_runs.rows import Row

APART = 0.1  # pairs whose measured times differ by less are a matter of noise
SAME = ("software", "model", "chip", "n_devices", "seq_len", "dtype", "task")
T = TypeVar("T")


def key_of(row: Row, same: Sequence[str]) -> tuple[str, ...]:
    """What rows of a group have in common: their source, and some columns."""
    return (row.family, *(row.cell(column) for column in same))


def grouped(items: Iterable[T], row: Callable[[T], Row], same: Sequence[str]) -> dict[tuple[str, ...], list[T]]:
    """Items whose rows are alike in their source and in some columns, by these: of each configuration the first."""
    found: dict[tuple[str, ...], dict[str, T]] = {}
    for item in items:
        found.setdefault(key_of(row(item), same), {}).setdefault(row(item).dup_group, item)
    return {key: list(members.values()) for key, members in found.items()}


def ordered_pairs(seconds: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Pairs of (measured, predicted) seconds whose measured times differ by over `APART`, and how many are ordered correctly."""
    pairs = [sorted(pair) for pair in combinations(seconds, 2)]
    apart = [(fast, slow) for fast, slow in pairs if slow[0] > fast[0] * (1 + APART)]
    return len(apart), sum(fast[1] < slow[1] for fast, slow in apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """`ordered`: share of pairs that differ by over a tenth that are ordered correctly; `lost`: throughput given up on average
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
    found = _groups(runs)
    counts = [ordered_pairs([(run.measured_s, run.predicted_s) for run in group]) for group in found]
    pairs, right = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0)
    if not pairs:
        return None
    lost = [_lost(group) for group in found]
    return Ranking(
        num_groups=len(found), num_pairs=pairs, ordered=right / pairs, lost=sum(lost) / len(lost), most_lost=max(lost)
    )


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


def _groups(runs: Sequence[Timed]) -> list[list[Timed]]:
    """Runs of one model on one machine by one stack, one of each configuration."""
    return [group for group in grouped(runs, lambda run: run.row, SAME).values() if len(group) > 1]


def _lost(group: Sequence[Timed]) -> float:
    best = min(run.measured_s for run in group)
    return 1.0 - best / min(group, key=lambda run: run.predicted_s).measured_s
