"""A plan: the layout chosen for a model, a cluster and a job, its estimate, the layouts that lost, and what was searched.

`plan_layout` makes the plan of a given layout, without a search; no NumPy is needed, so `estimate` starts fast. Beside a plan
stand published runs near it, and advice on a batch that is too small for its cluster. `shardwise plan` writes it
(`search/plan_file.py`); `train`, `export` and `reconcile` read it. `measure.nearest_published_runs` finds the runs, and
`search.compare_published_runs` prices their layouts.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.batch_size import LossTarget, parse_batch_schedule
from shardwise.book_formulas import Rule, book_rules
from shardwise.hardware import Cluster, with_ideal_constants, without_calibration
from shardwise.layout import Layout, layout_as_run, stack_of, unsupported_choices
from shardwise.model import Architecture, Job
from shardwise.pipeline import get_schedule
from shardwise.price import Estimate, Limits, Problem, Reliability, Run
from shardwise.price.estimate import estimate
from shardwise.price.roofline import issue_policy
from shardwise.price.training_run import price_scheduled_run, training_run
from shardwise.search.recompute_budget import fit_recompute_budget
from shardwise.values import Displayable, IssuePolicy, ceil_div
from shardwise.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A training run that others published.

    `layout_text` is the layout of its own devices; `recomputes` are the policies that it may have run with, one where the source
    states it. `tokens_per_s_per_device` was measured. `id` is that of its row in `calibrate/published_runs/runs.csv`.
    """

    id: str
    model_name: str
    chip: str
    num_devices: int
    software: str
    precision: str
    seq_len: int
    num_seqs: int
    layout_text: str
    recomputes: tuple[str, ...]
    tokens_per_s_per_device: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestRuns:
    """Published runs near a problem, nearest first. `same_model` and `same_chip` hold for all of them or for none."""

    runs: tuple[PublishedRun, ...]
    same_model: bool
    same_chip: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLayout:
    """The layout of published runs on a plan's cluster, priced for its job at the plan's rates.

    `run` is the nearest of the `num_runs` with this layout, of which the fastest measured `best_tokens_per_s_per_device`. A
    refused layout has a `problem`, and no price. `lacks` says what the plan's stack does not support of it. `lead` is its step
    time over the plan's, less one; `time` and `memory` are its terms less the plan's, in seconds and bytes.
    """

    run: PublishedRun
    num_runs: int
    best_tokens_per_s_per_device: float
    layout_text: str
    problem: str = ""
    lacks: str = ""
    step_time_s: float | None = None
    memory_bytes: float | None = None
    fits: bool | None = None
    lead: float | None = None
    difference: str = ""
    time: Mapping[str, float] | None = None
    memory: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedComparison:
    """A plan beside the nearest published runs. `unlike`: choices of the plan that none of the runs made."""

    num_runs: int
    same_model: bool
    same_chip: bool
    unlike: tuple[str, ...]
    layouts: tuple[PublishedLayout, ...]


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
    left out: "seq_len" and "batch_tokens", which are usual for the model (`model.job`), and of one priced layout "layout".
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


# A plan below this share of the rate that products sustain uses its devices badly. The share is a choice: published runs of
# dense models at their usual batch reach more than half (calibrate/published_runs/runs.csv), and those that do not have too few
# tokens for each device.
WELL_USED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAdvice:
    """A batch that is too small for its devices. `batch_tokens` is the smallest doubling of the batch with at least
    `min_tokens_per_device`, from which FSDP is bound by compute; `max_devices` is how many are bound by compute with the batch
    as it is."""

    tokens_per_device: float
    min_tokens_per_device: float
    batch_tokens: int
    max_devices: int
    reason: str


def advise_batch(plan: Plan) -> BatchAdvice | None:
    """Return what to do about a batch that leaves devices idle; None where the plan uses its devices, or its rules do not say.

    The rules are those of the book (`book_formulas.rules.job_rules`): FSDP alone is bound by compute from alpha / M tokens for
    each device, with alpha = C / W. A layout with other axes may be so with fewer, and a plan of a good MFU is left alone.

    >>> import shardwise as sw
    >>> plan = sw.plan("llama-3.2-1b", "h100:1024", global_batch_tokens="512Ki", seq_len=4096, pins="tp=8")
    >>> advice = advise_batch(plan)
    >>> advice.tokens_per_device, advice.batch_tokens // 2**20
    (512.0, 4)
    """
    rules = {rule.name: rule.value for rule in plan.rules}
    tokens, least, devices = (
        rules.get(name) for name in ("tokens_per_chip", "fsdp_min_tokens_per_chip", "fsdp_max_chips")
    )
    if tokens is None or least is None or devices is None or tokens >= least or devices < 1:
        return None
    calibration, chip = plan.cluster.calibration, plan.cluster.chip
    sustained = chip.matmul_fraction if calibration is None else calibration["matmul_fraction"]
    if plan.estimate.mfu >= WELL_USED * sustained:
        return None
    multiple = 1
    while multiple * tokens < least:
        multiple *= 2
    batch_tokens = multiple * plan.job.global_batch_tokens
    return BatchAdvice(
        tokens_per_device=tokens, min_tokens_per_device=least, batch_tokens=batch_tokens, max_devices=int(devices),
        reason=(
            f"{tokens:,.0f} tokens for each device are too few to use it well: FSDP alone is compute-bound from {least:,.0f}, "
            f"with a batch of {batch_tokens:,} tokens ({multiple} times this one), or with at most {int(devices):,} devices; "
            "--noise-scale tells whether a larger batch pays"
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """The plan of one given layout, and the smallest change with which it would fit; None if it fits."""

    plan: Plan
    smallest_change: str | None = None


def plan_layout(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, *, reliability: Reliability | None = None,
    as_run: bool = True,
) -> Plan:  # fmt: skip
    """Return the plan of a given layout, without a search: its estimate, the books' rules, and the whole run.

    A cluster without measurements is predicted under the typical stack of its chip (`with_problem_defaults`), and choices that
    the stack fixes are set as it runs them, unless `as_run` is false, for a layout that a launch sets. A budget of activation
    bytes becomes the set of tensors kept under it (`search.recompute_budget`). Choices that the stack does not support are noted
    in the estimate. `reliability` sets failure rate, restarts and power of the run.

    Raises `InputError` with every rule that the layout breaks.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**19, seq_len=4096)
    >>> plan = plan_layout(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job, sw.Layout.parse("fsdp=8 recompute=full"))
    >>> plan.layout.zero_stage, plan.estimate.fits, plan.bound_s < plan.estimate.step_time_s
    (3, True, True)
    """
    architecture.require_positions(job.seq_len)
    problem = Problem(architecture, cluster, job).with_defaults()
    stack = stack_of(problem.cluster)
    layout = fit_recompute_budget(problem, layout_as_run(stack, layout) if as_run else layout)
    priced = estimate(problem, layout)
    unsupported = unsupported_choices(stack, architecture, job, layout) if stack and stack.is_known else []
    priced = replace(priced, notes=(*priced.notes, *unsupported))
    return assemble_plan(problem, layout, priced, reliability)


def estimate_as_run(problem: Problem, layout: Layout) -> Estimate:
    """Return the estimate of a layout as the cluster's stack runs it; a budget of activation bytes is fitted first."""
    return estimate(problem, fit_recompute_budget(problem, layout_as_run(stack_of(problem.cluster), layout)))


def fill_layout(job: Job, layout: Layout) -> Job:
    """Return the job with the smallest multiple of its batch that gives every replica and every pipeline stage a micro-batch.

    >>> job = Job(global_batch_tokens=2**20, seq_len=4096)
    >>> fill_layout(job, Layout(dp=1024)).global_batch_tokens // 2**20, fill_layout(job, Layout(dp=64)) == job
    (4, True)
    """
    schedule, stages = get_schedule(layout.schedule), (layout.pp, layout.num_virtual_stages)
    multiple = schedule.micro_batch_multiple(*stages)
    micro_batches = ceil_div(max(layout.pp, schedule.min_micro_batches(*stages)), multiple) * multiple
    num_seqs = micro_batches * layout.micro_batch_seqs * layout.num_replicas
    return replace(job, global_batch_tokens=max(ceil_div(num_seqs, job.num_seqs), 1) * job.global_batch_tokens)


def with_batch_schedule(plan: Plan, schedule: str | None, reliability: Reliability | None = None) -> Plan:
    """Return the plan whose run has the phases of a schedule of batches, such as "0:1Mi,100G:4Mi"; unchanged without one.

    Raises `InputError` for a wrong schedule, a job without tokens, and batches that the layout does not run.
    """
    if schedule is None:
        return plan
    return replace(
        plan, run=price_scheduled_run(plan.problem, plan.layout, parse_batch_schedule(schedule), reliability)
    )


def assemble_plan(
    problem: Problem, layout: Layout, priced: Estimate, reliability: Reliability | None
) -> Plan:  # fmt: skip
    """Return the plan of a priced layout, with the books' rules, the whole run and the bound of the step."""
    # Without measurements the estimate itself is the bound at the rates that micro-benchmarks reach.
    bound_s = None
    if problem.cluster.calibration is not None:
        nominal = replace(problem, cluster=without_calibration(problem.cluster))
        bound_s = estimate(nominal, layout).step_time_s
        if bound_s > priced.step_time_s:  # the stack hides traffic that the convention of overlap exposes
            ideal = replace(problem, cluster=with_ideal_constants(problem.cluster))
            bound_s = min(estimate(ideal, layout).step_time_s, priced.step_time_s)
    warnings = problem.architecture.context_warnings(problem.job.seq_len)
    priced = replace(priced, notes=(*priced.notes, *warnings)) if warnings else priced
    return Plan(
        model=problem.architecture, cluster=problem.cluster, job=problem.job, layout=layout, estimate=priced,
        rules=book_rules(problem.architecture, problem.cluster, problem.job), versions=software_versions(),
        run=training_run(problem.architecture, problem.cluster, problem.job, priced, reliability),
        bound_s=bound_s, policy=issue_policy(problem.cluster),
    )  # fmt: skip
