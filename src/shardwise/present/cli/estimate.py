"""`shardwise estimate`: what one given layout costs."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import (
    add_job_arguments,
    add_output_arguments,
    layout_help,
    parse_layout_text,
    resolve,
    resolve_reliability,
)
from shardwise.present.cli.schedule_of_batches import add_schedule_argument, with_schedule
from shardwise.price import Problem
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.present.rendering.report import Report
    from shardwise.search import Plan
    from shardwise.values import Progress

DESCRIPTION = "Price one layout of a training job on a cluster: seconds of a step, bytes of a device, what bounds it."
EXAMPLES = (
    'shardwise estimate llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --layout "fsdp=8 recompute=full"',
    'shardwise estimate llama-3-70b h100:64 --batch-tokens 1Mi --seq-len 8Ki --layout "tp=8 pp=4 fsdp=2" --overlap sum',
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    add_job_arguments(parser)
    parser.group("job").add_argument("--layout", type=str, required=True, metavar="TEXT", help=layout_help())
    add_schedule_argument(parser.group("job"))
    add_output_arguments(parser, verbose=True)


def run(arguments: argparse.Namespace) -> str | Report:
    """The estimate, as a report or as JSON (the payload of a plan without a search)."""
    from shardwise.present.reports.plan import plan_report
    from shardwise.search import plan_layout
    from shardwise.search.plan_file import estimate_payload

    model, cluster, job = resolve(arguments)
    layout = parse_layout_text(arguments.layout, model, job)
    reliability = resolve_reliability(arguments)
    found = with_schedule(arguments, plan_layout(model, cluster, job, layout, reliability=reliability), reliability)
    change = None if found.estimate.fits else _smallest_change(found, arguments.progress)
    if arguments.json:
        return json.dumps(estimate_payload(found, change), indent=2)
    return plan_report(found, smallest_change=change)


def _smallest_change(found: Plan, progress: Progress) -> str:
    """What to change so that the layout fits; only here is something searched."""
    from shardwise.search import find_nearest_fitting
    from shardwise.search.explain.other_layouts import describe_smallest_change

    return describe_smallest_change(
        found,
        found.layout,
        lambda layout: find_nearest_fitting(Problem(found.model, found.cluster, found.job), layout, progress),
    )
