"""`explain`: why a plan is what it is, and how another layout compares."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from shardwise import measure, price, search
from shardwise.batch_size import LossTarget, parse_noise_scale
from shardwise.model import model_names
from shardwise.present import explorer
from shardwise.present.arguments import CLUSTER_HELP, PLAN_HELP, USUAL_JOB, JobFields
from shardwise.present.exports import html_report
from shardwise.present.verb import Argument, verb
from shardwise.values import InputError, Progress, argument_label, ignore_progress

if TYPE_CHECKING:
    from shardwise.batch_size import NoiseScale
    from shardwise.hardware import Cluster
    from shardwise.layout import Layout
    from shardwise.search import Explanation, Plan


def _report_html(explanation: Explanation) -> str:
    title = f"{explanation.model} on {explanation.cluster}: why this plan"
    return explorer.result_report("explain", title, explanation)


@verb(
    description="Say why a plan is what it is: does it fit, does it reach the batch, what bounds its throughput. A model and a "
    "cluster are planned first.",
    defaults=USUAL_JOB,
    examples=(
        "shardwise explain llama-3-8b h100:8",
        "shardwise plan llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --out plan.json",
        'shardwise explain plan.json --against "fsdp=8 recompute=full"',
        "shardwise explain plan.json --term memory.activations",
    ),
    exports=(html_report(_report_html),),
    group_order=("plan", "job", "cluster", "output"),
    has_details=True,
)
def explain(
    plan: Annotated[
        Plan | str | os.PathLike[str],
        Argument(group="plan", metavar="PLAN", help=f"{PLAN_HELP}, or a model to plan on a cluster"),
    ],
    against: Annotated[
        str | Layout | None,
        Argument(
            flag="--against", group="plan", metavar="TEXT", parse=str,
            help='another layout, such as "tp=8 pp=4 fsdp=16"',
        ),
    ] = None,
    *,
    cluster: Annotated[
        str | os.PathLike[str] | Cluster | None,
        Argument(group="cluster", completes="clusters", optional=True, help=f"of a model: {CLUSTER_HELP}"),
    ] = None,
    noise_scale: Annotated[
        str | float | os.PathLike[str] | NoiseScale | None,
        Argument(
            flag="--noise-scale", group="plan", metavar="N|RUN",
            help="of a plan that was made without: which side of the critical batch it lies on, and what the next doubling gains",
        ),
    ] = None,
    term: Annotated[
        str | None,
        Argument(
            flag="--term", group="plan", metavar="NAME",
            help="one term only, such as memory.activations or time.tp",
        ),
    ] = None,
    progress: Progress = ignore_progress,
    **fields: Unpack[JobFields],
) -> Explanation:  # fmt: skip
    """Return why a plan is what it is: whether it fits, whether it reaches the batch, what bounds its throughput, and the others.

    `plan` is a plan, the path of its file, or a model, which is planned on `cluster` first, for the job of `fields`. `against` is
    another layout to compare with: what its text leaves out is chosen as a search does. `term` is one term to take apart, such
    as "memory.activations". With a `noise_scale` the plan's side of the critical batch is said, too.

    Raises `InputError` for a layout that breaks a rule and for an unknown term.

    >>> import shardwise as sw
    >>> plan = sw.plan("llama-3.2-1b", "h100:8", global_batch_tokens="512Ki", seq_len=4096)
    >>> explanation = sw.explain(plan, "tp=8", term="time.tp")
    >>> explanation.fit.fits, explanation.throughput.bound, explanation.against.lead > 0.1
    (True, 'compute', True)
    >>> [term.layout for term in explanation.terms] == [str(plan.layout), explanation.against.layout]
    True
    """
    loaded = _with_noise_scale(_load_or_make_plan(plan, cluster, fields, progress), noise_scale)
    layout, added_fields = against, ""
    if isinstance(layout, str):
        layout, added_fields = search.parse_partial_layout(loaded.problem, layout, argument_label("against"))
    return search.explain_plan(
        loaded, partial(search.find_nearest_fitting, loaded.problem, progress=progress),
        other_layout=layout, filled=added_fields, term_name=term,
        plan_doublings=lambda repriced: (
            search.plan_doublings(repriced, repriced.to_loss, progress=progress) if repriced.to_loss else ()
        ),
        published=None if term else measure.compare_with_published_runs(loaded),
    )  # fmt: skip


def _load_or_make_plan(
    plan: Plan | str | os.PathLike[str], cluster: str | os.PathLike[str] | Cluster | None, fields: Mapping[str, Any],
    progress: Progress,
) -> Plan:  # fmt: skip
    """Return the plan of a value or a file, or that of a model on a cluster."""
    if cluster is None:
        if fields:
            labels = ", ".join(map(argument_label, fields))
            raise InputError(
                f"{labels}: found with a plan, which has a job; a model and a cluster are required with it"
            )
        if isinstance(plan, search.Plan):
            return plan
        if plan in model_names():
            raise InputError(f"cluster: missing; what to plan {plan} on is required, such as h100:8")
        return search.load_plan(Path(plan))
    if isinstance(plan, search.Plan) or search.is_plan_file(Path(plan)):
        raise InputError("cluster: found with a plan, which has one; a model is required with it")
    return search.plan_inputs(price.resolve_problem(plan, [cluster], None, fields), progress=progress)


def _with_noise_scale(plan: Plan, noise_scale: str | float | os.PathLike[str] | NoiseScale | None) -> Plan:
    """Return the plan with a noise scale: its tokens are then those to the loss with its batch."""
    if noise_scale is None:
        return plan
    value = Path(noise_scale) if isinstance(noise_scale, os.PathLike) else noise_scale
    batch = None if plan.job.tokens is None else float(plan.job.global_batch_tokens)
    noise = parse_noise_scale(value, argument_label("noise_scale"))
    return replace(plan, to_loss=LossTarget(noise=noise, tokens=plan.job.tokens, batch_tokens=batch))
