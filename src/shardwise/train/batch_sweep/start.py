"""A sweep over batches from its flags: what is wrong with any of its runs is said before the first begins."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch.runs import BatchRun
from shardwise.errors import InputError, collect, require
from shardwise.planning.codec import load_plan
from shardwise.planning.plan import Plan
from shardwise.search.sweep.values import parse_sweep
from shardwise.train.admission import admit
from shardwise.train.batch_sweep.design import Design
from shardwise.train.batch_sweep.record import SweepFolder
from shardwise.train.batch_sweep.sweep import BatchSweep
from shardwise.train.flags import settings_of
from shardwise.train.lock import RunLock
from shardwise.train.rank import build_parser
from shardwise.train.recipe_flags import whole
from shardwise.train.stop import StopRequest
from shardwise.units import parse_count, parse_quantity

REQUIRED = {
    "batches": "such as 4Ki:256Ki:x2",
    "to_loss": "such as 4.2",
    "data": "token shards that `shardwise tokenize` wrote",
    "out": "the sweep's folder",
}


def start(arguments: argparse.Namespace, say: Callable[[str], None]) -> tuple[BatchRun, ...]:
    """Run what is left of a sweep, and give all its runs. Raises `InputError`, and `SystemExit` where it was asked to stop."""
    missing = [name for name in REQUIRED if not getattr(arguments, name)]
    require([f"--{name.replace('_', '-')}: found none; {REQUIRED[name]}, is required" for name in missing])
    plan, target_loss = load_plan(arguments.source), parse_quantity(arguments.to_loss, what="--to-loss", unit="")
    sweep = _sweep(arguments, plan, design_of(arguments, plan), target_loss, say)
    collect(*(partial(_admit, plan, sweep.command(trial)) for trial in sweep.design.next_trials(())))
    with RunLock(sweep.folder.path) as lock, StopRequest() as stop:
        lock.take()
        before = sweep.folder.begin(_identity(arguments, sweep))
        say(f"{len(before)} of the sweep's runs are done; {sweep.num_processes} run side by side")
        code = sweep.run(stop)
    if code:
        say(f"stopped; the same command goes on with the sweep in {sweep.folder.path}")
        raise SystemExit(code)
    return sweep.runs()


def design_of(arguments: argparse.Namespace, plan: Plan) -> Design:
    """The design that flags say for a plan. Raises `InputError` with all that is wrong with them."""
    batches, rate, rates, seeds, steps = collect(
        lambda: parse_sweep(f"batch={arguments.batches}", "--batches").values,
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


def _sweep(
    arguments: argparse.Namespace, plan: Plan, design: Design, target_loss: float, say: Callable[[str], None]
) -> BatchSweep:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = plan.layout.num_devices
    processes = parse_count(arguments.processes, what="--processes") if arguments.processes else max(cores // ranks, 1)
    warmup = whole(arguments.warmup, "--warmup")
    flags = [f"--warmup={warmup}", "--schedule=constant"]
    flags += [f"--data={one}" for one in arguments.data] + [f"--set={one}" for one in arguments.set]
    return BatchSweep(
        plan=Path(arguments.source), design=design, target_loss=target_loss, folder=SweepFolder(Path(arguments.out)),
        flags=flags, num_processes=processes, num_threads=max(cores // (processes * ranks), 1), say=say,
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
