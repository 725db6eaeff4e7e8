"""`shardwise instructions`: what each device of a plan does, in order."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import PLAN, add_output_arguments
from shardwise.present.rendering.report import Report, Row, Section, Table
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.price.instruction_prices import PricedInstruction
    from shardwise.search.instruction_listing import Segment

DESCRIPTION = """What each device does in a step of a plan, in order: kernels, collectives where they start and where they are
waited for, and what is freed; on which stream, how many bytes, how long by itself, and why. The plan is priced by this list."""
EXAMPLES = (
    "shardwise plan llama-3-8b h100:8 --batch-tokens 512Ki --seq-len 8Ki --out plan.json",
    "shardwise instructions plan.json --pass forward --unit block",
)
PASSES = ("forward", "backward", "update")


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    plan = parser.group("plan")
    plan.add_argument("plan", metavar="PLAN", help=PLAN)
    plan.add_argument("--pass", dest="passes", choices=PASSES, action="append", help="this pass only (may be repeated)")
    plan.add_argument("--unit", metavar="NAME", help="this unit only: embedding, block, head, ...")
    plan.add_argument("--stage", type=int, default=0, metavar="N", help="of this pipeline stage (default: 0)")
    plan.add_argument("--all", action="store_true", help="what is sliced and freed too")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The list, as text or as JSON."""
    from shardwise.search import load_plan
    from shardwise.search.instruction_listing import instructions_payload, list_instructions

    plan = load_plan(arguments.plan)
    found = list_instructions(plan, stage=arguments.stage, passes=arguments.passes or PASSES, unit=arguments.unit)
    if arguments.json:
        return json.dumps(instructions_payload(plan, found, arguments.stage), indent=2)
    head = f"{plan.model.name}: {plan.layout}" + (f", stage {arguments.stage}" if plan.layout.pp > 1 else "")
    return [Section([head]), *(_segment(one, whole=arguments.all) for one in found)]


def _segment(found: Segment, *, whole: bool) -> Section:
    from shardwise.values import format_seconds

    times = [
        f"{found.layers} layers" * (found.layers > 1),
        f"{found.micro_batches} micro-batches" * (found.micro_batches > 1),
    ]
    head = f"{found.name} of {found.unit}" + "".join(f", {text}" for text in times if text)
    by_stream = ", ".join(f"{stream} {format_seconds(seconds)}" for stream, seconds in found.seconds.items())
    listed = [one for one in found.instructions if whole or one.kind not in ("free", "slice")]
    rows = (("stream", "what", "bytes", "alone", "why"), *(_row(one) for one in listed))
    return Section(
        [f"  in a step, each stream alone: {by_stream or 'nothing'}", "", Table(rows=rows, right=(2, 3))], title=head
    )


def _row(one: PricedInstruction) -> Row:
    from shardwise.values import format_bytes, format_seconds

    what = " ".join(_words(one))
    takes = "" if one.seconds is None else format_seconds(one.seconds)
    return one.stream, what, format_bytes(one.num_bytes) if one.num_bytes else "", takes, one.why


def _words(one: PricedInstruction) -> Iterator[str]:
    """What is done, with which tensors."""
    match one.kind:
        case "launch":
            yield f"{one.operation} {_names(one.tensors)} -> {_names(one.results)}"
        case "free":
            yield f"free {_names(one.tensors)}"
        case "slice":
            yield f"slice {_names(one.tensors)} over {', '.join(one.over)}"
        case kind:
            yield f"{kind} {one.operation} of {_names(one.tensors)}"
            yield f"over {', '.join(one.over)}"
            if kind == "start" and one.count > 1:
                yield f"in {one.count} pieces"


def _names(tensors: Sequence[str], most: int = 3) -> str:
    """Names of tensors, and how many more there are."""
    more = len(tensors) - most
    return ", ".join(tensors[:most]) + (f" and {more} more" if more > 0 else "")
