"""Branches of a checkpoint: which are to be made, the folder that each goes on in, and what its line says."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.batch.branch_files import FILE, KIND, SCHEMA, read_branches
from shardwise.batch.branches import Branch, window_loss
from shardwise.errors import InputError
from shardwise.measurement.folder import RunFolder, named
from shardwise.train.batch_branch.point import Start
from shardwise.train.checkpoint.folders import place
from shardwise.train.recipe import BatchRate, Recipe, recipe_payload
from shardwise.train.sources import source_words
from shardwise.train.trials.folder import TrialsFolder
from shardwise.units import format_quantity


def branches_folder(path: Path) -> TrialsFolder:
    """The folder of branches."""
    return TrialsFolder(path=path, kind=KIND, schema=SCHEMA, lines=FILE)


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
class Branching:
    """Branches of one checkpoint with these batches, in tokens, over the same window of tokens.

    A branch ends with the first step by which the window has been seen.
    """

    start: Start
    batches: Sequence[int]
    window_tokens: int
    rule: BatchRate
    folder: TrialsFolder

    @property
    def trials(self) -> list[BranchTrial]:
        """All of them, the smallest batch first."""
        return [BranchTrial(batch, -(-self.window_tokens // batch)) for batch in sorted(self.batches)]

    def branches(self) -> tuple[Branch, ...]:
        """Those that have ended."""
        return read_branches(self.folder.path) if self.folder.runs.exists() else ()

    def waiting(self) -> list[BranchTrial]:
        """Those that may be made now."""
        done = {branch.batch_tokens for branch in self.branches()}
        return [trial for trial in self.trials if trial.batch_tokens not in done]

    def has_come_to_its_end(self, trial: BranchTrial) -> bool:
        """Whether a branch has made all its steps."""
        return len(self.folder.losses_of(trial.name)) >= trial.num_steps

    def recipe(self, trial: BranchTrial) -> Recipe:
        """What a branch is trained with."""
        return self.start.recipe_of(trial.batch_tokens, self.rule, trial.num_steps)

    def prepare(self, trial: BranchTrial) -> None:
        """Make the folder of a run that ended with the checkpoint, and goes on as the branch does. Raises `InputError`."""
        run = self.folder.run_of(trial.name)
        if not run.holds_a_run:
            shutil.rmtree(run.path, ignore_errors=True)
            try:
                self._copy(run, trial)
            except OSError as error:
                raise InputError(f"cannot copy {self.start.checkpoint}: {error.filename}: {error.strerror}") from None

    def _copy(self, run: RunFolder, trial: BranchTrial) -> None:
        with named(run.path):
            copy = place(run.checkpoints, self.start.step)
            shutil.copytree(self.start.checkpoint, copy, copy_function=_linked)
            recipe = recipe_payload(self.recipe(trial), self.start.plan.job.optimizer)
            run.write(replace(self.start.of, recipe=recipe))  # which makes it a run: the last file

    def command(self, trial: BranchTrial) -> list[str]:
        """What `train` is given for a branch."""
        run = self.folder.run_of(trial.name)
        return [*source_words(self.start.recipe.data), f"--out={run.path}", "--resume", str(run.plan)]

    def line(self, trial: BranchTrial, failed: str | None) -> dict[str, Any]:
        """The line of a branch that has ended."""
        log = self.folder.log_of(trial.name)
        losses = [] if log is None else [record.loss for record in log.steps]
        held_out = None if log is None else log.validation.get(self.start.step + trial.num_steps)
        return {
            "batch_tokens": trial.batch_tokens, "learning_rate": self.start.rate_of(trial.batch_tokens, self.rule),
            "steps": trial.num_steps,
            "loss": None if failed else window_loss(losses, trial.batch_tokens, self.window_tokens),
            "held_out_loss": None if failed else held_out, "failed": failed,
        }  # fmt: skip

    def said(self, trial: BranchTrial, line: Mapping[str, Any]) -> str:
        """A branch that has ended in a line of progress."""
        ended = f"failed: {line['failed']}" if line["failed"] else f"a loss of {line['loss']:.4f}"
        return f"batch {trial.batch_tokens:,}, learning rate {format_quantity(line['learning_rate'])}: {ended}"


def _linked(source: str, target: str) -> None:
    """A checkpoint's files are never changed, so another name is as good as a copy, where the disk can give one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
