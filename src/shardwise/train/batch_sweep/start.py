"""A sweep over batches from its flags: what is wrong with any of its runs is said before the first begins."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch.runs import BatchRun
from shardwise.errors import InputError, collect
from shardwise.planning.codec import load_plan
from shardwise.planning.plan import Plan
from shardwise.train.admission import admit
from shardwise.train.batch_sweep.design import Design
from shardwise.train.batch_sweep.sweep import BatchSweep, sweep_folder
from shardwise.train.flags import settings_of
from shardwise.train.rank import build_parser
from shardwise.train.recipe_flags import whole
from shardwise.train.trials.flags import batches_of, require_given
from shardwise.train.trials.runner import Runner, Share
from shardwise.units import parse_count, parse_quantity

REQUIRED = {
    "batches": "such as 4Ki:256Ki:x2",
    "to_loss": "such as 4.2",
    "data": "token shards that `shardwise tokenize` wrote",
    "out": "the sweep's folder",
}


def start(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[BatchRun, ...]:
    """Run what is left of a sweep, and give all its runs. Raises `InputError`, and `SystemExit` where it was asked to stop."""
    require_given(arguments, REQUIRED)
    plan, target_loss = load_plan(arguments.source), parse_quantity(arguments.to_loss, what="--to-loss", unit="")
    design, share = design_of(arguments, plan), Share.of(arguments.processes, plan.layout.num_devices)
    sweep = _sweep(arguments, design, target_loss)
    collect(*(partial(_admit, plan, sweep.command(trial)) for trial in design.next_trials(())))
    Runner(sweep, share, say).to_the_end(_identity(arguments, sweep))
    return sweep.runs()


def design_of(arguments: argparse.Namespace, plan: Plan) -> Design:
    """The design that flags say for a plan. Raises `InputError` with all that is wrong with them."""
    batches, rate, rates, seeds, steps = collect(
        lambda: batches_of(arguments.batches),
        lambda: parse_quantity(arguments.learning_rate, what="--learning-rate", unit=""),
        lambda: tuple(
            parse_quantity(word, what="--learning-rates", unit="")
            for word in arguments.learning_rates.split(",")
            if word
        ),
        lambda: parse_count(arguments.seeds, what="--seeds"),
        lambda: parse_count(arguments.steps, what="--steps"),
    )
    return Design(
        batches=batches, plan_batch_tokens=plan.job.global_batch_tokens, learning_rate=rate, learning_rates=rates,
        num_seeds=seeds, most_steps=steps,
    )  # fmt: skip


def _sweep(arguments: argparse.Namespace, design: Design, target_loss: float) -> BatchSweep:
    warmup = whole(arguments.warmup, "--warmup")
    flags = [f"--warmup={warmup}", "--schedule=constant"]
    flags += [f"--data={one}" for one in arguments.data] + [f"--set={one}" for one in arguments.set]
    return BatchSweep(
        plan=Path(arguments.source), design=design, target_loss=target_loss, folder=sweep_folder(Path(arguments.out)),
        flags=flags,
    )  # fmt: skip


def _admit(plan: Plan, command: Sequence[str]) -> None:
    """The checks of `train` on one of the runs."""
    try:
        admit(plan, settings_of(build_parser().parse_args(command)))
    except InputError as error:
        batch = next(word for word in command if word.startswith("--batch-schedule"))
        raise InputError(*(f"{batch}: {problem}" for problem in error.problems)) from None


def _identity(arguments: argparse.Namespace, sweep: BatchSweep) -> dict[str, Any]:
    """What the runs of one sweep have in common."""
    design = sweep.design
    return {
        "plan": Path(arguments.source).read_text(encoding="utf-8"), "to_loss": sweep.target_loss, "flags": list(sweep.flags),
        "learning_rate": design.learning_rate, "learning_rates": list(design.learning_rates),
    }  # fmt: skip
