"""Write a plan as a launch of a target: its files, the command that starts it, what the target cannot express, and notes.

`export` refuses a plan that the target cannot run, and names the nearest layout that it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.hardware.published_constants import with_published_constants
from shardwise.hardware.stacks import get_stack
from shardwise.interop.launches.launch import Launch, launch_from_plan
from shardwise.interop.launches.launch_scripts import slurm_script
from shardwise.interop.launches.target import BATCH_FILE, README_FILE, LaunchFiles, Options, Target
from shardwise.interop.launches.translate_launch import (
    LISTED_FIELDS,
    choose_precision,
    lost_fields,
    refusals,
    to_options,
    use_target_stages,
)
from shardwise.layout.choices import choices_from_pins
from shardwise.layout.degrees import atomic_degrees, layout_degrees
from shardwise.layout.layout import Layout
from shardwise.layout.placement import Placement, cuts_by_axis, default_placement
from shardwise.layout.rules.table import violations
from shardwise.price.estimate import estimate
from shardwise.search.plan import Plan
from shardwise.search.planner import make_plan as search
from shardwise.values.errors import InputError, NothingFitsError
from shardwise.values.units import format_bytes, format_seconds


def build_files(target: Target, options: Options, launch: Launch) -> LaunchFiles:
    """Texts by name. The target's own come first."""
    own = dict(target.write(options, launch))
    if target.slurm and BATCH_FILE not in own:
        own[BATCH_FILE] = slurm_script(launch.machines, f"{launch.model.name}-{target.name}", target.command(launch))
    return {**own, README_FILE: _readme_text(target, list(own), launch)}


def _readme_text(target: Target, names: list[str], launch: Launch) -> str:
    job, machines = launch.job, launch.machines
    notes = "\n".join(f"- {note}" for note in target.notes(launch))
    return f"""# {launch.model.name} with {target.title}

Written for {target.title} {target.version} ({target.source}).

- model: {launch.model.name}
- job: {job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}, precision {job.precision}
- layout: {launch.layout}
- machines: {machines.num_nodes} nodes of {machines.devices_per_node} devices

Start it{f" on each node, or with `sbatch {BATCH_FILE}`" if BATCH_FILE in names else ""}:

    {target.command(launch)}

Files of {target.title}: {", ".join(name for name in names if name != BATCH_FILE)}.

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


NEAREST_PINS = (
    ("tp", "cp", "pp", "ep"),
    ("tp", "pp"),
    (),
)  # of a plan that cannot be run: what its nearest keeps, if it can


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedLaunch:
    """The files of a launch, what starts it, what of the plan the target has no words for, and what to know before it runs."""

    target: str
    version: str
    files: LaunchFiles
    command: str
    not_expressible: tuple[str, ...]
    warnings: tuple[str, ...]

    def payload(self) -> dict[str, Any]:
        """What `shardwise export --json` prints; files by name."""
        return {
            "schema": SCHEMA, "target": self.target, "version": self.version, "files": list(self.files),
            "command": self.command, "not_expressible": list(self.not_expressible), "warnings": list(self.warnings),
        }  # fmt: skip


def export(plan: Plan, target: Target) -> ExportedLaunch:
    """A plan as a launch of a target.

    Raises `InputError` where the target cannot run it, with each reason and the nearest layout that it can.
    """
    launch = choose_precision(launch_from_plan(plan), target)
    reasons = refusals(launch, target)
    if reasons:
        near = nearest_layout(plan, target)
        reasons.append(
            f"the nearest layout that it runs: {near}" if near else "it runs no layout of this job that fits"
        )
        raise InputError(f"{target.title} {target.version} cannot run this plan", *reasons)
    options = to_options(target, launch)
    listed = [text for part, text in lost_fields(target, launch, options) if part.startswith(LISTED_FIELDS)]
    return ExportedLaunch(
        target=target.name, version=target.version, files=build_files(target, options, launch), command=target.command(launch),
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
    degrees = atomic_degrees(plan.model, layout_degrees(layout))

    def links(placement: Placement) -> Mapping[str, Any]:
        return {axis: cut for axis, cut in cuts_by_axis(topology, placement, degrees).items() if degrees[axis] > 1}

    if links(theirs) != links(layout.placement or usual):
        found = estimate(plan.model, plan.cluster, plan.job, replace(layout, placement=theirs))
        yield (
            f"layout.placement is {layout.placement or usual}; {target.title} numbers ranks {','.join(target.order)}, innermost "
            f"first: a step of {format_seconds(found.step_time_s)} for {format_seconds(plan.estimate.step_time_s)}"
        )


def nearest_layout(plan: Plan, target: Target) -> Layout | None:
    """The best layout of the plan's job that a target runs, with as many of its degrees as leave one, if there is any."""
    cluster = with_published_constants(plan.cluster, get_stack(target.stack))
    for pinned in NEAREST_PINS:
        pins = {axis: getattr(plan.layout, axis) for axis in pinned}
        try:
            found = search(
                plan.model, cluster, replace(plan.job, loss=None), choices=choices_from_pins(pins, {}), elsewhere=False
            )
        except (InputError, NothingFitsError):
            continue
        for layout in (found.layout, *(other.layout for other in found.alternatives)):
            other = choose_precision(use_target_stages(replace(launch_from_plan(plan), layout=layout), target), target)
            if (
                not violations(plan.model, plan.job, cluster.num_devices, other.layout)
                and not refusals(other, target)
                and (other.layout == layout or estimate(plan.model, cluster, plan.job, other.layout).fits)
            ):
                return other.layout
    return None
