"""A sweep over batches: processes that train side by side, until every batch has its runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.batch.runs import BatchRun, read_runs
from shardwise.measurement.target import steps_to
from shardwise.train.batch_sweep.design import Design, Trial
from shardwise.train.batch_sweep.record import SweepFolder, line_of, losses_of, reason_of
from shardwise.train.parent import end_with_parent
from shardwise.train.stop import StopRequest, exit_code
from shardwise.units import counted, format_count, format_quantity

TICK_S = 0.2  # between two looks at what has ended
CHECKPOINT_EVERY = 500  # steps: what a sweep that is killed loses of each run


@dataclass(slots=True)
class BatchSweep:
    """A sweep in a folder. `flags` are those that all runs have (`shardwise train`), `num_processes` run at a time, each with
    `num_threads`, and `say` shows a line of progress."""

    plan: Path
    design: Design
    target_loss: float
    folder: SweepFolder
    flags: Sequence[str]
    num_processes: int
    num_threads: int
    say: Callable[[str], None]
    _running: dict[Trial, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, stop: StopRequest) -> int:
        """All runs that are left. The exit code: 0, or 128 and the signal by which it was asked to stop; runs that had begun then
        go on where they were when the sweep does."""
        try:
            while not stop.signal and (self._start() or self._running):
                self._record()
                stop.wait(TICK_S)
        finally:
            self._end()
        return exit_code(stop.signal)

    def runs(self) -> tuple[BatchRun, ...]:
        """Those that have ended."""
        return read_runs(self.folder.path) if self.folder.runs.exists() else ()

    def _start(self) -> bool:
        """Start what may be, as far as there is room. Whether anything is left to be run."""
        under_way = {trial.key for trial in self._running}
        waiting = [trial for trial in self.design.next_trials(self.runs()) if trial.key not in under_way]
        for trial in waiting[: self.num_processes - len(self._running)]:
            if self._is_done(trial):
                self._add(trial, None)
            else:
                self._running[trial] = self._started(trial)
        return bool(waiting)

    def _is_done(self, trial: Trial) -> bool:
        """Whether a run has come to its end before and was not recorded: the sweep was killed in between."""
        losses = losses_of(self.folder.run_of(trial))
        return len(losses) >= trial.most_steps or steps_to(losses, self.target_loss) is not None

    def _started(self, trial: Trial) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "shardwise", "train", *self.command(trial)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.num_threads)}
        with self.folder.output_of(trial).open("ab") as output:
            # The run ends with the sweep, and with a checkpoint; Ctrl-C reaches the sweep alone, which then asks each to stop.
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0,
                preexec_fn=end_with_parent,
            )  # fmt: skip

    def command(self, trial: Trial) -> list[str]:
        """What `train` is given for a run."""
        own: Mapping[str, object] = {
            "--batch-schedule": trial.batch_tokens, "--learning-rate": repr(trial.learning_rate), "--seed": trial.seed,
            "--steps": trial.most_steps, "--to-loss": self.target_loss, "--out": self.folder.run_of(trial).path,
            "--checkpoint-every": CHECKPOINT_EVERY, "--keep-last": 1,
        }  # fmt: skip
        again = ["--resume"] if self.folder.run_of(trial).holds_a_run else []
        return [*self.flags, *(f"{flag}={value}" for flag, value in own.items()), *again, str(self.plan)]

    def _record(self) -> None:
        """Write a line for each run that has ended."""
        for trial, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[trial]
                self._add(trial, reason_of(self.folder.output_of(trial), code) if code else None)

    def _add(self, trial: Trial, failed: str | None) -> None:
        run = self.folder.run_of(trial)
        line = line_of(trial, losses_of(run), self.target_loss, failed)
        self.folder.add(line)
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        done = f"{counted(len(self.runs()), 'run')} done, {len(self._running)} under way"
        self.say(f"{trial_text(trial)}: {_ended(line, trial)} ({done})")

    def _end(self) -> None:
        """Ask what runs to stop, and wait until it has."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            process.wait()


def trial_text(trial: Trial) -> str:
    """A run in a line of progress."""
    return f"batch {trial.batch_tokens:,}, learning rate {format_quantity(trial.learning_rate)}, seed {trial.seed}"


def _ended(line: Mapping[str, object], trial: Trial) -> str:
    if line["failed"]:
        return f"failed: {line['failed']}"
    if line["steps"] is None:
        return f"not reached in {counted(trial.most_steps, 'step')}"
    return f"{line['steps']:,.1f} steps, {format_count(float(str(line['tokens'])))} tokens"
