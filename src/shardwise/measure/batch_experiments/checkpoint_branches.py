"""Branches of a checkpoint of a run, each with another batch, over the same samples.

A branch is the folder of a run that ended with the checkpoint, with another recipe; it resumes like any other run.
"""

from __future__ import annotations

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
    LOSS_TOLERANCE,
    MIN_STEPS,
    Branch,
    BranchOutcome,
    read_branch_outcome,
    read_branches,
    window_loss,
)
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
from shardwise.records import RunFolder
from shardwise.records.run_folder import RunInputs
from shardwise.run import TrainingRecipe, check_run
from shardwise.run.checkpoints.manifest import read_payload
from shardwise.run.checkpoints.reader import checkpoint_files
from shardwise.run.checkpoints.step_folders import list_complete, step_folder
from shardwise.run.recipe import BATCH_LR_RULES, BatchLrRule, parse_recipe, parse_source, recipe_payload, source_flags
from shardwise.run.trainer.batch_schedule import resume_ramp
from shardwise.run.trainer.flags import RunSettings
from shardwise.search import Plan, load_plan
from shardwise.values import (
    CHECKSUM_KEY,
    InputError,
    argument_label,
    format_quantity,
    name_path_in_errors,
    parse_count,
    run_all,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchStart:
    """Checkpoint of a run. `values` are those of its manifest that are no tensors, `seal` its checksum."""

    run: RunFolder
    inputs: RunInputs
    plan: Plan
    recipe: TrainingRecipe
    step: int
    checkpoint: Path
    values: Mapping[str, Any]
    seal: object

    @classmethod
    def read(cls, path: Path, step: int | None) -> BranchStart:
        """Read the checkpoint of a step of the run in a folder; the newest if `step` is None. Raises `InputError`."""
        run = RunFolder(path)
        if not run.contains_run:
            raise InputError(f"{path} holds no run; the folder that `shardwise train --out` named is required")
        checkpoints = list_complete(run.checkpoints)
        if not checkpoints or (step is not None and step not in checkpoints):
            available = ", ".join(map(str, sorted(checkpoints))) or "none"
            requested = "any" if step is None else f"step {step}"
            raise InputError(
                f"{argument_label('step')}: found no checkpoint of {requested} in {run.checkpoints}, which has {available}; one "
                "of them is required: --keep-every of `shardwise train` keeps more"
            )
        checkpoint_step = max(checkpoints) if step is None else step
        inputs, payload = run.read_inputs(), read_payload(checkpoints[checkpoint_step])
        values = checkpoint_files(checkpoints[checkpoint_step], payload).values
        return cls(
            run=run, inputs=inputs, plan=load_plan(run.plan), recipe=parse_recipe(inputs.recipe, str(run.recipe)),
            step=checkpoint_step, checkpoint=checkpoints[checkpoint_step], values=values,
            seal=payload.get(CHECKSUM_KEY),
        )  # fmt: skip

    @property
    def batch_tokens(self) -> int:
        """Tokens of the batch with which the run continues."""
        ramp = resume_ramp(self.plan, self.recipe, self.values, self.step)
        return ramp.sequences(self.step) * self.plan.job.seq_len

    @property
    def learning_rate(self) -> float:
        """Learning rate of the run after the checkpoint."""
        return self.recipe.learning_rate_at(self.step, self.batch_tokens / self.plan.job.global_batch_tokens)

    def scaled_learning_rate(self, batch_tokens: int, rule: BatchLrRule) -> float:
        """Return the learning rate of a branch: the run's, scaled by the rule (`BATCH_LR_RULES`)."""
        return self.learning_rate * math.pow(batch_tokens / self.batch_tokens, BATCH_LR_RULES[rule])

    def recipe_of(self, batch_tokens: int, rule: BatchLrRule, num_steps: int) -> TrainingRecipe:
        """Return the recipe of a branch of `num_steps` steps: another batch, a constant learning rate, and no option
        that would change the samples of one branch and not of the others."""
        return replace(
            self.recipe, steps=self.step + num_steps, learning_rate=self.scaled_learning_rate(batch_tokens, rule),
            schedule="constant",
            warmup_steps=0, decay_steps=0, batch_ramp=(), batch_schedule=str(batch_tokens), batch_lr="none",
            to_loss=None, noise_scale_every=0, validate_every=0, checkpoint_every=CHECKPOINT_EVERY, keep_checkpoints=1,
            keep_every=0, loss_spike="ignore", norm_spike="ignore",
        )  # fmt: skip


def branches_folder(path: Path) -> ExperimentFolder:
    """Return the folder of an experiment with branches."""
    return ExperimentFolder(path=path, kind=BRANCH_KIND, schema=BRANCH_SCHEMA, lines=BRANCHES_FILE)


@dataclass(frozen=True, slots=True)
class BranchTrial:
    """A branch to make."""

    batch_tokens: int
    num_steps: int

    @property
    def name(self) -> str:
        """Name of the branch's folder."""
        return f"batch-{self.batch_tokens}"

    @property
    def settings(self) -> Mapping[str, Setting]:
        """Batch, which no other branch shares."""
        return {"batch_tokens": self.batch_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchExperiment:
    """Branches of one checkpoint with several batches, in tokens, over the same window of tokens. A branch ends with
    the first step that completes the window."""

    start: BranchStart
    batches: Sequence[int]
    window_tokens: int
    rule: BatchLrRule
    folder: ExperimentFolder

    @property
    def trials(self) -> list[BranchTrial]:
        """Branches, the smallest batch first."""
        return [self.trial_of({"batch_tokens": batch}) for batch in sorted(self.batches)]

    def trial_of(self, settings: Mapping[str, Any]) -> BranchTrial:
        """Return the branch of a batch."""
        batch_tokens = int(settings["batch_tokens"])
        return BranchTrial(batch_tokens, -(-self.window_tokens // batch_tokens))

    def branches(self) -> tuple[Branch, ...]:
        """Return the branches that have ended."""
        return read_branches(self.folder.path) if self.folder.runs.exists() else ()

    def pending_trials(self) -> list[BranchTrial]:
        """Return the branches that may be made now."""
        done = {branch.batch_tokens for branch in self.branches()}
        return [trial for trial in self.trials if trial.batch_tokens not in done]

    def is_complete(self, trial: BranchTrial) -> bool:
        """Return True if a branch has made all its steps."""
        return len(self.folder.losses_of(trial.name)) >= trial.num_steps

    def recipe(self, trial: BranchTrial) -> TrainingRecipe:
        """Return the recipe of a branch."""
        return self.start.recipe_of(trial.batch_tokens, self.rule, trial.num_steps)

    def prepare(self, trial: BranchTrial) -> None:
        """Make the folder of a run that ended with the checkpoint, unless it exists. Raises `InputError`."""
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
            run.write_inputs(replace(self.start.inputs, recipe=recipe))  # last: the folder counts as a run from here on

    def command(self, trial: BranchTrial) -> list[str]:
        """Return the arguments of `train` for a branch."""
        run = self.folder.run_of(trial.name)
        return [*source_flags(self.start.recipe.data), f"--out={run.path}", "--resume", str(run.plan)]

    def line(self, trial: BranchTrial, failed: str | None) -> dict[str, Any]:
        """Return the line of a branch that has ended."""
        log = self.folder.log_of(trial.name)
        losses = [] if log is None else [record.loss for record in log.steps]
        held_out = None if log is None else log.validation.get(self.start.step + trial.num_steps)
        return {
            "batch_tokens": trial.batch_tokens,
            "learning_rate": self.start.scaled_learning_rate(trial.batch_tokens, self.rule), "steps": trial.num_steps,
            "loss": None if failed else window_loss(losses, trial.batch_tokens, self.window_tokens),
            "held_out_loss": None if failed else held_out, "failed": failed,
        }  # fmt: skip

    def progress_line(self, trial: BranchTrial, line: Mapping[str, Any]) -> str:
        """Return the result of a branch as a line of progress."""
        ended = f"failed: {line['failed']}" if line["failed"] else f"a loss of {line['loss']:.4f}"
        return f"batch {trial.batch_tokens:,}, learning rate {format_quantity(line['learning_rate'])}: {ended}"


def _link_or_copy(source: str, target: str) -> None:
    """Link a file of the checkpoint, or copy it if the disk has no hard links: these files never change."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchRequest:
    """Branches as a user asks for them; numbers may be texts.

    The run in the folder `run` goes on from the checkpoint of `step` (None: the newest) at each batch of `batches` over `tokens`
    tokens of the sources `data` (none: those of the run); `batch_lr` says how the learning rate follows the batch.
    """

    run: PathLike
    batches: BatchSizes | None
    tokens: int | str | None
    step: int | str | None
    data: Sequence[str]
    out: PathLike | None
    batch_lr: BatchLrRule
    processes: int | str | None


REQUIRED = {
    "batches": "such as 4Ki:256Ki:x2",
    "tokens": "the window that each branch is trained on, such as 2G",
    "out": "the folder of the branches",
}


def run_checkpoint_branches(
    request: BranchRequest, report: Callable[[str], None], tolerance: float = LOSS_TOLERANCE
) -> BranchOutcome:
    """Make the branches that are left, and compare all of them. Raises `InputError`, and `SystemExit` after a signal."""
    require_arguments(request, REQUIRED)
    assert request.out is not None  # required
    experiment = _parse_branches(request, Path(request.out))
    budget = ProcessBudget.of(request.processes, experiment.start.plan.layout.num_devices)
    run_all(*(partial(_admit, experiment, trial) for trial in experiment.trials))
    run_trials(experiment, budget, experiment.start.plan.layout.num_devices, _identity(experiment), report)
    return read_branch_outcome(experiment.folder.path, tolerance)


def _parse_branches(request: BranchRequest, out: Path) -> BranchExperiment:
    """Return the branches of a request, and one with the run's own batch. Raises `InputError` with every problem."""
    batches, window_tokens, step, sources = run_all(
        lambda: parse_batches(request.batches or ""),
        lambda: parse_count(request.tokens or "", label=argument_label("tokens")),
        lambda: None if request.step is None else parse_count(request.step, label=argument_label("step")),
        lambda: tuple(map(parse_source, request.data)),
    )
    start = BranchStart.read(Path(request.run), step)
    start = replace(start, recipe=replace(start.recipe, data=sources)) if sources else start
    all_batches = {*batches, start.batch_tokens}
    if window_tokens < MIN_STEPS * max(all_batches):
        raise InputError(
            f"{argument_label('tokens')}: found {window_tokens:,}, {window_tokens / max(all_batches):.3g} steps of the largest "
            f"batch, {max(all_batches):,} tokens; at least {MIN_STEPS} are required: {MIN_STEPS * max(all_batches):,}, or "
            f"smaller {argument_label('batches')}"
        )
    return BranchExperiment(
        start=start, batches=sorted(all_batches), window_tokens=window_tokens, rule=request.batch_lr,
        folder=branches_folder(out),
    )  # fmt: skip


def _admit(experiment: BranchExperiment, trial: BranchTrial) -> None:
    """Check a branch as `train` does before it starts."""
    start, recipe = experiment.start, experiment.recipe(trial)
    try:
        check_run(start.plan, RunSettings(plan=start.run.plan, out=experiment.folder.run_of(trial.name), recipe=recipe))
        resume_ramp(start.plan, recipe, start.values, start.step)
    except InputError as error:
        raise InputError(
            *(f"{argument_label('batches')} {trial.batch_tokens}: {problem}" for problem in error.problems)
        ) from None


def _identity(experiment: BranchExperiment) -> dict[str, object]:
    start = experiment.start
    return {
        "run": str(start.run.path), "step": start.step, "checkpoint": start.seal, "batch_tokens": start.batch_tokens,
        "learning_rate": start.learning_rate, "batch_lr": experiment.rule, "window_tokens": experiment.window_tokens,
    }  # fmt: skip
