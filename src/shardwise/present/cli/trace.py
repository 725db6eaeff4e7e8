"""`shardwise trace`: the measured timeline of a run's step beside the planned one, and what it says."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments, write_file
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.measure.reconcile.trace_analysis import TraceAnalysis
    from shardwise.present.rendering.report import Report
    from shardwise.records import RunFolder

DESCRIPTION = """What the ranks of a run did in a step that `train --profile` recorded: kernels, waits and collectives under the
names of the planned step. Says how long each rank was busy, what communication was exposed on each axis and what was hidden
behind kernels, the gaps between kernels, and which rank the others waited for; and writes the measured step and the planned one
as one file for Chrome and Perfetto."""
EXAMPLES = (
    "shardwise train plan.json --data data --steps 20 --out runs/a --profile 10:13",
    "shardwise trace runs/a --step 12 --out trace.json",
    "shardwise trace runs/a --bottlenecks --memory memory.svg",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    run, output = parser.groups("run", "output")
    run.add_argument("folder", metavar="RUN", help="the folder of a run, which `shardwise train --out` named")
    run.add_argument("--step", metavar="N", help="the step, of those that were recorded (default: the last of them)")
    run.add_argument(
        "--bottlenecks",
        action="store_true",
        help="say what holds the step up, on which rank, and which layout would mend it",
    )
    output.add_argument(
        "--out",
        metavar="FILE",
        help="write the measured and the planned step as a trace for Chrome and Perfetto (JSON)",
    )
    output.add_argument(
        "--memory", type=picture_name, metavar="FILE", help="draw the memory of the run's first steps by category"
    )
    add_output_arguments(parser, verbose=True)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON; files are written first."""
    from pathlib import Path

    from shardwise.measure.reconcile.payloads import trace_payload
    from shardwise.measure.reconcile.trace_analysis import load_trace_analysis
    from shardwise.present.reports.step import trace_report
    from shardwise.records import RunFolder
    from shardwise.values import parse_count

    folder = RunFolder(Path(arguments.folder))
    folder.require_run_to_trace()
    step = None if arguments.step is None else parse_count(arguments.step, label="--step")
    found = load_trace_analysis(folder, step)
    _write_files(arguments, found, folder)
    if arguments.json:
        return json.dumps(trace_payload(found, bottlenecks=arguments.bottlenecks), indent=2)
    return trace_report(found, str(folder.path), bottlenecks=arguments.bottlenecks)


def _write_files(arguments: argparse.Namespace, found: TraceAnalysis, folder: RunFolder) -> None:
    from shardwise.present.charts.curves import draw_lines
    from shardwise.present.charts.step_charts import anatomy_chart, both_traces
    from shardwise.records.step_memory_and_collectives import read_memory_traces

    if arguments.memory:
        about = f"{found.plan.model.name}, {found.plan.layout}"
        write_picture("--memory", arguments.memory, draw_lines(anatomy_chart(read_memory_traces(folder), about)))
    if arguments.out:
        write_file("--out", arguments.out, both_traces(found.step, found.planned.step) + "\n")
