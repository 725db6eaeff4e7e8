"""Training runs side by side in one folder: a line of JSON for each run that has ended, and the processes that train.

`Runner` starts, records and stops the runs of an experiment until none is left; the same command resumes it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from shardwise.records import RunFolder, StepLog, read_json, read_log
from shardwise.run.faults.rank_status import end_with_parent
from shardwise.run.faults.stop_request import StopRequest, exit_code
from shardwise.run.folder_lock import RunLock
from shardwise.search.sweep_values import parse_sweep
from shardwise.values import (
    InputError,
    argument_label,
    parse_count,
    pluralize,
    raise_problems,
    read_text,
    write_json_atomic,
    write_text_atomic,
)

PathLike = str | os.PathLike[str]
BatchSizes = str | Sequence[int | str]


def require_arguments(request: object, required: Mapping[str, str]) -> None:
    """Raise `InputError` that names every field of a request that is missing; `required` says what each takes."""
    missing = [name for name in required if not getattr(request, name)]
    raise_problems([f"{argument_label(name)}: found none; {required[name]}, is required" for name in missing])


def parse_batches(batches: BatchSizes) -> tuple[int, ...]:
    """Return batches in tokens, in the order given. Raises `InputError`.

    >>> parse_batches("1Ki:4Ki:x2"), parse_batches("512,4Ki"), parse_batches([512, "4Ki"])
    ((1024, 2048, 4096), (512, 4096), (512, 4096))
    """
    text = batches if isinstance(batches, str) else ",".join(map(str, batches))
    return tuple(int(value) for value in parse_sweep(f"batch={text}", argument_label("batches")).values)


ERROR = "error: "
LONGEST_TEXT = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFolder:
    """Paths of an experiment of a `kind`, such as "sweep"; `lines` is the name of the file with a line per ended run."""

    path: Path
    kind: str
    schema: str
    lines: str

    @property
    def identity(self) -> Path:
        """File that identifies the experiment: what all of its runs have in common."""
        return self.path / f"{self.kind}.json"

    @property
    def runs(self) -> Path:
        """File with a line of JSON for each run that has ended."""
        return self.path / self.lines

    def run_of(self, name: str) -> RunFolder:
        """Return the folder of a run."""
        return RunFolder(self.path / "runs" / name)

    def output_of(self, name: str) -> Path:
        """Return the file with the output of a run."""
        return self.path / "runs" / f"{name}.txt"

    def open_or_resume(self, identity: Mapping[str, Any]) -> None:
        """Create the folder, or check that it holds the same experiment. Raises `InputError` if it does not."""
        payload = json.loads(json.dumps({"schema": self.schema, **identity}))
        if self.identity.exists():
            self._require_same(payload)
        elif self.path.is_dir() and any(path.name != "lock" for path in self.path.iterdir()):
            raise InputError(
                f"--out: {self.path} holds other files; an empty folder, or that of a {self.kind}, is required"
            )
        else:
            self.path.joinpath("runs").mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.identity, payload)

    def _require_same(self, payload: Mapping[str, Any]) -> None:
        recorded, folder_text = read_json(self.identity), f"the {self.kind} in {self.path}"
        differing = [name for name in {**recorded, **payload} if recorded.get(name) != payload.get(name)]
        if differing:
            raise InputError(
                *(
                    f"{name}: found {_short(payload.get(name))}; {folder_text} has {_short(recorded.get(name))}, which is "
                    "required: give the same, or another --out"
                    for name in differing
                )
            )

    def add(self, line: Mapping[str, Any]) -> None:
        """Append the line of a run. The file is replaced as a whole, so that a reader never sees half a line."""
        previous_lines = read_text(self.runs) if self.runs.exists() else ""
        write_text_atomic(self.runs, previous_lines + json.dumps(line) + "\n")

    def num_ended(self) -> int:
        """Return the number of runs that have ended."""
        return len(read_text(self.runs).splitlines()) if self.runs.exists() else 0

    def log_of(self, name: str) -> StepLog | None:
        """Return the log of a run; None if it has not started."""
        log = self.run_of(name).log
        return read_log(log) if log.exists() else None

    def losses_of(self, name: str) -> list[float]:
        """Return the losses of the steps of a run; none if it has not started."""
        log = self.log_of(name)
        return [] if log is None else [record.loss for record in log.steps]


def _short(value: object) -> str:
    """Return the text of a value for a message; a hash if it is long, such as a plan."""
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"one of hash {hashlib.sha256(text.encode('utf-8')).hexdigest()[:12]}"


def failure_reason(output: Path, code: int) -> str:
    """Return the error that a run printed last, or else its exit code with its last line."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    errors = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    last_line = "".join(f": {line}" for line in lines[-1:])
    return errors[-1] if errors else f"ended with exit code {code}{last_line}"


TICK_S = 0.2  # between two looks at what has ended
CHECKPOINT_EVERY = 500  # steps: what is lost of each run by those that are killed


class Trial(Protocol):
    """A run to make: the name of its folder, and a key that no other run of the experiment has."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> Hashable: ...


T = TypeVar("T", bound=Trial)


class Experiment(Protocol[T]):
    """Runs of one experiment, as `Runner` asks for them."""

    @property
    def folder(self) -> ExperimentFolder:
        """Folder of the experiment."""

    def pending_trials(self) -> Sequence[T]:
        """Return the trials that may start now, given the runs that have ended; includes those that are running."""

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


@dataclass(frozen=True, slots=True)
class ProcessBudget:
    """Number of runs at a time, and of threads of each."""

    num_processes: int
    num_threads: int

    @classmethod
    def of(cls, processes: int | str | None, num_ranks: int) -> ProcessBudget:
        """Divide the cores of this host among runs of `num_ranks` ranks; `processes` runs at a time, if given.
        Raises `InputError`."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_processes = (
            parse_count(processes, label=argument_label("processes")) if processes else max(cores // num_ranks, 1)
        )
        return cls(num_processes=num_processes, num_threads=max(cores // (num_processes * num_ranks), 1))


@dataclass(slots=True)
class Runner(Generic[T]):
    """Make the runs of an experiment; `report` shows a line of progress."""

    experiment: Experiment[T]
    budget: ProcessBudget
    report: Callable[[str], None]
    _running: dict[T, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run_all(self, identity: Mapping[str, Any]) -> None:
        """Make the runs that are left in the folder of the experiment with this identity. Raises `InputError` for a
        folder of another experiment, and `SystemExit` after a signal."""
        folder = self.experiment.folder
        with RunLock(folder.path) as lock, StopRequest() as stop:
            lock.take()
            folder.open_or_resume(identity)
            self.report(
                f"{folder.num_ended()} of the {folder.kind}'s runs are done; {self.budget.num_processes} run side by side"
            )
            code = self.run(stop)
        if code:
            self.report(f"stopped; the same command goes on with the {folder.kind} in {folder.path}")
            raise SystemExit(code)

    def run(self, stop: StopRequest) -> int:
        """Make the runs that are left, and return the exit code: 0, or 128 plus the signal that stopped it. Runs that
        were stopped resume from their checkpoints when this is run again."""
        try:
            while not stop.signal and (self._start_pending() or self._running):
                self._record()
                stop.wait(TICK_S)
        finally:
            self._end()
        return exit_code(stop.signal)

    def _start_pending(self) -> bool:
        """Start as many trials as there is room for; return False if nothing is left to run."""
        running_keys = {trial.key for trial in self._running}
        pending = [trial for trial in self.experiment.pending_trials() if trial.key not in running_keys]
        for trial in pending[: self.budget.num_processes - len(self._running)]:
            if self.experiment.is_complete(trial):  # but not recorded: an earlier runner was killed in between
                self._add(trial, None)
            else:
                self._running[trial] = self._start_process(trial)
        return bool(pending)

    def _start_process(self, trial: T) -> subprocess.Popen[bytes]:
        self.experiment.prepare(trial)
        command = [sys.executable, "-m", "shardwise", "train", *self.experiment.command(trial)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.budget.num_threads)}
        with self.experiment.folder.output_of(trial.name).open("ab") as output:
            # In a process group of its own: Ctrl-C reaches only the runner, which then asks each run to stop with a
            # checkpoint. `end_with_parent` ends the run if the runner is killed.
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0,
                preexec_fn=end_with_parent,
            )  # fmt: skip

    def _record(self) -> None:
        for trial, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[trial]
                # The log decides, not the exit code: a run may end with an error after its last step.
                has_failed = code and not self.experiment.is_complete(trial)
                self._add(
                    trial, failure_reason(self.experiment.folder.output_of(trial.name), code) if has_failed else None
                )

    def _add(self, trial: T, failed: str | None) -> None:
        folder, line = self.experiment.folder, self.experiment.line(trial, failed)
        folder.add(line)
        shutil.rmtree(folder.run_of(trial.name).checkpoints, ignore_errors=True)
        done = f"{pluralize(folder.num_ended(), 'run')} done, {len(self._running)} under way"
        self.report(f"{self.experiment.progress_line(trial, line)} ({done})")

    def _end(self) -> None:
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            process.wait()
