"""Batch and devices that reach a loss the soonest, or for the fewest dollars: every batch is planned on every cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shardwise.batch.target import LossTarget
from shardwise.cluster.cluster import Cluster
from shardwise.cost.reliability import Reliability
from shardwise.errors import InputError, MissingValueError, NothingFitsError
from shardwise.job import Job
from shardwise.model.architecture import Architecture
from shardwise.planning.compare import Limits
from shardwise.planning.loss_time import loss_run, loss_time
from shardwise.progress import Progress, silent, within
from shardwise.search.choices import Choices
from shardwise.search.plan import chosen_with_elsewhere, plan
from shardwise.search.to_loss.loss_choice import chosen, sensitivity
from shardwise.search.to_loss.loss_points import Goal, LossPoint, LossSearch
from shardwise.units import format_binary

AROUND = 4  # doublings on each side of the noise scale: beyond them the fewest tokens, or steps, are nearly reached (6% more)


def batches_around(noise_tokens: float, seq_len: int) -> tuple[int, ...]:
    """Batches in doublings around a noise scale, of whole sequences.

    >>> batches_around(1.2 * 2**20, 4096)[:3], len(batches_around(1.2 * 2**20, 4096))
    ((65536, 131072, 262144), 9)
    """
    nearest = round(math.log2(noise_tokens / seq_len))
    exponents = range(max(nearest - AROUND, 0), max(nearest + AROUND, 0) + 1)
    return tuple(seq_len * 2**exponent for exponent in exponents)


def plan_to_loss(
    architecture: Architecture, clusters: Sequence[Cluster], job: Job, target: LossTarget, *, batches: Sequence[int] = (),
    limits: Limits | None = None, goal: Goal | None = None, choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = silent,
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
        said = within(progress, f"{number} of {len(pairs)}: {cluster.name}, batch {format_binary(batch)}")
        points.append(_point(architecture, cluster, job, batch, target, asked, choices, reliability, said))
    if not any(point.plan for point in points):
        raise NothingFitsError(*(f"{point.name}: {point.problem}" for point in points))
    wanted: Goal = goal or ("usd" if asked.deadline_s is not None else "time")
    found = LossSearch(target=target, points=tuple(points), limits=asked, goal=wanted, chosen=None, reason="")
    found = chosen(found)
    told = chosen_with_elsewhere(found.points, found.chosen, choices, progress)
    return replace(found, points=told, sensitivity=tuple(sensitivity(found)))


def _point(
    architecture: Architecture, cluster: Cluster, job: Job, batch: int, target: LossTarget, limits: Limits,
    choices: Choices | None, reliability: Reliability | None, progress: Progress,
) -> LossPoint:  # fmt: skip
    place = LossPoint(cluster=cluster.name, chip=cluster.chip.name, num_devices=cluster.num_devices, batch_tokens=batch)
    try:
        # The run of its job is the one to the loss: days and dollars of a plan file are those that the search compares.
        tokens = None if target.tokens is None else target.tokens_to_loss(batch)
        own = replace(job, global_batch_tokens=batch, tokens=tokens)
        found = plan(
            architecture, cluster, own, choices=choices, reliability=reliability, progress=progress, elsewhere=False
        )
    except (InputError, MissingValueError, NothingFitsError) as error:
        return replace(place, problem=str(error))
    return replace(
        place, plan=replace(found, to_loss=target), time=loss_time(found, target, reliability),
        within_limits=not limits or limits.met(loss_run(found, target, reliability)),
    )  # fmt: skip
