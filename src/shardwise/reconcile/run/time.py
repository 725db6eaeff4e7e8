"""The seconds of a step by term, predicted against measured, and the term that is to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from shardwise.cost.estimate import Estimate, estimate
from shardwise.job import OVERLAPS
from shardwise.measurement.record import MEASURED_TERMS, StepRecord
from shardwise.planning.explain.constants import worsened
from shardwise.planning.plan import Plan
from shardwise.terms import TIME_TERMS

CLOSE = 0.05  # a step as close as that to its prediction has no term to blame
MOVES = 1e-6  # of a step: a term that moves by more hangs on what was changed


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm:
    """One term. `predicted_s` is None for what no estimate has; `hidden_s` is traffic that is predicted behind compute."""

    name: str
    predicted_s: float | None
    measured_s: float
    hidden_s: float = 0.0

    @property
    def difference_s(self) -> float:
        return self.measured_s - (self.predicted_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """A step: predicted, with the interval of nine of ten runs (None: the prediction is a bound), and measured: the median, and
    the 10th and 90th percentile, of `num_steps`. `rest_s` is the median of what no term of the estimate has."""

    predicted_s: float
    interval90: tuple[float, float] | None
    measured_s: float
    low_s: float
    high_s: float
    num_steps: int
    rest_s: float
    terms: tuple[TimeTerm, ...]

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.predicted_s

    @property
    def within(self) -> bool | None:
        """Whether the median is within the interval; None where there is none."""
        return None if self.interval90 is None else self.interval90[0] <= self.measured_s <= self.interval90[1]

    @property
    def rest_share(self) -> float:
        return self.rest_s / self.measured_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Guilty:
    """The term whose difference is the most of the step's error, `part` of it, and what it hangs on, what moves it most first."""

    term: TimeTerm
    part: float
    hangs_on: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None for a term that is not predicted."""
        return self.term.measured_s / self.term.predicted_s if self.term.predicted_s else None


def step_time(priced: Estimate, steps: Sequence[StepRecord]) -> StepTime:
    """Each term's median beside its prediction. Medians of terms do not add up to that of the step exactly."""
    ordered = sorted(record.step_time_s for record in steps)
    tenth = len(ordered) // 10
    return StepTime(
        predicted_s=priced.step_time_s, interval90=priced.interval90, measured_s=median(ordered), low_s=ordered[tenth],
        high_s=ordered[-1 - tenth], num_steps=len(ordered), terms=tuple(_terms(priced, steps)),
        rest_s=median(one.step_time_s - sum(one.seconds.get(name, 0.0) for name in TIME_TERMS) for one in steps),
    )  # fmt: skip


def _terms(priced: Estimate, steps: Sequence[StepRecord]) -> Iterator[TimeTerm]:
    for name in MEASURED_TERMS:
        predicted = priced.time[name] if name in TIME_TERMS else None
        measured = median(record.seconds.get(name, 0.0) for record in steps)
        yield TimeTerm(name=name, predicted_s=predicted, measured_s=measured, hidden_s=priced.hidden.get(name, 0.0))


def guilty(found: StepTime, hangs_on: Callable[[str], tuple[str, ...]]) -> Guilty | None:
    """The term to blame; None where the step is as predicted, within `CLOSE`."""
    error = found.difference_s
    if abs(error) <= CLOSE * found.measured_s:
        return None
    worst = max(found.terms, key=lambda term: term.difference_s / error)
    return Guilty(term=worst, part=worst.difference_s / error, hangs_on=hangs_on(worst.name))


def hangs_on(plan: Plan, term: str) -> tuple[str, ...]:
    """The constants and conventions that a term's price hangs on: those that move it when the plan is priced with another one.

    For what is not predicted there is none.
    """
    if term not in TIME_TERMS:
        return ()
    own = estimate(plan.model, plan.cluster, plan.job, plan.layout)
    others = [(name, cluster, plan.job) for name, _, cluster in worsened(plan)]
    others += [("job.overlap", plan.cluster, replace(plan.job, overlap=one)) for one in OVERLAPS]
    moved: dict[str, float] = {}
    for name, cluster, job in others:
        change = abs(estimate(plan.model, cluster, job, plan.layout).time[term] - own.time[term])
        if change > MOVES * own.step_time_s:
            moved[name] = max(change, moved.get(name, 0.0))
    return tuple(sorted(moved, key=lambda name: -moved[name]))
