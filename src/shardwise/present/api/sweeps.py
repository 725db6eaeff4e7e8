"""Plans over a range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.model import Job
from shardwise.present.api.given import Model, Pins, Where, pins_of, resolved
from shardwise.price import Reliability
from shardwise.values import InputError, Progress, ignore_progress, run_all

if TYPE_CHECKING:
    from shardwise.layout import Choices
    from shardwise.search import SweepCase, Swept
    from shardwise.search.plan_sweep import SweptValues


def sweep(
    model: Model, cluster: Where, job: Job | None = None, *, over: str | Sequence[str], stack: str | None = None,
    pins: Pins = "", maxima: Pins = "", choices: Choices | None = None, reliability: Reliability | None = None,
    progress: Progress = ignore_progress, **job_fields: Any,
) -> Swept:  # fmt: skip
    """Plan a job for each value of a range, or of two that make a grid, as `plan` does.

    `over` says what is swept, as `--sweep` does: "gpus=64:4096:x2", "seq_len=4096,8192", "batch=1Mi:4Mi:+1Mi",
    "model=llama-3-8b,llama-3-70b", or anything that can be pinned, such as "tp=1:8:x2"; a swept value replaces the argument.
    The other arguments are those of `plan`. A point at which nothing fits has no plan, and its `error` says why.

    Raises `InputError` for anything wrong in these, before the first point is planned.

    >>> import shardwise as sw
    >>> found = sw.sweep("llama-3.2-1b", "h100:8", over="gpus=8,16", global_batch_tokens="512Ki", seq_len=4096)
    >>> [point.plan.layout.num_devices for point in found.points]
    [8, 16]
    >>> found  # doctest: +ELLIPSIS
    Swept: gpus, 2 of 2 points
      gpus=8: step ..., MFU ...%, fsdp=8 ...
      gpus=16: step ..., MFU ...%, fsdp=16 ...
    """
    from shardwise.search import Swept, grid_points
    from shardwise.search.plan_sweep import plan_cases
    from shardwise.search.sweep_values import parse_sweeps

    sweeps = parse_sweeps([over] if isinstance(over, str) else over, "over")
    fixed, most = pins_of(pins, "pins"), pins_of(maxima, "maxima")
    twice = [one.name for one in sweeps if one.name in fixed]
    if twice:
        raise InputError(f"pins: found {', '.join(twice)}, which is swept; leave out one of the two")
    given = partial(_case, model, cluster, job, stack, job_fields, fixed, most, choices)
    cases: list[SweepCase] = run_all(*(partial(given, at) for at in grid_points(sweeps)))
    points = tuple(plan_cases(cases, reliability=reliability, progress=progress))
    return Swept(sweeps=sweeps, points=points, num_points=len(cases))


def _case(
    model: Model, cluster: Where, job: Job | None, stack: str | None, job_fields: Mapping[str, Any], pins: Mapping[str, Any],
    maxima: Mapping[str, Any], choices: Choices | None, at: SweptValues,
) -> SweepCase:  # fmt: skip
    """The inputs of the plan at one point."""
    from shardwise.hardware import Cluster
    from shardwise.layout import choices_from_pins
    from shardwise.search import SweepCase
    from shardwise.search.sweep_values import JOB_FIELDS, JOB_SWEEPS, resize_shorthand

    if "gpus" in at and isinstance(cluster, Cluster):
        raise InputError("over gpus: found a Cluster, which has one size; its name is required, such as 'h100:64'")
    where = resize_shorthand(str(cluster), at["gpus"]) if "gpus" in at else cluster
    fields = {**job_fields, **{field: at[name] for name, field in JOB_FIELDS.items() if name in at}}
    architecture, found, what = resolved(str(at["model"]) if "model" in at else model, where, job, stack, fields)
    swept = {name: value for name, value in at.items() if name not in JOB_SWEEPS}
    return SweepCase(
        at=at,
        model=architecture,
        cluster=found,
        job=what,
        choices=choices_from_pins({**pins, **swept}, maxima, choices),
    )
