"""`shardwise simulate`: a plan's step on simulated streams."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import PLAN, add_output_arguments, at_least, write_file
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.present.rendering.report import Report
    from shardwise.price import Simulation
    from shardwise.search import Plan

DESCRIPTION = """A plan's step, instruction by instruction: kernels on the compute stream, collectives on a stream for each axis,
waited for where the list has it, and the schedule of its passes. Says what is exposed of each axis, what the stages wait for one
another, what a device holds over time, and what the length of the step is made of; beside the plan's estimate."""
EXAMPLES = (
    "shardwise plan llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --out plan.json",
    "shardwise simulate plan.json --draw step.svg --trace step.json",
    "shardwise simulate plan.json --overlap sum --json",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    plan, output = parser.groups("plan", "output")
    plan.add_argument("plan", metavar="PLAN", help=PLAN)
    plan.add_argument(
        "--overlap", choices=("list", "sum", "max", "per_axis", "none"), default="list",
        help="list: starts and waits where the instruction list has them (the default); a convention of the estimate; none: each "
        "collective is waited for where it starts",
    )  # fmt: skip
    plan.add_argument(
        "--contention",
        metavar="X",
        help="how many times as long a kernel takes beside traffic (default: 1, no contention)",
    )
    output.add_argument("--draw", type=picture_name, metavar="FILE", help="draw streams and memory over time")
    output.add_argument(
        "--trace", metavar="FILE", help="write every kernel and transfer as a trace for Chrome and Perfetto (JSON)"
    )
    add_output_arguments(parser, verbose=True)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON."""
    from shardwise.present.reports.step import simulation_report
    from shardwise.price.simulation.result import simulation_payload
    from shardwise.search import load_plan

    plan = load_plan(arguments.plan)
    found = _simulation(arguments, plan)
    _write_files(arguments, found)
    return (
        json.dumps(simulation_payload(found, plan.estimate), indent=2)
        if arguments.json
        else simulation_report(found, plan)
    )


def _simulation(arguments: argparse.Namespace, plan: Plan) -> Simulation:
    from shardwise.price import simulate
    from shardwise.price.simulation.streams import CONTENTION

    given = arguments.contention
    contention = CONTENTION if given is None else at_least(1.0, given, "--contention")
    return simulate(plan.problem, plan.layout, overlap=arguments.overlap, contention=contention)


def _write_files(arguments: argparse.Namespace, found: Simulation) -> None:
    from shardwise.present.charts.step_charts import step_chart, step_trace_text
    from shardwise.present.charts.timeline import draw_timeline

    if arguments.draw:
        write_picture("--draw", arguments.draw, draw_timeline(step_chart(found)))
    if arguments.trace:
        write_file("--trace", arguments.trace, step_trace_text(found.step) + "\n")
