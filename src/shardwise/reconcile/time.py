"""The seconds of a step by term, predicted against measured, and the term that its error is attributed to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from shardwise.cost.estimate import Estimate, estimate
from shardwise.job import OVERLAPS
from shardwise.measurement.record import MEASURED_TERMS, StepRecord
from shardwise.planning.explain.constants import worsened
from shardwise.planning.plan import Plan
from shardwise.terms import TIME_TERMS

CLOSE = 0.05  # a step as close as that to its prediction has no attribution
OTHER = "other"  # the measured term that takes what no other term has
MOVES = 1e-6  # of a step: a term that moves by more depends on what was changed


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
    """A step: predicted, with its 90% prediction interval (None: the prediction is a bound), and measured.

    `measured_s` is the mean over the middle half of `num_steps` steps by their time, and each term's seconds are the mean over
    the same steps: they add up to it. `low_s` and `high_s` are the 10th and 90th percentile of all steps; `rest_s` is the part of
    `measured_s` that no term of the estimate has.
    """

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
        """Whether the measured step is within the interval; None where there is none."""
        return None if self.interval90 is None else self.interval90[0] <= self.measured_s <= self.interval90[1]

    @property
    def rest_share(self) -> float:
        return self.rest_s / self.measured_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The term whose difference is the most of the step's error, `part` of it, and what it depends on, the most first."""

    term: TimeTerm
    part: float
    depends_on: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None for a term that is not predicted."""
        return self.term.measured_s / self.term.predicted_s if self.term.predicted_s else None


def step_time(priced: Estimate, steps: Sequence[StepRecord]) -> StepTime:
    """Each term's measured seconds beside its prediction."""
    ordered = sorted(steps, key=lambda record: record.step_time_s)
    tenth, quarter = len(ordered) // 10, len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    terms = tuple(_terms(priced, middle))
    return StepTime(
        predicted_s=priced.step_time_s, interval90=priced.interval90,
        measured_s=fmean(record.step_time_s for record in middle), low_s=ordered[tenth].step_time_s,
        high_s=ordered[-1 - tenth].step_time_s, num_steps=len(ordered), terms=terms,
        rest_s=sum(term.measured_s for term in terms if term.name not in TIME_TERMS),
    )  # fmt: skip


def _terms(priced: Estimate, steps: Sequence[StepRecord]) -> Iterator[TimeTerm]:
    """Means over some steps; what none of a step's terms has is `other`."""
    for name in MEASURED_TERMS:
        predicted = priced.time[name] if name in TIME_TERMS else None
        measured = fmean(_other_s(record) if name == OTHER else record.seconds.get(name, 0.0) for record in steps)
        yield TimeTerm(name=name, predicted_s=predicted, measured_s=measured, hidden_s=priced.hidden.get(name, 0.0))


def _other_s(record: StepRecord) -> float:
    return record.step_time_s - sum(seconds for name, seconds in record.seconds.items() if name != OTHER)


def attribution(found: StepTime, depends_on: Callable[[str], tuple[str, ...]]) -> Attribution | None:
    """The term that the error is attributed to; None where the step is as predicted, within `CLOSE`."""
    error = found.difference_s
    if abs(error) <= CLOSE * found.measured_s:
        return None
    worst = max(found.terms, key=lambda term: term.difference_s / error)
    return Attribution(term=worst, part=worst.difference_s / error, depends_on=depends_on(worst.name))


def depends_on(plan: Plan, term: str) -> tuple[str, ...]:
    """The constants and conventions that a term's price depends on: those that move it when the plan is priced with others.

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
