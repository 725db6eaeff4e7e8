"""Choose what to run next: what may be the best of its group, in the order of what a run is expected to gain for its cost.

What needs more memory than the devices have is recorded as such, and a sample of the nearest is run to test that claim. What
cannot be the best within its interval is skipped, with the step that it would have to beat. Each measured run renews the
predictions of the others (`renewed_predictions`), so that both may change. The end is reached when nothing is left that may be
the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.measure.experiments.candidates import Candidate
from shardwise.measure.experiments.grid_file import ExperimentBudget
from shardwise.measure.experiments.ledger import LedgerRow
from shardwise.measure.experiments.ledger_lines import LedgerLine, RunPrediction
from shardwise.measure.experiments.ledger_summary import RunTimes, best_row
from shardwise.measure.experiments.listed_order import device_hours, within_budget
from shardwise.measure.experiments.renewed_predictions import LogStep, StepTerms, renew_predictions, renewed
from shardwise.values import format_bytes, format_seconds

CANNOT_WIN, NO_MEMORY = "cannot be the best", "predicted out of memory"
MOVED = 0.02  # by which a prediction must change before it is recorded again
DOES_NOT_FIT = "does not fit"


@dataclass(slots=True)
class ExpectedInformation:
    """Chooses among predicted configurations; `num_borderline` of those that are predicted not to fit are run all the same.

    `experiment` is what the ledger says about it. Implements `driver.RunChooser`.
    """

    candidates: Mapping[str, Candidate]
    budget: ExperimentBudget
    experiment: Mapping[str, Any]
    num_borderline: int = 2
    _steps: dict[str, LogStep] = field(default_factory=dict)
    _terms: dict[str, StepTerms] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, candidate in self.candidates.items():
            prediction = candidate.predict()
            assert prediction is not None  # of candidates with a problem
            self._terms[name] = StepTerms(prediction=prediction, time=candidate.step_terms)

    def review(self, rows: Mapping[str, LedgerRow]) -> Sequence[LedgerLine]:
        """Return the changes that follow from what has been measured: renewed predictions, what is skipped and what no more."""
        self._renew(rows)
        return list(self._changes(rows))

    def _renew(self, rows: Mapping[str, LedgerRow]) -> None:
        """Renew all predictions; runs of one stack and chip err together, whatever their group."""
        names = list(self.candidates)
        measured = [
            (index, row.measurement.step_time_s)
            for index, name in enumerate(names)
            if (row := rows[name]).state == "done" and row.measurement
        ]
        steps = renew_predictions([self._terms[name] for name in names], measured)
        self._steps = dict(zip(names, steps, strict=True))

    def _changes(self, rows: Mapping[str, LedgerRow]) -> Iterator[LedgerLine]:
        best_s = self._best_by_group(rows)
        tested, allowed = set(self._borderline(rows)), self._allowed_excess(rows)
        for name, candidate in self.candidates.items():
            row = rows[name]
            if not row.is_open or row.line.cause not in ("", CANNOT_WIN, NO_MEMORY):
                continue
            new = renewed(self._terms[name].prediction, self._steps[name])
            reason = self._excess_reason(new, allowed) if name not in tested else ""
            cause, bound = (NO_MEMORY, None) if reason else (CANNOT_WIN, best_s.get(candidate.configuration.group))
            if not reason and bound is not None and name not in tested and new.ends[0] >= bound:
                reason = (
                    f"its interval begins at {format_seconds(new.ends[0])}, and the best is {format_seconds(bound)}"
                )
            if reason and row.state == "predicted":
                yield LedgerLine(
                    fingerprint=name, state="skipped", reason=reason, cause=cause, bound_s=bound, prediction=new
                )
            elif not reason and row.state == "skipped":
                yield LedgerLine(
                    fingerprint=name, state="predicted", reason="may be the best after all", prediction=new
                )
            elif not reason and _has_moved(row.prediction, new):
                yield LedgerLine(fingerprint=name, state="predicted", prediction=new, reason=row.line.reason)

    def _best_by_group(self, rows: Mapping[str, LedgerRow]) -> dict[str, float]:
        """Return the fastest measured step of each group that has one."""
        members: dict[str, list[LedgerRow]] = {}
        for name, candidate in self.candidates.items():
            members.setdefault(candidate.configuration.group, []).append(rows[name])
        best = {group: best_row(group_rows) for group, group_rows in members.items()}
        return {group: row.measurement.step_time_s for group, row in best.items() if row and row.measurement}

    def _borderline(self, rows: Mapping[str, LedgerRow]) -> list[str]:
        """Return the configurations nearest beyond the memory, which test whether predictions of it are right."""
        beyond = [name for name, terms in self._terms.items() if terms.prediction.fits == DOES_NOT_FIT]
        return sorted(beyond, key=lambda name: _excess(self._terms[name].prediction))[: self.num_borderline]

    def _allowed_excess(self, rows: Mapping[str, LedgerRow]) -> float:
        """Return the largest share of the memory that a run was predicted to need and did with."""
        done = [_excess(self._terms[name].prediction) for name in self.candidates if rows[name].state == "done"]
        return max(done, default=0.0)

    def _excess_reason(self, prediction: RunPrediction, allowed: float) -> str:
        """Return why a prediction does not fit; "" for one that fits, or needs no more than a run that did."""
        if prediction.fits != DOES_NOT_FIT or _excess(prediction) <= allowed:
            return ""
        num_bytes, capacity = prediction.memory_bytes or 0.0, prediction.capacity_bytes or 0.0
        return f"needs {format_bytes(num_bytes)} of {format_bytes(capacity)}"

    def order(self, rows: Mapping[str, LedgerRow]) -> Sequence[LedgerRow]:
        """Return what may be run within the budget: the best predictions of groups without a run, then by expected gain."""
        waiting = [rows[name] for name in self.candidates if rows[name].state == "predicted"]
        best_s, times = self._best_by_group(rows), RunTimes.of(rows.values(), self.experiment)
        tested = set(self._borderline(rows))
        started = {row.configuration.group for name, row in rows.items() if name in self.candidates and row.attempts}
        firsts: dict[str, LedgerRow] = {}
        for row in sorted(waiting, key=lambda row: self._steps[row.configuration.fingerprint].mean):
            if row.configuration.fingerprint not in tested:
                firsts.setdefault(row.configuration.group, row)

        def worth(row: LedgerRow) -> float:
            name, group = row.configuration.fingerprint, row.configuration.group
            if group not in started and firsts.get(group) is row:
                return math.inf
            if name in tested:
                return 0.0
            reference_s = best_s.get(group) or math.exp(self._steps[firsts[group].configuration.fingerprint].mean)
            return self._steps[name].expected_improvement(reference_s) / device_hours(row, times)

        return within_budget(sorted(waiting, key=worth, reverse=True), rows, self.budget, self.experiment)


def _excess(prediction: RunPrediction) -> float:
    """Return the memory that a prediction needs, as a share of what there is."""
    return (prediction.memory_bytes or 0.0) / (prediction.capacity_bytes or 1.0)


def _has_moved(before: RunPrediction | None, after: RunPrediction) -> bool:
    if before is None:
        return True
    pairs = zip((before.step_time_s, *before.ends), (after.step_time_s, *after.ends), strict=True)
    return any(abs(new / old - 1.0) > MOVED for old, new in pairs)
