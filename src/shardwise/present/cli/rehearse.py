"""`shardwise rehearse`: one rank of a plan's world, run without the others and without data."""

from __future__ import annotations

import argparse
import importlib.util
import json

from shardwise.present.cli.arguments import PLAN, add_output_arguments
from shardwise.present.rendering.report import Report
from shardwise.values import InputError, Parser

DESCRIPTION = """Run a step of one rank of a plan's world, of any size, in this process: the engine of `train` on tensors without
data, over process groups whose other ranks are absent. The collectives that it issues are compared with the plan's list, and its
memory with the plan's, term by term. Exit code 3 where either is not as planned."""
EXAMPLES = (
    "shardwise plan llama-3-8b h100:1024 --batch-tokens 16Mi --seq-len 8192 --runnable --out plan.json",
    "shardwise rehearse plan.json --rank 1023 --json",
)
NOT_AS_PLANNED = 3  # a limit is missed


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    plan, training = parser.groups("plan", "training")
    plan.add_argument("plan", metavar="PLAN", help=PLAN)
    plan.add_argument("--rank", type=int, default=0, metavar="N", help="which of the plan's ranks (default: 0)")
    training.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="replace a value of the recipe, such as recipe.reduction=after; may be repeated",
    )  # fmt: skip
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON. Raises `InputError` for a plan that the engine does not run."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("rehearse: PyTorch is not installed; pip install shardwise[train]")
    from shardwise.layout import require_runnable
    from shardwise.measure.reconcile.payloads import rehearsal_payload
    from shardwise.measure.reconcile.rehearsal import compare_rehearsal
    from shardwise.present.reports.run import rehearsal_report
    from shardwise.run import TrainingRecipe
    from shardwise.run.trainer.flags import apply_changes
    from shardwise.search import load_plan
    from shardwise.values import get_precision, parse_overrides

    plan = load_plan(arguments.plan)
    recipe = apply_changes(TrainingRecipe(steps=1), parse_overrides(arguments.set, rooms=("recipe",))["recipe"])
    require_runnable(plan.model, plan.layout, get_precision(plan.job.precision), plan.job.optimizer)
    from shardwise.run.trainer.rehearsal import rehearse_rank

    found = compare_rehearsal(plan, recipe, rehearse_rank(plan, recipe, arguments.rank))
    arguments.exit_code = 0 if found.ok else NOT_AS_PLANNED
    return json.dumps(rehearsal_payload(plan, found), indent=2) if arguments.json else rehearsal_report(plan, found)
