"""A sweep over batches: which of its runs may be made, what each is given, and what its line says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.batch.runs import FILE, BatchRun, read_runs
from shardwise.measurement.target import LossTarget, steps_to
from shardwise.train.batch_sweep.design import Design, Trial
from shardwise.train.trials.folder import TrialsFolder
from shardwise.train.trials.runner import CHECKPOINT_EVERY
from shardwise.units import counted, format_count, format_quantity

SCHEMA = "shardwise.batch_sweep/1"


def sweep_folder(path: Path) -> TrialsFolder:
    """The folder of a sweep."""
    return TrialsFolder(path=path, kind="sweep", schema=SCHEMA, lines=FILE)


@dataclass(frozen=True, slots=True)
class BatchSweep:
    """A sweep in a folder. `flags` are those that all runs have (`shardwise train`)."""

    plan: Path
    design: Design
    target_loss: float
    folder: TrialsFolder
    flags: Sequence[str]

    def runs(self) -> tuple[BatchRun, ...]:
        """Those that have ended."""
        return read_runs(self.folder.path) if self.folder.runs.exists() else ()

    def waiting(self) -> list[Trial]:
        """Those that may be made now."""
        return list(self.design.next_trials(self.runs()))

    def has_come_to_its_end(self, trial: Trial) -> bool:
        """Whether a run has reached the loss, or has made all its steps."""
        losses = self.folder.losses_of(trial.name)
        return len(losses) >= trial.most_steps or steps_to(losses, self.target_loss) is not None

    def prepare(self, trial: Trial) -> None:
        """A run of a sweep begins from nothing."""

    def command(self, trial: Trial) -> list[str]:
        """What `train` is given for a run."""
        run = self.folder.run_of(trial.name)
        own: Mapping[str, object] = {
            "--batch-schedule": trial.batch_tokens, "--learning-rate": repr(trial.learning_rate), "--seed": trial.seed,
            "--steps": trial.most_steps, "--to-loss": self.target_loss, "--out": run.path,
            "--checkpoint-every": CHECKPOINT_EVERY, "--keep-last": 1,
        }  # fmt: skip
        again = ["--resume"] if run.holds_a_run else []
        return [*self.flags, *(f"{flag}={value}" for flag, value in own.items()), *again, str(self.plan)]

    def line(self, trial: Trial, failed: str | None) -> dict[str, Any]:
        """The line of a run that has ended."""
        return line_of(trial, self.folder.losses_of(trial.name), self.target_loss, failed)

    def said(self, trial: Trial, line: Mapping[str, Any]) -> str:
        """A run that has ended in a line of progress."""
        rate = format_quantity(trial.learning_rate)
        return f"batch {trial.batch_tokens:,}, learning rate {rate}, seed {trial.seed}: {_ended(line, trial)}"


def line_of(trial: Trial, losses: Sequence[float], target_loss: float, failed: str | None) -> dict[str, Any]:
    """The line of a run that has ended: its steps and tokens to the loss, null where it was not reached, and its last smoothed
    loss.

    >>> line_of(Trial(8, 1e-3, 0, 99), [3.0] * 30, 2.0, None)["steps"] is None
    True
    """
    target = LossTarget(target_loss)
    for loss in losses:
        target.add(loss)
    steps = None if failed else target.steps
    return {
        "batch_tokens": trial.batch_tokens, "learning_rate": trial.learning_rate, "seed": trial.seed, "steps": steps,
        "tokens": None if steps is None else steps * trial.batch_tokens, "loss": target.smoothed, "target_loss": target_loss,
        "failed": failed,
    }  # fmt: skip


def _ended(line: Mapping[str, Any], trial: Trial) -> str:
    if line["failed"]:
        return f"failed: {line['failed']}"
    if line["steps"] is None:
        return f"not reached in {counted(trial.most_steps, 'step')}"
    return f"{line['steps']:,.1f} steps, {format_count(line['tokens'])} tokens"
