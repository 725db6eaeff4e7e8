"""Time and dollars of a plan to a loss, the gain of the next doubling, and the values of a search to a loss.

The time of a fixed number of tokens stands beside the time to the loss, since a larger batch takes more tokens to it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from shardwise.batch_size import LossTarget
from shardwise.batch_size.tradeoff import CriticalBatchSide
from shardwise.hardware.cluster_loading import double_cluster
from shardwise.layout import Choices
from shardwise.price import Limits, Problem, Reliability, Run
from shardwise.price.training_run import training_run
from shardwise.search.plan import Plan
from shardwise.search.planner import make_plan
from shardwise.search.verdicts import NoPlanReason
from shardwise.values import (
    SECONDS_PER_DAY,
    Displayable,
    InputError,
    MissingValueError,
    NothingFitsError,
    Progress,
    format_binary,
    ignore_progress,
    prefix_progress,
)

DoublingKind = Literal["batch and devices", "batch", "devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTime:
    """A plan's times: of the target's tokens whatever loss they reach (`token_s`), and to the loss (`loss_s`), in seconds.

    Both are with the interruptions of that many devices. `steps` and `tokens` are those to the loss, S(B) and E(B), and the
    ratios are to the fewest of each. `chip_hours` and `usd` are to the loss; `usd` is None without a sourced price. Where the
    target has no tokens, all are of a billion of the fewest tokens. The fields in `_interval90` are the same with the step at the
    ends of its 90% prediction interval; None for a lower bound. The noise scale is taken as exact.

    Source: Stratos, Compute-Bound Training, 2026, 2.2.1 (token-time and loss-time).

    >>> import shardwise as sw
    >>> from shardwise.batch_size.noise_scale import NoiseScale
    >>> plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024)
    >>> found = time_to_loss(plan, LossTarget(noise=NoiseScale(tokens=2.0**16)))
    >>> found.steps_ratio, found.tokens_ratio, round(found.loss_s / found.token_s, 6)
    (2.0, 2.0, 2.0)
    """

    batch_tokens: int
    num_devices: int
    step_time_s: float
    batch_over_noise: float
    side: CriticalBatchSide
    steps: float
    tokens: float
    steps_ratio: float
    tokens_ratio: float
    token_s: float
    loss_s: float
    chip_hours: float
    usd: float | None
    token_s_interval90: tuple[float, float] | None = None
    loss_s_interval90: tuple[float, float] | None = None
    chip_hours_interval90: tuple[float, float] | None = None
    usd_interval90: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubling:
    """A plan with twice the batch, the devices or both: its time and dollars to the loss over those of the plan.

    `problem` says why it was not planned; its numbers are None then. Dollars go with chip-hours: the price stays.
    """

    doubled: DoublingKind
    cluster: str
    batch_tokens: int
    token_ratio: float | None = None
    loss_ratio: float | None = None
    usd_ratio: float | None = None
    problem: str = ""


def training_run_to_loss(plan: Plan, target: LossTarget, reliability: Reliability | None = None) -> Run:
    """Return the whole run of a plan to the loss; of a billion of the fewest tokens if the target has none."""
    job = replace(plan.job, tokens=target.tokens_to_loss(plan.job.global_batch_tokens))
    plan_reliability = plan.run.reliability if plan.run else None
    run = training_run(plan.model, plan.cluster, job, plan.estimate, reliability or plan_reliability)
    assert run is not None  # its job has tokens
    return run


def time_to_loss(plan: Plan, target: LossTarget, reliability: Reliability | None = None) -> LossTime:
    """Return times, tokens and dollars of a plan to a loss."""
    batch_tokens, run = plan.job.global_batch_tokens, training_run_to_loss(plan, target, reliability)
    tradeoff, loss_s = target.tradeoff, run.days * SECONDS_PER_DAY
    low, high = run.days_interval90 or (0.0, 0.0)
    interval = (low * SECONDS_PER_DAY, high * SECONDS_PER_DAY) if run.days_interval90 else None
    token_share = target.reference_tokens / run.tokens
    return LossTime(
        batch_tokens=batch_tokens, num_devices=plan.cluster.num_devices, step_time_s=plan.estimate.step_time_s,
        batch_over_noise=batch_tokens / target.noise.tokens, side=target.side(batch_tokens),
        steps=tradeoff.steps(batch_tokens), tokens=run.tokens, steps_ratio=tradeoff.steps(batch_tokens) / tradeoff.min_steps,
        tokens_ratio=run.tokens / tradeoff.min_tokens, token_s=loss_s * target.reference_tokens / run.tokens, loss_s=loss_s,
        chip_hours=run.chip_hours, usd=run.usd, loss_s_interval90=interval,
        token_s_interval90=interval and (interval[0] * token_share, interval[1] * token_share),
        chip_hours_interval90=run.chip_hours_interval90, usd_interval90=run.usd_interval90,
    )  # fmt: skip


def compare_doubling(doubled: DoublingKind, before: LossTime, after: LossTime, cluster: str) -> Doubling:
    """Return the ratios of times and dollars after a doubling to those before."""
    return Doubling(
        doubled=doubled, cluster=cluster, batch_tokens=after.batch_tokens, token_ratio=after.token_s / before.token_s,
        loss_ratio=after.loss_s / before.loss_s, usd_ratio=after.chip_hours / before.chip_hours,
    )  # fmt: skip


Goal = Literal["time", "usd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """A batch on a cluster: its plan with its time to the loss, or the reason for none (`problem`, in short `no_plan`)."""

    cluster: str
    chip: str
    num_devices: int
    batch_tokens: int
    plan: Plan | None = None
    time: LossTime | None = None
    problem: str | None = None
    within_limits: bool = True
    no_plan: NoPlanReason | None = None

    @property
    def name(self) -> str:
        """Cluster and batch as text."""
        return f"{self.cluster} with batches of {format_binary(self.batch_tokens)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseSensitivity:
    """Choice of batch and cluster with another noise scale; None where nothing meets the limits."""

    noise_tokens: float
    cluster: str | None
    batch_tokens: int | None
    loss_s: float | None
    regret: float | None  # how much longer (or dearer) the chosen point is then, as a share


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSearch(Displayable):
    """Plans to a loss, by cluster and batch; `chosen` is the index of the best, None if none meets the limits.

    `doublings` are the chosen plan's with twice the batch, the devices or both, where they were planned.

    >>> import shardwise as sw
    >>> search = sw.plan_to_loss("gpt-2", ["h100:4", "h100:8"], noise_scale="64Ki", batches=["64Ki", "128Ki"], seq_len=1024)
    >>> search.plan.cluster.name, search.reason, len(search.points)
    ('h100:8', 'the soonest at the loss', 4)
    """

    target: LossTarget
    points: tuple[LossPoint, ...]
    limits: Limits
    goal: Goal
    chosen: int | None
    reason: str
    sensitivity: tuple[NoiseSensitivity, ...] = ()
    doublings: tuple[Doubling, ...] = ()

    @property
    def plan(self) -> Plan | None:
        """Chosen plan, which carries the target."""
        return None if self.chosen is None else self.points[self.chosen].plan

    @property
    def best(self) -> tuple[LossPoint, ...]:
        """Best batch of each cluster, in the order of the clusters; a point without a plan if a cluster has none."""
        by_cluster: dict[str, list[LossPoint]] = {}
        for point in self.points:
            by_cluster.setdefault(point.cluster, []).append(point)
        chosen = None if self.chosen is None else self.points[self.chosen]
        return tuple(chosen if chosen in points else min(points, key=self.cost) for points in by_cluster.values())

    def cost(self, point: LossPoint) -> float:
        """Return the objective of a point: seconds or chip-hours to the loss, infinite without a plan."""
        return math.inf if point.time is None else point.time.loss_s if self.goal == "time" else point.time.chip_hours

    @property
    def diagonal(self) -> tuple[LossPoint, ...]:
        """Planned points with the chosen chip and tokens per device: batch and devices doubled together."""
        if self.chosen is None:
            return ()
        chosen = self.points[self.chosen]
        on_diagonal = [
            point
            for point in self.points
            if point.plan and point.chip == chosen.chip
            and point.batch_tokens * chosen.num_devices == chosen.batch_tokens * point.num_devices
        ]  # fmt: skip
        return tuple(sorted(on_diagonal, key=lambda point: point.num_devices))

    def __repr__(self) -> str:
        chosen = "none" if self.chosen is None else self.points[self.chosen].name
        noise = f"{self.target.noise.tokens:,.0f} tokens"
        return f"LossSearch: {len(self.points)} points, noise scale {noise}; {chosen}: {self.reason}"


DOUBLING_FACTORS: dict[DoublingKind, tuple[int, int]] = {
    "batch and devices": (2, 2),
    "batch": (2, 1),
    "devices": (1, 2),
}


def plan_doublings(
    plan: Plan, target: LossTarget, *, choices: Choices | None = None, progress: Progress = ignore_progress
) -> tuple[Doubling, ...]:
    """Plan twice the batch and the devices, the batch alone, and the devices alone, and compare the times to the loss.

    A doubling without a plan says why: nothing fits, or no cluster of twice the size is known.

    >>> import shardwise as sw
    >>> from shardwise.batch_size.noise_scale import NoiseScale
    >>> plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024)
    >>> both, batch, devices = plan_doublings(plan, LossTarget(noise=NoiseScale(tokens=1e6)))
    >>> both.cluster, both.loss_ratio > both.token_ratio, round(batch.usd_ratio / batch.loss_ratio, 6)
    ('h100:16', True, 1.0)
    """
    return tuple(
        _plan_doubling(plan, target, name, choices, prefix_progress(progress, f"twice the {name}"))
        for name in DOUBLING_FACTORS
    )


def _plan_doubling(
    plan: Plan, target: LossTarget, name: DoublingKind, choices: Choices | None, progress: Progress
) -> Doubling:
    batch_factor, device_factor = DOUBLING_FACTORS[name]
    batch_tokens = batch_factor * plan.job.global_batch_tokens
    cluster = plan.cluster if device_factor == 1 else double_cluster(plan.cluster)
    if cluster is None:
        problem = f"{plan.cluster.name} has no cluster of twice its size in the catalogue"
        return Doubling(doubled=name, cluster=plan.cluster.name, batch_tokens=batch_tokens, problem=problem)
    tokens = None if plan.job.tokens is None else target.tokens_to_loss(batch_tokens)
    job = replace(plan.job, global_batch_tokens=batch_tokens, tokens=tokens)
    try:
        doubled_plan = make_plan(
            Problem(plan.model, cluster, job), choices=choices, reliability=plan.run.reliability if plan.run else None,
            progress=progress, elsewhere=False,
        )  # fmt: skip
    except (InputError, MissingValueError, NothingFitsError) as error:
        return Doubling(doubled=name, cluster=cluster.name, batch_tokens=batch_tokens, problem=str(error))
    return compare_doubling(name, time_to_loss(plan, target), time_to_loss(doubled_plan, target), cluster.name)
