"""Plan the points of a sweep one after the other, and find the point from which scaling no longer pays (the knee)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.hardware import Cluster
from shardwise.layout import Choices
from shardwise.model import Architecture, Job
from shardwise.price import Estimate, Problem, Reliability
from shardwise.price.reliability import SECONDS_PER_HOUR
from shardwise.search.plan import Plan
from shardwise.search.planner import make_plan
from shardwise.search.sweep_values import Sweep, SweepValue, format_value
from shardwise.values import (
    COMMUNICATION_TERMS,
    Displayable,
    InputError,
    MissingValueError,
    NothingFitsError,
    Progress,
    format_seconds,
    ignore_progress,
    prefix_progress,
)

SweptValues = Mapping[str, SweepValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """Inputs of the plan at a point: the swept values (`at`), and all that follows from them."""

    at: SweptValues
    model: Architecture
    cluster: Cluster
    job: Job
    choices: Choices | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """A case with its plan, or with the reason why it has none (`error`): nothing fits, or no layout is legal."""

    case: SweepCase
    plan: Plan | None
    error: InputError | MissingValueError | NothingFitsError | None

    @property
    def at(self) -> SweptValues:
        """Swept values."""
        return self.case.at

    @property
    def name(self) -> str:
        """Swept values as text."""
        return ", ".join(f"{name}={format_value(value)}" for name, value in self.at.items())

    @property
    def usd_per_step(self) -> float | None:
        """Dollars of a step: devices · hours · price of a chip-hour; None without a plan or a sourced price."""
        price = self.case.cluster.chip.price_usd_per_hour
        if self.plan is None or price is None:
            return None
        return self.case.cluster.num_devices * self.plan.estimate.step_time_s / SECONDS_PER_HOUR * price

    @property
    def usd_per_token(self) -> float | None:
        """Dollars of a trained token, without interruptions; None if `usd_per_step` is."""
        return None if self.usd_per_step is None else self.usd_per_step / self.case.job.global_batch_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Knee:
    """First point of a series at which scaling no longer pays, and the reason."""

    point: SweepPoint
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept(Displayable):
    """Planned points of one sweep, or of two that make a grid; fewer than `num_points` if it was interrupted.

    >>> import shardwise as sw
    >>> swept = sw.sweep("gpt-2", "h100:8", over="gpus=4,8", global_batch_tokens="64Ki", seq_len=1024)
    >>> [(point.at["gpus"], point.plan.layout.num_devices) for point in swept.points]
    [(4, 4), (8, 8)]
    """

    sweeps: tuple[Sweep, ...]
    points: tuple[SweepPoint, ...]
    num_points: int

    def __repr__(self) -> str:
        names = " and ".join(sweep.name for sweep in self.sweeps)
        lines = [f"Swept: {names}, {len(self.points)} of {self.num_points} points"]
        for point in self.points:
            plan = point.plan
            figures = (
                f"step {format_seconds(plan.estimate.step_time_s)}, MFU {plan.estimate.mfu:.1%}, {plan.layout}"
                if plan
                else ""
            )
            lines.append(f"  {point.name}: {figures or point.error}")
        return "\n".join(lines)

    @property
    def along(self) -> Sweep:
        """Sweep on the horizontal axis: the one over devices, else the last with ordered values, else the last."""
        ordered = sorted(
            (sweep for sweep in reversed(self.sweeps) if sweep.is_ordered), key=lambda sweep: sweep.name != "gpus"
        )
        return ordered[0] if ordered else self.sweeps[-1]

    def series(self, along: str | None = None) -> list[tuple[SweptValues, tuple[SweepPoint, ...]]]:
        """Return the points along one sweep (default: `along`) as a series for each value of the other sweep."""
        name = along or self.along.name
        by_series: dict[tuple[tuple[str, SweepValue], ...], list[SweepPoint]] = {}
        for point in self.points:
            by_series.setdefault(tuple((key, value) for key, value in point.at.items() if key != name), []).append(
                point
            )
        return [(dict(fixed), tuple(points)) for fixed, points in by_series.items()]


def plan_cases(
    cases: Sequence[SweepCase], *, reliability: Reliability | None = None, progress: Progress = ignore_progress
) -> Iterator[SweepPoint]:
    """Yield each case with its plan, or with its error. The gain of another stack is not searched."""
    for number, case in enumerate(cases, 1):
        case_progress = prefix_progress(progress, f"{number} of {len(cases)}")
        try:
            plan = make_plan(
                Problem(case.model, case.cluster, case.job), choices=case.choices, reliability=reliability,
                progress=case_progress, elsewhere=False,
            )  # fmt: skip
        except (InputError, MissingValueError, NothingFitsError) as error:
            yield SweepPoint(case=case, plan=None, error=error)
        else:
            yield SweepPoint(case=case, plan=plan, error=None)


def step_time_parts(estimate: Estimate) -> dict[str, float]:
    """Return the seconds of a step by part: compute, recompute, exposed communication, bubble, optimizer and host; they add up.

    Exposed communication includes every axis and the step's control traffic."""
    time = estimate.time
    seconds_by_part = {
        "compute": time["forward"] + time["backward"], "recompute": time["recompute"],
        "exposed communication": sum(time[axis] for axis in (*COMMUNICATION_TERMS, "control")), "bubble": time["bubble"],
    }  # fmt: skip
    return {**seconds_by_part, "optimizer and host": time["optimizer"] + time["host"]}


def waiting_share(estimate: Estimate) -> float:
    """Return the share of a step in which devices wait: exposed communication and the bubble."""
    by_part = step_time_parts(estimate)
    return (by_part["exposed communication"] + by_part["bubble"]) / estimate.step_time_s


def find_knee(points: Sequence[SweepPoint]) -> Knee | None:
    """Return the first point that waits longer than it computes, or is bound by something else than the point before.

    Points without a plan are skipped."""
    previous: Estimate | None = None
    for point in points:
        if point.plan is None:
            continue
        estimate = point.plan.estimate
        by_part, lost_s = step_time_parts(estimate), waiting_share(estimate) * estimate.step_time_s
        compute_s = by_part["compute"] + by_part["recompute"]
        if lost_s > compute_s:
            longer = f"{format_seconds(lost_s)}, longer than compute, {format_seconds(compute_s)}"
            return Knee(point=point, reason=f"exposed communication and bubble take {longer}")
        if previous is not None and estimate.bound != previous.bound:
            return Knee(point=point, reason=f"bound by {estimate.bound} in place of {previous.bound}")
        previous = estimate
    return None
