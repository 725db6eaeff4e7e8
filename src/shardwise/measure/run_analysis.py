"""A measured run analysed: what ran, what was measured of it, its utilisation, and the prediction beside it.

Model, cluster, job and layout are of a user's description, a plan, a framework's launch or a run's folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.hardware import Cluster, get_stack, load_measured_cluster, with_published_constants, without_calibration
from shardwise.hardware.cluster_loading import apply_stack
from shardwise.interop import read_files
from shardwise.interop.launches.launch import cluster_machines
from shardwise.interop.read_launch import parse_launch
from shardwise.layout import Layout, parse_layout_text
from shardwise.measure.utilisation import (
    MeasuredStep,
    RunSetup,
    UtilisationReport,
    break_down_step,
    compute_utilisation,
    read_measured_log,
)
from shardwise.model import load_model
from shardwise.price import Problem, resolve_problem, with_problem_defaults
from shardwise.records.logs.training_log import read_run_header
from shardwise.search import Plan, is_plan_file, load_plan, make_plan, plan_layout
from shardwise.values import InputError, Progress, argument_label, ignore_progress, parse_duration, parse_quantity

PathLike = str | os.PathLike[str]
# Fields of a `RunDescription` that a plan and a launch say themselves.
FIELDS_OF_PLAN = ("model", "cluster", "global_batch_tokens", "seq_len", "layout", "precision", "launch", "overrides")
FIELDS_OF_LAUNCH = ("global_batch_tokens", "seq_len", "layout", "precision", "overrides")
REQUIRED_FIELDS = ("model", "cluster", "seq_len")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A user's description of a run: a plan, the files of a launch, or model, cluster, job and layout; None or empty if left out.

    Numbers may be texts. `overrides` are texts such as "model.num_layers=40", of model, job and chip.
    """

    plan: PathLike | Plan | None = None
    launch: Sequence[PathLike] = ()
    model: PathLike | None = None
    cluster: PathLike | None = None
    global_batch_tokens: int | str | None = None
    seq_len: int | str | None = None
    layout: str | Layout | None = None
    precision: str | None = None
    stack: str | None = None
    overrides: Sequence[str] = ()


def identify_run(description: RunDescription, logs: Sequence[PathLike] = ()) -> RunSetup:
    """Return what ran. A folder of a run among the logs says it too. Raises `InputError` with what is missing, or said twice."""
    plan = description.plan or _plan_of_folder(description, logs)
    if plan is not None:
        _require_left_out(description, FIELDS_OF_PLAN, "the plan")
        return run_from_plan(plan if isinstance(plan, Plan) else load_plan(Path(plan)), description.stack)
    if description.launch:
        _require_left_out(description, FIELDS_OF_LAUNCH, "the launch")
        return run_from_launch(description.launch, description.cluster, description.model, description.stack)
    return _run_from_fields(description)


def _plan_of_folder(description: RunDescription, logs: Sequence[PathLike]) -> Path | None:
    """Return the plan in the folder of a run among the logs, unless the description says what ran."""
    folders = [Path(path) for path in logs if Path(path).is_dir()]
    plan = folders[0] / "plan.json" if len(folders) == 1 else None
    is_described = description.launch or any(getattr(description, name) for name in REQUIRED_FIELDS)
    return plan if plan is not None and plan.exists() and not is_described else None


def run_from_plan(plan: Plan, stack: str | None = None) -> RunSetup:
    """Return what a plan says; a stack replaces the plan's."""
    cluster = (
        plan.cluster if stack is None else with_published_constants(without_calibration(plan.cluster), get_stack(stack))
    )
    return RunSetup(
        model=plan.model, cluster=cluster, job=plan.job, layout=plan.layout, batch_tokens=plan.job.global_batch_tokens,
        software=_stack_name(cluster),
    )  # fmt: skip


def run_from_launch(
    files: Sequence[PathLike], cluster: PathLike | None, model: PathLike | None = None, stack: str | None = None
) -> RunSetup:
    """Return what the launch of a framework says. Raises `InputError` without a cluster, which no launch names."""
    if cluster is None:
        raise InputError(f"{argument_label('cluster')}: missing; what the launch ran on is required, such as h100:64")
    measured = load_measured_cluster(os.fspath(cluster))
    parsed = parse_launch(
        read_files([os.fspath(path) for path in files]), cluster_machines(measured.nominal),
        model=load_model(os.fspath(model)) if model else None,
    )  # fmt: skip
    # A user's own calibration is of the software that ran; otherwise the framework's stack.
    stack_name = stack or (None if measured.calibration else parsed.target.stack)
    planned, job = with_problem_defaults(
        apply_stack(measured, get_stack(stack_name) if stack_name else None), parsed.launch.job
    )
    return RunSetup(
        model=parsed.launch.model, cluster=planned, job=job, layout=parsed.launch.layout,
        batch_tokens=job.global_batch_tokens, software=stack or parsed.target.stack, unknown=parsed.unknown,
    )  # fmt: skip


def run_from_files(files: Sequence[PathLike], cluster: PathLike) -> RunSetup:
    """Return what a plan, or the files of a launch, say."""
    if len(files) == 1 and is_plan_file(os.fspath(files[0])):
        return run_from_plan(load_plan(Path(files[0])))
    return run_from_launch(files, cluster)


def _run_from_fields(description: RunDescription) -> RunSetup:
    model, cluster, seq_len = description.model, description.cluster, description.seq_len
    if not (model and cluster and seq_len):
        missing = ", ".join(argument_label(name) for name in REQUIRED_FIELDS if not getattr(description, name))
        sources = f"{argument_label('plan')}, {argument_label('launch')}"
        raise InputError(f"mfu: {missing} missing; these, or {sources} or the folder of a run, say what ran")
    fields = {
        "global_batch_tokens": description.global_batch_tokens, "seq_len": seq_len, "precision": description.precision,
        "stack": description.stack, "overrides": description.overrides,
    }  # fmt: skip
    inputs = resolve_problem(model, [cluster], fields={name: value for name, value in fields.items() if value})
    job = inputs.job
    if "global_batch_tokens" in inputs.defaults:  # the log may say it
        job = replace(job, global_batch_tokens=job.seq_len)
    layout = description.layout
    if isinstance(layout, str):
        layout = parse_layout_text(layout, inputs.architecture, job, argument_label("layout"))
    return RunSetup(
        model=inputs.architecture, cluster=inputs.problem.cluster, job=job, layout=layout,
        software=_stack_name(inputs.problem.cluster),
        batch_tokens=job.global_batch_tokens if description.global_batch_tokens else None,
    )  # fmt: skip


def _require_left_out(description: RunDescription, names: Sequence[str], source: str) -> None:
    """Raise `InputError` for fields that repeat what a plan or a launch says."""
    repeated = [argument_label(name) for name in names if getattr(description, name)]
    if repeated:
        raise InputError(
            f"{', '.join(repeated)}: found beside {source}, which says {'it' if len(repeated) == 1 else 'them'}; leave out one "
            "of the two"
        )


def _stack_name(cluster: Cluster) -> str:
    return cluster.calibration.stack if cluster.calibration else ""


RATE_UNITS = ("device", "gpu", "chip")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementSource:
    """A measurement, one of these: files or a folder of logs, tokens/s ("410k", "6400/device"), seconds of a step ("8.1s")."""

    logs: Sequence[PathLike] = ()
    tokens_per_s: str | float | None = None
    step_time: str | float | None = None


def analyse_run(
    description: RunDescription, source: MeasurementSource, progress: Progress = ignore_progress
) -> UtilisationReport:
    """Return the utilisation of a measured run, with the breakdown of its step, or without a layout the best plan beside it.

    A plan's file may stand where logs do. Raises `InputError` with what is missing.
    """
    description, source = _take_plan_from_logs(description, source)
    _require_single_source(source)
    description = _take_sequence_from_logs(description, source)
    setup, measured = read_measurement(source, identify_run(description, source.logs))
    return _compare_with_prediction(setup, measured, progress)


def _take_plan_from_logs(
    description: RunDescription, source: MeasurementSource
) -> tuple[RunDescription, MeasurementSource]:
    """Move a plan's file among the logs to the description. Raises `InputError` for a second plan."""
    plans = [path for path in source.logs if is_plan_file(os.fspath(path))]
    if not plans:
        return description, source
    all_plans = [*([description.plan] if description.plan else []), *plans]
    if len(all_plans) > 1:
        raise InputError(
            f"mfu: found {len(all_plans)} plans, {', '.join(map(str, all_plans))}; one, of the run that was measured, is required"
        )
    logs = [path for path in source.logs if path not in plans]
    return replace(description, plan=plans[0]), replace(source, logs=logs)


def _take_sequence_from_logs(description: RunDescription, source: MeasurementSource) -> RunDescription:
    """Fill in a sequence's length that the logs say before the first step, where nothing else says what ran."""
    if description.seq_len or description.plan or description.launch or not (description.model and description.cluster):
        return description
    header = read_run_header([Path(path) for path in source.logs])
    return replace(description, seq_len=header.seq_len) if header.seq_len else description


def _require_single_source(source: MeasurementSource) -> None:
    labels = {argument_label(name): getattr(source, name) for name in ("logs", "tokens_per_s", "step_time")}
    names = [label for label, value in labels.items() if value]
    if len(names) != 1:
        raise InputError(
            f"mfu: found {' and '.join(names) or 'no measurement'}; one of {', '.join(labels)} is required"
        )


def read_measurement(source: MeasurementSource, setup: RunSetup) -> tuple[RunSetup, MeasuredStep]:
    """Return what was measured of a run, and its setup, with the batch that the log says. Raises `InputError`."""
    num_devices, batch = setup.cluster.num_devices, setup.batch_tokens
    if source.logs:
        return read_measured_log([Path(path) for path in source.logs], setup)
    if source.step_time is not None:
        seconds = _parse_step_time(source.step_time)
        if batch is None:
            raise InputError(
                f"{argument_label('global_batch_tokens')}: missing; the tokens of a step that took "
                f"{argument_label('step_time')} are required"
            )
        return setup, MeasuredStep(batch / seconds / num_devices, seconds)
    assert source.tokens_per_s is not None  # one of the three is required
    rate = _parse_rate(source.tokens_per_s, num_devices)
    return setup, MeasuredStep(rate, batch / rate / num_devices if batch else None)


def _parse_step_time(step_time: str | float) -> float:
    text = step_time if isinstance(step_time, str) else f"{step_time!r}s"
    return parse_duration(text, label=argument_label("step_time"))


def _parse_rate(tokens_per_s: str | float, num_devices: int) -> float:
    """Return tokens/s of a device; the text has those of a device ("6400/device") or of all."""
    text, label = str(tokens_per_s), argument_label("tokens_per_s")
    number, slash, unit = text.partition("/")
    rate = parse_quantity(number, label=label, unit="")
    if rate <= 0 or (slash and unit.strip() not in RATE_UNITS):
        raise InputError(f"{label}: found {text!r}; a number above 0 is required, such as 410k, or 6400/device")
    return rate if slash else rate / num_devices


def _compare_with_prediction(setup: RunSetup, measured: MeasuredStep, progress: Progress) -> UtilisationReport:
    problem = Problem(setup.model, setup.cluster, setup.job)
    utilisation = compute_utilisation(problem, measured.tokens_per_s_per_device, setup.layout)
    report = UtilisationReport(setup=setup, measured=measured, utilisation=utilisation)
    if measured.step_time_s is None:
        return report
    if setup.layout is None:
        return replace(report, plan=make_plan(problem, progress=progress, elsewhere=False))
    plan = plan_layout(setup.model, setup.cluster, setup.job, setup.layout)
    return replace(report, plan=plan, breakdown=break_down_step(plan, measured.step_time_s, utilisation))
