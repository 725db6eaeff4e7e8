"""What `plan` writes and `train`, `export` and `reconcile` read."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.batch.target import LossTarget
from shardwise.books.rules import Rule, book_rules
from shardwise.cluster.cluster import Cluster
from shardwise.cluster.stacks import predicted, rated, typical_stack
from shardwise.cost.budget import within_budget
from shardwise.cost.estimate import Estimate, estimate
from shardwise.cost.rates import loss_of, policy_of
from shardwise.cost.reliability import Reliability
from shardwise.cost.run import Run, training_run
from shardwise.draw.notebook import Pictured, Shown
from shardwise.issuing import IssuePolicy
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.planning.abilities import as_run, lacking, stack_of
from shardwise.version import __version__

SCHEMA = "shardwise.plan/3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout that was not taken, its cost, and why it lost."""

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
class Plan(Pictured):
    """A model, a cluster and a job as resolved, the layout, its estimate, and their provenance.

    `bound_s` is the lower bound of the step in seconds, with kernels and links at the best that micro-benchmarks reach; None
    where the estimate is that bound itself. `alternatives` are the runners-up with the reason why each lost, `rules` those of
    the books. `run` is the whole run; None for a job without `tokens`. `policy` says which collectives the plan's stack issues
    for its layout. `to_loss` is the loss that batch and devices were chosen for, with the noise scale; None for a given batch.

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

    @property
    def exposed_share(self) -> float | None:
        """The exposed share of communication by measured constants; None where a convention decides (`job.convention`)."""
        return None if self.cluster.calibration is None else self.estimate.exposed_share

    def shown(self) -> Shown:
        """The plan as text and picture, as a notebook displays it."""
        from shardwise.planning.picture import shown_plan

        return shown_plan(self)

    def __repr__(self) -> str:
        job, estimate = self.job, "\n  ".join(repr(self.estimate).removeprefix("Estimate: ").split("\n  "))
        return (
            f"Plan: {self.model.name} on {self.cluster.name}, {job.global_batch_tokens:,} tokens per batch, sequences of "
            f"{job.seq_len:,}, {job.precision}\n  {self.layout}\n  {estimate}"
        )


def as_planned(cluster: Cluster, job: Job) -> tuple[Cluster, Job]:
    """The cluster and the job of a plan, with defaults filled in.

    A cluster without measurements is predicted under the typical stack of its chip, unless the job names a convention of
    overlap: then the plan is made by the bound of that convention. A host, or a chip of an unknown vendor, is also planned by
    the bound. The loss is the one with the least memory that the stack has.
    """
    stack = typical_stack(cluster.chip) if cluster.calibration is None and job.overlap is None else None
    cluster = predicted(cluster, stack) if stack else cluster
    return cluster, replace(job, loss=loss_of(cluster, job))


def bound_seconds(architecture: Architecture, cluster: Cluster, job: Job, layout: Layout) -> float | None:
    """Seconds of a layout's step at the rates that micro-benchmarks reach; None where the estimate is that bound."""
    if cluster.calibration is None:
        return None
    return estimate(architecture, rated(cluster), job, layout).step_time_s


def plan_layout(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, *, reliability: Reliability | None = None
) -> Plan:
    """A plan for a given layout, without a search: its estimate, the books' rules, and what the whole run takes.

    A cluster without measurements is predicted under the typical stack of its chip (`as_planned`), and choices that the stack
    fixes are set as it runs them. A budget of activations becomes the set of tensors that is kept under it
    (`cost.budget`). What the stack does not support is noted in the estimate. `reliability` gives the failure rate,
    restarts and power of the run (defaults: `Reliability`).

    Raises `InputError` with every rule that the layout breaks.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**19, seq_len=4096)
    >>> plan = plan_layout(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job, sw.Layout.parse("fsdp=8 recompute=full"))
    >>> plan.layout.zero_stage, plan.estimate.fits, plan.bound_s < plan.estimate.step_time_s
    (3, True, True)
    """
    architecture.require_positions(job.seq_len)
    (cluster, job), asked = as_planned(cluster, job), job
    stack = stack_of(cluster)
    layout = within_budget(architecture, cluster, job, as_run(stack, layout))
    priced = estimate(architecture, cluster, job, layout)
    lacks = lacking(stack, architecture, asked, layout) if stack and stack.known else []
    priced = replace(priced, notes=(*priced.notes, *lacks))
    return Plan(
        model=architecture, cluster=cluster, job=job, layout=layout, estimate=priced,
        rules=book_rules(architecture, cluster, job), versions=versions(),
        run=training_run(architecture, cluster, job, priced, reliability),
        bound_s=bound_seconds(architecture, cluster, job, layout), policy=policy_of(cluster),
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of the software that made the plan."""
    return {"shardwise": __version__, "python": platform.python_version()}
