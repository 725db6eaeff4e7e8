"""What ran, as flags, a plan, a framework's launch or the folder of a run say it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.measure import RunSetup
    from shardwise.search import Plan

# What a plan and a launch say themselves.
OF_PLAN = ("model", "cluster", "batch_tokens", "seq_len", "layout", "precision", "launch", "set")
OF_LAUNCH = ("batch_tokens", "seq_len", "layout", "precision", "set")
REQUIRED = ("model", "cluster", "seq_len")


def ran_of(arguments: argparse.Namespace) -> RunSetup:
    """What ran. Raises `InputError` with what is missing, or said twice."""
    from shardwise.search import load_plan

    plan = arguments.plan or _plan_of_folder(arguments)
    if plan is not None:
        _require_unsaid(arguments, OF_PLAN, "the plan")
        return ran_plan(load_plan(plan), arguments.stack)
    if arguments.launch:
        _require_unsaid(arguments, OF_LAUNCH, "the launch")
        return ran_launch(arguments.launch, arguments.cluster, arguments.model, arguments.stack)
    return _ran_flags(arguments)


def _plan_of_folder(arguments: argparse.Namespace) -> Path | None:
    """The plan in the folder of a run that is given as a log, unless flags say what ran."""
    folders = [Path(path) for path in arguments.logs if Path(path).is_dir()]
    found = folders[0] / "plan.json" if len(folders) == 1 else None
    said = arguments.launch or any(getattr(arguments, name) for name in REQUIRED)
    return found if found is not None and found.exists() and not said else None


def ran_plan(plan: Plan, stack: str | None) -> RunSetup:
    """What a plan says; a stack takes the place of the plan's."""
    from shardwise.hardware import get_stack, with_published_constants, without_calibration
    from shardwise.measure import RunSetup

    cluster = (
        plan.cluster if stack is None else with_published_constants(without_calibration(plan.cluster), get_stack(stack))
    )
    return RunSetup(
        model=plan.model, cluster=cluster, job=plan.job, layout=plan.layout, batch_tokens=plan.job.global_batch_tokens,
        software=_software(cluster),
    )  # fmt: skip


def ran_launch(files: list[str], cluster: str | None, model: str | None, stack: str | None) -> RunSetup:
    """What the launch of a framework says."""
    from shardwise.hardware import get_stack, load_measured_cluster
    from shardwise.hardware.cluster_loading import apply_stack
    from shardwise.interop import read_files
    from shardwise.interop.launches.launch import cluster_machines
    from shardwise.interop.read_launch import parse_launch
    from shardwise.measure import RunSetup
    from shardwise.model import load_model
    from shardwise.price import with_problem_defaults
    from shardwise.values import InputError

    if cluster is None:
        raise InputError("--cluster: missing; what the launch ran on is required, such as h100:64")
    own = load_measured_cluster(cluster)
    heard = parse_launch(read_files(files), cluster_machines(own.nominal), model=load_model(model) if model else None)
    # A user's own calibration is of the software that ran; otherwise the framework's stack.
    named = stack or (None if own.calibration else heard.target.stack)
    found, job = with_problem_defaults(apply_stack(own, get_stack(named) if named else None), heard.launch.job)
    return RunSetup(
        model=heard.launch.model, cluster=found, job=job, layout=heard.launch.layout, batch_tokens=job.global_batch_tokens,
        software=stack or heard.target.stack, unknown=heard.unknown,
    )  # fmt: skip


def ran_files(files: list[str], cluster: str) -> RunSetup:
    """What a plan, or the files of a launch, say."""
    from shardwise.search import is_plan_file, load_plan

    if len(files) == 1 and is_plan_file(files[0]):
        return ran_plan(load_plan(files[0]), None)
    return ran_launch(files, cluster, None, None)


def _ran_flags(arguments: argparse.Namespace) -> RunSetup:
    from shardwise.measure import RunSetup
    from shardwise.present.cli.arguments import parse_layout_text, resolve
    from shardwise.values import InputError

    missing = [name for name in REQUIRED if not getattr(arguments, name)]
    if missing:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise InputError(f"mfu: {flags} missing; these, or --plan, --launch or the folder of a run, say what ran")
    given = {"tokens": None, "overlap": None}
    model, cluster, job = resolve(argparse.Namespace(**{**vars(arguments), **given}))
    layout = parse_layout_text(arguments.layout, model, job) if arguments.layout else None
    return RunSetup(
        model=model, cluster=cluster, job=job, layout=layout, software=_software(cluster),
        batch_tokens=job.global_batch_tokens if arguments.batch_tokens else None,
    )  # fmt: skip


def _require_unsaid(arguments: argparse.Namespace, names: tuple[str, ...], by: str) -> None:
    """Raise `InputError` for flags beside what says the same."""
    from shardwise.values import InputError

    said = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name)]
    if said:
        raise InputError(
            f"{', '.join(said)}: found beside {by}, which says {'it' if len(said) == 1 else 'them'}; leave out one of the two"
        )


def _software(cluster: Cluster) -> str:
    return cluster.calibration.stack if cluster.calibration else ""
