"""What a plan takes to a loss: the time of a fixed number of tokens beside the time to the loss, and its dollars."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from shardwise.batch.target import LossTarget, Side
from shardwise.cost.reliability import Reliability
from shardwise.cost.run import Run, training_run
from shardwise.units import SECONDS_PER_DAY

if TYPE_CHECKING:
    from shardwise.planning.plan import Plan

Doubled = Literal["batch and devices", "batch", "devices"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTime:
    """A plan's times: of the target's tokens whatever loss they reach (`token_s`), and to the loss (`loss_s`), in seconds.

    Both are with the interruptions of that many devices. `steps` and `tokens` are those to the loss, S(B) and E(B), and the
    ratios are to the fewest of each. `chip_hours` and `usd` are to the loss; `usd` is None without a sourced price. Where the
    target has no tokens, all are of a billion of the fewest tokens.

    Source: Stratos, Compute-Bound Training, 2026, 2.2.1 (token-time and loss-time).

    >>> import shardwise as sw
    >>> from shardwise.batch.noise_scale import NoiseScale
    >>> plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024)
    >>> found = loss_time(plan, LossTarget(noise=NoiseScale(tokens=2.0**16)))
    >>> found.steps_ratio, found.tokens_ratio, round(found.loss_s / found.token_s, 6)
    (2.0, 2.0, 2.0)
    """

    batch_tokens: int
    num_devices: int
    step_time_s: float
    batch_over_noise: float
    side: Side
    steps: float
    tokens: float
    steps_ratio: float
    tokens_ratio: float
    token_s: float
    loss_s: float
    chip_hours: float
    usd: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubling:
    """A plan with twice the batch, the devices or both: its time and dollars to the loss over those of the plan.

    `problem` says why it was not planned; its numbers are None then. Dollars go with chip-hours: the price stays.
    """

    doubled: Doubled
    cluster: str
    batch_tokens: int
    token_ratio: float | None = None
    loss_ratio: float | None = None
    usd_ratio: float | None = None
    problem: str = ""


def loss_run(plan: Plan, target: LossTarget, reliability: Reliability | None = None) -> Run:
    """The whole run of a plan to the loss, with interruptions; of a billion of the fewest tokens where the target has none."""
    job = replace(plan.job, tokens=target.tokens_to_loss(plan.job.global_batch_tokens))
    given = plan.run.reliability if plan.run else None
    run = training_run(plan.model, plan.cluster, job, plan.estimate, reliability or given)
    assert run is not None  # its job has tokens
    return run


def loss_time(plan: Plan, target: LossTarget, reliability: Reliability | None = None) -> LossTime:
    """What a plan takes to a loss."""
    batch, run = plan.job.global_batch_tokens, loss_run(plan, target, reliability)
    law, loss_s = target.tradeoff, run.days * SECONDS_PER_DAY
    return LossTime(
        batch_tokens=batch, num_devices=plan.cluster.num_devices, step_time_s=plan.estimate.step_time_s,
        batch_over_noise=batch / target.noise.tokens, side=target.side(batch),
        steps=law.steps(batch), tokens=run.tokens, steps_ratio=law.steps(batch) / law.min_steps,
        tokens_ratio=run.tokens / law.min_tokens, token_s=loss_s * target.reference_tokens / run.tokens, loss_s=loss_s,
        chip_hours=run.chip_hours, usd=run.usd,
    )  # fmt: skip


def doubling(doubled: Doubled, before: LossTime, after: LossTime, cluster: str) -> Doubling:
    """How the times and the dollars of a plan change."""
    return Doubling(
        doubled=doubled, cluster=cluster, batch_tokens=after.batch_tokens, token_ratio=after.token_s / before.token_s,
        loss_ratio=after.loss_s / before.loss_s, usd_ratio=after.chip_hours / before.chip_hours,
    )  # fmt: skip
