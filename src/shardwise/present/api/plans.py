"""Plans of a job, on one cluster or on several, and why they are what they are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.layout import Layout
from shardwise.model import Job
from shardwise.present.api.given import (
    Model,
    Noise,
    Pins,
    Where,
    architecture_of,
    cluster_of,
    job_of,
    pins_of,
    resolved,
    stack_of,
)
from shardwise.price import Reliability
from shardwise.search import Plan
from shardwise.values import Progress, ignore_progress, run_all

if TYPE_CHECKING:
    from shardwise.layout import Choices
    from shardwise.price import Limits
    from shardwise.search import Comparison, Explanation, LossSearch
    from shardwise.search.loss_time import Goal


def plan(
    model: Model, cluster: Where, job: Job | None = None, *, stack: str | None = None, pins: Pins = "", maxima: Pins = "",
    choices: Choices | None = None, runnable: bool = False, divisible: bool = False, reliability: Reliability | None = None,
    noise_scale: Noise | None = None, to_loss: float | None = None, progress: Progress = ignore_progress, **job_fields: Any,
) -> Plan:  # fmt: skip
    """The best layout for a job on a cluster: the simplest of the fastest that fit, with its estimate and why others lost.

    Without a `stack`, and on a cluster without measurements, the step is predicted for the typical stack of the chip; a job with
    an `overlap` is planned by the lower bound of that convention. `pins` and `maxima` narrow the search, as `--pin` and `--max`
    do: {"tp": 8} or "tp=8 recompute=full"; `choices` are what it may otherwise choose from. `runnable`: only layouts that
    `train` runs, with its loss; `divisible`: only layouts that split the batch evenly. `reliability` has the failure rate,
    restarts and power for the run of a job with `tokens`. `progress` is called as the search proceeds. With a `noise_scale`, or a
    loss in nats (`to_loss`), the batch that reaches the loss the soonest is chosen too: `plan_to_loss` on one cluster.

    Raises `InputError` for anything wrong in these, `NothingFitsError` where no layout fits, with the smallest excess.

    >>> import shardwise as sw
    >>> found = sw.plan("llama-3.2-1b", "h100:8", global_batch_tokens="512Ki", seq_len=4096)
    >>> found.layout.num_devices, found.estimate.fits, found.job.num_seqs
    (8, True, 128)
    >>> found  # doctest: +ELLIPSIS
    Plan: llama-3.2-1b on h100:8, 524,288 tokens per batch, sequences of 4,096, bf16
      fsdp=...
      step ... tokens/s per device, MFU ...%, bound by ...
      memory ... GB of 80 GB (fits, ...% free)
    >>> sw.plan("llama-3.2-1b", "h100:8", found.job, pins="tp=2 zero_stage=3", maxima={"cp": 1}).layout.tp
    2
    >>> low, high = found.estimate.interval90
    >>> found.bound_s < low < found.estimate.step_time_s < high
    True
    >>> sw.plan("llama-3.2-1b", "h100:8", found.job, stack="nemo-25").cluster.calibration.stack
    'nemo-25'
    >>> sw.plan("gpt-2", "h100:8", noise_scale="128Ki", seq_len=1024).job.global_batch_tokens
    131072
    """
    if noise_scale is not None or to_loss is not None:
        found = plan_to_loss(
            model, [cluster], job, noise_scale=noise_scale, to_loss=to_loss, stack=stack, pins=pins, maxima=maxima,
            choices=choices, runnable=runnable, divisible=divisible, reliability=reliability, progress=progress, **job_fields,
        )  # fmt: skip
        assert found.plan is not None  # without limits one is chosen
        return found.plan
    from shardwise.layout import choices_from_pins, job_for_engine
    from shardwise.price import Problem
    from shardwise.search import make_plan as search_plan

    architecture, where, what = resolved(model, cluster, job, stack, job_fields)
    kept = choices_from_pins(
        pins_of(pins, "pins"), pins_of(maxima, "maxima"), choices, runnable=runnable, divisible=divisible
    )
    what = job_for_engine(what) if runnable else what
    return search_plan(Problem(architecture, where, what), choices=kept, reliability=reliability, progress=progress)


def plan_clusters(
    model: Model, clusters: Sequence[Where], job: Job | None = None, *, stack: str | None = None,
    limits: Limits | None = None, pins: Pins = "", maxima: Pins = "", choices: Choices | None = None,
    reliability: Reliability | None = None, progress: Progress = ignore_progress, **job_fields: Any,
) -> Comparison:  # fmt: skip
    """Plan a job on each of several clusters and choose one: the cheapest that meets all `limits`, or without limits the fastest.

    The other arguments are those of `plan`. A cluster on which nothing fits stays in the comparison, with the reason. Raises
    `InputError` for a wrong model, job, cluster, pin or maximum.

    >>> import shardwise as sw
    >>> found = sw.plan_clusters("gpt-2", ["h100:8", "a100-80gb:8"], global_batch_tokens="64Ki", seq_len=1024)
    >>> found.plan.cluster.name, found.reason
    ('h100:8', 'the fastest')
    """
    from shardwise.layout import choices_from_pins
    from shardwise.price import Problem
    from shardwise.search.compare_clusters import plan_clusters as search_clusters

    architecture, what, *several = run_all(
        lambda: architecture_of(model),
        lambda: job_of(job, job_fields, stack_of(clusters, stack)),
        *(partial(cluster_of, one, stack) for one in clusters),
    )
    kept = choices_from_pins(pins_of(pins, "pins"), pins_of(maxima, "maxima"), choices)
    problems = [Problem(architecture, cluster, what) for cluster in several]
    return search_clusters(problems, limits=limits, choices=kept, reliability=reliability, progress=progress)


def plan_to_loss(
    model: Model, clusters: Sequence[Where], job: Job | None = None, *, noise_scale: Noise | None = None,
    to_loss: float | None = None, batches: Sequence[int | str] = (), goal: Goal | None = None, limits: Limits | None = None,
    stack: str | None = None, pins: Pins = "", maxima: Pins = "", choices: Choices | None = None, runnable: bool = False,
    divisible: bool = False, reliability: Reliability | None = None, progress: Progress = ignore_progress, **job_fields: Any,
) -> LossSearch:  # fmt: skip
    """Plan every batch on every cluster, and choose what reaches a loss the soonest, or for the fewest dollars (`goal="usd"`).

    `noise_scale`: tokens, the folder of a run that measured it, or a `NoiseScale`; without it, that of the published law at the
    loss `to_loss`, in nats per token. `batches` are tokens (default: the job's own batch, or without one doublings around the
    noise scale). The job's `tokens` are those to the loss with the smallest batch that is given, or without one the fewest. The
    other arguments are those of `plan_clusters`.

    Raises `InputError` for anything wrong in these, `NothingFitsError` where no batch has a plan.

    >>> import shardwise as sw
    >>> found = sw.plan_to_loss("gpt-2", ["h100:8", "h100:16"], noise_scale="128Ki", batches=["64Ki", "128Ki"], seq_len=1024)
    >>> found.plan.cluster.name, [point.batch_tokens for point in found.points[:2]]
    ('h100:16', [65536, 131072])
    >>> first, second = (point.time for point in found.points[:2])
    >>> first.tokens_ratio, second.tokens_ratio, second.loss_s / second.token_s
    (1.5, 2.0, 2.0)
    """
    from shardwise.layout import choices_from_pins, job_for_engine
    from shardwise.model import default_seq_len
    from shardwise.present.api.losses import loss_target
    from shardwise.price import Limits, Problem
    from shardwise.search.plan_to_target_loss import LossQuestion
    from shardwise.search.plan_to_target_loss import plan_to_loss as search_to_loss

    architecture, *several = run_all(
        lambda: architecture_of(model), *(partial(cluster_of, one, stack) for one in clusters)
    )
    target, sizes, what = loss_target(
        noise_scale, to_loss, batches, job, job_fields,
        usual_seq_len=default_seq_len(architecture), stack=stack_of(clusters, stack),
    )  # fmt: skip
    kept = choices_from_pins(
        pins_of(pins, "pins"), pins_of(maxima, "maxima"), choices, runnable=runnable, divisible=divisible
    )
    what = job_for_engine(what) if runnable else what
    return search_to_loss(
        [Problem(architecture, cluster, what) for cluster in several],
        LossQuestion(target, tuple(sizes), limits or Limits(), goal),
        choices=kept, reliability=reliability, progress=progress,
    )  # fmt: skip


def explain(
    plan: Plan | str | os.PathLike[str], against: str | Layout | None = None, *, term: str | None = None,
    progress: Progress = ignore_progress,
) -> Explanation:  # fmt: skip
    """Why a plan is what it is: whether it fits, whether it reaches the batch, what bounds its throughput, and the alternatives.

    `plan` is a plan or the path of its file, `against` another layout to compare with: what its text leaves out is chosen as a
    search does. `term` is one term to take apart, such as "memory.activations".

    Raises `InputError` for a layout that breaks a rule and for an unknown term.

    >>> import shardwise as sw
    >>> found = sw.plan("llama-3.2-1b", "h100:8", global_batch_tokens="512Ki", seq_len=4096)
    >>> explanation = sw.explain(found, "tp=8", term="time.tp")
    >>> explanation.fit.fits, explanation.throughput.bound, explanation.against.lead > 0.1
    (True, 'compute', True)
    >>> [term.layout for term in explanation.terms] == [str(found.layout), explanation.against.layout]
    True
    """
    from shardwise.layout import parse_fields
    from shardwise.search import find_nearest_fitting, load_plan, plan_doublings
    from shardwise.search.explain.explanation import explain_plan as explain_plan
    from shardwise.search.nearest_fitting_layout import added_fields_text, complete_layout

    of = plan if isinstance(plan, Plan) else load_plan(os.fspath(plan))
    other, chosen = against, ""
    if isinstance(other, str):
        said = parse_fields(other, prefix="against")
        other = complete_layout(of.problem, said)
        chosen = added_fields_text(other, said)
    nearest = partial(find_nearest_fitting, of.problem, progress=progress)
    return explain_plan(
        of,
        nearest,
        other_layout=other,
        filled=chosen,
        term_name=term,
        plan_doublings=lambda plan: plan_doublings(plan, plan.to_loss, progress=progress) if plan.to_loss else (),
    )
