"""Plan of a given layout, without a search. No NumPy is needed, so `estimate` starts fast."""

from dataclasses import dataclass, replace

from shardwise.batch_size import parse_batch_schedule
from shardwise.book_formulas import book_rules
from shardwise.hardware import Cluster, with_ideal_constants, without_calibration
from shardwise.layout import Layout, layout_as_run, stack_of, unsupported_choices
from shardwise.model import Architecture, Job
from shardwise.pipeline import get_schedule
from shardwise.price import Estimate, Problem, Reliability
from shardwise.price.estimate import estimate
from shardwise.price.roofline import issue_policy
from shardwise.price.training_run import price_scheduled_run, training_run
from shardwise.search.plan import Plan, software_versions
from shardwise.search.recompute_budget import fit_recompute_budget
from shardwise.values import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """The plan of one given layout, and the smallest change with which it would fit; None if it fits."""

    plan: Plan
    smallest_change: str | None = None


def plan_layout(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout, *, reliability: Reliability | None = None
) -> Plan:
    """Return the plan of a given layout, without a search: its estimate, the books' rules, and the whole run.

    A cluster without measurements is predicted under the typical stack of its chip (`with_problem_defaults`), and choices that
    the stack fixes are set as it runs them. A budget of activation bytes becomes the set of tensors kept under it
    (`search.recompute_budget`). Choices that the stack does not support are noted in the estimate. `reliability` sets failure
    rate, restarts and power of the run.

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
    layout = fit_recompute_budget(problem, layout_as_run(stack, layout))
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
    return Plan(
        model=problem.architecture, cluster=problem.cluster, job=problem.job, layout=layout, estimate=priced,
        rules=book_rules(problem.architecture, problem.cluster, problem.job), versions=software_versions(),
        run=training_run(problem.architecture, problem.cluster, problem.job, priced, reliability),
        bound_s=bound_s, policy=issue_policy(problem.cluster),
    )  # fmt: skip
