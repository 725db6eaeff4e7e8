"""Choose the batch and the cluster that reach a loss soonest, or for the fewest dollars: every batch is planned on every
cluster.

Entry point: `plan_to_loss`. The result also says whether another noise scale would choose another batch or cluster."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from shardwise.batch_size import LossTarget
from shardwise.layout import Choices
from shardwise.model import Job
from shardwise.price import PRICE_FIELD, Limits, Problem, Reliability
from shardwise.search.compare_clusters import describe_missed_limits, limit_names
from shardwise.search.loss_time import Goal, LossPoint, LossSearch, NoiseSensitivity, time_to_loss, training_run_to_loss
from shardwise.search.planner import add_other_stack_gain, make_plan
from shardwise.search.verdicts import RESOLUTION, error_without_plan, no_plan_reason
from shardwise.values import (
    InputError,
    MissingValueError,
    NothingFitsError,
    Progress,
    format_binary,
    ignore_progress,
    prefix_progress,
)

# On each side of the noise scale: beyond them the fewest tokens, or steps, are nearly reached (6% more).
DOUBLINGS_AROUND = 4


def batches_around(noise_tokens: float, seq_len: int) -> tuple[int, ...]:
    """Return batches in doublings around a noise scale, of whole sequences, in tokens.

    >>> batches_around(1.2 * 2**20, 4096)[:3], len(batches_around(1.2 * 2**20, 4096))
    ((65536, 131072, 262144), 9)
    """
    nearest = round(math.log2(noise_tokens / seq_len))
    exponents = range(max(nearest - DOUBLINGS_AROUND, 0), max(nearest + DOUBLINGS_AROUND, 0) + 1)
    return tuple(seq_len * 2**exponent for exponent in exponents)


@dataclass(frozen=True, slots=True)
class LossQuestion:
    """Question to a search for a loss: the loss, the batches to try, and what is best.

    `batches` are tokens (default: doublings around the noise scale, `batches_around`). `goal`: "time" (default), or "usd"
    (default with a deadline)."""

    target: LossTarget
    batches: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)
    goal: Goal | None = None

    def batches_for(self, job: Job) -> tuple[int, ...]:
        """Return the batches to try for a job, in tokens."""
        return self.batches or batches_around(self.target.noise.tokens, job.seq_len)


def plan_to_loss(
    problems: Iterable[Problem], question: LossQuestion, *, choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = ignore_progress,
) -> LossSearch:  # fmt: skip
    """Plan every batch on every cluster, and choose what reaches the loss the soonest, or for the fewest dollars.

    `problems` are those of one job on each of the clusters. Of plans whose times a prediction cannot tell apart, the cheaper one
    is chosen. If no point has a plan, raises `NothingFitsError` where nothing fits at one of them, else what all of them lack."""
    target, limits, points = question.target, question.limits, []
    pairs = [(problem, batch) for problem in problems for batch in question.batches_for(problem.job)]
    for number, (problem, batch) in enumerate(pairs, 1):
        cluster = problem.cluster
        point = LossPoint(
            cluster=cluster.name, chip=cluster.chip.name, num_devices=cluster.num_devices, batch_tokens=batch
        )
        try:
            # The run of its job is the one to the loss: days and dollars of a plan file are those that the search compares.
            tokens = None if target.tokens is None else target.tokens_to_loss(batch)
            plan = make_plan(
                replace(problem, job=replace(problem.job, global_batch_tokens=batch, tokens=tokens)), choices=choices,
                reliability=reliability, elsewhere=False,
                progress=prefix_progress(
                    progress, f"{number} of {len(pairs)}: {cluster.name}, batch {format_binary(batch)}"
                ),
            )  # fmt: skip
        except (InputError, MissingValueError, NothingFitsError) as error:
            points.append(replace(point, problem=str(error), no_plan=no_plan_reason(error)))
            continue
        within_limits = not limits or limits.met(training_run_to_loss(plan, target, reliability))
        time = time_to_loss(plan, target, reliability)
        points.append(replace(point, plan=replace(plan, to_loss=target), time=time, within_limits=within_limits))
    if not any(point.plan for point in points):
        lines = [f"{point.name}: {point.problem}" for point in points]
        raise error_without_plan((point.no_plan for point in points), lines)
    goal = question.goal or ("usd" if limits.deadline_s is not None else "time")
    search = choose_point(
        LossSearch(target=target, points=tuple(points), limits=limits, goal=goal, chosen=None, reason="")
    )
    sensitivity = tuple(noise_sensitivity(search))
    if search.chosen is not None and search.plan is not None:  # of the chosen plan only: it takes as long as a plan
        plan = add_other_stack_gain(search.plan, choices, progress)
        points[search.chosen] = replace(points[search.chosen], plan=plan)
    return replace(search, points=tuple(points), sensitivity=sensitivity)


def describe_missed_target(search: LossSearch) -> Iterator[str]:
    """Yield why no point was chosen, and by how much the nearest misses the limits."""
    yield search.reason
    runs = [(point, training_run_to_loss(point.plan, search.target)) for point in search.points if point.plan]
    by_days = search.limits.deadline_s is not None
    point, run = min(runs, key=lambda pair: pair[1].days if by_days else pair[1].chip_hours)
    yield from (f"the nearest, {point.name}: {line}" for line in describe_missed_limits(search.limits, run))


# How far off a noise scale without an interval may be. A choice: McCandlish et al. 2018 find B_simple and the critical batch of
# sweeps within such a factor for most tasks.
NOISE_UNCERTAINTY = 2.0


def choose_point(search: LossSearch) -> LossSearch:
    """Return the search with its chosen point and the reason.

    For the goal "time" the soonest; of those that a prediction cannot tell from it, the cheapest. For "usd" the other way
    round. If any point has no price, chip-hours decide in place of dollars."""
    eligible = {i: point.time for i, point in enumerate(search.points) if point.time and point.within_limits}
    if not eligible:
        return replace(search, chosen=None, reason=f"no batch on any cluster meets the {limit_names(search.limits)}")
    unpriced_chips = sorted({search.points[i].chip for i, time in eligible.items() if time.usd is None})

    def seconds(i: int) -> float:
        return eligible[i].loss_s

    def cost(i: int) -> float:
        return eligible[i].chip_hours if unpriced_chips else eligible[i].usd or 0.0

    if search.goal == "time":
        key, tie_key, tie_name, reason = seconds, cost, "cheapest", "the soonest at the loss"
    else:
        key, tie_key, tie_name, reason = cost, seconds, "soonest", "the fewest dollars to the loss"
        if unpriced_chips:
            reason = f"the fewest chip-hours to the loss (no sourced {PRICE_FIELD} of {', '.join(unpriced_chips)})"
    first = min(eligible, key=key)
    chosen = min((i for i in eligible if key(i) <= key(first) * (1 + RESOLUTION)), key=tie_key)
    if chosen != first:
        reason += f", and the {tie_name} of those within {RESOLUTION:.0%} of it"
    return replace(search, chosen=chosen, reason=reason + (" within the limits" if search.limits else ""))


def noise_sensitivity(search: LossSearch) -> Iterator[NoiseSensitivity]:
    """Yield the choice at both ends of the noise scale's interval (default: half and twice); nothing is planned again."""
    if search.chosen is None:
        return
    noise = search.target.noise
    low, high = noise.interval90 or (noise.tokens / NOISE_UNCERTAINTY, noise.tokens * NOISE_UNCERTAINTY)
    for tokens in (low, high):
        other_search = _with_target(search, search.target.with_noise(tokens / noise.tokens))
        if other_search.chosen is None:
            yield NoiseSensitivity(noise_tokens=tokens, cluster=None, batch_tokens=None, loss_s=None, regret=None)
            continue
        other_point, chosen_point = other_search.points[other_search.chosen], other_search.points[search.chosen]
        regret = other_search.cost(chosen_point) / other_search.cost(other_point) - 1.0
        yield NoiseSensitivity(
            noise_tokens=tokens, cluster=other_point.cluster, batch_tokens=other_point.batch_tokens,
            loss_s=other_point.time.loss_s if other_point.time else None, regret=max(regret, 0.0),
        )  # fmt: skip


def _with_target(search: LossSearch, target: LossTarget) -> LossSearch:
    """Return the same plans with another target."""
    points = tuple(
        replace(
            point,
            time=time_to_loss(point.plan, target),
            within_limits=not search.limits or search.limits.met(training_run_to_loss(point.plan, target)),
        )
        if point.plan
        else point
        for point in search.points
    )
    return choose_point(replace(search, target=target, points=points, chosen=None))
