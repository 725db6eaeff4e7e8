"""A search to a loss as plain data: what `shardwise plan --noise-scale --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.batch.target import LossTarget
from shardwise.layout.payload import LayoutPayload
from shardwise.planning.loss_time import Doubling, LossTime
from shardwise.planning.payload import PlanPayload, layout_of_plan, plan_payload
from shardwise.search.to_loss.loss_points import LossPoint, LossSearch, Sensitivity
from shardwise.units import SECONDS_PER_DAY

SCHEMA = "shardwise.to_loss/1"


class LossPointPayload(TypedDict):
    """A batch on a cluster. Where it has no plan, `problem` says why and the rest is null."""

    cluster: str
    chip: str
    num_devices: int
    batch_tokens: int
    problem: str | None
    within_limits: bool
    layout: LayoutPayload | None
    mfu: float | None
    interval90: tuple[float, float] | None
    time: LossTime | None


class ToLossPayload(TypedDict):
    """Every batch on every cluster to a loss; `chosen` is the number of a point, `plan` its plan.

    `diagonal` are the numbers of points with the chosen one's tokens per device: batch and devices doubled together.
    """

    schema: Literal["shardwise.to_loss/1"]
    target: LossTarget
    min_steps: float
    min_tokens: float
    goal: Literal["time", "usd"]
    deadline_days: float | None
    budget_usd: float | None
    chosen: int | None
    reason: str
    points: list[LossPointPayload]
    diagonal: list[int]
    doublings: list[Doubling]
    sensitivity: list[Sensitivity]
    plan: PlanPayload | None


def search_payload(found: LossSearch, doublings: Sequence[Doubling] = ()) -> dict[str, Any]:
    """The versioned payload."""
    law, deadline = found.target.tradeoff, found.limits.deadline_s
    return {
        "schema": SCHEMA, "target": asdict(found.target), "min_steps": law.min_steps, "min_tokens": law.min_tokens,
        "goal": found.goal, "deadline_days": None if deadline is None else deadline / SECONDS_PER_DAY,
        "budget_usd": found.limits.budget_usd, "chosen": found.chosen, "reason": found.reason,
        "points": [_point(point) for point in found.points],
        "diagonal": [found.points.index(point) for point in found.diagonal],
        "doublings": [asdict(one) for one in doublings], "sensitivity": [asdict(one) for one in found.sensitivity],
        "plan": plan_payload(found.plan) if found.plan else None,
    }  # fmt: skip


def _point(point: LossPoint) -> dict[str, Any]:
    estimate = point.plan.estimate if point.plan else None
    return {
        "cluster": point.cluster, "chip": point.chip, "num_devices": point.num_devices, "batch_tokens": point.batch_tokens,
        "problem": point.problem, "within_limits": point.within_limits,
        "layout": layout_of_plan(point.plan) if point.plan else None, "mfu": estimate.mfu if estimate else None,
        "interval90": list(estimate.interval90) if estimate and estimate.interval90 else None,
        "time": asdict(point.time) if point.time else None,
    }  # fmt: skip
