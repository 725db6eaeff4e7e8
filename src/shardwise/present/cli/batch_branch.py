"""`shardwise batch branch`: go on from a checkpoint at several batches, and find the largest that loses nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardwise.batch_size.branch_losses import LOSS_TOLERANCE
from shardwise.present.cli import batch_runs
from shardwise.present.cli.pictures import write_picture
from shardwise.present.rendering.report import Block, Report, Row, Section, Table
from shardwise.run.recipe import BATCH_LR_RULES
from shardwise.values import InputError, format_count, format_quantity, pluralize

if TYPE_CHECKING:
    from shardwise.batch_size import BranchPoint
    from shardwise.batch_size.branch_losses import Branch, ComparedBranches

SOURCE = "the folder of a run with a checkpoint, or of branches that were made"
PICTURE = "the losses of the branches by batch, and the tolerance"
RULE = "sqrt"
FLAGS: Mapping[str, Mapping[str, Any]] = {
    **batch_runs.FLAGS,
    "--tokens": {"metavar": "N", "help": "the window: tokens that each branch is trained on"},
    "--step": {"metavar": "N", "help": "that of the checkpoint (default: the newest)"},
    "--batch-lr": {
        "choices": tuple(BATCH_LR_RULES), "default": RULE,
        "help": f"how the learning rate follows the batch: sqrt of Adam, linear of SGD (default: {RULE})",
    },
    "--tolerance": {
        "default": str(LOSS_TOLERANCE), "metavar": "X",
        "help": f"nats above the best of smaller batches that count as nothing lost (default: {LOSS_TOLERANCE:g})",
    },
}  # fmt: skip
OF_RUNS = ("--batches", "--data", "--out", "--processes", "--tokens", "--step")  # no use where nothing is run


def run(arguments: argparse.Namespace) -> str | Report:
    """The critical batch, when all branches have ended. Raises `InputError`, and `SystemExit` where it was asked to stop."""
    from shardwise.batch_size.branch_losses import compare_branches, require_tolerance
    from shardwise.batch_size.payloads import branches_payload
    from shardwise.present.charts.batch_size_charts import branches_chart
    from shardwise.present.charts.draw_chart import draw_chart
    from shardwise.values import parse_quantity

    tolerance = parse_quantity(arguments.tolerance, label="--tolerance", unit="")
    require_tolerance(tolerance)
    point, branches = _branches(arguments)
    found = compare_branches(branches, tolerance)
    if arguments.plot:
        write_picture("--plot", arguments.plot, draw_chart(branches_chart(point, found)))
    return json.dumps(branches_payload(point, found), indent=2) if arguments.json else branches_report(point, found)


def _branches(arguments: argparse.Namespace) -> tuple[BranchPoint, tuple[Branch, ...]]:
    """Those of a folder, or those that are made now."""
    from shardwise.batch_size.branch_losses import is_branch_folder, read_branch_point, read_branches

    if is_branch_folder(arguments.source):
        given = [flag for flag in OF_RUNS if getattr(arguments, flag[2:])]
        if given:
            raise InputError(
                f"{', '.join(given)}: {arguments.source} holds branches that were made; leave out, or the folder of a run is "
                "required"
            )
        return read_branch_point(arguments.source), read_branches(arguments.source)
    batch_runs.require_torch("batch branch")
    from shardwise.measure.batch_experiments.checkpoint_branches import run_checkpoint_branches

    return run_checkpoint_branches(arguments, batch_runs.say)


def branches_report(point: BranchPoint, found: ComparedBranches) -> Report:
    """The critical batch, and each branch beside those of smaller batches."""
    count = pluralize(len(found.compared), "branch")
    title = f"{count} from step {point.step:,} of {point.run}, {format_count(point.window_tokens)} tokens each"
    return [
        Section(list(_head(point, found)), title=title),
        Section([_table(point, found)]),
        Section([f"failed: batch {branch.batch_tokens:,.0f}: {branch.failed}" for branch in found.failed]),
    ]


def _head(point: BranchPoint, found: ComparedBranches) -> Iterator[Block]:
    from shardwise.present.charts.batch_size_charts import said_of_branches

    yield f"  {said_of_branches(found)}"
    yield (
        f"  tolerance {format_quantity(found.tolerance)} nats above the lowest loss of all smaller batches; the run's batch is "
        f"{point.batch_tokens:,.0f} tokens, its learning rate {format_quantity(point.learning_rate)}"
    )
    if found.next_tokens is None:
        yield "  note: the largest batch is within the tolerance, and the critical one may be larger: try larger ones"
    elif found.is_smallest:
        yield "  note: only the smallest batch is within the tolerance, and the critical one may be smaller: try smaller ones"


def _table(point: BranchPoint, found: ComparedBranches) -> Table:
    rows: list[Row] = [
        ("batch, tokens", "of the run's", "learning rate", "steps", "loss", "over smaller ones", "", "held-out loss")
    ]
    for one in found.compared:
        branch = one.branch
        rows.append(
            (
                f"{branch.batch_tokens:,.0f}", f"{branch.batch_tokens / point.batch_tokens:.3g}",
                format_quantity(branch.learning_rate), f"{branch.steps:,.0f}", f"{branch.loss:.4f}", f"{one.excess:+.4f}",
                "within" if one.is_within else "over", "" if branch.held_out_loss is None else f"{branch.held_out_loss:.4f}",
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=(0, 1, 2, 3, 4, 5, 7))
