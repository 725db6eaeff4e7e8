"""The driver of an experiment: submits attempts, records how they end, and stops when nothing is worth running.

Before an attempt is submitted, a line says so; what happened to it is read from its folder. So a driver that is killed anywhere
leaves all that the next one needs, and no attempt runs twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardwise.measure.experiments.attempt_files import AttemptFolder, AttemptJob, read_tail
from shardwise.measure.experiments.backends import GONE, NOT_STARTED, RUNNING, Backend, Submission, SubmittedJob
from shardwise.measure.experiments.job_packing import PackedJob, choose_jobs
from shardwise.measure.experiments.ledger import Ledger, LedgerRow, rows_in_state
from shardwise.measure.experiments.ledger_lines import ACTIVE, LedgerLine, RunMeasurement, seconds_between, utc_now
from shardwise.measure.experiments.ledger_summary import RunTimes
from shardwise.measure.experiments.run_endings import CANCELLED, AttemptEnding, judge_attempt, judge_scheduler
from shardwise.run.faults.stop_request import StopRequest, exit_code
from shardwise.values import InputError, describe_error, pluralize
from shardwise.values.errors import OutputError
from shardwise.values.input_texts import parse_digits

RESULT_WAIT_S = 10.0  # for the result of a job that its scheduler calls ended: file systems of clusters show files late
CANCEL_WAIT_S = 20.0  # beyond the time that cancelled runs have to end, for them to write how they did
REFUSED = "refused"  # cause of a configuration that its target cannot run
NEVER_STARTED = AttemptEnding("failed", "cancelled before its start", CANCELLED)
GOES_ON = "the same command goes on from this ledger once it can be written"
NO_MEASUREMENT = "no measurement"  # cause of a run that exited with 0 and logged nothing that can be read


class RunTarget(Protocol):
    """A program whose runs are measured: how it is started for a configuration, and how its logs are read.

    `start_s` is what runs take besides their steps, by those that were done.
    """

    start_s: float | None

    def write_job(self, row: LedgerRow, attempt: str, folder: AttemptFolder) -> AttemptJob:
        """Write the files that an attempt needs, and return what it runs and its limits. Raises `InputError`."""

    def is_complete(self, row: LedgerRow) -> bool:
        """Return True for a run that has made all its steps, whatever its process ended with."""

    def read_measurement(self, row: LedgerRow, folder: AttemptFolder) -> RunMeasurement:
        """Return what a run measured. Raises `InputError` where its logs do not say."""


class RunChooser(Protocol):
    """Configurations that are worth running next, and those that are not."""

    def review(self, rows: Mapping[str, LedgerRow]) -> Sequence[LedgerLine]:
        """Return changes of state of configurations that follow from what has ended: predictions, and what is skipped."""

    def order(self, rows: Mapping[str, LedgerRow]) -> Sequence[LedgerRow]:
        """Return the configurations that may be started, the most useful first."""


@dataclass(slots=True)
class ExperimentDriver:
    """Runs an experiment until nothing is left that is worth running; `report` gets a line for each attempt that has ended.

    `experiment` is what its session line says, `versions` those that each attempt runs with. An attempt that ended by a cause
    which another may not meet is repeated up to `num_retries` times.
    """

    ledger: Ledger
    backend: Backend
    target: RunTarget
    chooser: RunChooser
    experiment: Mapping[str, Any]
    versions: Mapping[str, str]
    num_retries: int = 1
    report: Callable[[str], None] = lambda text: None
    _vanished_at: dict[str, str] = field(default_factory=dict)  # attempts whose jobs are gone, since when
    _changed: bool = True

    def run(self, stop: StopRequest) -> int:
        """Run to the end, and return the exit code: 0, or 128 plus the signal that stopped it. Local runs are then cancelled."""
        while not stop.signal:
            self._collect()
            if self._changed:  # nothing else gives room to start more
                self._changed = False
                self.ledger.append(*self.chooser.review(self.ledger.rows))
                self._submit()
            if not self._changed and (self.backend.hands_over or not self._active_rows()):
                break
            stop.wait(self.backend.tick_s)
        if stop.signal and not self.backend.outlive_stop:
            self._cancel()
        return exit_code(stop.signal)

    def _active_rows(self) -> list[LedgerRow]:
        return rows_in_state(self.ledger.rows.values(), *ACTIVE)

    def _jobs(self, rows: Sequence[LedgerRow]) -> list[SubmittedJob]:
        return [
            SubmittedJob(
                folder=node_folder(self._folder(row, row.line.attempt), 0), attempt=_attempt_name(row), job=row.line.job
            )
            for row in rows
        ]

    def _folder(self, row: LedgerRow, attempt: int) -> AttemptFolder:
        return AttemptFolder(self.ledger.attempts_folder / row.configuration.fingerprint / f"attempt-{attempt}")

    def _collect(self) -> None:
        """Record attempts that have begun or ended since the last look; submit again what was never started."""
        rows = self._active_rows()
        unstarted: list[LedgerRow] = []
        for row, job, state in zip(rows, self._jobs(rows), self.backend.poll(self._jobs(rows)), strict=True):
            if state == NOT_STARTED:
                unstarted.append(row)
            elif ending := self._ending(row, job.folder, state):
                self._record_ending(row, job, ending)
            elif row.state == "pending" and (job.folder.is_claimed or state == RUNNING):
                self.ledger.append(self._line(row, "running", row.line.attempt, job=row.line.job))
        self._start(unstarted)

    def _ending(self, row: LedgerRow, folder: AttemptFolder, state: str) -> AttemptEnding | None:
        """Return how an attempt has ended; None while it may still go on."""
        job = folder.read_job()
        results = [node_folder(folder, node).read_result() for node in range(job.num_nodes)]
        was_stopped = any(result is not None and result.ending == "cancelled" for result in results)
        will_return = was_stopped and judge_scheduler(state) is None and state != GONE  # preempted, and requeued
        if all(results) and not will_return:
            output = "\n".join(read_tail(node_folder(folder, node).output) for node in range(job.num_nodes))
            return judge_attempt(results, output, limit_s=job.time_limit_s, hang_s=job.hang_after_s)
        ending = judge_attempt(results, "", limit_s=0.0, hang_s=0.0) if state == GONE else judge_scheduler(state)
        if ending is None:
            self._vanished_at.pop(row.configuration.fingerprint, None)
            return None
        first_look = self._vanished_at.setdefault(row.configuration.fingerprint, utc_now())
        waited_s = seconds_between(first_look, utc_now())
        if waited_s < (RESULT_WAIT_S if state != GONE else self.backend.tick_s):
            return None
        return ending

    def _record_ending(self, row: LedgerRow, job: SubmittedJob, ending: AttemptEnding) -> None:
        """Record how an attempt ended, with its measurement; and that it is repeated, where that may help."""
        folder = job.folder
        measurement = None
        if ending.state != "done" and self.target.is_complete(row):
            ending = AttemptEnding("done", f"with all its steps, though {ending.reason}")
        if ending.state == "done":
            try:
                measurement = self.target.read_measurement(row, folder)
            except InputError as error:
                ending = AttemptEnding("failed", error.problems[0], NO_MEASUREMENT)
        result = folder.read_result()
        began = row.line.written_at
        seconds = result.seconds if result else seconds_between(began, utc_now())
        line = self._line(
            row, ending.state, row.line.attempt, reason=ending.reason, cause=ending.cause, measurement=measurement,
            seconds=seconds, job=row.line.job,
        )  # fmt: skip
        lines = [line]
        if ending.cause == CANCELLED or (ending.is_transient and self._num_repeated(row) < self.num_retries):
            lines.append(self._line(row, "predicted", 0, reason=f"to be run again after: {ending.reason}", logs=""))
        self.ledger.append(*lines)
        self._vanished_at.pop(row.configuration.fingerprint, None)
        self.backend.release(job)
        self._changed = True
        self._report(row, line)

    def _num_repeated(self, row: LedgerRow) -> int:
        return sum(line.cause != CANCELLED for line in row.attempts.values()) - 1

    def _report(self, row: LedgerRow, line: LedgerLine) -> None:
        rows = self.ledger.rows.values()
        ended, active = len(rows) - len(rows_in_state(rows, "predicted", "skipped", *ACTIVE)), len(self._active_rows())
        measured = f", a step of {line.measurement.step_time_s:.4g} s" if line.measurement else ""
        reason = f": {line.reason}" if line.reason else ""
        self.report(
            f"{row.configuration.label}: {line.state}{measured}{reason} "
            f"({pluralize(ended, 'configuration')} ended, {active} under way)"
        )

    def _line(self, row: LedgerRow, state: str, attempt: int, **fields: object) -> LedgerLine:
        folder = self._folder(row, attempt).path.relative_to(self.ledger.path.parent).as_posix() if attempt else ""
        return LedgerLine(
            **{
                "fingerprint": row.configuration.fingerprint,
                "state": state,
                "attempt": attempt,
                "logs": folder,
                **fields,
            }  # type: ignore[arg-type]
        )

    def _submit(self) -> None:
        """Record and start as many of the configurations that are worth running as there is room for."""
        candidates = {row.configuration.fingerprint: row for row in self.chooser.order(self.ledger.rows)}
        times = RunTimes.of(self.ledger.rows.values(), self.experiment)
        self.target.start_s = times.start_s
        queue, running = (
            [self._packed(row, times) for row in rows] for rows in (candidates.values(), self._active_rows())
        )
        chosen = choose_jobs(queue, running, self.backend.capacity)
        prepared = [self._prepare(candidates[job.name]) for job in chosen]
        self._start([row for row in prepared if row is not None])

    def _packed(self, row: LedgerRow, times: RunTimes) -> PackedJob:
        configuration, elapsed_s = row.configuration, 0.0
        if row.state in ACTIVE:
            elapsed_s = seconds_between(row.line.written_at, utc_now())
        return PackedJob(
            name=configuration.fingerprint, seconds=max(times.seconds(row) - elapsed_s, 0.0),
            size=self.backend.size_of(configuration.num_nodes, configuration.num_devices),
        )  # fmt: skip

    def _prepare(self, row: LedgerRow) -> LedgerRow | None:
        """Write the files of the next attempt of a configuration, and record that it is to be started.

        Return None for one that the target refuses, which is skipped with its reason.
        """
        attempt = max(row.attempts, default=0) + 1
        folder = self._folder(row, attempt)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write_job(self.target.write_job(row, attempt_name(row, attempt), folder))
        except InputError as error:
            self._changed = True
            self.ledger.append(self._line(row, "skipped", 0, reason="; ".join(error.problems), cause=REFUSED))
            return None
        except OSError as error:
            raise OutputError(f"cannot write {folder.path}: {describe_error(error)}; {GOES_ON}") from None
        self.ledger.append(self._line(row, "pending", attempt, prediction=row.prediction, versions=dict(self.versions)))
        return self.ledger.rows[row.configuration.fingerprint]

    def _start(self, rows: Sequence[LedgerRow]) -> None:
        """Submit attempts that are recorded, and record the names that the scheduler gave them."""
        if not rows:
            return
        submissions = [self._submission(row) for row in rows]
        names = self.backend.submit(submissions)
        self.ledger.append(
            *(self._line(row, "pending", row.line.attempt, job=name) for row, name in zip(rows, names, strict=True))
        )

    def _submission(self, row: LedgerRow) -> Submission:
        folder = self._folder(row, row.line.attempt)
        return Submission(
            folder=folder, attempt=_attempt_name(row), num_nodes=row.configuration.num_nodes,
            num_devices=row.configuration.num_devices, time_limit_s=folder.read_job().time_limit_s,
        )  # fmt: skip

    def _cancel(self) -> None:
        """Cancel what runs, and record it, so that it is run again by the next driver."""
        jobs = self._jobs(self._active_rows())
        self.backend.cancel(jobs)
        deadline = time.monotonic() + CANCEL_WAIT_S + max((job.folder.read_job().grace_s for job in jobs), default=0.0)
        while (rows := self._active_rows()) and time.monotonic() < deadline:
            for row, job, state in zip(rows, self._jobs(rows), self.backend.poll(self._jobs(rows)), strict=True):
                # A process that was asked to end before it had made its claim has run nothing.
                never_started = state == NOT_STARTED or (state == GONE and not job.folder.is_claimed)
                ending = NEVER_STARTED if never_started else self._ending(row, job.folder, state)
                if ending:
                    self._record_ending(row, job, ending)
            time.sleep(self.backend.tick_s)


def attempt_name(row: LedgerRow, attempt: int) -> str:
    """Return the name of an attempt among all of the experiment's."""
    return f"{row.configuration.fingerprint}-{attempt}"


def _attempt_name(row: LedgerRow) -> str:
    return attempt_name(row, row.line.attempt)


def node_folder(folder: AttemptFolder, node: int) -> AttemptFolder:
    """Return the folder as a node of the attempt sees it, after its last requeue."""
    restarts = [path.name.rpartition("-")[2] for path in Path(folder.path).glob(f"claim-{node}-*")]
    return AttemptFolder(folder.path, node, max((parse_digits(text) or 0 for text in restarts), default=0))
