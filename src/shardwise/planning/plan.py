"""What `plan` writes and `train`, `export` and `reconcile` read."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.cluster.cluster import Cluster
from shardwise.cost.estimate import Estimate, estimate
from shardwise.cost.operations import Operations
from shardwise.cost.rules import Rule, book_rules
from shardwise.cost.run import Run, training_run
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.version import __version__

SCHEMA = "shardwise.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout that was not taken, what it would cost, and why it lost."""

    layout: Layout
    estimate: Estimate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """What was searched. `num_layouts` counts distinct legal layouts whose time and memory were computed."""

    space: Mapping[str, list[Any]]
    num_layouts: int
    num_fitting: int
    num_illegal_by_rule: Mapping[str, int]
    cpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Model, cluster and job as resolved, the layout, its estimate, and where they come from.

    `run` is what the whole run takes; None for a job without a length in tokens, and in a file of an earlier version.
    """

    model: Architecture
    cluster: Cluster
    job: Job
    layout: Layout
    estimate: Estimate
    alternatives: tuple[Alternative, ...] = ()
    rules: tuple[Rule, ...] = ()
    search: SearchSummary | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    run: Run | None = None

    def __repr__(self) -> str:
        job, estimate = self.job, "\n  ".join(repr(self.estimate).removeprefix("Estimate: ").split("\n  "))
        return (
            f"Plan: {self.model.name} on {self.cluster.name}, {job.global_batch_tokens:,} tokens per batch, sequences of "
            f"{job.seq_len:,}, {job.precision}\n  {self.layout}\n  {estimate}"
        )


def plan_layout(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, *, operations: Operations | None = None
) -> Plan:
    """A plan for one given layout, without a search. Raises `InputError` with every rule that it breaks."""
    architecture.require_positions(job.seq_len)
    priced = estimate(architecture, cluster, job, layout)
    return Plan(
        model=architecture, cluster=cluster, job=job, layout=layout, estimate=priced,
        rules=book_rules(architecture, cluster, job), versions=versions(),
        run=training_run(architecture, cluster, job, priced, operations),
    )  # fmt: skip


def versions() -> dict[str, str]:
    """What the plan was made with."""
    return {"shardwise": __version__, "python": platform.python_version()}
