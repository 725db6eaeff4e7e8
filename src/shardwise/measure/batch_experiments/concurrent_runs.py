"""Training runs side by side in one folder: the folder with a line for each run that has ended, and the processes that train.

`Runner` starts, records and stops the runs of an experiment until none is left; the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
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

from shardwise.records.run_folder import RunFolder, read_json
from shardwise.records.step_log import StepLog, read_log
from shardwise.run.faults.rank_status import end_with_parent
from shardwise.run.faults.stop_request import StopRequest, exit_code
from shardwise.run.folder_lock import RunLock
from shardwise.search.sweep_values import parse_sweep
from shardwise.values.atomic_files import write_json_atomic, write_text_atomic
from shardwise.values.errors import InputError, raise_problems
from shardwise.values.units import parse_count, pluralize


def require_flags(arguments: argparse.Namespace, required: Mapping[str, str]) -> None:
    """Raise `InputError` that names every flag that is missing; `required` has what each of them takes."""
    missing = [name for name in required if not getattr(arguments, name)]
    raise_problems([f"--{name.replace('_', '-')}: found none; {required[name]}, is required" for name in missing])


def parse_batches(text: str) -> tuple[int, ...]:
    """The batches in tokens that `--batches` names, in the order given. Raises `InputError`.

    >>> parse_batches("1Ki:4Ki:x2"), parse_batches("512,4Ki")
    ((1024, 2048, 4096), (512, 4096))
    """
    return tuple(int(value) for value in parse_sweep(f"batch={text}", "--batches").values)


ERROR = "error: "
LONGEST_TEXT = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFolder:
    """Where runs of one kind (`kind`, such as "sweep") keep what; `lines` is the name of the file with a line for each."""

    path: Path
    kind: str
    schema: str
    lines: str

    @property
    def identity(self) -> Path:
        """What the runs are of."""
        return self.path / f"{self.kind}.json"

    @property
    def runs(self) -> Path:
        """A line of JSON for each run that has ended."""
        return self.path / self.lines

    def run_of(self, name: str) -> RunFolder:
        """The folder of a run."""
        return RunFolder(self.path / "runs" / name)

    def output_of(self, name: str) -> Path:
        """What a run prints."""
        return self.path / "runs" / f"{name}.txt"

    def open_or_resume(self, of: Mapping[str, Any]) -> None:
        """Make the folder, or go on with the runs in it. Raises `InputError` for a folder with runs of something else."""
        said = json.loads(json.dumps({"schema": self.schema, **of}))
        if self.identity.exists():
            self._require_same(said)
        elif self.path.is_dir() and any(path.name != "lock" for path in self.path.iterdir()):
            raise InputError(
                f"--out: {self.path} holds other files; an empty folder, or that of a {self.kind}, is required"
            )
        else:
            self.path.joinpath("runs").mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.identity, said)

    def _require_same(self, said: Mapping[str, Any]) -> None:
        before, where = read_json(self.identity), f"the {self.kind} in {self.path}"
        differs = [name for name in {**before, **said} if before.get(name) != said.get(name)]
        if differs:
            raise InputError(
                *(
                    f"{name}: found {_short(said.get(name))}; {where} has {_short(before.get(name))}, which is required: give "
                    "the same, or another --out"
                    for name in differs
                )
            )

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the line of a run: a file that is read is whole at any moment."""
        before = self.runs.read_text(encoding="utf-8") if self.runs.exists() else ""
        write_text_atomic(self.runs, before + json.dumps(line) + "\n")

    def num_ended(self) -> int:
        """The runs that have ended."""
        return len(self.runs.read_text(encoding="utf-8").splitlines()) if self.runs.exists() else 0

    def log_of(self, name: str) -> StepLog | None:
        """The log of a run; None where it has not begun."""
        log = self.run_of(name).log
        return read_log(log) if log.exists() else None

    def losses_of(self, name: str) -> list[float]:
        """The losses of the steps of a run; none where it has not begun."""
        log = self.log_of(name)
        return [] if log is None else [record.loss for record in log.steps]


def _short(value: object) -> str:
    """A value in a message; of a long one, such as a plan, its hash."""
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"one of hash {hashlib.sha256(text.encode('utf-8')).hexdigest()[:12]}"


def failure_reason(output: Path, code: int) -> str:
    """Why a run failed: the error that it printed last, or its exit code with its last line."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    said = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    last = "".join(f": {line}" for line in lines[-1:])
    return said[-1] if said else f"ended with exit code {code}{last}"


TICK_S = 0.2  # between two looks at what has ended
CHECKPOINT_EVERY = 500  # steps: what is lost of each run by those that are killed


class Trial(Protocol):
    """A run that is to be made: the name of its folder, and what tells it from all others of its folder."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> Hashable: ...


T = TypeVar("T", bound=Trial)


class Experiment(Protocol[T]):
    """Runs that belong together, as a runner asks for them."""

    @property
    def folder(self) -> ExperimentFolder:
        """Where they are kept."""

    def pending_trials(self) -> Sequence[T]:
        """Those that may be made now, by what has ended; those under way are among them."""

    def prepare(self, trial: T) -> None:
        """Have what a run needs beside its flags. Raises `InputError`."""

    def command(self, trial: T) -> list[str]:
        """What `train` is given for a run; of one that had begun, that it goes on."""

    def is_complete(self, trial: T) -> bool:
        """Whether the log of a run has all its steps."""

    def line(self, trial: T, failed: str | None) -> dict[str, Any]:
        """The line of a run that has ended; `failed` is why it did not come to its end."""

    def progress_line(self, trial: T, line: Mapping[str, Any]) -> str:
        """The same for people."""


@dataclass(frozen=True, slots=True)
class ProcessBudget:
    """How many runs there are at a time, and the threads of each."""

    num_processes: int
    num_threads: int

    @classmethod
    def of(cls, processes: str | None, ranks: int) -> ProcessBudget:
        """Of this host's cores, for runs of so many ranks; `processes` is what `--processes` says. Raises `InputError`."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = parse_count(processes, what="--processes") if processes else max(cores // ranks, 1)
        return cls(num_processes=count, num_threads=max(cores // (count * ranks), 1))


@dataclass(slots=True)
class Runner(Generic[T]):
    """Makes the runs of `trials`; `say` shows a line of progress."""

    trials: Experiment[T]
    share: ProcessBudget
    say: Callable[[str], None]
    _running: dict[T, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run_all(self, of: Mapping[str, Any]) -> None:
        """All runs that are left of those that are `of` this. Raises `InputError` for a folder of other runs, and `SystemExit`
        where it was asked to stop."""
        folder = self.trials.folder
        with RunLock(folder.path) as lock, StopRequest() as stop:
            lock.take()
            folder.open_or_resume(of)
            self.say(
                f"{folder.num_ended()} of the {folder.kind}'s runs are done; {self.share.num_processes} run side by side"
            )
            code = self.run(stop)
        if code:
            self.say(f"stopped; the same command goes on with the {folder.kind} in {folder.path}")
            raise SystemExit(code)

    def run(self, stop: StopRequest) -> int:
        """All runs that are left. The exit code: 0, or 128 and the signal by which it was asked to stop; runs that had begun then
        go on where they were when this is run again."""
        try:
            while not stop.signal and (self._start_pending() or self._running):
                self._record()
                stop.wait(TICK_S)
        finally:
            self._end()
        return exit_code(stop.signal)

    def _start_pending(self) -> bool:
        """Start what may be, as far as there is room. Whether anything is left to be run."""
        under_way = {trial.key for trial in self._running}
        waiting = [trial for trial in self.trials.pending_trials() if trial.key not in under_way]
        for trial in waiting[: self.share.num_processes - len(self._running)]:
            if self.trials.is_complete(trial):  # and was not recorded: this was killed in between
                self._add(trial, None)
            else:
                self._running[trial] = self._start_process(trial)
        return bool(waiting)

    def _start_process(self, trial: T) -> subprocess.Popen[bytes]:
        self.trials.prepare(trial)
        command = [sys.executable, "-m", "shardwise", "train", *self.trials.command(trial)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.share.num_threads)}
        with self.trials.folder.output_of(trial.name).open("ab") as output:
            # The run ends with this process, and with a checkpoint; Ctrl-C reaches this alone, which then asks each to stop.
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0,
                preexec_fn=end_with_parent,
            )  # fmt: skip

    def _record(self) -> None:
        """Write a line for each run that has ended; one that came to its end did so whatever its process ended with."""
        for trial, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[trial]
                has_failed = code and not self.trials.is_complete(trial)
                self._add(trial, failure_reason(self.trials.folder.output_of(trial.name), code) if has_failed else None)

    def _add(self, trial: T, failed: str | None) -> None:
        folder, line = self.trials.folder, self.trials.line(trial, failed)
        folder.add(line)
        shutil.rmtree(folder.run_of(trial.name).checkpoints, ignore_errors=True)
        done = f"{pluralize(folder.num_ended(), 'run')} done, {len(self._running)} under way"
        self.say(f"{self.trials.progress_line(trial, line)} ({done})")

    def _end(self) -> None:
        """Ask what runs to stop, and wait until it has."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            process.wait()
