"""`shardwise reconcile`: a plan against a run of it, term by term."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import PLAN, add_output_arguments
from shardwise.present.cli.html import add_report_argument, write_report
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.measure import Reconciliation
    from shardwise.present.rendering.report import Report
    from shardwise.search import Plan

DESCRIPTION = """Compare a run of `shardwise train` with its plan: every term of the step time and of the memory, predicted and
measured; the part that no term explains; the term that the error is attributed to; and the collectives that were issued, with
those that were planned."""
EXAMPLES = (
    "shardwise train plan.json --data data --steps 50 --out runs/a",
    "shardwise reconcile plan.json runs/a --plot reconciled.svg",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    run, output = parser.groups("run", "output")
    run.add_argument("plan", metavar="PLAN", help=PLAN)
    run.add_argument("folder", metavar="RUN", help="the folder of its run, which `shardwise train --out` named")
    output.add_argument(
        "--plot", type=picture_name, metavar="FILE", help="draw predicted and measured terms side by side"
    )
    add_report_argument(parser)
    add_output_arguments(parser, verbose=True)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON; the picture is written first."""
    from pathlib import Path

    from shardwise.measure import read_run, reconcile_payload
    from shardwise.measure.reconcile.reconciliation import reconcile
    from shardwise.present.reports.run import reconcile_report
    from shardwise.search import load_plan

    plan, folder = load_plan(arguments.plan), Path(arguments.folder)
    found = reconcile(plan, read_run(plan, folder))
    if arguments.plot:
        _draw(plan, found, arguments.plot)
    title = f"{plan.model.name}: {folder.name} against its plan"
    write_report(arguments.report, "reconcile", title, lambda: reconcile_payload(plan, found))
    if arguments.json:
        return json.dumps(reconcile_payload(plan, found), indent=2)
    return reconcile_report(plan, found, str(folder))


def _draw(plan: Plan, found: Reconciliation, target: str) -> None:
    from shardwise.present.charts.bars import draw_bar_charts
    from shardwise.present.charts.measurement_charts import reconciliation_charts

    about = f"{plan.model.name}, {plan.layout}, on {found.machine}"
    write_picture("--plot", target, draw_bar_charts(reconciliation_charts(found, about)))
