"""`shardwise plan --sweep`: the same job planned for each of several values."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shardwise.present.cli.arguments import resolve, resolve_reliability, write_file
from shardwise.present.cli.html import write_report
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.present.rendering.report import Report
from shardwise.values import (
    InputError,
    NothingFitsError,
    Parser,
    format_problems,
    parse_overrides,
    raise_problems,
    run_all,
    write_error,
)
from shardwise.values.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from shardwise.layout import Choices
    from shardwise.search import SweepCase, SweepPoint, Swept
    from shardwise.search.plan_sweep import SweptValues

OF_ONE_PLAN = ("out", "export", "deadline", "budget")
OF_SWEEPS = ("draw", "csv")


def add_sweep_arguments(parser: Parser) -> None:
    """`--sweep`, and the files that a sweep may be written to."""
    search, output = parser.groups("search", "output")
    search.add_argument(
        "--sweep", action="append", default=[], metavar="NAME=VALUES",
        help="plan for each value: gpus=64:4096:x2, seq_len=4096:32768:+4096, batch=1Mi,2Mi,4Mi, model=llama-3-8b,llama-3-70b, "
        "or what --pin takes, such as tp=1:32:x2; it stands in place of what is given otherwise; twice makes a grid",
    )  # fmt: skip
    output.add_argument(
        "--draw",
        type=picture_name,
        metavar="FILE",
        help="of a sweep: draw step, MFU, dollars and layouts over its values, of a grid a heat map",
    )
    output.add_argument("--csv", metavar="FILE", help="of a sweep: write a row for each point")


def require_no_sweep(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for flags that only a sweep has."""
    given = [f"--{name}" for name in OF_SWEEPS if getattr(arguments, name)]
    if given:
        raise InputError(
            f"{', '.join(given)}: of sweeps; --sweep is required beside it, such as --sweep gpus=64:4096:x2"
        )


def run_sweep(arguments: argparse.Namespace, pins: Mapping[str, Any], maxima: Mapping[str, Any]) -> str | Report:
    """The points, as a report or as JSON, and their files. After Ctrl-C those that were planned by then, with its exit code.

    Raises what kept the points from a plan where none has one.
    """
    from shardwise.search import Swept, grid_points
    from shardwise.search.sweep_values import parse_sweeps
    from shardwise.values import require_writable

    sweeps = parse_sweeps(arguments.sweep)
    _require_alone(arguments, pins, [sweep.name for sweep in sweeps])
    cases: list[SweepCase] = run_all(*(partial(_case, arguments, at, pins, maxima) for at in grid_points(sweeps)))
    for target in filter(None, (arguments.draw, arguments.csv, arguments.report)):
        require_writable(target)
    points = _planned(arguments, cases)
    _require_a_plan(points)
    return _written(arguments, Swept(sweeps=sweeps, points=points, num_points=len(cases)))


def _planned(arguments: argparse.Namespace, cases: list[SweepCase]) -> tuple[SweepPoint, ...]:
    """The points; after Ctrl-C those that were planned by then, if one of them has a plan."""
    from shardwise.search.plan_sweep import plan_cases

    points: list[SweepPoint] = []
    try:
        for point in plan_cases(cases, reliability=resolve_reliability(arguments), progress=arguments.progress):
            points.append(point)
    except KeyboardInterrupt:
        if not any(point.plan for point in points):
            raise
        said = f"stopped after {len(points)} of {len(cases)} points"
        write_error((format_problems([said], EXIT_INTERRUPTED, as_json=True) if arguments.json else said) + "\n")
        arguments.exit_code = EXIT_INTERRUPTED
    return tuple(points)


def _require_alone(arguments: argparse.Namespace, pins: Mapping[str, Any], names: list[str]) -> None:
    """Raise `InputError` for what a sweep cannot stand beside."""
    from shardwise.search.sweep_values import JOB_FIELDS

    fixed = parse_overrides(arguments.set)["job"]
    given = [(f"--pin {name}", name) for name in pins if name in names]
    given += [(f"--set job.{field}", name) for name, field in JOB_FIELDS.items() if name in names and field in fixed]
    problems = [f"{flag}: found --sweep {name} with it; leave out one of the two" for flag, name in given]
    alone = ", ".join(f"--{name}" for name in OF_ONE_PLAN if getattr(arguments, name) is not None)
    if alone:
        problems.append(f"{alone}: found --sweep beside it; these are of one plan, so leave out one or the other")
    if len(arguments.cluster) > 1:
        clusters = ", ".join(arguments.cluster)
        problems.append(f"--sweep: found {len(arguments.cluster)} clusters ({clusters}); one is required")
    raise_problems(problems)


def _case(
    arguments: argparse.Namespace, at: SweptValues, pins: Mapping[str, Any], maxima: Mapping[str, Any]
) -> SweepCase:
    """What the command line stands for with the values of a point in it."""
    from shardwise.layout import choices_from_pins, job_for_engine
    from shardwise.search import SweepCase
    from shardwise.search.sweep_values import JOB_SWEEPS, resize_shorthand

    given = {name: str(value) for name, value in at.items() if name in JOB_SWEEPS}
    own = argparse.Namespace(**vars(arguments))
    own.model, own.seq_len = given.get("model", arguments.model), given.get("seq_len", arguments.seq_len)
    own.batch_tokens = given.get("batch", arguments.batch_tokens)
    (cluster,) = arguments.cluster
    own.cluster = resize_shorthand(cluster, at["gpus"]) if "gpus" in at else cluster
    model, where, job = resolve(own)
    choices: Choices | None = choices_from_pins(
        {**pins, **{name: value for name, value in at.items() if name not in JOB_SWEEPS}}, maxima,
        runnable=arguments.runnable, divisible=arguments.divisible,
    )  # fmt: skip
    return SweepCase(
        at=at, model=model, cluster=where, job=job_for_engine(job) if arguments.runnable else job, choices=choices
    )


def _require_a_plan(points: Sequence[SweepPoint]) -> None:
    """Raise where no point has a plan: nothing fits, or where that is said of none of them the input is wrong."""
    if any(point.plan for point in points):
        return
    lines = [f"{point.name}: {point.error}" for point in points]
    nothing_fits = any(isinstance(point.error, NothingFitsError) for point in points)
    raise NothingFitsError(*lines) if nothing_fits else InputError(*lines)


def _written(arguments: argparse.Namespace, swept: Swept) -> str | Report:
    from shardwise.present.charts.draw_chart import draw_chart
    from shardwise.present.charts.sweep_charts import sweep_chart
    from shardwise.present.reports.sweep import sweep_report
    from shardwise.search.payloads import sweep_csv, sweep_payload

    if arguments.draw:
        write_picture("--draw", arguments.draw, draw_chart(sweep_chart(swept)))
    if arguments.csv:
        write_file("--csv", arguments.csv, sweep_csv(swept))
    title = f"{arguments.model} on {arguments.cluster[0]} over {' and '.join(sweep.name for sweep in swept.sweeps)}"
    write_report(arguments.report, "sweep", title, lambda: sweep_payload(swept))
    return json.dumps(sweep_payload(swept), indent=2) if arguments.json else sweep_report(swept)
