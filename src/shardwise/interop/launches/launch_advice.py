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

from shardwise.hardware.cluster import Cluster
from shardwise.hardware.published_constants import with_published_constants
from shardwise.hardware.stacks import get_stack
from shardwise.interop.launches.launch import Launch, LaunchFields, cluster_machines
from shardwise.interop.launches.read_launch import ParsedLaunch, parse_launch
from shardwise.interop.launches.target import LaunchFiles, Target
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.layout.choices import stack_search_values
from shardwise.layout.layout import Layout
from shardwise.layout.payload import LayoutPayload
from shardwise.layout.rules.stack_abilities import stack_of
from shardwise.layout.rules.table import violations
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.pipeline.registry import NATURAL, natural_schedule
from shardwise.price.estimate import Estimate, estimate
from shardwise.search.layout_plan import plan_layout
from shardwise.search.plan import Plan
from shardwise.search.plan_file import layout_of_plan
from shardwise.search.planner import make_plan
from shardwise.values.errors import InputError, NothingFitsError

MAX_CHANGES = 5  # changes that are listed
MIN_GAIN = 0.01  # of a step: what a change gains at least


class ChangePayload(TypedDict):
    """Options to set (null: to leave out), the layout that they make, and its step and memory."""

    change: dict[str, Any]
    layout: LayoutPayload
    step_time_s: float
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChange:
    """Options to set (None: to leave out), and the step and the memory with them."""

    options: dict[str, Any]
    layout: Layout
    estimate: Estimate

    def payload(self, plan: Plan) -> dict[str, Any]:
        """As `shardwise read --json` prints it; `plan` is that of the launch as it was read."""
        return {
            "change": self.options, "layout": layout_of_plan(plan, self.layout), "step_time_s": self.estimate.step_time_s,
            "memory_bytes": self.estimate.memory_bytes,
        }  # fmt: skip


def list_changes(launch: Launch, target: Target, cluster: Cluster) -> list[LaunchChange]:
    """Changes that make the step faster, or fit where it does not: the layout that a search picks, then each choice that is
    changed alone, the fastest first; at most `MAX_CHANGES`."""
    now = estimate(launch.model, cluster, launch.job, launch.layout)
    limit = now.step_time_s * (1 - MIN_GAIN) if now.fits else float("inf")
    told = partial(_try_layout, launch, target, cluster, limit)
    picked = told(layout) if (layout := _searched_layout(launch, cluster)) else None
    alone = {layout: change for layout in _neighbor_layouts(launch, cluster) if (change := told(layout))}
    several = sorted(alone.values(), key=lambda change: change.estimate.step_time_s)
    others = [change for change in several if picked is None or change.layout != picked.layout]
    return [*([picked] if picked else []), *others][:MAX_CHANGES]


def _try_layout(launch: Launch, target: Target, cluster: Cluster, limit: float, layout: Layout) -> LaunchChange | None:
    """The change to another layout; None where the target does not run that, or where it is no better."""
    other = replace(launch, layout=layout, plan=None)
    if violations(launch.model, launch.job, cluster.num_devices, layout) or refusals(other, target):
        return None
    priced = estimate(launch.model, cluster, launch.job, layout)
    if not priced.fits or priced.step_time_s >= limit:
        return None
    return LaunchChange(options=_changed_options(target, launch, other), layout=layout, estimate=priced)


def _searched_layout(launch: Launch, cluster: Cluster) -> Layout | None:
    """The layout that a search takes for the job; None where none fits."""
    try:
        return make_plan(launch.model, cluster, launch.job, elsewhere=False).layout
    except (InputError, NothingFitsError):
        return None


def _neighbor_layouts(launch: Launch, cluster: Cluster) -> Iterator[Layout]:
    """Layouts that differ in one choice: those that a search under the stack has, and half or twice the micro-batch."""
    layout, stack = launch.layout, stack_of(cluster)
    values: dict[str, tuple[Any, ...]] = {} if stack is None else stack_search_values(stack, launch.model, launch.job)
    values.pop("stages", None)
    values["micro_batch_seqs"] = _half_and_twice(layout.micro_batch_seqs)
    values["num_virtual_stages"] = _half_and_twice(layout.num_virtual_stages) if layout.pp > 1 else ()
    for name, choices in values.items():
        for value in choices:
            try:
                yield _replace_choice(layout, name, value)
            except InputError:
                continue


def _half_and_twice(count: int) -> tuple[int, ...]:
    return (count // 2, count * 2) if count % 2 == 0 else (count * 2,)


def _replace_choice(layout: Layout, name: str, value: Any) -> Layout:
    """A layout with another value; the schedule goes with the stages, and flags are true or false."""
    if (name == "schedule" and value == NATURAL) or name == "num_virtual_stages":
        virtual = value if name == "num_virtual_stages" else layout.num_virtual_stages
        schedule = natural_schedule(layout.pp, virtual)
        return replace(layout, num_virtual_stages=virtual, schedule=schedule, layers_per_stage=None)
    if isinstance(getattr(layout, name), bool):
        value = bool(value)
    return replace(layout, **{name: value})


def _changed_options(target: Target, before: Launch, after: Launch) -> dict[str, Any]:
    """Options that differ; None for those that go."""
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
        """What `shardwise read --json` prints."""
        heard, plan = self.parsed, self.plan
        return {
            "schema": SCHEMA, "target": heard.target.name, "version": heard.target.version,
            "model": model_payload(plan.model), "cluster": plan.cluster.name, "job": asdict(plan.job),
            "layout": layout_of_plan(plan),
            "unknown": list(heard.unknown), "unread": list(heard.unread), "notes": list(heard.notes),
            "estimate": asdict(plan.estimate),
            "better": [change.payload(plan) for change in self.better],
        }  # fmt: skip


def price_launch(
    files: LaunchFiles, cluster: Cluster, *, target: str | None = None, model: Architecture | None = None,
    beside: LaunchFields | None = None,
) -> PricedLaunch:  # fmt: skip
    """The verdict on a launch's files on a cluster, predicted for its framework's stack unless the cluster was measured.

    `target` is the framework where the options do not tell it, `model` the model where the launch does not say it, `beside` other
    parts that it leaves out (`read_launch.USER_FIELDS`). Raises
    `InputError` for what is no launch, and for one that is not legal on this cluster.
    """
    heard = parse_launch(files, cluster_machines(cluster), target=target, model=model, beside=beside)
    where = cluster if cluster.calibration else with_published_constants(cluster, get_stack(heard.target.stack))
    launch = heard.launch
    found = plan_layout(launch.model, where, launch.job, launch.layout)
    return PricedLaunch(parsed=heard, plan=found, better=tuple(list_changes(launch, heard.target, where)))
