"""`shardwise explain`: why this plan, and why not another."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import PLAN, add_output_arguments
from shardwise.present.cli.html import add_report_argument, write_report
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.layout import Layout
    from shardwise.present.rendering.report import Report
    from shardwise.search import Plan
    from shardwise.search.loss_time import Doubling
    from shardwise.values import Progress

DESCRIPTION = "Say why a plan is what it is: does it fit, does it reach the batch, what bounds its throughput."
EXAMPLES = (
    "shardwise plan llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --out plan.json",
    'shardwise explain plan.json --against "fsdp=8 recompute=full"',
    "shardwise explain plan.json --term memory.activations",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    plan = parser.group("plan")
    plan.add_argument("plan", metavar="PLAN", help=PLAN)
    plan.add_argument("--against", type=str, metavar="TEXT", help='another layout, such as "tp=8 pp=4 fsdp=16"')
    plan.add_argument(
        "--noise-scale", metavar="N|RUN",
        help="of a plan that was made without: which side of the critical batch it lies on, and what the next doubling gains",
    )  # fmt: skip
    plan.add_argument("--term", metavar="NAME", help="one term only, such as memory.activations or time.tp")
    add_report_argument(parser)
    add_output_arguments(parser, verbose=True)


def run(arguments: argparse.Namespace) -> str | Report:
    """The explanation, as text or as JSON."""
    from shardwise.present.reports.explanation import explain_report
    from shardwise.search import find_nearest_fitting, load_plan
    from shardwise.search.explain.explanation import explain_plan
    from shardwise.search.payloads import explanation_payload

    plan = _with_noise(load_plan(arguments.plan), arguments.noise_scale)
    against = arguments.against
    other, filled = (None, "") if against is None else parse_against(plan, against)
    found = explain_plan(
        plan, lambda layout: find_nearest_fitting(plan.problem, layout, arguments.progress),
        other_layout=other, filled=filled, term_name=arguments.term,
        plan_doublings=lambda priced: _doubled(priced, arguments.progress),
    )  # fmt: skip
    title = f"{found.model} on {found.cluster}: why this plan"
    write_report(arguments.report, "explain", title, lambda: explanation_payload(found, plan))
    return json.dumps(explanation_payload(found, plan), indent=2) if arguments.json else explain_report(found)


def _with_noise(plan: Plan, given: str | None) -> Plan:
    """The plan with a noise scale that is given: its tokens are then those to the loss with its batch."""
    from dataclasses import replace

    from shardwise.batch_size import LossTarget, parse_noise_scale

    if given is None:
        return plan
    batch = None if plan.job.tokens is None else float(plan.job.global_batch_tokens)
    target = LossTarget(noise=parse_noise_scale(given, "--noise-scale"), tokens=plan.job.tokens, batch_tokens=batch)
    return replace(plan, to_loss=target)


def _doubled(plan: Plan, progress: Progress) -> tuple[Doubling, ...]:
    from shardwise.search import plan_doublings

    return plan_doublings(plan, plan.to_loss, progress=progress) if plan.to_loss else ()


def parse_against(plan: Plan, text: str) -> tuple[Layout, str]:
    """The other layout, with the choices that its text leaves out as a search makes them; and these choices."""
    from shardwise.layout import DERIVED_FIELDS, parse_fields
    from shardwise.layout.payload import check_derived_fields
    from shardwise.search.nearest_fitting_layout import added_fields_text, complete_layout
    from shardwise.values import InputError

    said = parse_fields(text, prefix="--against", extra_counts=DERIVED_FIELDS)
    if not said:
        raise InputError(f"--against: found {text!r}; a part of a layout is required at least, such as tp=8")
    derived = {key: said.pop(key) for key in DERIVED_FIELDS if key in said}
    layout = complete_layout(plan.problem, said)
    return check_derived_fields(layout, derived, plan.model, plan.job), added_fields_text(layout, said)
