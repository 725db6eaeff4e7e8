"""Write a plan as a launch of a target: its files, the command that starts it, what the target cannot express, and notes.

`export` refuses a plan that the target cannot run, and names the nearest layout that it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.hardware.published_constants import predicted
from shardwise.hardware.stacks import stack_named
from shardwise.interop.launches.launch import Launch, launch_of
from shardwise.interop.launches.launch_scripts import slurm
from shardwise.interop.launches.target import BATCH, README, Files, Options, Target
from shardwise.interop.launches.translate_launch import LISTED, as_taken, in_own_precision, refusals, say, unsaid
from shardwise.layout.choices import choices_from_pins
from shardwise.layout.degrees import atomic_degrees, degrees_of
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement, cut_levels, default_placement
from shardwise.layout.rules.table import violations
from shardwise.price.estimate import estimate
from shardwise.search.plan import Plan
from shardwise.search.planner import plan as search
from shardwise.values.errors import InputError, NothingFitsError
from shardwise.values.units import format_bytes, format_seconds


def files_of(target: Target, options: Options, launch: Launch) -> Files:
    """Texts by name. The target's own come first."""
    own = dict(target.write(options, launch))
    if target.slurm and BATCH not in own:
        own[BATCH] = slurm(launch.machines, f"{launch.model.name}-{target.name}", target.command(launch))
    return {**own, README: _page(target, list(own), launch)}


def _page(target: Target, names: list[str], launch: Launch) -> str:
    job, machines = launch.job, launch.machines
    notes = "\n".join(f"- {note}" for note in target.notes(launch))
    return f"""# {launch.model.name} with {target.title}

Written for {target.title} {target.version} ({target.source}).

- model: {launch.model.name}
- job: {job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}, precision {job.precision}
- layout: {launch.layout}
- machines: {machines.num_nodes} nodes of {machines.devices_per_node} devices

Start it{f" on each node, or with `sbatch {BATCH}`" if BATCH in names else ""}:

    {target.command(launch)}

Files of {target.title}: {", ".join(name for name in names if name != BATCH)}.

{notes}
"""


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
                plan.model, cluster, replace(plan.job, loss=None), choices=choices_from_pins(pins, {}), elsewhere=False
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
