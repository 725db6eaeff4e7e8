"""`estimate`: what one layout costs. With a layout NumPy is not loaded, so that it starts fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

from shardwise import price, search
from shardwise.layout import Layout, parse_layout_shape, parse_layout_text
from shardwise.model import Job
from shardwise.present.arguments import USUAL_JOB, BatchSchedule, ClusterName, JobFields, LayoutText, Model
from shardwise.present.verb import verb
from shardwise.values import Progress, argument_label, ignore_progress, run_all

if TYPE_CHECKING:
    from shardwise.price import ClusterLike, Estimate, ModelLike, ProblemInputs
    from shardwise.search import LayoutPlan


class _JobAndLayout(NamedTuple):
    """A layout and the job that it is priced for; `defaults` names what was left out."""

    job: Job
    layout: Layout
    defaults: tuple[str, ...]


@verb(
    description="Price one layout of a training job on a cluster: seconds of a step, bytes of a device, what bounds it.",
    defaults={**USUAL_JOB, "layout": "the one that `plan` chooses"},
    examples=(
        'shardwise estimate llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --layout "fsdp=8 recompute=full"',
        'shardwise estimate llama-3-70b h100:64 --batch-tokens 1Mi --seq-len 8Ki --layout "tp=8 pp=4 fsdp=2" --overlap sum',
    ),
    group_order=("job", "cluster", "output"),
    has_details=True,
)
def price_layout(
    model: Model, cluster: ClusterName, job: Job | None = None, *, layout: LayoutText = None,
    batch_schedule: BatchSchedule = None, progress: Progress = ignore_progress, **fields: Unpack[JobFields],
) -> LayoutPlan:  # fmt: skip
    """Return the plan of one layout, without a search, and the smallest change with which it fits if it does not.

    Without a layout it is the one that `plan` chooses. A batch and a sequence that are left out are usual for the model; the
    batch is a multiple of that if the layout needs more sequences. The step is predicted for the typical stack of the chip unless
    a stack is named. Raises `InputError` with all that is wrong, and with every rule that the layout breaks.
    """
    inputs = _resolve_inputs(model, cluster, job, fields, layout)
    job, layout, defaults = _choose_layout(inputs, layout, progress)
    plan = search.plan_layout(inputs.architecture, inputs.clusters[0], job, layout, reliability=inputs.reliability)
    plan = search.with_batch_schedule(replace(plan, defaults=defaults), batch_schedule, inputs.reliability)
    change = None if plan.estimate.fits else search.find_smallest_change(plan, progress)
    return search.LayoutPlan(plan=plan, smallest_change=change)


def estimate(
    model: Model, cluster: ClusterName, job: Job | None = None, layout: LayoutText = None, **fields: Unpack[JobFields]
) -> Estimate:
    """Return what one layout costs: seconds of a step and bytes of a device, by term.

    With a `stack`, or on a calibrated cluster, the step is predicted with a 90% interval; otherwise it is a lower bound. Without
    a layout it is the one that `plan` chooses; a batch and a sequence that are left out are usual for the model.

    Raises `InputError` for an unknown model, cluster or stack, a wrong job, and with every rule that the layout breaks;
    `MissingValueError` for a rate without a source.

    >>> import shardwise as sw
    >>> estimate = sw.estimate(
    ...     "llama-3-8b", "h100:8", layout="fsdp=8 recompute=full", global_batch_tokens="512Ki", seq_len="8Ki"
    ... )
    >>> estimate.fits, estimate.bound
    (True, 'compute')
    >>> abs(sum(estimate.time.values()) / estimate.step_time_s - 1) < 1e-12
    True
    """
    inputs = _resolve_inputs(model, cluster, job, fields, layout, assume_stack=False)
    inputs.architecture.require_positions(inputs.job.seq_len)
    job, layout, _ = _choose_layout(inputs, layout, ignore_progress)
    problem = replace(inputs.problem, job=job)
    return search.estimate_as_run(problem, layout)


def _resolve_inputs(
    model: ModelLike, cluster: ClusterLike, job: Job | None, fields: Mapping[str, Any], layout: str | Layout | None, *,
    assume_stack: bool = True,
) -> ProblemInputs:  # fmt: skip
    """Return the inputs. Raises `InputError` with all that is wrong with them and with the text of a layout."""
    inputs, _ = run_all(
        lambda: price.resolve_problem(model, [cluster], job, fields, assume_stack=assume_stack),
        lambda: parse_layout_shape(layout, argument_label("layout")) if isinstance(layout, str) else None,
    )
    return cast("ProblemInputs", inputs)


def _choose_layout(inputs: ProblemInputs, layout: str | Layout | None, progress: Progress) -> _JobAndLayout:
    """Return the layout, or the one that a search chooses, and the job with a default batch that fills it."""
    if layout is None:
        plan = search.plan_inputs(inputs, progress=progress)
        job = replace(inputs.job, global_batch_tokens=plan.job.global_batch_tokens)
        return _JobAndLayout(job, plan.layout, (*inputs.default_names, "layout"))
    label, job = argument_label("layout"), inputs.job
    if "global_batch_tokens" in inputs.defaults:
        job = search.fill_layout(job, parse_layout_shape(layout, label) if isinstance(layout, str) else layout)
    if isinstance(layout, str):
        layout = parse_layout_text(layout, inputs.architecture, job, label)
    return _JobAndLayout(job, layout, inputs.default_names)
