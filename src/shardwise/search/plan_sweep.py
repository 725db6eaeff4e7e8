"""Plan the points of a sweep one after the other, and find the point from which scaling no longer pays (the knee)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardwise.hardware import Cluster
from shardwise.layout import Choices, choices_from_pins, job_for_engine
from shardwise.model import Architecture, Job
from shardwise.price import ClusterLike, Estimate, ModelLike, Problem, Reliability, resolve_problem
from shardwise.price.reliability import SECONDS_PER_HOUR
from shardwise.search.plan import Plan
from shardwise.search.planner import make_plan
from shardwise.search.sweep_values import (
    JOB_FIELDS,
    JOB_SWEEPS,
    Sweep,
    SweepValue,
    format_value,
    grid_points,
    resize_shorthand,
)
from shardwise.search.verdicts import NoPlanReason, error_without_plan, no_plan_reason
from shardwise.values import (
    COMMUNICATION_TERMS,
    Displayable,
    InputError,
    MissingValueError,
    NothingFitsError,
    Progress,
    argument_label,
    format_seconds,
    ignore_progress,
    parse_overrides,
    prefix_progress,
    raise_problems,
    run_all,
)

SweptValues = Mapping[str, SweepValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCase:
    """Inputs of the plan at a point: the swept values (`at`), and all that follows from them.

    `defaults` names what a user left out: "seq_len", "batch_tokens".
    """

    at: SweptValues
    model: Architecture
    cluster: Cluster
    job: Job
    choices: Choices | None
    reliability: Reliability | None = None
    defaults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """A case with its plan, or with the reason why it has none (`error`, in short `no_plan`)."""

    case: SweepCase
    plan: Plan | None
    error: InputError | MissingValueError | NothingFitsError | None

    @property
    def at(self) -> SweptValues:
        """Swept values."""
        return self.case.at

    @property
    def no_plan(self) -> NoPlanReason | None:
        """Reason in two or three words why it has no plan; None for a point with one."""
        return None if self.error is None else no_plan_reason(self.error)

    @property
    def name(self) -> str:
        """Swept values as text."""
        return ", ".join(f"{name}={format_value(value)}" for name, value in self.at.items())

    @property
    def usd_per_step(self) -> float | None:
        """Dollars of a step: devices · hours · price of a chip-hour; None without a plan or a sourced price."""
        return None if self.plan is None else self._step_usd(self.plan.estimate.step_time_s)

    @property
    def usd_per_step_interval90(self) -> tuple[float, float] | None:
        """Dollars of a step at the ends of its 90% prediction interval; None for a bound, and if `usd_per_step` is."""
        interval = self.plan.estimate.interval90 if self.plan else None
        low, high = map(self._step_usd, interval or (0.0, 0.0))
        return None if interval is None or low is None or high is None else (low, high)

    @property
    def usd_per_token(self) -> float | None:
        """Dollars of a trained token, without interruptions; None if `usd_per_step` is."""
        return None if self.usd_per_step is None else self.usd_per_step / self.case.job.global_batch_tokens

    @property
    def usd_per_token_interval90(self) -> tuple[float, float] | None:
        """Dollars of a trained token at the ends of the step's interval; None if `usd_per_step_interval90` is."""
        tokens, interval = self.case.job.global_batch_tokens, self.usd_per_step_interval90
        return interval and (interval[0] / tokens, interval[1] / tokens)

    def _step_usd(self, step_time_s: float) -> float | None:
        price = self.case.cluster.chip.price_usd_per_hour
        return None if price is None else self.case.cluster.num_devices * step_time_s / SECONDS_PER_HOUR * price


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

    @property
    def is_complete(self) -> bool:
        """True unless the sweep was interrupted before its last point."""
        return len(self.points) == self.num_points

    @property
    def defaults(self) -> tuple[str, ...]:
        """The names of what a user left out, and was assumed: "seq_len", "batch_tokens"."""
        return self.points[0].case.defaults if self.points else ()

    @property
    def interruption(self) -> str:
        """Say how many points were planned before an interruption; empty if all were."""
        return "" if self.is_complete else f"stopped after {len(self.points)} of {self.num_points} points"

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


def sweep_cases(
    model: ModelLike, cluster: ClusterLike, job: Job | None, fields: Mapping[str, Any], sweeps: Sequence[Sweep], *,
    pins: Mapping[str, Any], maxima: Mapping[str, Any], choices: Choices | None = None, runnable: bool = False,
    divisible: bool = False, reliability: Reliability | None = None,
) -> list[SweepCase]:  # fmt: skip
    """Return the inputs of every point of one sweep or two, whose values replace what the other arguments say.

    `fields` are those of `price.resolve_problem`. Raises `InputError` with all that is wrong.
    """
    _require_not_swept(pins, fields, [sweep.name for sweep in sweeps])
    make_case = partial(
        _sweep_case, model, cluster, job, fields, pins=pins, maxima=maxima, choices=choices, runnable=runnable,
        divisible=divisible, reliability=reliability,
    )  # fmt: skip
    cases: list[SweepCase] = run_all(*(partial(make_case, swept_values) for swept_values in grid_points(sweeps)))
    return cases


def _require_not_swept(pins: Mapping[str, Any], fields: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise `InputError` for pins and overrides of what is swept."""
    overridden = parse_overrides(fields.get("overrides", ()))["job"]
    fixed = [(f"{argument_label('pins')} {name}", name) for name in pins if name in names]
    fixed += [
        (f"--set job.{field}", name) for name, field in JOB_FIELDS.items() if name in names and field in overridden
    ]
    raise_problems(
        [f"{label}: found {argument_label('over')} {name} with it; leave out one of the two" for label, name in fixed]
    )


def _sweep_case(
    model: ModelLike, cluster: ClusterLike, job: Job | None, fields: Mapping[str, Any], swept_values: SweptValues, *,
    pins: Mapping[str, Any], maxima: Mapping[str, Any], choices: Choices | None, runnable: bool, divisible: bool,
    reliability: Reliability | None,
) -> SweepCase:  # fmt: skip
    if "gpus" in swept_values and isinstance(cluster, Cluster):
        raise InputError(
            f"{argument_label('over')} gpus: found a Cluster, which has one size; its name is required, such as 'h100:64'"
        )
    inputs = resolve_problem(
        str(swept_values["model"]) if "model" in swept_values else model,
        [resize_shorthand(str(cluster), swept_values["gpus"]) if "gpus" in swept_values else cluster],
        job,
        {**fields, **{field: swept_values[name] for name, field in JOB_FIELDS.items() if name in swept_values}},
    )
    swept_pins = {name: value for name, value in swept_values.items() if name not in JOB_SWEEPS}
    return SweepCase(
        at=swept_values, model=inputs.architecture, cluster=inputs.clusters[0],
        job=job_for_engine(inputs.job) if runnable else inputs.job,
        choices=choices_from_pins({**pins, **swept_pins}, maxima, choices, runnable=runnable, divisible=divisible),
        reliability=reliability or inputs.reliability, defaults=inputs.default_names,
    )  # fmt: skip


def plan_cases(cases: Sequence[SweepCase], *, progress: Progress = ignore_progress) -> Iterator[SweepPoint]:
    """Yield each case with its plan, or with its error. The gain of another stack is not searched."""
    for number, case in enumerate(cases, 1):
        case_progress = prefix_progress(progress, f"{number} of {len(cases)}")
        try:
            plan = make_plan(
                Problem(case.model, case.cluster, case.job), choices=case.choices, reliability=case.reliability,
                progress=case_progress, elsewhere=False,
            )  # fmt: skip
        except (InputError, MissingValueError, NothingFitsError) as error:
            yield SweepPoint(case=case, plan=None, error=error)
        else:
            yield SweepPoint(case=case, plan=replace(plan, defaults=case.defaults), error=None)


def run_sweep(
    sweeps: Sequence[Sweep],
    cases: Sequence[SweepCase],
    *,
    keep_interrupted: bool = False,
    progress: Progress = ignore_progress,
) -> Swept:
    """Plan every case. With `keep_interrupted` Ctrl-C returns the points that were planned by then, if one of them has a plan."""
    points: list[SweepPoint] = []
    try:
        for point in plan_cases(cases, progress=progress):
            points.append(point)
    except KeyboardInterrupt:
        if not keep_interrupted or not any(point.plan for point in points):
            raise
    return Swept(sweeps=tuple(sweeps), points=tuple(points), num_points=len(cases))


def require_a_plan(swept: Swept) -> None:
    """Raise if no point has a plan: `NothingFitsError` if nothing fits at one of them, else what all of them lack."""
    if any(point.plan for point in swept.points):
        return
    lines = [f"{point.name}: {point.error}" for point in swept.points]
    raise error_without_plan((point.no_plan for point in swept.points), lines)


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
