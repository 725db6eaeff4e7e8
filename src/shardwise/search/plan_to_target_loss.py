"""Batch and devices that reach a loss the soonest, or for the fewest dollars: every batch is planned on every cluster.

Entry point: `plan_to_loss`. The result also says whether another noise scale would choose another batch or cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardwise.batch_size.tradeoff import LossTarget
from shardwise.hardware.cluster import Cluster
from shardwise.layout.choices import Choices
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price.problem import PRICE_FIELD, Limits
from shardwise.price.reliability import Reliability
from shardwise.search.compare_clusters import add_gain_to_chosen
from shardwise.search.loss_time import (
    Goal,
    LossPoint,
    LossSearch,
    LossTime,
    NoiseSensitivity,
    time_to_loss,
    training_run_to_loss,
)
from shardwise.search.planner import make_plan
from shardwise.search.verdicts import RESOLUTION
from shardwise.values.errors import InputError, MissingValueError, NothingFitsError
from shardwise.values.progress import Progress, ignore_progress, prefix_progress
from shardwise.values.units import format_binary

# On each side of the noise scale: beyond them the fewest tokens, or steps, are nearly reached (6% more).
DOUBLINGS_AROUND = 4


def batches_around(noise_tokens: float, seq_len: int) -> tuple[int, ...]:
    """Batches in doublings around a noise scale, of whole sequences.

    >>> batches_around(1.2 * 2**20, 4096)[:3], len(batches_around(1.2 * 2**20, 4096))
    ((65536, 131072, 262144), 9)
    """
    nearest = round(math.log2(noise_tokens / seq_len))
    exponents = range(max(nearest - DOUBLINGS_AROUND, 0), max(nearest + DOUBLINGS_AROUND, 0) + 1)
    return tuple(seq_len * 2**exponent for exponent in exponents)


def plan_to_loss(
    architecture: Architecture, clusters: Sequence[Cluster], job: Job, target: LossTarget, *, batches: Sequence[int] = (),
    limits: Limits | None = None, goal: Goal | None = None, choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = ignore_progress,
) -> LossSearch:  # fmt: skip
    """Plan every batch on every cluster, and choose what reaches the loss the soonest, or for the fewest dollars.

    `batches` are tokens (default: doublings around the noise scale); the job's own batch counts only where they are left out and
    the target has none. `goal`: "time" (default), or "usd" (default with a deadline). Of plans whose times differ by less than a
    prediction resolves the cheaper one is chosen. Raises `NothingFitsError` where no point has a plan.
    """
    asked = limits or Limits()
    sizes = tuple(batches) or batches_around(target.noise.tokens, job.seq_len)
    pairs = [(cluster, batch) for cluster in clusters for batch in sizes]
    points = []
    for number, (cluster, batch) in enumerate(pairs, 1):
        said = prefix_progress(progress, f"{number} of {len(pairs)}: {cluster.name}, batch {format_binary(batch)}")
        points.append(_plan_point(architecture, cluster, job, batch, target, asked, choices, reliability, said))
    if not any(point.plan for point in points):
        raise NothingFitsError(*(f"{point.name}: {point.problem}" for point in points))
    wanted: Goal = goal or ("usd" if asked.deadline_s is not None else "time")
    found = LossSearch(target=target, points=tuple(points), limits=asked, goal=wanted, chosen=None, reason="")
    found = choose_point(found)
    told = add_gain_to_chosen(found.points, found.chosen, choices, progress)
    return replace(found, points=told, sensitivity=tuple(noise_sensitivity(found)))


def _plan_point(
    architecture: Architecture, cluster: Cluster, job: Job, batch: int, target: LossTarget, limits: Limits,
    choices: Choices | None, reliability: Reliability | None, progress: Progress,
) -> LossPoint:  # fmt: skip
    place = LossPoint(cluster=cluster.name, chip=cluster.chip.name, num_devices=cluster.num_devices, batch_tokens=batch)
    try:
        # The run of its job is the one to the loss: days and dollars of a plan file are those that the search compares.
        tokens = None if target.tokens is None else target.tokens_to_loss(batch)
        own = replace(job, global_batch_tokens=batch, tokens=tokens)
        found = make_plan(
            architecture, cluster, own, choices=choices, reliability=reliability, progress=progress, elsewhere=False
        )
    except (InputError, MissingValueError, NothingFitsError) as error:
        return replace(place, problem=str(error))
    return replace(
        place, plan=replace(found, to_loss=target), time=time_to_loss(found, target, reliability),
        within_limits=not limits or limits.met(training_run_to_loss(found, target, reliability)),
    )  # fmt: skip


# How far off a noise scale without an interval may be. A choice: McCandlish et al. 2018 find B_simple and the critical batch of
# sweeps within such a factor for most tasks.
NOISE_UNCERTAINTY = 2.0


def choose_point(found: LossSearch) -> LossSearch:
    """The search with its choice, and the reason."""
    able = [i for i, point in enumerate(found.points) if point.time and point.within_limits]
    if not able:
        asked = {"deadline": found.limits.deadline_s, "budget": found.limits.budget_usd}
        limits = " and the ".join(name for name, limit in asked.items() if limit is not None)
        return replace(found, chosen=None, reason=f"no batch on any cluster meets the {limits}")
    number, reason = _choose_by_time(found, able) if found.goal == "time" else _choose_by_usd(found, able)
    return replace(found, chosen=number, reason=reason + ("" if not found.limits else " within the limits"))


def _times_by_number(found: LossSearch, numbers: Sequence[int]) -> dict[int, LossTime]:
    return {i: time for i in numbers if (time := found.points[i].time)}


def _choose_by_time(found: LossSearch, able: Sequence[int]) -> tuple[int, str]:
    """The soonest; of those that a prediction cannot tell from it, the one of the fewest dollars."""
    times = _times_by_number(found, able)
    soonest = min(times, key=lambda i: times[i].loss_s)
    near = [i for i in times if times[i].loss_s <= times[soonest].loss_s * (1 + RESOLUTION)]
    best = min(near, key=_dollar_cost(found, times))
    return best, "the soonest at the loss" + (
        "" if best == soonest else f", and the cheapest of those within {RESOLUTION:.0%} of it"
    )


def _choose_by_usd(found: LossSearch, able: Sequence[int]) -> tuple[int, str]:
    """The cheapest; of those that a prediction cannot tell from it, the soonest."""
    times = _times_by_number(found, able)
    cost = _dollar_cost(found, times)
    cheapest = min(times, key=cost)
    near = [i for i in times if cost(i) <= cost(cheapest) * (1 + RESOLUTION)]
    best = min(near, key=lambda i: times[i].loss_s)
    dearer = sorted({found.points[i].chip for i in times if times[i].usd is None})
    reason = "the fewest dollars to the loss"
    if dearer:
        reason = f"the fewest chip-hours to the loss (no sourced {PRICE_FIELD} of {', '.join(dearer)})"
    return best, reason + ("" if best == cheapest else f", and the soonest of those within {RESOLUTION:.0%} of it")


def _dollar_cost(found: LossSearch, times: dict[int, LossTime]) -> Callable[[int], float]:
    """Dollars; chip-hours where one of them has no price."""
    if any(time.usd is None for time in times.values()):
        return lambda i: times[i].chip_hours
    return lambda i: times[i].usd or 0.0


def noise_sensitivity(found: LossSearch) -> Iterator[NoiseSensitivity]:
    """What would be chosen at the ends of the noise scale's interval, or at half and twice of it; nothing is planned again."""
    if found.chosen is None:
        return
    noise = found.target.noise
    low, high = noise.interval90 or (noise.tokens / NOISE_UNCERTAINTY, noise.tokens * NOISE_UNCERTAINTY)
    for tokens in (low, high):
        other = _with_target(found, found.target.with_noise(tokens / noise.tokens))
        if other.chosen is None:
            yield NoiseSensitivity(noise_tokens=tokens, cluster=None, batch_tokens=None, loss_s=None, regret=None)
            continue
        best, kept = other.points[other.chosen], other.points[found.chosen]
        regret = other.cost(kept) / other.cost(best) - 1.0
        yield NoiseSensitivity(
            noise_tokens=tokens, cluster=best.cluster, batch_tokens=best.batch_tokens,
            loss_s=best.time.loss_s if best.time else None, regret=max(regret, 0.0),
        )  # fmt: skip


def _with_target(found: LossSearch, target: LossTarget) -> LossSearch:
    """The same plans to another target."""
    points = tuple(
        replace(
            point,
            time=time_to_loss(point.plan, target),
            within_limits=not found.limits or found.limits.met(training_run_to_loss(point.plan, target)),
        )
        if point.plan
        else point
        for point in found.points
    )
    return choose_point(replace(found, target=target, points=points, chosen=None))
