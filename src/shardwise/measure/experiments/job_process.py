"""The process that runs the command of an attempt on a node, watches it, and leaves nothing of it behind.

`python -m shardwise.measure.experiments.job_process FOLDER` is what every scheduler starts. It claims the attempt, so that no
other process runs it too, starts the command in a session of its own, ends it at its time limit or without a heartbeat, ends
and checks what it left, and writes how it ended. It does without its driver, which may die meanwhile.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.measure.experiments.attempt_files import AttemptFolder, AttemptJob, AttemptResult, CleanUp, Ending
from shardwise.measure.experiments.process_cleanup import (
    ATTEMPT_NODE_VARIABLE,
    ATTEMPT_VARIABLE,
    count_oom_kills,
    end_processes,
    listening_ports,
    processes_of,
    remove_shared_memory,
    shared_memory_files,
    still_listening,
)
from shardwise.run.faults.rank_status import end_with_parent
from shardwise.values import describe_error

TICK_S = 0.05  # between two looks at the command
LEFTOVERS_EVERY_S = 2.0  # between two looks at its ports and its files of shared memory
HEARTBEATS_EVERY_S = 0.5
WRITE_RETRIES, WRITE_RETRY_S = 60, 1.0  # of a result on a full disk, which the clean-up may have made room on


def run_attempt(folder: str | os.PathLike[str]) -> None:
    """Run the command of an attempt on this node; do nothing where a process has begun to. However it ends, a result says so."""
    attempt = AttemptFolder.of_process(Path(folder))
    watch = _Watch(attempt, attempt.read_job())
    with watch.signals():  # before the claim, by which a driver finds this process and may ask it to end
        try:
            claim = attempt.make_claim()
        except FileExistsError:
            return
        try:
            _write_result(attempt, watch.run())
        finally:
            os.close(claim)


def _write_result(attempt: AttemptFolder, result: AttemptResult) -> None:
    for _ in range(WRITE_RETRIES):
        with suppress(OSError):
            attempt.write_result(result)
            return
        time.sleep(WRITE_RETRY_S)
    attempt.write_result(result)


@dataclass(slots=True)
class _Watch:
    """A command that runs, and what has been seen of it."""

    attempt: AttemptFolder
    job: AttemptJob
    started: float = field(default_factory=time.monotonic)
    ports: set[int] = field(default_factory=set)
    shared_files: set[str] = field(default_factory=set)
    stop_signal: int = 0

    def run(self) -> AttemptResult:
        """Run the command to its end, and return how it ended."""
        oom_kills = count_oom_kills()
        try:
            process = self._start()
        except (OSError, ValueError) as error:
            return AttemptResult(
                ending="not started", exit_code=127, seconds=self._elapsed_s, error=describe_error(error),
                clean_up=self._clean_up(0.0),
            )  # fmt: skip
        ending = self._wait(process)
        clean_up = self._clean_up(self.job.grace_s if process.poll() is None else 0.0)
        if process.poll() is None:  # without /proc
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return AttemptResult(
            ending=ending, exit_code=process.returncode, seconds=self._elapsed_s, clean_up=clean_up,
            oom_kills=count_oom_kills() - oom_kills, peak_rss_bytes=usage.ru_maxrss * 1024,
        )  # fmt: skip

    @property
    def _mark(self) -> str:
        """Name of the attempt and its node, which its processes carry in their environment."""
        return f"{self.job.attempt}:{self.attempt.node}"

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def _start(self) -> subprocess.Popen[bytes]:
        self.attempt.scratch.mkdir(exist_ok=True)
        environment = {
            **os.environ, **self.job.environment, ATTEMPT_VARIABLE: self.job.attempt, ATTEMPT_NODE_VARIABLE: self._mark,
            "TMPDIR": str(self.attempt.scratch),
        }  # fmt: skip
        with self.attempt.output.open("ab") as output:
            # In a session of its own, which a Ctrl-C at the driver's terminal does not reach.
            return subprocess.Popen(
                _local_command(self.job.command), env=environment, cwd=self.job.working_folder or self.attempt.path,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip

    def _wait(self, process: subprocess.Popen[bytes]) -> Ending:
        next_look, next_heartbeat, last_sign = 0.0, 0.0, time.time()
        while process.poll() is None:
            now = time.monotonic()
            if self.stop_signal:
                return "cancelled"
            if self._elapsed_s > self.job.time_limit_s:
                return "time limit"
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEATS_EVERY_S
                last_sign = max(last_sign, self._last_change())
                if time.time() - last_sign > self.job.hang_after_s:
                    return "no heartbeat"
            if now >= next_look:
                next_look = now + LEFTOVERS_EVERY_S
                self._look_at_leftovers()
            time.sleep(TICK_S)
        return "cancelled" if self.stop_signal else "exit"

    def _last_change(self) -> float:
        """Return when the output, or a file that is a heartbeat, changed last."""
        paths = [
            self.attempt.output,
            *(path for pattern in self.job.heartbeats for path in self.attempt.path.glob(pattern)),
        ]
        times = [0.0]
        for path in paths:
            with suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def _look_at_leftovers(self) -> None:
        pids = list(processes_of(self._mark))
        self.ports |= listening_ports(pids)
        self.shared_files |= shared_memory_files(pids)

    def _clean_up(self, grace_s: float) -> CleanUp:
        """End what is left, remove its files, and check that its ports are free."""
        self._look_at_leftovers()
        ended, remaining = end_processes(self._mark, grace_s)
        removed = remove_shared_memory(self.shared_files)
        if self.attempt.scratch.exists():
            shutil.rmtree(self.attempt.scratch, ignore_errors=True)
        return CleanUp(
            killed=sorted(ended.values()), removed_files=removed, open_ports=sorted(still_listening(self.ports)),
            remaining=sorted(remaining.values()),
        )  # fmt: skip

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take SIGTERM, SIGINT and what submitit sends before a timeout as a request to cancel."""
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
        handlers: dict[int, Callable[..., object] | int | None] = {}
        with suppress(ValueError):  # handlers belong to the main thread, which a debug executor may not be
            handlers = {signum: signal.signal(signum, self._cancel) for signum in signals}
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _cancel(self, signum: int, frame: object) -> None:
        self.stop_signal = self.stop_signal or signum


def _local_command(command: Sequence[str]) -> list[str]:
    """Return a command with this machine's Python in place of the driver's, where that is not here."""
    program, *arguments = command
    is_missing = Path(program).is_absolute() and not Path(program).exists()
    return [sys.executable if is_missing and Path(program).name.startswith("python") else program, *arguments]


if __name__ == "__main__":
    run_attempt(sys.argv[1])
