"""Branches of a run's checkpoint, each with a batch of its own, over the same samples.

A branch is the folder of a run that ended with the checkpoint, with another recipe, so that it is resumed like any other run.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.batch_size.branch_losses import (
    BRANCH_KIND,
    BRANCH_SCHEMA,
    BRANCHES_FILE,
    MIN_STEPS,
    Branch,
    BranchPoint,
    read_branch_point,
    read_branches,
    window_loss,
)
from shardwise.measure.batch_experiments.concurrent_runs import (
    CHECKPOINT_EVERY,
    ExperimentFolder,
    ProcessBudget,
    Runner,
    parse_batches,
    require_flags,
)
from shardwise.records.run_folder import RunFolder, RunInputs
from shardwise.run.checkpoints.manifest import read_payload
from shardwise.run.checkpoints.reader import checkpoint_files
from shardwise.run.checkpoints.step_folders import list_complete, step_folder
from shardwise.run.recipe import (
    BATCH_LR_RULES,
    BatchLrRule,
    TrainingRecipe,
    parse_recipe,
    parse_source,
    recipe_payload,
    source_flags,
)
from shardwise.run.trainer.batch_schedule import resume_ramp
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.preflight import check_run
from shardwise.search.plan import Plan
from shardwise.search.plan_file import load_plan
from shardwise.values.atomic_files import name_path_in_errors
from shardwise.values.checksums import CHECKSUM_KEY
from shardwise.values.errors import InputError, run_all
from shardwise.values.units import format_quantity, parse_count


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchStart:
    """A run's checkpoint. `values` are its plain ones, `seal` the sum that tells it from others."""

    run: RunFolder
    of: RunInputs
    plan: Plan
    recipe: TrainingRecipe
    step: int
    checkpoint: Path
    values: Mapping[str, Any]
    seal: object

    @classmethod
    def read(cls, path: Path, step: int | None) -> BranchStart:
        """The checkpoint of a step of the run in a folder (None: the newest). Raises `InputError`."""
        run = RunFolder(path)
        if not run.contains_run:
            raise InputError(f"{path} holds no run; the folder that `shardwise train --out` named is required")
        found = list_complete(run.checkpoints)
        if not found or (step is not None and step not in found):
            there = ", ".join(map(str, sorted(found))) or "none"
            wanted = "any" if step is None else f"step {step}"
            raise InputError(
                f"--step: found no checkpoint of {wanted} in {run.checkpoints}, which has {there}; one of them is required: "
                "--keep-every of `shardwise train` keeps more"
            )
        at = max(found) if step is None else step
        of, payload = run.read_inputs(), read_payload(found[at])
        values = checkpoint_files(found[at], payload).values
        return cls(
            run=run, of=of, plan=load_plan(run.plan), recipe=parse_recipe(of.recipe, str(run.recipe)), step=at,
            checkpoint=found[at], values=values, seal=payload.get(CHECKSUM_KEY),
        )  # fmt: skip

    @property
    def batch_tokens(self) -> int:
        """Tokens of the batch that the run goes on with."""
        ramp = resume_ramp(self.plan, self.recipe, self.values, self.step)
        return ramp.sequences(self.step) * self.plan.job.seq_len

    @property
    def learning_rate(self) -> float:
        """The run's own after the checkpoint."""
        return self.recipe.learning_rate_at(self.step, self.batch_tokens / self.plan.job.global_batch_tokens)

    def scaled_learning_rate(self, batch_tokens: int, rule: BatchLrRule) -> float:
        """The learning rate of a branch: the run's, changed as the rule has it (`BATCH_LR_RULES`)."""
        return self.learning_rate * math.pow(batch_tokens / self.batch_tokens, BATCH_LR_RULES[rule])

    def recipe_of(self, batch_tokens: int, rule: BatchLrRule, num_steps: int) -> TrainingRecipe:
        """The run's recipe for a branch of so many steps: another batch, a learning rate that stays, and nothing by which its
        samples would come to differ from those of others."""
        return replace(
            self.recipe, steps=self.step + num_steps, learning_rate=self.scaled_learning_rate(batch_tokens, rule),
            schedule="constant",
            warmup_steps=0, decay_steps=0, batch_ramp=(), batch_schedule=str(batch_tokens), batch_lr="none", to_loss=None,
            noise_scale_every=0, validate_every=0, checkpoint_every=CHECKPOINT_EVERY, keep_checkpoints=1, keep_every=0,
            loss_spike="ignore", norm_spike="ignore",
        )  # fmt: skip


def branches_folder(path: Path) -> ExperimentFolder:
    """The folder of branches."""
    return ExperimentFolder(path=path, kind=BRANCH_KIND, schema=BRANCH_SCHEMA, lines=BRANCHES_FILE)


@dataclass(frozen=True, slots=True)
class BranchTrial:
    """A branch that is to be made."""

    batch_tokens: int
    num_steps: int

    @property
    def name(self) -> str:
        """That of its folder."""
        return f"batch-{self.batch_tokens}"

    @property
    def key(self) -> int:
        """What tells it from the others."""
        return self.batch_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchExperiment:
    """Branches of one checkpoint with these batches, in tokens, over the same window of tokens.

    A branch ends with the first step by which the window has been seen.
    """

    start: BranchStart
    batches: Sequence[int]
    window_tokens: int
    rule: BatchLrRule
    folder: ExperimentFolder

    @property
    def trials(self) -> list[BranchTrial]:
        """All of them, the smallest batch first."""
        return [BranchTrial(batch, -(-self.window_tokens // batch)) for batch in sorted(self.batches)]

    def branches(self) -> tuple[Branch, ...]:
        """Those that have ended."""
        return read_branches(self.folder.path) if self.folder.runs.exists() else ()

    def pending_trials(self) -> list[BranchTrial]:
        """Those that may be made now."""
        done = {branch.batch_tokens for branch in self.branches()}
        return [trial for trial in self.trials if trial.batch_tokens not in done]

    def is_complete(self, trial: BranchTrial) -> bool:
        """Whether a branch has made all its steps."""
        return len(self.folder.losses_of(trial.name)) >= trial.num_steps

    def recipe(self, trial: BranchTrial) -> TrainingRecipe:
        """What a branch is trained with."""
        return self.start.recipe_of(trial.batch_tokens, self.rule, trial.num_steps)

    def prepare(self, trial: BranchTrial) -> None:
        """Make the folder of a run that ended with the checkpoint, and goes on as the branch does. Raises `InputError`."""
        run = self.folder.run_of(trial.name)
        if not run.contains_run:
            shutil.rmtree(run.path, ignore_errors=True)
            try:
                self._copy(run, trial)
            except OSError as error:
                raise InputError(f"cannot copy {self.start.checkpoint}: {error.filename}: {error.strerror}") from None

    def _copy(self, run: RunFolder, trial: BranchTrial) -> None:
        with name_path_in_errors(run.path):
            copy = step_folder(run.checkpoints, self.start.step)
            shutil.copytree(self.start.checkpoint, copy, copy_function=_link_or_copy)
            recipe = recipe_payload(self.recipe(trial), self.start.plan.job.optimizer)
            run.write_inputs(replace(self.start.of, recipe=recipe))  # which makes it a run: the last file

    def command(self, trial: BranchTrial) -> list[str]:
        """What `train` is given for a branch."""
        run = self.folder.run_of(trial.name)
        return [*source_flags(self.start.recipe.data), f"--out={run.path}", "--resume", str(run.plan)]

    def line(self, trial: BranchTrial, failed: str | None) -> dict[str, Any]:
        """The line of a branch that has ended."""
        log = self.folder.log_of(trial.name)
        losses = [] if log is None else [record.loss for record in log.steps]
        held_out = None if log is None else log.validation.get(self.start.step + trial.num_steps)
        return {
            "batch_tokens": trial.batch_tokens, "learning_rate": self.start.scaled_learning_rate(trial.batch_tokens, self.rule),
            "steps": trial.num_steps,
            "loss": None if failed else window_loss(losses, trial.batch_tokens, self.window_tokens),
            "held_out_loss": None if failed else held_out, "failed": failed,
        }  # fmt: skip

    def progress_line(self, trial: BranchTrial, line: Mapping[str, Any]) -> str:
        """A branch that has ended in a line of progress."""
        ended = f"failed: {line['failed']}" if line["failed"] else f"a loss of {line['loss']:.4f}"
        return f"batch {trial.batch_tokens:,}, learning rate {format_quantity(line['learning_rate'])}: {ended}"


def _link_or_copy(source: str, target: str) -> None:
    """A checkpoint's files are never changed, so another name is as good as a copy, where the disk can give one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


REQUIRED = {
    "batches": "such as 4Ki:256Ki:x2",
    "tokens": "the window that each branch is trained on, such as 2G",
    "out": "the folder of the branches",
}


def run_checkpoint_branches(
    arguments: argparse.Namespace, say: Callable[[str], None]
) -> tuple[BranchPoint, tuple[Branch, ...]]:
    """Make the branches that are left, and give them all. Raises `InputError`, and `SystemExit` where it was asked to stop."""
    require_flags(arguments, REQUIRED)
    branching = parse_branches(arguments)
    share = ProcessBudget.of(arguments.processes, branching.start.plan.layout.num_devices)
    run_all(*(partial(_admit, branching, trial) for trial in branching.trials))
    Runner(branching, share, say).run_all(_identity(branching))
    return read_branch_point(branching.folder.path), read_branches(branching.folder.path)


def parse_branches(arguments: argparse.Namespace) -> BranchExperiment:
    """The branches that flags name, that with the run's own batch among them. Raises `InputError` with all that is wrong."""
    batches, window, step, sources = run_all(
        lambda: parse_batches(arguments.batches),
        lambda: parse_count(arguments.tokens, what="--tokens"),
        lambda: None if arguments.step is None else parse_count(arguments.step, what="--step"),
        lambda: tuple(map(parse_source, arguments.data)),
    )
    begun = BranchStart.read(Path(arguments.source), step)
    begun = replace(begun, recipe=replace(begun.recipe, data=sources)) if sources else begun
    every = {*batches, begun.batch_tokens}
    if window < MIN_STEPS * max(every):
        raise InputError(
            f"--tokens: found {window:,}, {window / max(every):.3g} steps of the largest batch, "
            f"{max(every):,} tokens; at least {MIN_STEPS} are required: {MIN_STEPS * max(every):,}, or smaller --batches"
        )
    return BranchExperiment(
        start=begun, batches=sorted(every), window_tokens=window, rule=arguments.batch_lr,
        folder=branches_folder(Path(arguments.out)),
    )  # fmt: skip


def _admit(branching: BranchExperiment, trial: BranchTrial) -> None:
    """The checks of `train` on one of the branches."""
    begun, recipe = branching.start, branching.recipe(trial)
    try:
        check_run(begun.plan, RunSettings(plan=begun.run.plan, out=branching.folder.run_of(trial.name), recipe=recipe))
        resume_ramp(begun.plan, recipe, begun.values, begun.step)
    except InputError as error:
        raise InputError(*(f"--batches {trial.batch_tokens}: {problem}" for problem in error.problems)) from None


def _identity(branching: BranchExperiment) -> dict[str, object]:
    """What the branches have in common."""
    begun = branching.start
    return {
        "run": str(begun.run.path), "step": begun.step, "checkpoint": begun.seal, "batch_tokens": begun.batch_tokens,
        "learning_rate": begun.learning_rate, "batch_lr": branching.rule, "window_tokens": branching.window_tokens,
    }  # fmt: skip
