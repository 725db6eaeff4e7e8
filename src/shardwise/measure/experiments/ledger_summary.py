"""Summary of an experiment: states, the best of each group, what it has cost, and what is left."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from shardwise.measure.experiments.ledger import LedgerContent, LedgerRow, ended_attempts, read_ledger
from shardwise.measure.experiments.ledger_lines import ACTIVE, STATES, Interval, LedgerLine
from shardwise.price.reliability import SECONDS_PER_HOUR
from shardwise.values import Payload

WAITING = ("predicted", *ACTIVE)  # states of configurations that are left to run
UNKNOWN_START_S = 60.0  # seconds that a run takes besides its steps, before one has ended: a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentCost:
    """Runs, hours of devices, and dollars where every chip has a price."""

    num_runs: int
    device_hours: float
    usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRun:
    """The fastest measured configuration of a group, with the step that was predicted before it ran."""

    label: str
    fingerprint: str
    step_time_s: float
    predicted_s: float | None
    interval90: Interval | None
    mfu: float | None
    tokens_per_s_per_device: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """A group of competing configurations.

    `best` is None before the first run. `least_left_s` is the lowest end of the intervals of what is left, and `settled` is true
    where nothing is left that could be faster.
    """

    group: str
    num_configurations: int
    num_done: int
    num_left: int
    best: BestRun | None
    least_left_s: float | None
    settled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseCount:
    """Number of configurations that share a cause, such as "out of memory", and the reason of one of them."""

    cause: str
    count: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalCoverage:
    """Number of measured steps that lay in the 90% intervals that were predicted before their runs."""

    num_inside: int
    num_runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentStatus(Payload):
    """State of an experiment as its ledger has it.

    `states` counts configurations. `spent` is what ended attempts have cost, `left` what those that are left are predicted to.
    `skipped` and `failures` are by cause, the most frequent first. `torn_bytes` is the size of a last line that was cut off.
    """

    SCHEMA = "shardwise.experiments_status/1"
    ledger: str
    experiment: Mapping[str, Any]
    states: Mapping[str, int]
    num_attempts: int
    groups: Sequence[GroupProgress]
    spent: ExperimentCost
    left: ExperimentCost
    skipped: Sequence[CauseCount]
    failures: Sequence[CauseCount]
    coverage: IntervalCoverage
    torn_bytes: int = 0


def summarise_ledger(path: str | os.PathLike[str]) -> ExperimentStatus:
    """Return how far the experiment of a ledger is. Raises `InputError` for a file that is no ledger."""
    return summarise_content(read_ledger(path), os.fspath(path))


def summarise_content(content: LedgerContent, path: str) -> ExperimentStatus:
    """Return how far an experiment is, from what its ledger at `path` holds."""
    rows = list(content.rows.values())
    experiment = content.sessions[-1].experiment if content.sessions else {}
    states = Counter(row.state for row in rows)
    return ExperimentStatus(
        ledger=path, experiment=experiment, states={state: states[state] for state in STATES if states[state]},
        num_attempts=sum(len(row.attempts) for row in rows), groups=group_progress(rows), spent=cost_of_attempts(rows),
        left=cost_left(rows, experiment), skipped=count_causes(row.line for row in rows if row.state == "skipped"),
        failures=count_causes(
            line for row in rows for line in ended_attempts(row) if line.state != "done"
        ),
        coverage=interval_coverage(rows), torn_bytes=content.torn_bytes,
    )  # fmt: skip


def group_progress(rows: Iterable[LedgerRow]) -> tuple[GroupProgress, ...]:
    """Return the progress of each group, in the order in which they were recorded."""
    rows_by_group: dict[str, list[LedgerRow]] = {}
    for row in rows:
        rows_by_group.setdefault(row.configuration.group, []).append(row)
    return tuple(_progress_of_group(group, members) for group, members in rows_by_group.items())


def best_row(rows: Iterable[LedgerRow]) -> LedgerRow | None:
    """Return the row with the fastest measured step; None if none was measured."""
    measured = [row for row in rows if row.state == "done" and row.measurement]
    return min(measured, key=lambda row: row.measurement.step_time_s if row.measurement else 0.0, default=None)


def _progress_of_group(group: str, rows: Sequence[LedgerRow]) -> GroupProgress:
    waiting = [row for row in rows if row.state in WAITING]
    best = best_row(rows)
    low_ends = [row.prediction.ends[0] for row in waiting if row.prediction]
    return GroupProgress(
        group=group, num_configurations=len(rows), num_done=sum(row.state == "done" for row in rows), num_left=len(waiting),
        best=None if best is None else _describe_best(best), least_left_s=min(low_ends, default=None),
        settled=best is not None and not waiting,
    )  # fmt: skip


def _describe_best(row: LedgerRow) -> BestRun:
    assert row.measurement is not None
    before, measured = row.predicted_before, row.measurement
    return BestRun(
        label=row.configuration.label, fingerprint=row.configuration.fingerprint, step_time_s=measured.step_time_s,
        predicted_s=before.step_time_s if before else None, interval90=before.interval90 if before else None, mfu=measured.mfu,
        tokens_per_s_per_device=measured.tokens_per_s_per_device,
    )  # fmt: skip


def cost_of_attempts(rows: Iterable[LedgerRow]) -> ExperimentCost:
    """Return what the attempts that have ended have cost."""
    timed = [(row, line.seconds) for row in rows for line in ended_attempts(row) if line.seconds is not None]
    return _cost(timed)


def cost_left(rows: Sequence[LedgerRow], experiment: Mapping[str, Any]) -> ExperimentCost:
    """Return what the configurations that are left are predicted to cost."""
    waiting = [row for row in rows if row.state in WAITING]
    expected = RunTimes.of(rows, experiment)
    return _cost([(row, expected.seconds(row)) for row in waiting])


def _cost(timed: Sequence[tuple[LedgerRow, float]]) -> ExperimentCost:
    prices = [row.prediction.usd_per_hour if row.prediction else None for row, _ in timed]
    dollars = [
        seconds / SECONDS_PER_HOUR * price
        for (_, seconds), price in zip(timed, prices, strict=True)
        if price is not None
    ]
    return ExperimentCost(
        num_runs=len(timed),
        device_hours=sum(seconds * row.configuration.num_devices for row, seconds in timed) / SECONDS_PER_HOUR,
        usd=sum(dollars) if timed and len(dollars) == len(timed) else None,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimes:
    """Durations of runs: `start_s` besides their steps, of which there are `num_steps`; `typical_s` without a prediction."""

    num_steps: int
    start_s: float
    typical_s: float

    @classmethod
    def of(cls, rows: Iterable[LedgerRow], experiment: Mapping[str, Any]) -> RunTimes:
        """Return the times from the runs that were done, and from what the experiment assumes before one was."""
        num_steps = int(experiment.get("steps") or 0)
        done = [
            (row.measurement.step_time_s, row.line.seconds)
            for row in rows
            if row.state == "done" and row.measurement and row.line.seconds is not None
        ]
        starts = [max(seconds - num_steps * step_s, 0.0) for step_s, seconds in done]
        assumed_s = float(experiment.get("start_s") or UNKNOWN_START_S)
        return cls(
            num_steps=num_steps, start_s=median(starts) if starts else assumed_s,
            typical_s=median([seconds for _, seconds in done]) if done else assumed_s,
        )  # fmt: skip

    def seconds(self, row: LedgerRow) -> float:
        """Return the seconds that a run is predicted to take."""
        return self.typical_s if row.prediction is None else self.start_s + self.num_steps * row.prediction.step_time_s


def count_causes(lines: Iterable[LedgerLine]) -> tuple[CauseCount, ...]:
    """Return how many lines share each cause, the most frequent first."""
    examples: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for line in lines:
        cause = line.cause or line.state
        counts[cause] += 1
        examples.setdefault(cause, line.reason)
    return tuple(CauseCount(cause=cause, count=count, example=examples[cause]) for cause, count in counts.most_common())


def interval_coverage(rows: Iterable[LedgerRow]) -> IntervalCoverage:
    """Return how many measured steps lay in their predicted intervals."""
    judged = [
        before.ends[0] <= row.measurement.step_time_s <= before.ends[1]
        for row in rows
        if row.measurement and (before := row.predicted_before) and before.interval90
    ]
    return IntervalCoverage(num_inside=sum(judged), num_runs=len(judged))
