"""Branches from their flags: what is wrong with any of them is said before the first begins."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardwise.batch.branch_files import read_branch_point, read_branches
from shardwise.batch.branches import LEAST_STEPS, Branch, BranchPoint
from shardwise.errors import InputError, collect
from shardwise.train.admission import admit
from shardwise.train.batch_branch.branching import Branching, BranchTrial, branches_folder
from shardwise.train.batch_branch.point import Start
from shardwise.train.batching import resumed_ramp
from shardwise.train.flags import Settings
from shardwise.train.sources import parse_source
from shardwise.train.trials.flags import batches_of, require_given
from shardwise.train.trials.runner import Runner, Share
from shardwise.units import parse_count

REQUIRED = {
    "batches": "such as 4Ki:256Ki:x2",
    "tokens": "the window that each branch is trained on, such as 2G",
    "out": "the folder of the branches",
}


def start(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[BranchPoint, tuple[Branch, ...]]:
    """Make the branches that are left, and give them all. Raises `InputError`, and `SystemExit` where it was asked to stop."""
    require_given(arguments, REQUIRED)
    branching = branching_of(arguments)
    share = Share.of(arguments.processes, branching.start.plan.layout.num_devices)
    collect(*(partial(_admit, branching, trial) for trial in branching.trials))
    Runner(branching, share, say).to_the_end(_identity(branching))
    return read_branch_point(branching.folder.path), read_branches(branching.folder.path)


def branching_of(arguments: argparse.Namespace) -> Branching:
    """The branches that flags name, that with the run's own batch among them. Raises `InputError` with all that is wrong."""
    batches, window, step, sources = collect(
        lambda: batches_of(arguments.batches),
        lambda: parse_count(arguments.tokens, what="--tokens"),
        lambda: None if arguments.step is None else parse_count(arguments.step, what="--step"),
        lambda: tuple(map(parse_source, arguments.data)),
    )
    begun = Start.read(Path(arguments.source), step)
    begun = replace(begun, recipe=replace(begun.recipe, data=sources)) if sources else begun
    every = {*batches, begun.batch_tokens}
    if window < LEAST_STEPS * max(every):
        raise InputError(
            f"--tokens: found {window:,}, {window / max(every):.3g} steps of the largest batch, "
            f"{max(every):,} tokens; at least {LEAST_STEPS} are required: {LEAST_STEPS * max(every):,}, or smaller --batches"
        )
    return Branching(
        start=begun, batches=sorted(every), window_tokens=window, rule=arguments.batch_lr,
        folder=branches_folder(Path(arguments.out)),
    )  # fmt: skip


def _admit(branching: Branching, trial: BranchTrial) -> None:
    """The checks of `train` on one of the branches."""
    begun, recipe = branching.start, branching.recipe(trial)
    try:
        admit(begun.plan, Settings(plan=begun.run.plan, out=branching.folder.run_of(trial.name), recipe=recipe))
        resumed_ramp(begun.plan, recipe, begun.values, begun.step)
    except InputError as error:
        raise InputError(*(f"--batches {trial.batch_tokens}: {problem}" for problem in error.problems)) from None


def _identity(branching: Branching) -> dict[str, object]:
    """What the branches have in common."""
    begun = branching.start
    return {
        "run": str(begun.run.path), "step": begun.step, "checkpoint": begun.seal, "batch_tokens": begun.batch_tokens,
        "learning_rate": begun.learning_rate, "batch_lr": branching.rule, "window_tokens": branching.window_tokens,
    }  # fmt: skip
