"""Sweep over batches: train with each batch to one loss, at the learning rate that reaches it in the fewest steps.

The next runs follow from those that have ended, so a sweep may stop and resume at any time. Problems of its runs are
reported before the first starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch_size.batch_sweep_fit import NOT_REACHED, RUNS_FILE, BatchRun, SweptRuns, read_batch_runs
from shardwise.batch_size.learning_rate import square_root_learning_rate
from shardwise.measure.batch_experiments.experiment_folder import (
    CHECKPOINT_EVERY,
    BatchSizes,
    ExperimentFolder,
    PathLike,
    ProcessBudget,
    parse_batches,
    require_arguments,
)
from shardwise.measure.batch_experiments.trial_runs import run_trials
from shardwise.measure.experiments.ledger_lines import Setting
from shardwise.records.step_log import StepsToLoss, steps_to_loss
from shardwise.run import check_run
from shardwise.run.trainer.flags import build_parser, parse_settings, parse_whole_number
from shardwise.search import Plan, load_plan
from shardwise.values import (
    InputError,
    argument_label,
    format_count,
    format_quantity,
    parse_count,
    parse_quantity,
    pluralize,
    raise_problems,
    read_text,
    run_all,
)

RATE_FACTOR = 2.0  # between neighbouring learning rates: one of them is within a factor of its root of the best rate
FARTHEST_FACTOR = 3  # powers of RATE_FACTOR around the square-root rule's rate: 1/8 to 8 times


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """A run to make, and the step after which it is of no more use."""

    batch_tokens: int
    learning_rate: float
    seed: int
    most_steps: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"batch-{self.batch_tokens}-rate-{self.learning_rate:.3g}-seed-{self.seed}"

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Batch, learning rate and seed, which no other run of the sweep shares."""
        return {"batch_tokens": self.batch_tokens, "learning_rate": self.learning_rate, "seed": self.seed}


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Batches in tokens, each run to a loss with `num_seeds` seeds at the learning rate that needs the fewest steps.

    The rate is searched with the first seed: among `learning_rates` or, if there are none, around that of the
    square-root rule, which is `learning_rate` at a batch of `plan_batch_tokens`. Both neighbours of the best rate (half
    and double) are tried until the best lies between them. A rate that needs more steps than the best so far is stopped
    there.

    Raises `InputError` for a rate that is not a number above 0.
    """

    batches: tuple[int, ...]
    plan_batch_tokens: int
    learning_rate: float
    learning_rates: tuple[float, ...] = ()
    num_seeds: int = 3
    first_seed: int = 0
    most_steps: int = 10_000

    def __post_init__(self) -> None:
        wrong = [rate for rate in (self.learning_rate, *self.learning_rates) if not 0 < rate < math.inf]
        raise_problems([f"learning rate: found {rate:g}; a number above 0 is required" for rate in wrong])

    @property
    def seeds(self) -> range:
        """Seeds that each batch is run with."""
        return range(self.first_seed, self.first_seed + self.num_seeds)

    def next_trials(self, runs: Sequence[BatchRun]) -> Iterator[SweepTrial]:
        """Yield the runs that may be made now; the smallest batches, which take the most steps, first."""
        for batch in sorted(self.batches):
            yield from self._of_batch(batch, [run for run in runs if run.batch_tokens == batch])

    def _of_batch(self, batch: int, runs: Sequence[BatchRun]) -> Iterator[SweepTrial]:
        tuning = [run for run in runs if run.seed == self.first_seed]
        best = min((run for run in tuning if run.steps is not None), key=lambda run: run.steps or 0.0, default=None)
        rates = [rate for rate in self._rates(batch, tuning, best) if rate not in [run.learning_rate for run in tuning]]
        limit = self.most_steps if best is None or best.steps is None else min(math.ceil(best.steps), self.most_steps)
        yield from (SweepTrial(batch, rate, self.first_seed, limit) for rate in rates)
        if best is not None and best.learning_rate is not None and not rates:
            finished_seeds = [run.seed for run in runs if run.learning_rate == best.learning_rate]
            for seed in self.seeds:
                if seed not in finished_seeds:
                    yield SweepTrial(batch, best.learning_rate, seed, self.most_steps)

    def _rates(self, batch: int, tuning: Sequence[BatchRun], best: BatchRun | None) -> Sequence[float]:
        """Return the learning rates that must have run before the best of them counts."""
        if self.learning_rates:
            return self.learning_rates
        rule_rate = square_root_learning_rate(self.learning_rate, self.plan_batch_tokens, batch)
        grid = [rule_rate * RATE_FACTOR**power for power in range(-FARTHEST_FACTOR, FARTHEST_FACTOR + 1)]
        if not tuning:
            return [rule_rate]
        tried = [grid.index(run.learning_rate) for run in tuning if run.learning_rate in grid]
        if best is not None:
            best_index = grid.index(best.learning_rate) if best.learning_rate in grid else FARTHEST_FACTOR
            nearby = [best_index - 1, best_index + 1]
        else:  # rates are too high if a run has failed, too low if all ran out of steps
            nearby = [min(tried) - 1] if any(run.failed != NOT_REACHED for run in tuning) else [max(tried) + 1]
        return [grid[index] for index in nearby if 0 <= index < len(grid)]


SCHEMA = "shardwise.batch_sweep/1"


def sweep_folder(path: Path) -> ExperimentFolder:
    """Return the folder of a sweep."""
    return ExperimentFolder(path=path, kind="sweep", schema=SCHEMA, lines=RUNS_FILE)


@dataclass(frozen=True, slots=True)
class BatchSweep:
    """A sweep in a folder; `flags` of `shardwise train` are common to all runs."""

    plan: Path
    design: Design
    target_loss: float
    folder: ExperimentFolder
    flags: Sequence[str]

    def runs(self) -> tuple[BatchRun, ...]:
        """Return the runs that have ended."""
        return read_batch_runs(self.folder.path) if self.folder.runs.exists() else ()

    def pending_trials(self) -> list[SweepTrial]:
        """Return the runs that may be made now."""
        return list(self.design.next_trials(self.runs()))

    def trial_of(self, settings: Mapping[str, Any]) -> SweepTrial:
        """Return the trial of some settings, with as many steps as any may make."""
        return SweepTrial(**settings, most_steps=self.design.most_steps)

    def is_complete(self, trial: SweepTrial) -> bool:
        """Return True if a run has reached the loss or made all its steps."""
        losses = self.folder.losses_of(trial.name)
        return len(losses) >= trial.most_steps or steps_to_loss(losses, self.target_loss) is not None

    def prepare(self, trial: SweepTrial) -> None:
        """Do nothing: a run of a sweep starts from scratch."""

    def command(self, trial: SweepTrial) -> list[str]:
        """Return the arguments of `train` for a run."""
        run = self.folder.run_of(trial.name)
        run_flags: Mapping[str, object] = {
            "--batch-schedule": trial.batch_tokens, "--learning-rate": repr(trial.learning_rate), "--seed": trial.seed,
            "--steps": trial.most_steps, "--to-loss": self.target_loss, "--out": run.path,
            "--checkpoint-every": CHECKPOINT_EVERY, "--keep-last": 1,
        }  # fmt: skip
        resume_flag = ["--resume"] if run.contains_run else []
        return [*self.flags, *(f"{flag}={value}" for flag, value in run_flags.items()), *resume_flag, str(self.plan)]

    def line(self, trial: SweepTrial, failed: str | None) -> dict[str, Any]:
        """Return the line of a run that has ended."""
        return result_line(trial, self.folder.losses_of(trial.name), self.target_loss, failed)

    def progress_line(self, trial: SweepTrial, line: Mapping[str, Any]) -> str:
        """Return the result of a run as a line of progress."""
        rate = format_quantity(trial.learning_rate)
        return f"batch {trial.batch_tokens:,}, learning rate {rate}, seed {trial.seed}: {_result_text(line, trial)}"


def result_line(trial: SweepTrial, losses: Sequence[float], target_loss: float, failed: str | None) -> dict[str, Any]:
    """Return the line of an ended run: steps and tokens to the loss (None if not reached), and its last smoothed loss.

    >>> result_line(SweepTrial(8, 1e-3, 0, 99), [3.0] * 30, 2.0, None)["steps"] is None
    True
    """
    target = StepsToLoss(target_loss)
    for loss in losses:
        target.add_loss(loss)
    steps = None if failed else target.steps
    return {
        "batch_tokens": trial.batch_tokens, "learning_rate": trial.learning_rate, "seed": trial.seed, "steps": steps,
        "tokens": None if steps is None else steps * trial.batch_tokens, "loss": target.smoothed,
        "target_loss": target_loss, "failed": failed,
    }  # fmt: skip


def _result_text(line: Mapping[str, Any], trial: SweepTrial) -> str:
    if line["failed"]:
        return f"failed: {line['failed']}"
    if line["steps"] is None:
        return f"not reached in {pluralize(trial.most_steps, 'step')}"
    return f"{line['steps']:,.1f} steps, {format_count(line['tokens'])} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """A sweep as a user asks for it; numbers may be texts.

    Each batch of `batches` ("4Ki:256Ki:x2", or a list) is trained on the sources `data` to the loss `to_loss`. `learning_rates`
    are tried at every batch in place of a search around `learning_rate`. `changes` are texts "recipe.NAME=VALUE".
    """

    plan: PathLike
    batches: BatchSizes | None
    to_loss: float | str | None
    data: Sequence[str]
    out: PathLike | None
    seeds: int | str
    learning_rate: float | str
    learning_rates: str | Sequence[float | str]
    steps: int | str
    warmup: int | str
    changes: Sequence[str]
    processes: int | str | None


REQUIRED = {
    "batches": "such as 4Ki:256Ki:x2",
    "to_loss": "such as 4.2",
    "data": "token shards that `shardwise tokenize` wrote",
    "out": "the sweep's folder",
}


def run_batch_sweep(request: SweepRequest, report: Callable[[str], None]) -> SweptRuns:
    """Make the runs that are left of a sweep, and return all of them. Raises `InputError`, and `SystemExit` after a
    signal."""
    require_arguments(request, REQUIRED)
    assert request.out is not None  # required
    plan = load_plan(Path(request.plan))
    target_loss = parse_quantity(str(request.to_loss), label=argument_label("to_loss"), unit="")
    design = _parse_design(request, plan)
    budget = ProcessBudget.of(request.processes, plan.layout.num_devices)
    sweep = _build_sweep(request, Path(request.out), design, target_loss)
    run_all(*(partial(_admit, plan, sweep.command(trial)) for trial in design.next_trials(())))
    run_trials(sweep, budget, plan.layout.num_devices, _identity(request, sweep), report)
    return SweptRuns(folder=os.fspath(request.out), to_loss=str(request.to_loss), runs=sweep.runs())


def _parse_design(request: SweepRequest, plan: Plan) -> Design:
    """Return the design of a sweep. Raises `InputError` with every problem of the request."""
    rates = request.learning_rates
    rate_texts = rates.split(",") if isinstance(rates, str) else [str(rate) for rate in rates]
    rates_label = argument_label("learning_rates")
    batches, learning_rate, learning_rates, num_seeds, most_steps = run_all(
        lambda: parse_batches(request.batches or ""),
        lambda: parse_quantity(str(request.learning_rate), label=argument_label("learning_rate"), unit=""),
        lambda: tuple(parse_quantity(text, label=rates_label, unit="") for text in rate_texts if text),
        lambda: parse_count(request.seeds, label=argument_label("seeds")),
        lambda: parse_count(request.steps, label=argument_label("steps")),
    )
    return Design(
        batches=batches, plan_batch_tokens=plan.job.global_batch_tokens, learning_rate=learning_rate,
        learning_rates=learning_rates, num_seeds=num_seeds, most_steps=most_steps,
    )  # fmt: skip


def _build_sweep(request: SweepRequest, out: Path, design: Design, target_loss: float) -> BatchSweep:
    warmup = parse_whole_number(str(request.warmup), argument_label("warmup"))
    flags = [f"--warmup={warmup}", "--schedule=constant"]
    flags += [f"--data={text}" for text in request.data] + [f"--set={text}" for text in request.changes]
    return BatchSweep(
        plan=Path(request.plan), design=design, target_loss=target_loss, folder=sweep_folder(out), flags=flags
    )


def _admit(plan: Plan, command: Sequence[str]) -> None:
    """Check a run as `train` does before it starts."""
    try:
        check_run(plan, parse_settings(build_parser().parse_args(command)))
    except InputError as error:
        batch_flag = next(argument for argument in command if argument.startswith("--batch-schedule"))
        raise InputError(*(f"{batch_flag}: {problem}" for problem in error.problems)) from None


def _identity(request: SweepRequest, sweep: BatchSweep) -> dict[str, Any]:
    design = sweep.design
    return {
        "plan": read_text(Path(request.plan)), "to_loss": sweep.target_loss,
        "flags": list(sweep.flags), "learning_rate": design.learning_rate,
        "learning_rates": list(design.learning_rates),
    }  # fmt: skip
