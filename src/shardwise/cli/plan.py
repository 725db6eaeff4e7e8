"""`shardwise plan`: the fastest layout that fits, and why."""

from __future__ import annotations

import argparse
import json
from typing import Any

from shardwise.cli.arguments import add_job_arguments, resolve


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "plan", help="search all layouts and choose the fastest that fits",
        description="Search all layouts of a training job on a cluster and choose the fastest that fits.",
    )  # fmt: skip
    add_job_arguments(parser)
    parser.add_argument("--out", metavar="FILE", help="write the plan to a file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The plan, as a report or as JSON."""
    from shardwise.cli.report import plan_report
    from shardwise.planning.codec import dump_plan, plan_payload
    from shardwise.search.plan import plan

    found = plan(*resolve(arguments))
    if arguments.out:
        dump_plan(found, arguments.out)
    return json.dumps(plan_payload(found), indent=2) if arguments.json else plan_report(found)
