"""Plans on several clusters, for several values, and to a loss: the other modes of `plan` on the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Unpack

from shardwise import interop, price, search
from shardwise.model import Job
from shardwise.present.arguments import (
    Budget,
    Deadline,
    GoalName,
    IsDivisible,
    IsRunnable,
    JobFields,
    Maxima,
    Model,
    NoiseScaleText,
    Pins,
    TargetLoss,
    read_choices,
    read_pins,
)
from shardwise.present.verb import Argument
from shardwise.values import Progress, argument_label, ignore_progress

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.layout import Choices
    from shardwise.price import Limits, Reliability
    from shardwise.search import Comparison, LossSearch, Swept


def plan_clusters(
    model: Model, clusters: Sequence[str | os.PathLike[str] | Cluster], job: Job | None = None, *, deadline: Deadline = None,
    budget: Budget = None, limits: Limits | None = None, pins: Pins = "", maxima: Maxima = "", runnable: IsRunnable = False,
    divisible: IsDivisible = False, choices: Choices | None = None, reliability: Reliability | None = None,
    progress: Progress = ignore_progress, **fields: Unpack[JobFields],
) -> Comparison:  # fmt: skip
    """Plan a job on each of several clusters and choose one: the cheapest that meets all `limits`, or without limits the fastest.

    `limits` may be written as `deadline` and `budget`, too. The other arguments are those of `plan`; a batch that is left out is
    the same on all clusters. A cluster on which nothing fits stays in the comparison, with the reason. Raises `InputError` for a
    wrong model, job, cluster, pin or maximum.

    >>> import shardwise as sw
    >>> comparison = sw.plan_clusters("gpt-2", ["h100:8", "a100-80gb:8"], global_batch_tokens="64Ki", seq_len=1024)
    >>> comparison.plan.cluster.name, comparison.reason
    ('h100:8', 'the fastest')
    """
    allowed = read_choices(pins, maxima, choices, runnable=runnable, divisible=divisible)
    inputs = price.resolve_problem(model, clusters, job, fields)
    if "stack" in fields:
        interop.require_stack_model(inputs.problem)
    limits = limits or price.parse_limits(deadline, budget, inputs.job.tokens)
    job = search.job_for_clusters(inputs, choices=allowed, runnable=runnable, progress=progress)
    return search.plan_clusters(
        [price.Problem(inputs.architecture, cluster, job) for cluster in inputs.clusters], limits=limits, choices=allowed,
        reliability=reliability or inputs.reliability, defaults=inputs.default_names, progress=progress,
    )  # fmt: skip


def sweep(
    model: Model, cluster: str | os.PathLike[str] | Cluster, job: Job | None = None, *,
    over: Annotated[
        str | Sequence[str],
        Argument(
            flag="--sweep", group="search", repeat=True, metavar="NAME=VALUES",
            help="plan for each value: gpus=64:4096:x2, seq_len=4096:32768:+4096, batch=1Mi,2Mi,4Mi, "
            "model=llama-3-8b,llama-3-70b, or what --pin takes, such as tp=1:32:x2; it stands in place of what is given "
            "otherwise; twice makes a grid",
        ),
    ],
    pins: Pins = "", maxima: Maxima = "", runnable: IsRunnable = False, divisible: IsDivisible = False,
    choices: Choices | None = None, reliability: Reliability | None = None, keep_interrupted: bool = False,
    progress: Progress = ignore_progress, **fields: Unpack[JobFields],
) -> Swept:  # fmt: skip
    """Plan a job for each value of a range, or of two that make a grid, as `plan` does.

    `over` says what is swept, as `--sweep` does: "gpus=64:4096:x2", "seq_len=4096,8192", "batch=1Mi:4Mi:+1Mi",
    "model=llama-3-8b,llama-3-70b", or anything that can be pinned, such as "tp=1:8:x2"; a swept value replaces the argument.
    The other arguments are those of `plan`; a batch that is left out is the usual one of the model at every point. A point at
    which nothing fits has no plan, and its `error` says why. With `keep_interrupted` Ctrl-C returns the points planned so far.

    Raises `InputError` for anything wrong in these, before the first point is planned.

    >>> import shardwise as sw
    >>> swept = sw.sweep("llama-3.2-1b", "h100:8", over="gpus=8,16", global_batch_tokens="512Ki", seq_len=4096)
    >>> [point.plan.layout.num_devices for point in swept.points]
    [8, 16]
    >>> swept  # doctest: +ELLIPSIS
    Swept: gpus, 2 of 2 points
      gpus=8: step ..., MFU ...%, fsdp=8 ...
      gpus=16: step ..., MFU ...%, fsdp=16 ...
    """
    sweeps = search.parse_sweeps([over] if isinstance(over, str) else over, argument_label("over"))
    cases = search.sweep_cases(
        model, cluster, job, fields, sweeps, pins=read_pins(pins, "pins"), maxima=read_pins(maxima, "maxima"),
        choices=choices, runnable=runnable, divisible=divisible, reliability=reliability,
    )  # fmt: skip
    return search.run_sweep(sweeps, cases, keep_interrupted=keep_interrupted, progress=progress)


def plan_to_loss(
    model: Model, clusters: Sequence[str | os.PathLike[str] | Cluster], job: Job | None = None, *, deadline: Deadline = None,
    budget: Budget = None, limits: Limits | None = None, pins: Pins = "", maxima: Maxima = "",
    noise_scale: NoiseScaleText = None, to_loss: TargetLoss = None, goal: GoalName = None, batches: Sequence[int | str] = (),
    runnable: IsRunnable = False, divisible: IsDivisible = False, choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = ignore_progress, **fields: Unpack[JobFields],
) -> LossSearch:  # fmt: skip
    """Plan every batch on every cluster, and choose what reaches a loss the soonest, or for the fewest dollars (`goal="usd"`).

    `noise_scale`: tokens, the folder of a run that measured it, or a `NoiseScale`; without it, that of the published law at the
    loss `to_loss`, in nats per token. `batches` are tokens (default: the job's own batch, or without one doublings around the
    noise scale). The job's `tokens` are those to the loss with the smallest batch that is given, or without one the fewest. The
    chosen plan is planned again with twice the batch, the devices and both (`doublings`). The other arguments are those of
    `plan_clusters`.

    Raises `InputError` for anything wrong in these, `NothingFitsError` where no batch has a plan.

    >>> import shardwise as sw
    >>> search = sw.plan_to_loss("gpt-2", ["h100:8", "h100:16"], noise_scale="128Ki", batches=["64Ki", "128Ki"], seq_len=1024)
    >>> search.plan.cluster.name, [point.batch_tokens for point in search.points[:2]]
    ('h100:16', [65536, 131072])
    >>> first, second = (point.time for point in search.points[:2])
    >>> first.tokens_ratio, second.tokens_ratio, second.loss_s / second.token_s
    (1.5, 2.0, 2.0)
    """
    allowed = read_choices(pins, maxima, choices, runnable=runnable, divisible=divisible)
    problem = search.resolve_loss_problem(
        model, clusters, job, fields, noise_scale=noise_scale, to_loss=to_loss, batches=batches
    )
    limits = limits or price.parse_limits(deadline, budget, problem.inputs.job.tokens)
    loss_search = search.plan_loss_problem(
        problem,
        limits=limits,
        goal=goal,
        choices=allowed,
        runnable=runnable,
        reliability=reliability,
        progress=progress,
    )
    if loss_search.plan is None:
        return loss_search
    doublings = search.plan_doublings(loss_search.plan, loss_search.target, choices=allowed, progress=progress)
    return replace(loss_search, doublings=doublings)
