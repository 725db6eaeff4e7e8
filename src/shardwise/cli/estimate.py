"""`shardwise estimate`: what one given layout costs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli.arguments import add_job_arguments, layout_help, parse_layout_text, resolve


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "estimate", help="price one layout", description="Price one layout of a training job on a cluster."
    )
    add_job_arguments(parser)
    parser.add_argument("--layout", required=True, metavar="TEXT", help=layout_help())
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The estimate, as a report or as JSON (the payload of a plan without a search)."""
    from shardwise.cli.report import plan_report
    from shardwise.planning.codec import plan_payload
    from shardwise.planning.plan import plan_layout

    model, cluster, job = resolve(arguments)
    found = plan_layout(model, cluster, job, parse_layout_text(arguments.layout, model, job))
    return json.dumps(plan_payload(found), indent=2) if arguments.json else plan_report(found)
