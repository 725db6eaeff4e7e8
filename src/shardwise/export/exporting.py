"""A plan as the launch of a target: its files, what the target has no words for, and the nearest plan that it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.cluster.stacks import predicted, stack_named
from shardwise.cost.estimate import estimate
from shardwise.errors import InputError, NothingFitsError
from shardwise.export.field import Given
from shardwise.export.files import files_of
from shardwise.export.launch import Launch, launch_of, with_stages
from shardwise.export.saying import LISTED, hear, refusals, say, unsaid
from shardwise.export.target import Files, Target
from shardwise.layout.family import atomic_degrees
from shardwise.layout.layout import Layout
from shardwise.layout.legality import degrees_of, violations
from shardwise.layout.placement import Placement, cut_levels, default_placement
from shardwise.optimizer.optimizer import Optimizer
from shardwise.optimizer.table import optimizer_named
from shardwise.planning.plan import Plan
from shardwise.precision import PRECISIONS, Precision, precision_named
from shardwise.search.pins import narrowed
from shardwise.search.plan import plan as search
from shardwise.units import format_bytes, format_seconds

SCHEMA = "shardwise.export/1"


class ExportPayload(TypedDict):
    """A launch that was written: names of its files, and the command that starts it."""

    schema: Literal["shardwise.export/1"]
    target: str
    version: str
    files: list[str]
    command: str
    not_expressible: list[str]
    warnings: list[str]


PINNED = (("tp", "cp", "pp", "ep"), ("tp", "pp"), ())  # of a plan that cannot be run: what its nearest keeps, if it can


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files of a launch, what starts it, what of the plan the target has no words for, and what to know before it runs."""

    target: str
    version: str
    files: Files
    command: str
    not_expressible: tuple[str, ...]
    warnings: tuple[str, ...]

    def payload(self) -> dict[str, Any]:
        """What `shardwise export --json` prints; files by name."""
        return {
            "schema": SCHEMA, "target": self.target, "version": self.version, "files": list(self.files),
            "command": self.command, "not_expressible": list(self.not_expressible), "warnings": list(self.warnings),
        }  # fmt: skip


def export(plan: Plan, target: Target) -> Exported:
    """A plan as a launch of a target.

    Raises `InputError` where the target cannot run it, with each reason and the nearest layout that it can.
    """
    launch = in_own_precision(launch_of(plan), target)
    reasons = refusals(launch, target)
    if reasons:
        near = nearest(plan, target)
        reasons.append(
            f"the nearest layout that it runs: {near}" if near else "it runs no layout of this job that fits"
        )
        raise InputError(f"{target.title} {target.version} cannot run this plan", *reasons)
    options = say(target, launch)
    listed = [text for part, text in unsaid(target, launch, options) if part.startswith(LISTED)]
    return Exported(
        target=target.name, version=target.version, files=files_of(target, options, launch), command=target.command(launch),
        not_expressible=(*_precision_note(plan, launch, target), *listed, *_placement_note(plan, target)),
        warnings=tuple(target.notes(launch)),
    )  # fmt: skip


def in_own_precision(launch: Launch, target: Target) -> Launch:
    """The launch in the precision recipe that a target takes for the plan's, where it has no words for that one: the nearest of
    those that multiply in the same format. Formats of gradients and of the optimizer's state are a framework's own choice."""
    if not refusals(launch, target):
        return launch
    own, optimizer = precision_named(launch.job.precision), optimizer_named(launch.job.optimizer)
    alike = [recipe for recipe in PRECISIONS.values() if recipe.product_format == own.product_format]
    for recipe in sorted(alike, key=partial(_distance, own, optimizer)):
        other = replace(launch, job=replace(launch.job, precision=recipe.name))
        if not refusals(other, target):
            return other
    return launch


def _distance(own: Precision, optimizer: Optimizer, other: Precision) -> tuple[float, int]:
    """How far a recipe is from a plan's: in bytes of state for a parameter, part by part, and then in choices that differ."""
    parts = zip(own.state_parts(optimizer), other.state_parts(optimizer), strict=True)
    choices = (getattr(own, one.name) != getattr(other, one.name) for one in fields(own))
    return sum(abs(ours - theirs) for ours, theirs in parts), sum(choices)


def _precision_note(plan: Plan, launch: Launch, target: Target) -> Iterator[str]:
    """What a step and the memory are in the precision that the target takes in place of the plan's."""
    if launch.job.precision != plan.job.precision:
        own = plan.estimate
        found = estimate(plan.model, plan.cluster, replace(plan.job, precision=launch.job.precision), plan.layout)
        yield (
            f"job.precision is {plan.job.precision}; {target.title} takes {launch.job.precision}: a step of "
            f"{format_seconds(found.step_time_s)} for {format_seconds(own.step_time_s)}, "
            f"{format_bytes(found.memory_bytes)} for {format_bytes(own.memory_bytes)}"
            + ("" if found.fits else ", which does not fit")
        )


def _placement_note(plan: Plan, target: Target) -> Iterator[str]:
    """Where the target numbers its ranks in another order than the plan: what the step takes then."""
    if target.order is None:
        return
    topology, layout = plan.cluster.topology, plan.layout
    usual = default_placement(topology)
    theirs = replace(usual, axes=target.order)
    degrees = atomic_degrees(plan.model, degrees_of(layout))

    def links(placement: Placement) -> Mapping[str, Any]:
        return {axis: cut for axis, cut in cut_levels(topology, placement, degrees).items() if degrees[axis] > 1}

    if links(theirs) != links(layout.placement or usual):
        found = estimate(plan.model, plan.cluster, plan.job, replace(layout, placement=theirs))
        yield (
            f"layout.placement is {layout.placement or usual}; {target.title} numbers ranks {','.join(target.order)}, innermost "
            f"first: a step of {format_seconds(found.step_time_s)} for {format_seconds(plan.estimate.step_time_s)}"
        )


def nearest(plan: Plan, target: Target) -> Layout | None:
    """The best layout of the plan's job that a target runs, with as many of its degrees as leave one, if there is any."""
    cluster = predicted(plan.cluster, stack_named(target.stack))
    for pinned in PINNED:
        pins = {axis: getattr(plan.layout, axis) for axis in pinned}
        try:
            found = search(
                plan.model, cluster, replace(plan.job, loss=None), choices=narrowed(pins, {}), elsewhere=False
            )
        except (InputError, NothingFitsError):
            continue
        for layout in (found.layout, *(other.layout for other in found.alternatives)):
            other = in_own_precision(as_taken(replace(launch_of(plan), layout=layout), target), target)
            if (
                not violations(plan.model, plan.job, cluster.num_devices, other.layout)
                and not refusals(other, target)
                and (other.layout == layout or estimate(plan.model, cluster, plan.job, other.layout).fits)
            ):
                return other.layout
    return None


def as_taken(launch: Launch, target: Target) -> Launch:
    """A launch with its layers on the stages of a pipeline as the target deals them out, where it has no word for others."""
    try:
        stages = hear(target, Given(say(target, launch), launch.machines)).get("layout.stages")
        return launch if stages is None else replace(launch, layout=with_stages(launch.layout, launch.model, stages))
    except InputError:
        return launch
