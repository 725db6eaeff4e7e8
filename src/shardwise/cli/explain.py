"""`shardwise explain`: why this plan, and why not another."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import add_verbose_argument, parse_layout_text
from shardwise.cli.html import add_report_argument, write_report

if TYPE_CHECKING:
    from shardwise.cli.section import Report

EPILOG = """examples:
  shardwise explain plan.json
  shardwise explain plan.json --against "tp=8 pp=8 fsdp=8"
  shardwise explain plan.json --term memory.activations"""


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "explain", help="say why a plan is what it is, and how another layout compares",
        description="Say why a plan is what it is: does it fit, does it reach the batch, what bounds its throughput.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("plan", metavar="FILE", help="a plan that `plan --out` wrote")
    parser.add_argument("--against", type=str, metavar="TEXT", help='another layout, such as "tp=8 pp=4 fsdp=16"')
    parser.add_argument("--term", metavar="NAME", help="one term only, such as memory.activations or time.tp")
    add_report_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the payload as JSON")
    add_verbose_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str | Report:
    """The explanation, as text or as JSON."""
    from shardwise.cli.explain_report import explain_report
    from shardwise.planning.codec import load_plan
    from shardwise.planning.explain import explain
    from shardwise.planning.explain.payload import explanation_payload
    from shardwise.search.plan import nearest_fitting

    plan = load_plan(arguments.plan)
    against = arguments.against
    other = None if against is None else parse_layout_text(against, plan.model, plan.job, "--against")
    found = explain(
        plan, lambda layout: nearest_fitting(plan.model, plan.cluster, plan.job, layout, arguments.progress),
        other=other, term_name=arguments.term,
    )  # fmt: skip
    title = f"{found.model} on {found.cluster}: why this plan"
    write_report(arguments.report, "explain", title, lambda: explanation_payload(found, plan))
    return json.dumps(explanation_payload(found, plan), indent=2) if arguments.json else explain_report(found)
