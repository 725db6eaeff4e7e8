"""One job on several clusters, and what would bring a plan within its deadline or its budget."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.cluster.cluster import Cluster, Shorthand, parse_shorthand
from shardwise.cluster.load import load_cluster
from shardwise.cluster.networks import with_chip
from shardwise.cluster.stacks import calibrated
from shardwise.cost.reliability import Reliability
from shardwise.cost.run import Run
from shardwise.errors import InputError, MissingValueError, NothingFitsError
from shardwise.job import Job
from shardwise.model.architecture import Architecture
from shardwise.planning.compare import PRICE, Comparison, Contender, Limits, compare
from shardwise.planning.plan import Plan
from shardwise.progress import Progress, silent, within
from shardwise.search.choices import Choices
from shardwise.search.plan import chosen_with_elsewhere, plan
from shardwise.units import SECONDS_PER_DAY, format_count, format_days, format_usd

# Sizes that are planned in search of one that meets the limits, as multiples of what would do at the same throughput for each
# device: more devices have less, and counts with large prime factors lay out badly. The next power of two comes last.
GROWTH = (1.0, 1.25, 1.5)
NUM_TRIES = 4
MOST_TIMES = 64  # as many devices


def plan_clusters(
    architecture: Architecture, clusters: Sequence[Cluster], job: Job, *, limits: Limits | None = None,
    choices: Choices | None = None, reliability: Reliability | None = None, progress: Progress = silent,
) -> Comparison:  # fmt: skip
    """Plan a job on each cluster and choose one: see `compare`. A cluster on which nothing fits stays in the list, with the
    reason."""
    asked = limits or Limits()
    found = compare(
        [_contender(architecture, one, job, asked, choices, reliability, progress) for one in clusters], asked
    )
    return replace(found, contenders=chosen_with_elsewhere(found.contenders, found.chosen, choices, progress))


def _contender(
    architecture: Architecture, cluster: Cluster, job: Job, limits: Limits, choices: Choices | None,
    reliability: Reliability | None, progress: Progress,
) -> Contender:  # fmt: skip
    found, problem = None, None
    try:
        found = plan(
            architecture,
            cluster,
            job,
            choices=choices,
            reliability=reliability,
            progress=within(progress, cluster.name),
            elsewhere=False,
        )
    except (NothingFitsError, MissingValueError) as error:
        problem = str(error)
    run = found.run if found else None
    return Contender(
        cluster=cluster.name, chip=cluster.chip.name, num_devices=cluster.num_devices, plan=found, problem=problem,
        in_time=limits.in_time(run), within_budget=limits.within_budget(run),
    )  # fmt: skip


def misses(limits: Limits, run: Run) -> list[str]:
    """Each limit that a run misses, or that cannot be judged, and by how much."""
    found = []
    if limits.deadline_s is not None and limits.in_time(run) is False:
        deadline = limits.deadline_s / SECONDS_PER_DAY
        found.append(
            f"{format_days(run.days)} are {format_days(run.days - deadline)} more than the deadline of {format_days(deadline)} "
            f"({run.days / deadline - 1:.0%} too long)"
        )
    if limits.budget_usd is not None and run.usd is None:
        found.append(f"no sourced {PRICE}, so a budget cannot be checked: give one with --set chip.{PRICE}=VALUE")
    elif limits.budget_usd is not None and run.usd is not None and limits.within_budget(run) is False:
        found.append(
            f"{format_usd(run.usd)} is {format_usd(run.usd - limits.budget_usd)} more than the budget of "
            f"{format_usd(limits.budget_usd)} ({run.usd / limits.budget_usd - 1:.0%} too much)"
        )
    return found


def remedies(missed: Plan, limits: Limits, *, choices: Choices | None = None, progress: Progress = silent) -> list[str]:
    """What would bring a plan within the limits it misses: other numbers of the chip, planned again, and other remedies."""
    run, found = missed.run, []
    assert run is not None
    late, dear = limits.in_time(run) is False, limits.within_budget(run) is False
    if late or dear:
        found.append(_other_size(missed, run, limits, choices, progress, more=late))
    if late and limits.deadline_s is not None:
        found.append(_mfu_needed(missed, run.days * SECONDS_PER_DAY / limits.deadline_s))
    if dear and limits.budget_usd is not None and run.usd is not None:
        share = limits.budget_usd / run.usd
        found.append(
            f"{format_count(share * run.tokens)} of the {format_count(run.tokens)} tokens, or "
            f"${limits.budget_usd / run.chip_hours:.2f} a chip-hour in place of ${run.usd / run.chip_hours:.2f}"
        )
    return found


def _mfu_needed(missed: Plan, times: float) -> str:
    mfu = missed.estimate.mfu * times
    if mfu > 1:
        return f"no layout on these devices: {mfu:.0%} of their peak would be needed (the plan reaches {missed.estimate.mfu:.1%})"
    return (
        f"an MFU of {mfu:.1%} on these devices, with as few interruptions (the plan reaches {missed.estimate.mfu:.1%})"
    )


def _other_size(
    missed: Plan, run: Run, limits: Limits, choices: Choices | None, progress: Progress, *, more: bool
) -> str:
    """The first of some clusters with more (or fewer) chips that meets all limits, planned again."""
    times = run.days * SECONDS_PER_DAY / limits.deadline_s if more and limits.deadline_s else 0.5
    tried: list[tuple[Cluster, Run]] = []
    for cluster in _tries(missed.cluster, times):
        try:
            again = plan(
                missed.model, cluster, missed.job, choices=choices, reliability=run.reliability,
                progress=within(progress, cluster.name), elsewhere=False,
            ).run  # fmt: skip
        except NothingFitsError:
            continue
        assert again is not None
        if limits.met(again):
            return f"{cluster.name}, planned again: {_figures(again)}"
        tried.append((cluster, again))
    if tried:
        nearest, figures = min(tried, key=lambda pair: pair[1].days if more else pair[1].usd or math.inf)
        names = ", ".join(cluster.name for cluster, _ in tried)
        return f"none of {names}, planned again, does it; {nearest.name} takes {_figures(figures)}"
    if more:
        return (
            f"{math.ceil(missed.cluster.num_devices * times):,} devices, if each had the throughput that it has here "
            "(not planned: more links, smaller shares of the batch)"
        )
    return "the model fits on no smaller cluster of this chip that was tried"


def _tries(cluster: Cluster, times: float) -> list[Cluster]:
    if times < 1:
        return list(itertools.islice(sizes(cluster, times), NUM_TRIES))
    least = [times * growth for growth in GROWTH] + [2.0 ** math.ceil(math.log2(times))]
    found = {one.name: one for one in (next(sizes(cluster, enough), None) for enough in least) if one}
    return sorted(found.values(), key=lambda one: one.num_devices)


def _figures(run: Run) -> str:
    dollars = "" if run.usd is None else f", {format_usd(run.usd)}"
    return f"{run.days:.1f} days, {format_count(run.chip_hours)} chip-hours{dollars}"


def sizes(cluster: Cluster, times: float) -> Iterator[Cluster]:
    """Clusters of at least (below 1: at most) so many times the devices, the nearest first; only for clusters of the
    catalogue.

    Switched clusters grow in quarters of their size, a torus by whole multiples of its axes, pods by number. All shrink by
    halves.
    """
    try:
        written = parse_shorthand(cluster.name)
        if written.chip == "local" or _alike(cluster, cluster.name).topology != cluster.topology:
            return
    except (InputError, MissingValueError):
        return  # a user's own cluster has no rule by which it grows
    for text in _texts(written, times):
        try:
            sized = _alike(cluster, text)
        except (InputError, MissingValueError):
            continue  # not whole hosts, or larger than a pod
        yield with_chip(sized, cluster.chip)


def _alike(cluster: Cluster, text: str) -> Cluster:
    """Another cluster of the catalogue, with the constants of this one."""
    found = load_cluster(text)
    return found if cluster.calibration is None else calibrated(found, cluster.calibration)


def _texts(written: Shorthand, times: float) -> Iterator[str]:
    """Shorthands of other sizes. Of several pods the number changes, and each pod stays as it is."""
    if written.num_pods is None:
        for shape in _larger(written.shape, times) if times >= 1 else _smaller(written.shape):
            yield f"{written.chip}:{'x'.join(map(str, shape))}"
        return
    pod = f"{written.chip}:{'x'.join(map(str, written.shape))}{'_twisted' if written.twisted else ''}"
    counts = range(max(math.ceil(written.num_pods * times), written.num_pods + 1), written.num_pods * MOST_TIMES + 1)
    for (num_pods,) in ((n,) for n in counts) if times >= 1 else _smaller((written.num_pods,)):
        yield f"{pod}*{num_pods}"


def _larger(shape: tuple[int, ...], times: float) -> Iterator[tuple[int, ...]]:
    whole = math.prod(shape)
    if len(shape) == 1:
        quarters = range(max(5, math.ceil(4 * times)), 4 * MOST_TIMES + 1)
        yield from ((whole * quarter // 4,) for quarter in quarters if whole * quarter % 4 == 0)
        return
    factors = itertools.product(range(1, 9), repeat=len(shape))
    shapes = {tuple(size * factor for size, factor in zip(shape, by, strict=True)) for by in factors}
    enough = (other for other in shapes if whole * times <= math.prod(other) and math.prod(other) > whole)
    yield from sorted(enough, key=lambda other: (math.prod(other), max(other), other))


def _smaller(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Half the devices, repeatedly: the longest axis is halved."""
    while max(shape) > 1 and max(shape) % 2 == 0:
        longest = shape.index(max(shape))
        shape = (*shape[:longest], shape[longest] // 2, *shape[longest + 1 :])
        yield shape
