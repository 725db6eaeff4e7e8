"""Plan one job on several clusters, compare the plans with a deadline and a budget, and suggest what would meet missed limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwise.hardware import Cluster
from shardwise.hardware.cluster_loading import iterate_sizes
from shardwise.layout import Choices
from shardwise.price import PRICE_FIELD, Limits, Problem, Reliability, Run, missing_price
from shardwise.search.plan import Plan
from shardwise.search.planner import add_other_stack_gain, make_plan
from shardwise.search.verdicts import MODEL_ERROR, NoPlanReason, no_plan_reason
from shardwise.values import (
    SECONDS_PER_DAY,
    Displayable,
    MissingValueError,
    NothingFitsError,
    Progress,
    format_count,
    format_days,
    format_usd,
    ignore_progress,
    prefix_progress,
)
from shardwise.values.errors import MissedLimitError

# Sizes that are planned in search of one that meets the limits, as multiples of what would do at the same throughput for each
# device: more devices have less, and counts with large prime factors lay out badly. The next power of two comes last.
GROWTH_FACTORS = (1.0, 1.25, 1.5)
NUM_TRIES = 4


def plan_clusters(
    problems: Iterable[Problem], *, limits: Limits | None = None, choices: Choices | None = None,
    reliability: Reliability | None = None, defaults: tuple[str, ...] = (), progress: Progress = ignore_progress,
) -> Comparison:  # fmt: skip
    """Plan a job on each cluster and choose one (`choose_contender`). A cluster on which nothing fits stays, with the reason.

    `problems` are those of one job on each of the clusters. `defaults` names what a user left out of the job."""
    limits, contenders = limits or Limits(), []
    for problem in problems:
        plan, reason, no_plan, cluster = None, None, None, problem.cluster
        try:
            plan = make_plan(
                problem, choices=choices, reliability=reliability, progress=prefix_progress(progress, cluster.name),
                elsewhere=False,
            )  # fmt: skip
            plan = replace(plan, defaults=defaults)
        except (NothingFitsError, MissingValueError) as error:
            reason, no_plan = str(error), no_plan_reason(error)
        run = plan.run if plan else None
        contenders.append(
            Contender(
                cluster=cluster.name, chip=cluster.chip.name, num_devices=cluster.num_devices, plan=plan, problem=reason,
                no_plan=no_plan, in_time=limits.in_time(run), within_budget=limits.within_budget(run),
            )
        )  # fmt: skip
    comparison = replace(choose_contender(contenders, limits), choices=choices)
    if comparison.chosen is None or comparison.plan is None:
        return comparison
    plan = add_other_stack_gain(
        comparison.plan, choices, progress
    )  # of the chosen plan only: it takes as long as a plan
    contenders[comparison.chosen] = replace(contenders[comparison.chosen], plan=plan)
    return replace(comparison, contenders=tuple(contenders))


def describe_missed_limits(limits: Limits, run: Run) -> list[str]:
    """Describe each limit that a run misses, or that cannot be judged, and by how much."""
    misses = []
    if limits.deadline_s is not None and limits.in_time(run) is False:
        deadline = limits.deadline_s / SECONDS_PER_DAY
        misses.append(
            f"{format_days(run.days)} are {format_days(run.days - deadline)} more than the deadline of {format_days(deadline)} "
            f"({run.days / deadline - 1:.0%} too long{_met_at_best(run.days_interval90, deadline, format_days)})"
        )
    if limits.budget_usd is not None and run.usd is None:
        misses.append(
            f"no sourced {PRICE_FIELD}, so a budget cannot be checked: give one with --set chip.{PRICE_FIELD}=VALUE"
        )
    elif limits.budget_usd is not None and run.usd is not None and limits.within_budget(run) is False:
        misses.append(
            f"{format_usd(run.usd)} is {format_usd(run.usd - limits.budget_usd)} more than the budget of "
            f"{format_usd(limits.budget_usd)} ({run.usd / limits.budget_usd - 1:.0%} too much"
            f"{_met_at_best(run.usd_interval90, limits.budget_usd, format_usd)})"
        )
    return misses


def _met_at_best(interval: tuple[float, float] | None, limit: float, form: Callable[[float], str]) -> str:
    """Return that the lower end of an interval meets a limit which the prediction misses; "" where it does not."""
    return (
        f"; the lower end of its 90% interval, {form(interval[0])}, meets it"
        if interval and interval[0] <= limit
        else ""
    )


def require_within_limits(
    plan: Plan, limits: Limits, choices: Choices | None = None, progress: Progress = ignore_progress
) -> None:
    """Raise `MissedLimitError` for a plan whose run misses a limit: by how much, and what would meet it.

    A budget without a price is wrong input: `MissingValueError` names the value.
    """
    if not limits or limits.met(plan.run):
        return
    assert plan.run is not None  # limits are of a run with a length
    if limits.budget_usd is not None and plan.run.usd is None:
        raise missing_price([plan.cluster.chip.name])
    lines = [f"{plan.cluster.name}: {line}" for line in describe_missed_limits(limits, plan.run)]
    remedies = suggest_remedies(plan, limits, choices=choices, progress=progress)
    raise MissedLimitError("\n".join([*lines, *(f"what would do: {line}" for line in remedies)]))


def suggest_remedies(
    missed: Plan, limits: Limits, *, choices: Choices | None = None, progress: Progress = ignore_progress
) -> list[str]:
    """Suggest cluster sizes, an MFU, fewer tokens or a price that would meet the missed limits; other sizes are planned."""
    run, remedies = missed.run, []
    assert run is not None
    late, dear = limits.in_time(run) is False, limits.within_budget(run) is False
    if late or dear:
        remedies.append(_plan_other_sizes(missed, run, limits, choices, progress, more=late))
    if late and limits.deadline_s is not None:
        remedies.append(_required_mfu_text(missed, run.days * SECONDS_PER_DAY / limits.deadline_s))
    if dear and limits.budget_usd is not None and run.usd is not None:
        share = limits.budget_usd / run.usd
        remedies.append(
            f"{format_count(share * run.tokens)} of the {format_count(run.tokens)} tokens, or "
            f"${limits.budget_usd / run.chip_hours:.2f} a chip-hour in place of ${run.usd / run.chip_hours:.2f}"
        )
    return remedies


def _required_mfu_text(missed: Plan, speedup: float) -> str:
    mfu = missed.estimate.mfu * speedup
    if mfu > 1:
        return f"no layout on these devices: {mfu:.0%} of their peak would be needed (the plan reaches {missed.estimate.mfu:.1%})"
    return (
        f"an MFU of {mfu:.1%} on these devices, with as few interruptions (the plan reaches {missed.estimate.mfu:.1%})"
    )


def _plan_other_sizes(
    missed: Plan, run: Run, limits: Limits, choices: Choices | None, progress: Progress, *, more: bool
) -> str:
    """Describe the first cluster with more (or fewer) chips that meets all limits, planned again."""
    size_ratio = run.days * SECONDS_PER_DAY / limits.deadline_s if more and limits.deadline_s else 0.5
    tried: list[tuple[Cluster, Run]] = []
    unfit: list[str] = []
    for cluster in _sizes_to_try(missed.cluster, size_ratio):
        try:
            other_run = make_plan(
                Problem(missed.model, cluster, missed.job), choices=choices, reliability=run.reliability,
                progress=prefix_progress(progress, cluster.name), elsewhere=False,
            ).run  # fmt: skip
        except NothingFitsError:
            unfit.append(cluster.name)
            continue
        assert other_run is not None
        if limits.met(other_run):
            return f"{cluster.name}, planned again: {_run_summary(other_run)}"
        tried.append((cluster, other_run))
    if tried:
        nearest, nearest_run = min(tried, key=lambda pair: pair[1].days if more else _known_usd(pair[1]))
        names = ", ".join(cluster.name for cluster, _ in tried)
        return f"none of {names}, planned again, does it; {nearest.name} takes {_run_summary(nearest_run)}"
    if more:
        if unfit:
            return f"the model does not fit on {', '.join(unfit)}, the larger clusters that were planned"
        return (
            f"{math.ceil(missed.cluster.num_devices * size_ratio):,} devices, if each had the throughput that it has here "
            "(not planned: more links, smaller shares of the batch)"
        )
    return f"the model does not fit on {', '.join(unfit)}" if unfit else "no smaller cluster of this chip is known"


def _known_usd(run: Run) -> float:
    """Return the dollars of a run; infinite where they are not known, so that they are never the fewest."""
    return math.inf if run.usd is None else run.usd


def _sizes_to_try(cluster: Cluster, size_ratio: float) -> list[Cluster]:
    if size_ratio < 1:
        return list(itertools.islice(iterate_sizes(cluster, size_ratio), NUM_TRIES))
    min_ratios = [size_ratio * growth for growth in GROWTH_FACTORS] + [2.0 ** math.ceil(math.log2(size_ratio))]
    candidates = {
        candidate.name: candidate
        for candidate in (next(iterate_sizes(cluster, min_ratio), None) for min_ratio in min_ratios)
        if candidate
    }
    return sorted(candidates.values(), key=lambda candidate: candidate.num_devices)


def _run_summary(run: Run) -> str:
    dollars = "" if run.usd is None else f", {format_usd(run.usd)}"
    return f"{run.days:.1f} days, {format_count(run.chip_hours)} chip-hours{dollars}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One cluster: its plan, or the reason for none (`problem`, in short `no_plan`); which limits it meets (None: not known)."""

    cluster: str
    chip: str
    num_devices: int
    plan: Plan | None
    problem: str | None
    in_time: bool | None
    within_budget: bool | None
    no_plan: NoPlanReason | None = None

    @property
    def run(self) -> Run | None:
        """Whole run on this cluster."""
        return self.plan.run if self.plan else None

    @property
    def stack(self) -> str | None:
        """Stack for which its plan is predicted; None for a bound."""
        calibration = self.plan.cluster.calibration if self.plan else None
        return calibration.stack if calibration else None

    @property
    def interval90(self) -> tuple[float, float] | None:
        """90% prediction interval of the step in seconds; None for a bound."""
        return self.plan.estimate.interval90 if self.plan else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of its estimate, such as a chip that is priced at its peak."""
        return tuple(self.plan.estimate.notes) if self.plan else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Displayable):
    """Contenders in the order given, and the index of the chosen one (`chosen`); None if none meets the limits.

    `reason` says why it was chosen, or what comes nearest to the limits. `choices` are those of the search.

    >>> import shardwise as sw
    >>> limits = sw.Limits(budget_usd=1e6)
    >>> comparison = sw.plan_clusters(
    ...     "gpt-2", ["h100:8", "h100:16"], limits=limits, global_batch_tokens="64Ki", seq_len=1024, tokens="10G"
    ... )
    >>> comparison.contenders[comparison.chosen].plan is comparison.plan
    True
    """

    contenders: tuple[Contender, ...]
    limits: Limits
    chosen: int | None
    reason: str
    choices: Choices | None = None

    @property
    def plan(self) -> Plan | None:
        """Plan of the chosen contender, or None."""
        return None if self.chosen is None else self.contenders[self.chosen].plan


def describe_near_misses(comparison: Comparison, progress: Progress = ignore_progress) -> Iterator[str]:
    """Yield what each cluster misses, and for the one that misses by the least what would meet the limits."""
    limits = comparison.limits
    planned = [
        (contender, contender.plan, contender.run)
        for contender in comparison.contenders
        if contender.plan and contender.run
    ]
    for contender in comparison.contenders:
        missed = (
            describe_missed_limits(limits, contender.run) if contender.run else [contender.problem or "nothing fits"]
        )
        yield from (f"{contender.cluster}: {line}" for line in missed)
    by_days = limits.deadline_s is not None
    nearest, plan, _ = min(planned, key=lambda row: row[2].days if by_days else _known_usd(row[2]))
    for line in suggest_remedies(plan, limits, choices=comparison.choices, progress=progress):
        yield f"what would do for {nearest.cluster}: {line}"


def choose_contender(contenders: Sequence[Contender], limits: Limits) -> Comparison:
    """Choose: with a deadline the cheapest that meets all limits, otherwise the fastest that does.

    If one of those has no sourced price, chip-hours decide in place of dollars. A job without a length in tokens is compared by
    its step time."""
    able = [i for i, contender in enumerate(contenders) if contender.plan and (not limits or limits.met(contender.run))]
    if not able:
        reason = _reason_for_none(contenders, limits)
        return Comparison(contenders=tuple(contenders), limits=limits, chosen=None, reason=reason)
    measure, reason = _deciding_measure([contenders[i] for i in able], limits)
    ranked = sorted(able, key=lambda i: measure(contenders[i]))
    if len(ranked) > 1:
        lead = measure(contenders[ranked[1]]) / measure(contenders[ranked[0]]) - 1
        if lead < MODEL_ERROR:
            reason += f"; {contenders[ranked[1]].cluster} is within {lead:.1%}, below the model's error"
    return Comparison(contenders=tuple(contenders), limits=limits, chosen=ranked[0], reason=reason)


def _reason_for_none(contenders: Sequence[Contender], limits: Limits) -> str:
    """Return why no cluster is chosen; a cluster of which something is not known is not said to miss a limit, or not to fit."""
    if any(contender.plan for contender in contenders):
        costs_are_known = all(
            contender.within_budget is not None for contender in contenders if contender.plan and limits.budget_usd
        )
        return f"no cluster {'meets' if costs_are_known else 'is known to meet'} the {limit_names(limits)}"
    reasons = {contender.no_plan or "nothing fits" for contender in contenders}
    if reasons == {"nothing fits"}:
        return "no layout fits on any of the clusters"
    listed = ", ".join(f"{contender.cluster}: {contender.no_plan or 'nothing fits'}" for contender in contenders)
    return f"no cluster has a plan ({listed})"


def limit_names(limits: Limits) -> str:
    """Return the names of the limits that are set: "deadline", "budget", "deadline and the budget" or ""."""
    named = {"deadline": limits.deadline_s, "budget": limits.budget_usd}
    return " and the ".join(name for name, limit in named.items() if limit is not None)


def _deciding_measure(eligible: Sequence[Contender], limits: Limits) -> tuple[Callable[[Contender], float], str]:
    """Return the quantity that decides (less is better), and its wording."""
    if limits.deadline_s is None:
        return _run_seconds, "the fastest" if limits.budget_usd is None else "the fastest within the budget"
    condition = "meets the deadline" + ("" if limits.budget_usd is None else " and the budget")
    unpriced_chips = sorted({contender.chip for contender in eligible if contender.run and contender.run.usd is None})
    if unpriced_chips:
        return (
            _run_chip_hours,
            f"the one of the fewest chip-hours that {condition}: no sourced {PRICE_FIELD} for {', '.join(unpriced_chips)}",
        )
    return _run_usd, f"the cheapest that {condition}"


def _run_seconds(contender: Contender) -> float:
    """Seconds of the run; of a step if the length is unknown, which gives the same order without interruptions."""
    assert contender.plan
    return contender.run.days * SECONDS_PER_DAY if contender.run else contender.plan.estimate.step_time_s


def _run_chip_hours(contender: Contender) -> float:
    assert contender.run
    return contender.run.chip_hours


def _run_usd(contender: Contender) -> float:
    assert contender.run
    assert contender.run.usd is not None
    return contender.run.usd
