"""A measured run analysed: what ran, what was measured of it, its utilisation, and the prediction beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.measure.run_identification import PathLike, RunDescription, identify_run
from shardwise.measure.utilisation import (
    MeasuredStep,
    RunSetup,
    UtilisationReport,
    break_down_step,
    compute_utilisation,
    read_measured_log,
)
from shardwise.price import Problem
from shardwise.search import is_plan_file, make_plan, plan_layout
from shardwise.values import InputError, Progress, ignore_progress, parse_duration, parse_quantity
from shardwise.values.argument_labels import argument_label

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
