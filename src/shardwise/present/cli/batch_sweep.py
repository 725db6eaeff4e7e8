"""`shardwise batch sweep`: train at several batches to one loss, each with a learning rate and seeds of its own."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.present.cli import batch_runs
from shardwise.present.rendering.report import Block, Report, Row, Section, Table
from shardwise.values import format_count, format_quantity, pluralize

if TYPE_CHECKING:
    from shardwise.batch_size.batch_sweep_fit import BatchRun

SOURCE = "a plan"
NUM_SEEDS, MOST_STEPS, LEARNING_RATE, WARMUP = "3", "10000", "3e-4", "10"


FLAGS: Mapping[str, Mapping[str, Any]] = {
    **batch_runs.FLAGS,
    "--to-loss": {"metavar": "X", "help": "the smoothed training loss in nats at which each run ends"},
    "--seeds": {"default": NUM_SEEDS, "metavar": "N", "help": f"runs of each batch at its best rate (default: {NUM_SEEDS})"},
    "--learning-rate": {
        "default": LEARNING_RATE, "metavar": "X",
        "help": "that of the plan's batch; other batches begin with the square root rule's, and half and double of the best are "
        f"tried until it lies between them (default: {LEARNING_RATE})",
    },
    "--learning-rates": {
        "default": "", "type": str, "metavar": "LIST", "help": "try these at every batch instead: 1e-3,2e-3,4e-3",
    },
    "--steps": {"default": MOST_STEPS, "metavar": "N", "help": f"at most of each run (default: {MOST_STEPS})"},
    "--warmup": {"default": WARMUP, "metavar": "N", "help": f"steps in which the learning rate rises (default: {WARMUP})"},
    "--set": {
        "action": "append", "default": [], "metavar": "KEY=VALUE", "help": "a value of the recipe of all runs; may be repeated",
    },
}  # fmt: skip


def run(arguments: argparse.Namespace) -> str | Report:
    """What the runs came to, when all have ended. Raises `InputError`, and `SystemExit` where it was asked to stop."""
    batch_runs.require_torch("batch sweep")
    from shardwise.batch_size.batch_sweep_fit import select_best_runs
    from shardwise.batch_size.payloads import batch_runs_payload
    from shardwise.measure.batch_experiments.batch_sweep import run_batch_sweep

    found = run_batch_sweep(arguments, batch_runs.say)
    if arguments.json:
        return json.dumps(batch_runs_payload(found), indent=2)
    title = f"{arguments.out}: {pluralize(len(found), 'run')} to a loss of {arguments.to_loss}"
    return [
        Section([_table(select_best_runs(found))], title=title),
        Section(list(_failed(found))),
        Section([f"next: shardwise batch fit {arguments.out}"]),
    ]


def _table(best: Sequence[BatchRun]) -> Block:
    """A row for each batch: the mean over its seeds."""
    rows: list[Row] = [("batch, tokens", "learning rate", "seeds", "steps", "tokens")]
    for batch in sorted({run.batch_tokens for run in best}):
        runs = [run for run in best if run.batch_tokens == batch]
        steps = [run.steps for run in runs if run.steps is not None]
        rates = ", ".join(sorted({format_quantity(run.learning_rate or 0.0) for run in runs}))
        mean = sum(steps) / len(steps) if steps else None
        reached = ("not reached", "") if mean is None else (f"{mean:,.0f}", format_count(mean * batch))
        rows.append((f"{batch:,.0f}", rates, f"{len(steps)}", *reached))
    return Table(rows=tuple(rows), right=range(5))


def _failed(runs: Sequence[BatchRun]) -> Iterator[str]:
    """The runs that ended without a result."""
    from shardwise.batch_size.batch_sweep_fit import NOT_REACHED

    for run in runs:
        if run.failed not in (None, NOT_REACHED):
            yield f"failed: batch {run.batch_tokens:,.0f}, learning rate {run.learning_rate:g}, seed {run.seed}: {run.failed}"
