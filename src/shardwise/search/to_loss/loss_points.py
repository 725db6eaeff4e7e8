"""Batches on clusters, planned to a loss, as values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from shardwise.batch.target import LossTarget
from shardwise.draw.notebook import Pictured, Shown
from shardwise.planning.compare import Limits
from shardwise.planning.loss_time import LossTime
from shardwise.planning.plan import Plan
from shardwise.units import format_binary

Goal = Literal["time", "usd"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPoint:
    """A batch on a cluster: its plan with what it takes to the loss, or why it has none (`problem`)."""

    cluster: str
    chip: str
    num_devices: int
    batch_tokens: int
    plan: Plan | None = None
    time: LossTime | None = None
    problem: str | None = None
    within_limits: bool = True

    @property
    def name(self) -> str:
        """Cluster and batch as text."""
        return f"{self.cluster} with batches of {format_binary(self.batch_tokens)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What would be chosen with another noise scale: its batch and cluster; None where nothing meets the limits."""

    noise_tokens: float
    cluster: str | None
    batch_tokens: int | None
    loss_s: float | None
    regret: float | None  # how much longer (or dearer) the chosen point is then, as a share


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSearch(Pictured):
    """Plans to a loss, by cluster and batch; `chosen` is the number of the best, None where none meets the limits.

    >>> import shardwise as sw
    >>> found = sw.plan_to_loss("gpt-2", ["h100:4", "h100:8"], noise_scale="64Ki", batches=["64Ki", "128Ki"], seq_len=1024)
    >>> found.plan.cluster.name, found.reason, len(found.points)
    ('h100:8', 'the soonest at the loss', 4)
    """

    target: LossTarget
    points: tuple[LossPoint, ...]
    limits: Limits
    goal: Goal
    chosen: int | None
    reason: str
    sensitivity: tuple[Sensitivity, ...] = ()

    @property
    def plan(self) -> Plan | None:
        """The chosen plan, which carries the target."""
        return None if self.chosen is None else self.points[self.chosen].plan

    @property
    def best(self) -> tuple[LossPoint, ...]:
        """The best batch of each cluster, in the order of the clusters; one without a plan where none has one."""
        found: dict[str, list[LossPoint]] = {}
        for point in self.points:
            found.setdefault(point.cluster, []).append(point)
        mark = None if self.chosen is None else self.points[self.chosen]
        return tuple(mark if mark in each else min(each, key=self.cost) for each in found.values())

    def cost(self, point: LossPoint) -> float:
        """What is minimised, of a point: seconds or chip-hours to the loss, infinite without a plan."""
        return math.inf if point.time is None else point.time.loss_s if self.goal == "time" else point.time.chip_hours

    @property
    def diagonal(self) -> tuple[LossPoint, ...]:
        """Batch and devices doubled together: the planned points with the chosen one's tokens per device and its chip."""
        if self.chosen is None:
            return ()
        mark = self.points[self.chosen]
        same = [
            point
            for point in self.points
            if point.plan and point.chip == mark.chip
            and point.batch_tokens * mark.num_devices == mark.batch_tokens * point.num_devices
        ]  # fmt: skip
        return tuple(sorted(same, key=lambda point: point.num_devices))

    def shown(self) -> Shown:
        """The points as a table and a picture, as a notebook displays them."""
        from shardwise.search.to_loss.loss_picture import shown_search

        return shown_search(self)

    def __repr__(self) -> str:
        chosen = "none" if self.chosen is None else self.points[self.chosen].name
        noise = f"{self.target.noise.tokens:,.0f} tokens"
        return f"LossSearch: {len(self.points)} points, noise scale {noise}; {chosen}: {self.reason}"
