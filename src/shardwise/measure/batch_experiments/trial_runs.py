"""Runs of an experiment on the batch size under the driver of `experiments`: its target, and the order of its trials.

Which trial is next follows from the lines of the experiment's folder. The ledger beside them has the attempts, so a driver that
is killed leaves its runs alive, and the next one records them.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from shardwise.measure.batch_experiments.experiment_folder import ExperimentFolder, ProcessBudget
from shardwise.measure.experiments.attempt_files import AttemptFolder, AttemptJob
from shardwise.measure.experiments.backends import LocalProcesses
from shardwise.measure.experiments.driver import REFUSED, ExperimentDriver
from shardwise.measure.experiments.ledger import Ledger, LedgerRow, rows_in_state
from shardwise.measure.experiments.ledger_lines import (
    ACTIVE,
    ENDED,
    Configuration,
    LedgerLine,
    RunMeasurement,
    SessionLine,
    Setting,
    utc_now,
)
from shardwise.records.logs.training_log import num_warm_up
from shardwise.run.faults.stop_request import StopRequest
from shardwise.search.plan import software_versions
from shardwise.values import InputError, pluralize, raise_problems

NO_LIMIT_S = 10 * 365 * 86400.0  # a run of an experiment ends by its loss or its steps, however long these take
SAVE_WAIT_S = 600.0  # for a run that is stopped to end its step and write a checkpoint: a choice
NUM_RETRIES = 1  # of a run that was killed: it goes on from its checkpoint
NOT_NEEDED = "not needed"  # cause of a trial that other runs have made needless


class Trial(Protocol):
    """A run to make: the name of its folder, and settings that no other run of the experiment has."""

    @property
    def name(self) -> str: ...

    @property
    def settings(self) -> Mapping[str, Setting]: ...


T = TypeVar("T", bound=Trial)


class Experiment(Protocol[T]):
    """Runs of one experiment, as the driver asks for them."""

    @property
    def folder(self) -> ExperimentFolder:
        """Folder of the experiment."""

    def pending_trials(self) -> Sequence[T]:
        """Return the trials that may start now, given the runs that have ended; includes those that are running."""

    def trial_of(self, settings: Mapping[str, Any]) -> T:
        """Return the trial of some settings."""

    def prepare(self, trial: T) -> None:
        """Write the files that a run needs besides its flags. Raises `InputError`."""

    def command(self, trial: T) -> list[str]:
        """Return the arguments of `train` for a run; with `--resume` if it has started before."""

    def is_complete(self, trial: T) -> bool:
        """Return True if the log of a run has all its steps."""

    def line(self, trial: T, failed: str | None) -> dict[str, Any]:
        """Return the line of a run that has ended; `failed` is the reason if it did not complete."""

    def progress_line(self, trial: T, line: Mapping[str, Any]) -> str:
        """Return the line of a run as text."""


@dataclass(slots=True)
class TrialRuns(Generic[T]):
    """The trials of an experiment, as target and as chooser of the driver; `report` shows a line of progress.

    Each run has `num_ranks` ranks with `num_threads` threads. A trial is made as it is when it starts: its last step may depend
    on the runs that have ended until then. Implements `driver.RunTarget` and `driver.RunChooser`.
    """

    experiment: Experiment[T]
    report: Callable[[str], None]
    num_ranks: int = 1
    num_threads: int = 1
    start_s: float | None = None
    _pending: dict[str, T] = field(default_factory=dict)
    _started: dict[str, T] = field(default_factory=dict)
    _seen: dict[str, int] | None = None  # attempts of configurations whose end has a line, or had one

    def _configuration(self, trial: T) -> Configuration:
        return Configuration(settings=trial.settings, label=trial.name, group=trial.name, num_devices=self.num_ranks)

    def _trial(self, row: LedgerRow) -> T:
        fingerprint, settings = row.configuration.fingerprint, row.configuration.settings
        trial = self._started.get(fingerprint) or self._pending.get(fingerprint)
        return trial or self.experiment.trial_of(settings)

    def write_job(self, row: LedgerRow, attempt: str, folder: AttemptFolder) -> AttemptJob:
        """Prepare the folder of a run, and return its command. Raises `InputError`."""
        trial = self._pending[row.configuration.fingerprint]
        self.experiment.prepare(trial)
        self._started[row.configuration.fingerprint] = trial
        command = [sys.executable, "-m", "shardwise", "train", *self.experiment.command(trial)]
        return AttemptJob(
            attempt=attempt, command=command, environment={"OMP_NUM_THREADS": str(self.num_threads)}, time_limit_s=NO_LIMIT_S,
            hang_after_s=NO_LIMIT_S, grace_s=SAVE_WAIT_S, working_folder=os.getcwd(),
        )  # fmt: skip

    def is_complete(self, row: LedgerRow) -> bool:
        """Return True if the log has all steps: a run may end with an error after its last."""
        return self.experiment.is_complete(self._trial(row))

    def read_measurement(self, row: LedgerRow, folder: AttemptFolder) -> RunMeasurement:
        """Return the steps of a run's log. Raises `InputError` for one without a step."""
        log = self.experiment.folder.log_of(self._trial(row).name)
        if log is None or not log.steps:
            raise InputError(f"{folder.output}: the run has ended without a step; a log with one is required")
        times = [record.step_time_s for record in log.steps]
        return RunMeasurement(
            step_time_s=median(times[num_warm_up(len(times)) :]), num_steps=len(times), loss=log.steps[-1].loss
        )

    def review(self, rows: Mapping[str, LedgerRow]) -> Sequence[LedgerLine]:
        """Record the runs that have ended, and return which trials are to be run now and which no more."""
        is_first = self._seen is None
        self._record(rows)
        return list(self._changes(rows, is_first))

    def _record(self, rows: Mapping[str, LedgerRow]) -> None:
        """Write a line for each run that has ended, and for each whose log is complete without one.

        Runs that had ended before this driver began have a line, unless it was taken out so that they are made again.
        """
        if self._seen is None:
            self._seen = {name: max(row.attempts) for name, row in rows.items() if row.state in ENDED}
        self._list_pending()
        for name, row in rows.items():
            if row.state in ENDED and self._seen.get(name) != max(row.attempts):
                self._seen[name] = max(row.attempts)
                self._add(self._trial(row), None if row.state == "done" else row.line.reason, rows)
                self._list_pending()
        while complete := [
            trial for name, trial in self._pending.items() if self._is_recordable(rows.get(name), trial)
        ]:
            self._add(complete[0], None, rows)
            self._list_pending()

    def _is_recordable(self, row: LedgerRow | None, trial: T) -> bool:
        """Return whether a run is complete and has no line: an earlier driver was killed in between."""
        return (row is None or row.state not in ACTIVE) and self.experiment.is_complete(trial)

    def _list_pending(self) -> None:
        self._pending = {self._configuration(trial).fingerprint: trial for trial in self.experiment.pending_trials()}

    def _add(self, trial: T, failed: str | None, rows: Mapping[str, LedgerRow]) -> None:
        folder, line = self.experiment.folder, self.experiment.line(trial, failed)
        folder.add(line)
        shutil.rmtree(folder.run_of(trial.name).checkpoints, ignore_errors=True)
        active = len(rows_in_state(rows.values(), *ACTIVE))
        done = f"{pluralize(folder.num_ended(), 'run')} done, {active} under way"
        self.report(f"{self.experiment.progress_line(trial, line)} ({done})")

    def _changes(self, rows: Mapping[str, LedgerRow], is_first: bool) -> Iterator[LedgerLine]:
        for name, trial in self._pending.items():
            row = rows.get(name)
            if row is None:
                yield LedgerLine(fingerprint=name, state="predicted", configuration=self._configuration(trial))
            elif row.state in ENDED or (row.state == "skipped" and (is_first or row.line.cause != REFUSED)):
                yield LedgerLine(fingerprint=name, state="predicted", reason="it is to be run again")
        for name, row in rows.items():
            if row.state == "predicted" and name not in self._pending:
                reason = "runs that have ended make it needless"
                yield LedgerLine(fingerprint=name, state="skipped", reason=reason, cause=NOT_NEEDED)

    def order(self, rows: Mapping[str, LedgerRow]) -> Sequence[LedgerRow]:
        """Return the trials that may start, in the order of the experiment."""
        return [rows[name] for name in self._pending if rows[name].state == "predicted"]


def run_trials(
    experiment: Experiment[T], budget: ProcessBudget, num_ranks: int, identity: Mapping[str, Any],
    report: Callable[[str], None],
) -> None:  # fmt: skip
    """Make the runs that are left in the folder of the experiment with this identity, side by side.

    Raises `InputError` for a folder of another experiment, and for a run that cannot be prepared; `SystemExit` after a signal.
    """
    folder = experiment.folder
    folder.require_usable(identity)  # before the ledger is created there
    with Ledger(folder.ledger, "--out") as ledger, StopRequest() as stop:
        folder.open_or_resume(identity)
        report(f"{folder.num_ended()} of the {folder.kind}'s runs are done; {budget.num_processes} run side by side")
        trials = TrialRuns(experiment, report, num_ranks, budget.num_threads)
        description = {"target": "train", "kind": folder.kind}
        ledger.append(SessionLine(written_at=utc_now(), experiment=description, versions=software_versions()))
        driver = ExperimentDriver(
            ledger=ledger, backend=LocalProcesses(capacity=budget.num_processes * num_ranks), target=trials, chooser=trials,
            experiment=description, versions=software_versions(), num_retries=NUM_RETRIES,
        )  # fmt: skip
        code = driver.run(stop)
        refused = [row.line.reason for row in ledger.rows.values() if row.line.cause == REFUSED]
    if code:
        report(f"stopped; the same command goes on with the {folder.kind} in {folder.path}")
        raise SystemExit(code)
    raise_problems(refused)
