"""Plans with a batch that the user left out: the usual one of the model, or a multiple that fills a large cluster."""

from __future__ import annotations

from dataclasses import replace

from shardwise.layout import Choices, job_for_engine
from shardwise.model import Job
from shardwise.price import Problem, ProblemInputs, Reliability
from shardwise.search.plan import Plan
from shardwise.search.planner import add_other_stack_gain, make_plan
from shardwise.values import NothingFitsError, Progress, ceil_div, ignore_progress


def plan_inputs(
    inputs: ProblemInputs, *, choices: Choices | None = None, runnable: bool = False, reliability: Reliability | None = None,
    progress: Progress = ignore_progress,
) -> Plan:  # fmt: skip
    """Search for the best layout on the first cluster (`make_plan`); `defaults` of the plan names what was left out.

    A batch that was left out is the usual one of the model, or a multiple with a sequence for every replica of the layout.
    `runnable`: with the loss of the engine of `train`. Raises `NothingFitsError` if no layout fits.
    """
    problem = replace(inputs.problem, job=job_for_engine(inputs.job)) if runnable else inputs.problem
    reliability = reliability or inputs.reliability
    if "global_batch_tokens" in inputs.defaults:
        plan = _plan_usual_batch(problem, choices, reliability, progress)
        plan = add_other_stack_gain(plan, choices, progress)
    else:
        plan = make_plan(problem, choices=choices, reliability=reliability, progress=progress)
    return replace(plan, defaults=inputs.default_names)


def job_for_clusters(
    inputs: ProblemInputs,
    *,
    choices: Choices | None = None,
    runnable: bool = False,
    progress: Progress = ignore_progress,
) -> Job:
    """Return the job of plans on several clusters: a batch that was left out has a sequence for every replica on the largest."""
    job = job_for_engine(inputs.job) if runnable else inputs.job
    if "global_batch_tokens" not in inputs.defaults:
        return job
    largest = max(inputs.clusters, key=lambda cluster: cluster.num_devices)
    try:
        plan = _plan_usual_batch(Problem(inputs.architecture, largest, job), choices, None, progress)
    except NothingFitsError:
        return job
    return replace(job, global_batch_tokens=plan.job.global_batch_tokens)


def _plan_usual_batch(
    problem: Problem, choices: Choices | None, reliability: Reliability | None, progress: Progress
) -> Plan:
    """Plan with the smallest multiple of the job's batch that has a sequence for every replica of the chosen layout.

    If nothing fits, the batch is doubled up to a sequence for every device: more of them make no other layout legal.
    """
    usual, job, first_error = problem.job, problem.job, None
    while True:
        try:
            plan = make_plan(
                replace(problem, job=job), choices=choices, reliability=reliability, progress=progress, elsewhere=False
            )
        except NothingFitsError as error:
            first_error = first_error or error
            if job.num_seqs >= problem.cluster.num_devices:
                raise first_error from None
            multiple = 2 * job.num_seqs // usual.num_seqs
        else:
            multiple = ceil_div(plan.layout.num_replicas, usual.num_seqs)
            if multiple * usual.num_seqs <= job.num_seqs:
                return plan
        job = replace(usual, global_batch_tokens=multiple * usual.global_batch_tokens)
