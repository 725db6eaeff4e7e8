"""What a layout costs."""

from __future__ import annotations

from typing import Any

from shardwise.layout import Layout
from shardwise.model import Job
from shardwise.present.api.given import Model, Where, layout_of, resolved
from shardwise.price import Estimate, Problem
from shardwise.values import run_all


def estimate(
    model: Model, cluster: Where, job: Job | None = None, layout: str | Layout | None = None, *, stack: str | None = None,
    **job_fields: Any,
) -> Estimate:  # fmt: skip
    """What one layout costs: seconds of a step and bytes of a device, by term.

    With a `stack`, or on a calibrated cluster, the step is predicted with a 90% interval; otherwise it is a lower bound.

    Raises `InputError` for an unknown model, cluster or stack, a wrong job, and with every rule that the layout breaks;
    `MissingValueError` for a rate without a source.

    >>> import shardwise as sw
    >>> found = sw.estimate(
    ...     "llama-3-8b", "h100:8", layout="fsdp=8 recompute=full", global_batch_tokens="512Ki", seq_len="8Ki"
    ... )
    >>> found.fits, found.bound
    (True, 'compute')
    >>> abs(sum(found.time.values()) / found.step_time_s - 1) < 1e-12
    True
    """
    from shardwise.layout import layout_as_run, stack_of
    from shardwise.price.estimate import estimate as price
    from shardwise.search.recompute_budget import fit_recompute_budget

    chosen, (architecture, where, what) = run_all(
        lambda: layout_of(layout), lambda: resolved(model, cluster, job, stack, job_fields)
    )
    architecture.require_positions(what.seq_len)
    problem = Problem(architecture, where, what)
    return price(
        problem,
        fit_recompute_budget(problem, layout_as_run(stack_of(where), chosen)),
    )
