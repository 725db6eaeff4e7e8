"""A plan: the layout chosen for a model, a cluster and a job, its estimate, the layouts that lost, and what was searched.

`shardwise plan` writes it (`search/plan_file.py`); `train`, `export` and `reconcile` read it.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.batch_size import LossTarget
from shardwise.book_formulas import Rule
from shardwise.hardware import Cluster
from shardwise.layout import Layout
from shardwise.model import Architecture, Job
from shardwise.price import Estimate, Limits, Problem, Run
from shardwise.search.published_runs import PublishedComparison
from shardwise.values import Displayable, IssuePolicy
from shardwise.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Rejected layout, with its estimate and the reason."""

    layout: Layout
    estimate: Estimate
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSummary:
    """Statistics of a search. `num_layouts` counts distinct legal layouts: the memory of each was computed, and the time
    unless a bound excluded it. `elsewhere`: the gain of a layout that the stack does not support, where predictions can tell."""

    space: Mapping[str, list[Any]]
    num_layouts: int
    num_fitting: int
    num_illegal_by_rule: Mapping[str, int]
    cpu_seconds: float
    elsewhere: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Displayable):
    """A model, a cluster and a job as resolved, the chosen layout, its estimate, and their provenance.

    `bound_s` is the lower bound of the step in seconds, with kernels and links at the best rates of micro-benchmarks; None if
    the estimate itself is that bound. `alternatives` are the runners-up with the reasons, `rules` those of the books. `run` is
    the whole run; None for a job without `tokens`. `policy` says which collectives the stack issues for the layout. `to_loss`
    is the loss that batch and devices were chosen for, with the noise scale; None for a given batch. `defaults` names what a user
    left out: "seq_len" and "batch_tokens", which are usual for the model (`model.usual_job`), and of one priced layout "layout".
    `limits` are those that the run was required to meet, and `published` the nearest published runs beside the plan; a plan that
    is read from a file has neither.

    >>> import shardwise as sw
    >>> plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024, tokens="10G")
    >>> plan.layout.num_devices, plan.bound_s < plan.estimate.step_time_s, plan.run.num_steps
    (8, True, 152588)
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
    bound_s: float | None = None
    policy: IssuePolicy = field(default_factory=IssuePolicy)
    to_loss: LossTarget | None = None
    defaults: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits, compare=False)
    published: PublishedComparison | None = field(default=None, compare=False)

    @property
    def problem(self) -> Problem:
        """The model, cluster and job that the plan was made for."""
        return Problem(self.model, self.cluster, self.job)

    @property
    def exposed_share(self) -> float | None:
        """Exposed share of communication by measured constants; None if a convention decides (`job.convention`)."""
        return None if self.cluster.calibration is None else self.estimate.exposed_share

    def __repr__(self) -> str:
        job, estimate = self.job, "\n  ".join(repr(self.estimate).removeprefix("Estimate: ").split("\n  "))
        return (
            f"Plan: {self.model.name} on {self.cluster.name}, {job.global_batch_tokens:,} tokens per batch, sequences of "
            f"{job.seq_len:,}, {job.precision}\n  {self.layout}\n  {estimate}"
        )


def software_versions() -> dict[str, str]:
    """Return the versions of Shardwise and Python."""
    return {"shardwise": __version__, "python": platform.python_version()}
