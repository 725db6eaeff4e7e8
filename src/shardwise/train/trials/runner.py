"""Processes that train side by side, until no run is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from shardwise.train.lock import RunLock
from shardwise.train.parent import end_with_parent
from shardwise.train.stop import StopRequest, exit_code
from shardwise.train.trials.folder import TrialsFolder, reason_of
from shardwise.units import counted, parse_count

TICK_S = 0.2  # between two looks at what has ended
CHECKPOINT_EVERY = 500  # steps: what is lost of each run by those that are killed


class Trial(Protocol):
    """A run that is to be made: the name of its folder, and what tells it from all others of its folder."""

    @property
    def name(self) -> str: ...

    @property
    def key(self) -> Hashable: ...


T = TypeVar("T", bound=Trial)


class Trials(Protocol[T]):
    """Runs that belong together, as a runner asks for them."""

    @property
    def folder(self) -> TrialsFolder:
        """Where they are kept."""

    def waiting(self) -> Sequence[T]:
        """Those that may be made now, by what has ended; those under way are among them."""

    def prepare(self, trial: T) -> None:
        """Have what a run needs beside its flags. Raises `InputError`."""

    def command(self, trial: T) -> list[str]:
        """What `train` is given for a run; of one that had begun, that it goes on."""

    def has_come_to_its_end(self, trial: T) -> bool:
        """Whether the log of a run has all its steps."""

    def line(self, trial: T, failed: str | None) -> dict[str, Any]:
        """The line of a run that has ended; `failed` is why it did not come to its end."""

    def said(self, trial: T, line: Mapping[str, Any]) -> str:
        """The same for people."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many runs there are at a time, and the threads of each."""

    num_processes: int
    num_threads: int

    @classmethod
    def of(cls, processes: str | None, ranks: int) -> Share:
        """Of this host's cores, for runs of so many ranks; `processes` is what `--processes` says. Raises `InputError`."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        count = parse_count(processes, what="--processes") if processes else max(cores // ranks, 1)
        return cls(num_processes=count, num_threads=max(cores // (count * ranks), 1))


@dataclass(slots=True)
class Runner(Generic[T]):
    """Makes the runs of `trials`; `say` shows a line of progress."""

    trials: Trials[T]
    share: Share
    say: Callable[[str], None]
    _running: dict[T, subprocess.Popen[bytes]] = field(default_factory=dict)

    def to_the_end(self, of: Mapping[str, Any]) -> None:
        """All runs that are left of those that are `of` this. Raises `InputError` for a folder of other runs, and `SystemExit`
        where it was asked to stop."""
        folder = self.trials.folder
        with RunLock(folder.path) as lock, StopRequest() as stop:
            lock.take()
            folder.begin(of)
            self.say(
                f"{folder.num_done()} of the {folder.kind}'s runs are done; {self.share.num_processes} run side by side"
            )
            code = self.run(stop)
        if code:
            self.say(f"stopped; the same command goes on with the {folder.kind} in {folder.path}")
            raise SystemExit(code)

    def run(self, stop: StopRequest) -> int:
        """All runs that are left. The exit code: 0, or 128 and the signal by which it was asked to stop; runs that had begun then
        go on where they were when this is run again."""
        try:
            while not stop.signal and (self._start() or self._running):
                self._record()
                stop.wait(TICK_S)
        finally:
            self._end()
        return exit_code(stop.signal)

    def _start(self) -> bool:
        """Start what may be, as far as there is room. Whether anything is left to be run."""
        under_way = {trial.key for trial in self._running}
        waiting = [trial for trial in self.trials.waiting() if trial.key not in under_way]
        for trial in waiting[: self.share.num_processes - len(self._running)]:
            if self.trials.has_come_to_its_end(trial):  # and was not recorded: this was killed in between
                self._add(trial, None)
            else:
                self._running[trial] = self._started(trial)
        return bool(waiting)

    def _started(self, trial: T) -> subprocess.Popen[bytes]:
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
                has_failed = code and not self.trials.has_come_to_its_end(trial)
                self._add(trial, reason_of(self.trials.folder.output_of(trial.name), code) if has_failed else None)

    def _add(self, trial: T, failed: str | None) -> None:
        folder, line = self.trials.folder, self.trials.line(trial, failed)
        folder.add(line)
        shutil.rmtree(folder.run_of(trial.name).checkpoints, ignore_errors=True)
        done = f"{counted(folder.num_done(), 'run')} done, {len(self._running)} under way"
        self.say(f"{self.trials.said(trial, line)} ({done})")

    def _end(self) -> None:
        """Ask what runs to stop, and wait until it has."""
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)
        for process in self._running.values():
            process.wait()
