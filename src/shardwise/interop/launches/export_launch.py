"""Write a plan as a launch of a target: its files, the command that starts it, what the target cannot express, and notes.

`export` refuses a plan that the target cannot run, and names the nearest layout that it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.hardware import get_stack, with_published_constants
from shardwise.interop.launches.launch import Launch, launch_from_plan
from shardwise.interop.launches.launch_scripts import slurm_script
from shardwise.interop.launches.target import BATCH_FILE, README_FILE, LaunchFiles, Target
from shardwise.interop.launches.translate_launch import (
    LISTED_FIELDS,
    choose_precision,
    lost_fields,
    refusals,
    to_options,
    use_target_stages,
)
from shardwise.interop.text_formats.option_tables import Options
from shardwise.layout import (
    Layout,
    Placement,
    atomic_degrees,
    choices_from_pins,
    cuts_by_axis,
    default_placement,
    layout_degrees,
    supported_precision,
    violations,
)
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search import Plan
from shardwise.search import make_plan as search
from shardwise.values import InputError, NothingFitsError, Payload, format_bytes, format_seconds


def build_files(target: Target, options: Options, launch: Launch) -> LaunchFiles:
    """Return the texts of a launch's files by name: the target's own first, then the batch script and the README."""
    target_files = dict(target.write(options, launch))
    if target.slurm and BATCH_FILE not in target_files:
        job_name = f"{launch.model.name}-{target.name}"
        target_files[BATCH_FILE] = slurm_script(launch.machines, job_name, target.command(launch))
    return {**target_files, README_FILE: _readme_text(target, list(target_files), launch)}


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


# Degrees that the nearest layout keeps from a plan that the target cannot run; tried in order.
# Said where `nearest_layout` has none: of each search only the choice and its runners-up are tried on the target.
NONE_NEAR = (
    "it runs none of the layouts that were tried, the choice and the runners-up of a search; whether it runs another one that "
    "fits is not known"
)
NEAREST_PINS = (("tp", "cp", "pp", "ep"), ("tp", "pp"), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedLaunch:
    """A plan written for a target.

    `files` are texts by name, and `command` starts them on each node, or where `starts_on` says. `not_expressible` are sentences
    about fields of the plan that the target has no option for; `warnings` are what the user must set or know before the run.
    `folder` is where the files were written, if they were.
    """

    target: str
    version: str
    files: LaunchFiles
    command: str
    not_expressible: tuple[str, ...]
    warnings: tuple[str, ...]
    folder: str | None = None
    starts_on: str = "each node"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRecord(Payload):
    """Written launch of a framework: the names of its files, and the command that starts it."""

    SCHEMA = "shardwise.export/1"
    target: str
    version: str
    files: Sequence[str]
    command: str
    not_expressible: Sequence[str]
    warnings: Sequence[str]

    @classmethod
    def of(cls, launch: ExportedLaunch) -> ExportRecord:
        """Return the record of a launch."""
        return cls.from_attributes(launch, files=list(launch.files))


def write_launch(launch: ExportedLaunch, folder: str, label: str) -> ExportedLaunch:
    """Write the files of a launch to a folder, which is made, and return the launch with the folder.

    Raises `InputError`, which begins with `label`, for a folder or file that cannot be written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in launch.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"{label}: cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None
    return replace(launch, folder=folder)


def export(plan: Plan, target: Target) -> ExportedLaunch:
    """Write a plan as a launch of a target.

    Raises `InputError` if the target cannot run the plan, with each reason and the nearest layout that it can run.
    """
    launch = choose_precision(launch_from_plan(plan), target)
    reasons = refusals(launch, target)
    if reasons:
        nearest = nearest_layout(plan, target)
        fix = f"the nearest layout that it runs: {nearest}" if nearest else NONE_NEAR
        raise InputError(f"{target.title} {target.version} cannot run this plan", *reasons, fix)
    options = to_options(target, launch)
    listed = [text for field, text in lost_fields(target, launch, options) if field.startswith(LISTED_FIELDS)]
    return ExportedLaunch(
        target=target.name, version=target.version, files=build_files(target, options, launch), command=target.command(launch),
        not_expressible=(*_precision_note(plan, launch, target), *listed, *_placement_note(plan, target)),
        warnings=tuple(target.notes(launch)),
    )  # fmt: skip


def _precision_note(plan: Plan, launch: Launch, target: Target) -> Iterator[str]:
    """Yield a note with step time and memory in the precision that replaces the plan's."""
    if launch.job.precision != plan.job.precision:
        planned = plan.estimate
        converted = estimate(
            Problem(plan.model, plan.cluster, replace(plan.job, precision=launch.job.precision)), plan.layout
        )
        yield (
            f"job.precision is {plan.job.precision}; {target.title} takes {launch.job.precision}: a step of "
            f"{format_seconds(converted.step_time_s)} for {format_seconds(planned.step_time_s)}, "
            f"{format_bytes(converted.memory_bytes)} for {format_bytes(planned.memory_bytes)}"
            + ("" if converted.fits else ", which does not fit")
        )


def _placement_note(plan: Plan, target: Target) -> Iterator[str]:
    """Yield a note if the target's rank order puts an axis on other links than the plan's placement."""
    if target.order is None:
        return
    topology, layout = plan.cluster.topology, plan.layout
    default = default_placement(topology)
    target_placement = replace(default, axes=target.order)
    degrees = atomic_degrees(plan.model, layout_degrees(layout))

    def links(placement: Placement) -> Mapping[str, Any]:
        return {axis: cut for axis, cut in cuts_by_axis(topology, placement, degrees).items() if degrees[axis] > 1}

    if links(target_placement) != links(layout.placement or default):
        reordered = estimate(plan.problem, replace(layout, placement=target_placement))
        yield (
            f"layout.placement is {layout.placement or default}; {target.title} numbers ranks {','.join(target.order)}, "
            f"innermost first: a step of {format_seconds(reordered.step_time_s)} for {format_seconds(plan.estimate.step_time_s)}"
        )


def nearest_layout(plan: Plan, target: Target) -> Layout | None:
    """Return the best layout for the plan's job that the target can run; None if it runs none of those that were tried.

    Keeps as many of the plan's degrees as possible: each entry of `NEAREST_PINS` is searched in turn.
    """
    stack = get_stack(target.stack)
    cluster = with_published_constants(plan.cluster, stack)
    precision = supported_precision(stack, plan.job)
    for pinned_axes in NEAREST_PINS:
        pins = {axis: getattr(plan.layout, axis) for axis in pinned_axes}
        try:
            job, choices = replace(plan.job, loss=None, precision=precision), choices_from_pins(pins, {})
            nearest_plan = search(Problem(plan.model, cluster, job), choices=choices, elsewhere=False)
        except (InputError, NothingFitsError):
            continue
        for layout in (nearest_plan.layout, *(alternative.layout for alternative in nearest_plan.alternatives)):
            planned = use_target_stages(replace(launch_from_plan(plan), layout=layout), target)
            candidate = choose_precision(planned, target)
            if (
                not violations(plan.model, plan.job, cluster.num_devices, candidate.layout)
                and not refusals(candidate, target)
                and (
                    candidate.layout == layout
                    or estimate(Problem(plan.model, cluster, plan.job), candidate.layout).fits
                )
            ):
                return candidate.layout
    return None
