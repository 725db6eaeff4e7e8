"""Price a launch that was read from a framework's files, and list changes of its options that make it faster.

`price_launch` predicts the step for the stack of the framework. `list_changes` searches the best layout that the framework runs,
and tries each option alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.hardware import Cluster, get_stack, with_published_constants
from shardwise.interop.launches.launch import Launch, LaunchFields, cluster_machines
from shardwise.interop.launches.target import LaunchFiles, Target
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.layout import Layout, LayoutPayload, stack_of, violations
from shardwise.layout.choices import stack_search_values
from shardwise.model import Architecture, Job, ModelPayload, model_payload
from shardwise.pipeline import NATURAL, natural_schedule
from shardwise.price import Estimate, Problem
from shardwise.price.estimate import estimate
from shardwise.search import Plan, layout_of_plan, make_plan, plan_layout
from shardwise.values import InputError, NothingFitsError

MAX_CHANGES = 5
MIN_GAIN = 0.01  # part of the step time that a change must save


class ChangePayload(TypedDict):
    """Options to set (null: to leave out), the layout that they make, and its step and memory."""

    change: dict[str, Any]
    layout: LayoutPayload
    step_time_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChange:
    """Options to set (None: to leave out), the layout that results, and its estimate."""

    options: dict[str, Any]
    layout: Layout
    estimate: Estimate

    def payload(self, plan: Plan) -> dict[str, Any]:
        """Return the entry of `shardwise read --json`; `plan` is that of the launch as it was read."""
        return {
            "change": self.options, "layout": layout_of_plan(plan, self.layout), "step_time_s": self.estimate.step_time_s,
            "memory_bytes": self.estimate.memory_bytes,
        }  # fmt: skip


def list_changes(launch: Launch, target: Target, cluster: Cluster) -> list[LaunchChange]:
    """List at most `MAX_CHANGES` changes that make the step faster, or make it fit.

    The layout that a search picks comes first, then changes of a single choice, fastest first.
    """
    current = estimate(Problem(launch.model, cluster, launch.job), launch.layout)
    time_limit_s = current.step_time_s * (1 - MIN_GAIN) if current.fits else float("inf")
    try_layout = partial(_try_layout, launch, target, cluster, time_limit_s)
    searched = try_layout(layout) if (layout := _searched_layout(launch, cluster)) else None
    neighbors = {layout: change for layout in _neighbor_layouts(launch, cluster) if (change := try_layout(layout))}
    ranked = sorted(neighbors.values(), key=lambda change: change.estimate.step_time_s)
    distinct = [change for change in ranked if searched is None or change.layout != searched.layout]
    return [*([searched] if searched else []), *distinct][:MAX_CHANGES]


def _try_layout(
    launch: Launch, target: Target, cluster: Cluster, time_limit_s: float, layout: Layout
) -> LaunchChange | None:
    """Return the change to another layout, or None if the target cannot run it or it is not faster than the limit."""
    changed = replace(launch, layout=layout, plan=None)
    if violations(launch.model, launch.job, cluster.num_devices, layout) or refusals(changed, target):
        return None
    estimated = estimate(Problem(launch.model, cluster, launch.job), layout)
    if not estimated.fits or estimated.step_time_s >= time_limit_s:
        return None
    return LaunchChange(options=_changed_options(target, launch, changed), layout=layout, estimate=estimated)


def _searched_layout(launch: Launch, cluster: Cluster) -> Layout | None:
    """Return the layout that a search picks for the job, or None if nothing fits."""
    try:
        return make_plan(Problem(launch.model, cluster, launch.job), elsewhere=False).layout
    except (InputError, NothingFitsError):
        return None


def _neighbor_layouts(launch: Launch, cluster: Cluster) -> Iterator[Layout]:
    """Yield layouts that differ in one choice: those that a search under the stack tries, and half or twice the micro-batch."""
    layout, stack = launch.layout, stack_of(cluster)
    choices: dict[str, tuple[Any, ...]] = {} if stack is None else stack_search_values(stack, launch.model, launch.job)
    choices.pop("stages", None)
    choices["micro_batch_seqs"] = _half_and_twice(layout.micro_batch_seqs)
    choices["num_virtual_stages"] = _half_and_twice(layout.num_virtual_stages) if layout.pp > 1 else ()
    for name, alternatives in choices.items():
        for alternative in alternatives:
            try:
                yield _replace_choice(layout, name, alternative)
            except InputError:
                continue


def _half_and_twice(count: int) -> tuple[int, ...]:
    return (count // 2, count * 2) if count % 2 == 0 else (count * 2,)


def _replace_choice(layout: Layout, name: str, choice: Any) -> Layout:
    """Return the layout with another choice. The schedule follows the number of virtual stages; flags become booleans."""
    if (name == "schedule" and choice == NATURAL) or name == "num_virtual_stages":
        num_virtual_stages = choice if name == "num_virtual_stages" else layout.num_virtual_stages
        schedule = natural_schedule(layout.pp, num_virtual_stages)
        return replace(layout, num_virtual_stages=num_virtual_stages, schedule=schedule, layers_per_stage=None)
    if isinstance(getattr(layout, name), bool):
        choice = bool(choice)
    return replace(layout, **{name: choice})


def _changed_options(target: Target, before: Launch, after: Launch) -> dict[str, Any]:
    """Return the options that differ after a change; None for those that go away."""
    old, new = to_options(target, before), to_options(target, after)
    changed = {name: value for name, value in new.items() if old.get(name) != value}
    return {**changed, **{name: None for name in old if name not in new}}


SCHEMA = "shardwise.read/2"


class ReadPayload(TypedDict):
    """A launch that was read. `unknown`: options that the release does not have; `unread`: those that no plan depends on."""

    schema: Literal["shardwise.read/2"]
    target: str
    version: str
    model: ModelPayload
    cluster: str
    job: Job
    layout: LayoutPayload
    unknown: list[str]
    unread: list[str]
    notes: list[str]
    estimate: Estimate
    better: list[ChangePayload]


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLaunch:
    """A launch as it was read, as a plan with its estimate, and the changes that make it faster."""

    parsed: ParsedLaunch
    plan: Plan
    better: tuple[LaunchChange, ...]

    def payload(self) -> dict[str, Any]:
        """Return the JSON value of `shardwise read --json`."""
        parsed, plan = self.parsed, self.plan
        return {
            "schema": SCHEMA, "target": parsed.target.name, "version": parsed.target.version,
            "model": model_payload(plan.model), "cluster": plan.cluster.name, "job": asdict(plan.job),
            "layout": layout_of_plan(plan),
            "unknown": list(parsed.unknown), "unread": list(parsed.unread), "notes": list(parsed.notes),
            "estimate": asdict(plan.estimate),
            "better": [change.payload(plan) for change in self.better],
        }  # fmt: skip


def price_launch(
    files: LaunchFiles, cluster: Cluster, *, target: str | None = None, model: Architecture | None = None,
    user_fields: LaunchFields | None = None,
) -> PricedLaunch:  # fmt: skip
    """Read a launch from its files and price it on a cluster, with changes that make it faster.

    It is priced for the framework's stack, unless the cluster was measured. `target` names the framework if the options do not
    tell, `model` is the model if the files do not say it, and `user_fields` are fields that the files may leave out
    (`read_launch.USER_FIELDS`). Raises `InputError` if the files are no launch, or one that this cluster cannot run.
    """
    parsed = parse_launch(files, cluster_machines(cluster), target=target, model=model, user_fields=user_fields)
    priced_cluster = cluster
    if not cluster.calibration:
        priced_cluster = with_published_constants(cluster, get_stack(parsed.target.stack))
    launch = parsed.launch
    plan = plan_layout(launch.model, priced_cluster, launch.job, launch.layout)
    return PricedLaunch(parsed=parsed, plan=plan, better=tuple(list_changes(launch, parsed.target, priced_cluster)))
