"""`shardwise verify`: does the layout of a plan train as one process does?"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import PLAN, add_output_arguments
from shardwise.present.rendering.report import Report, Row, Section, Status, Table
from shardwise.step import count_collectives
from shardwise.values import InputError, Parser

if TYPE_CHECKING:
    from shardwise.verify.training.plan_verification import MeshVerification, PlanVerification

DESCRIPTION = """Check that the layout of a plan trains right. A small model with the plan's structure is trained for some steps
on meshes of at most 8 ranks that have all axes and variants of the plan's layout, in float64 on this machine's CPU, and on one
rank: loss, norm, every gradient and every weight are compared, and the collectives with the instruction list."""
REMARK = "Exit codes: 0 it trains right, 2 the input is wrong, 3 it does not train right."
EXAMPLES = (
    "shardwise plan llama-3-70b h100:1024 --batch-tokens 4Mi --seq-len 8Ki --runnable --out plan.json",
    "shardwise verify plan.json",
    "shardwise verify plan.json --set recipe.balance=bias --set recipe.reduction=after --json",
)
NOT_RIGHT = 3  # a limit is missed


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    plan, training = parser.groups("plan", "training")
    plan.add_argument("plan", metavar="PLAN", help=PLAN)
    training.add_argument("--steps", default="3", metavar="N", help="optimizer steps (default: 3)")
    training.add_argument("--seed", default="0", metavar="N", help="of weights and tokens (default: 0)")
    training.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="a value of the recipe, such as recipe.balance=bias or recipe.respect_documents=true; may be repeated",
    )  # fmt: skip
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """What was found, as text or as JSON."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("verify: PyTorch is not installed; pip install shardwise[train]")
    from shardwise.search import load_plan
    from shardwise.verify.training.plan_verification import verify_payload, verify_plan
    from shardwise.verify.training.training_case import small_recipe

    plan = load_plan(arguments.plan)
    found = verify_plan(plan, small_recipe(plan, arguments.steps, arguments.seed, arguments.set), arguments.progress)
    arguments.exit_code = 0 if found.ok else NOT_RIGHT
    return json.dumps(verify_payload(found), indent=2) if arguments.json else _report(str(plan.layout), found)


def _report(layout: str, found: PlanVerification) -> Report:
    from shardwise.verify.training.compare_runs import ERROR_LIMITS

    limits = ("limit", "", *(f"{limit:.0e}" for limit in ERROR_LIMITS.values()), "")
    rows: tuple[Row, ...] = (("mesh", "ranks", *ERROR_LIMITS, "collectives"), *map(_row, found.meshes), limits)
    right = "the layout trains as one process does, and issues what the instruction list has"
    wrong = "the layout does NOT train as one process does, or issues other collectives than listed"
    return [
        Section([f"{layout}, in small, against one process in float64"]),
        Section([Table(rows=rows, right=(1, 2, 3, 4, 5)), *(line for one in found.meshes for line in _problems(one))]),
        Section([Status(right, "good") if found.ok else Status(wrong, "bad")]),
    ]


def _row(one: MeshVerification) -> Row:
    count = count_collectives(one.case.instance, one.case.num_micro_batches).total()
    collectives = f"{count} of {count} as listed" if not one.differing else "differ"
    errors = (f"{error:.1e}" for error in one.errors.largest.values())
    return _name(one), str(one.case.layout.num_devices), *errors, collectives


def _name(one: MeshVerification) -> str:
    return " ".join(f"{atom}={degree}" for atom, degree in one.degrees.items()) or "one device"


def _problems(one: MeshVerification, most: int = 8) -> Iterator[str]:
    """What of a mesh is not compared, which gradient and weight are farthest off, and the first collectives that differ."""
    if one.errors.without_gradient:
        yield f"{_name(one)}: without a gradient, and not compared: {', '.join(one.errors.without_gradient)}"
    if not one.errors.ok:
        yield f"{_name(one)}: farthest off are the gradient of {one.errors.gradient} and the weight {one.errors.weight}"
    more = len(one.differing) - most
    yield from (f"{_name(one)}: {text}" for text in one.differing[:most])
    if more > 0:
        yield f"{_name(one)}: and {more} more"
