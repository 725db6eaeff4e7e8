"""Backends that run attempts: the seam `submit`, `poll`, `cancel`, and processes of this machine behind it.

A backend starts `job_process` for each attempt. What happened is read from the attempt's folder; a backend only adds what a
scheduler knows about a job that has written nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shardwise.measure.experiments.attempt_files import AttemptFolder
from shardwise.measure.experiments.process_cleanup import end_processes

JOB_MODULE = "shardwise.measure.experiments.job_process"
RELEASE_WAIT_S = 10.0  # for a process that has written its result to end
# States of a job that has no result, in SLURM's words; "NOT STARTED": no process has claimed it, and none is known that will.
RUNNING, WAITING, GONE, NOT_STARTED = "RUNNING", "PENDING", "GONE", "NOT STARTED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """An attempt to start: its folder, its name among all attempts, the machines that it takes, and its time limit."""

    folder: AttemptFolder
    attempt: str
    num_nodes: int
    num_devices: int
    time_limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """An attempt that was submitted: its folder, its name, and that of the scheduler ("" where the driver did not learn it)."""

    folder: AttemptFolder
    attempt: str
    job: str


class Backend(Protocol):
    """A place where attempts run.

    `capacity` is the number of units (devices or nodes, see `size_of`) that run at a time; None: as many as there are. Jobs
    that `outlive_stop` go on when the driver is asked to stop. One that `hands_over` writes files for the user to submit, and the
    driver ends. `tick_s` is the time between two polls.
    """

    @property
    def hands_over(self) -> bool: ...

    @property
    def capacity(self) -> int | None: ...

    @property
    def outlive_stop(self) -> bool: ...

    @property
    def tick_s(self) -> float: ...

    def size_of(self, num_nodes: int, num_devices: int) -> int:
        """Return the units of the capacity that a run takes."""

    def submit(self, submissions: Sequence[Submission]) -> Sequence[str]:
        """Start attempts, and return the names that the scheduler gives them. Raises `InputError` where it refuses them."""

    def poll(self, jobs: Sequence[SubmittedJob]) -> Sequence[str]:
        """Return the state of each job, in SLURM's words or as `GONE` or `NOT_STARTED`."""

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        """Ask jobs to end. Those that run write a result."""

    def release(self, job: SubmittedJob) -> None:
        """Free what the backend has for a job whose result was recorded."""


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def job_command(folder: Path) -> list[str]:
    """Return the command that runs an attempt on a node."""
    return [sys.executable, "-m", JOB_MODULE, str(folder.resolve())]


@dataclass(slots=True)
class LocalProcesses:
    """Processes of this machine, which outlive the driver: each is found again by its files.

    `capacity` devices run at a time. With `num_gpus` each attempt sees only its own GPUs.
    """

    capacity: int
    num_gpus: int = 0
    outlive_stop: bool = False
    hands_over: bool = False
    tick_s: float = 0.2
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _gpus: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def size_of(self, num_nodes: int, num_devices: int) -> int:
        """Return the number of devices, at most all of them."""
        return min(num_devices, self.capacity)

    def submit(self, submissions: Sequence[Submission]) -> Sequence[str]:
        """Start a process for each attempt, in a session of its own."""
        return [self._start(submission) for submission in submissions]

    def _start(self, submission: Submission) -> str:
        process = subprocess.Popen(
            job_command(submission.folder.path), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **self._devices(submission)},
        )  # fmt: skip
        self._processes[submission.attempt] = process
        return f"{process.pid}"

    def _devices(self, submission: Submission) -> Mapping[str, str]:
        if not self.num_gpus:
            threads = max(num_cores() // self.capacity, 1)
            return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": f"{threads}"}
        used = {gpu for gpus in self._gpus.values() for gpu in gpus}
        free = [gpu for gpu in range(self.num_gpus) if gpu not in used]
        self._gpus[submission.attempt] = tuple(free[: submission.num_devices])
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self._gpus[submission.attempt]))}

    def poll(self, jobs: Sequence[SubmittedJob]) -> Sequence[str]:
        """Return the state of each process, by its claim where another driver has started it."""
        states = [self._state(job) for job in jobs]
        active = {job.attempt for job, state in zip(jobs, states, strict=True) if state == RUNNING}
        self._gpus = {attempt: gpus for attempt, gpus in self._gpus.items() if attempt in active}
        return states

    def _state(self, job: SubmittedJob) -> str:
        process = self._processes.get(job.attempt)
        if process is not None and process.poll() is None:
            return RUNNING
        self._processes.pop(job.attempt, None)
        if job.folder.is_alive:
            return RUNNING
        if process is None and not job.folder.is_claimed:
            return NOT_STARTED
        end_processes(job.attempt, 0.0)  # of a process that was killed before it could
        return GONE

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        """Ask the processes that watch these attempts to end them."""
        for job in jobs:
            process = self._processes.get(job.attempt)
            pid = job.folder.watcher if process is None else process.pid
            if pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)

    def release(self, job: SubmittedJob) -> None:
        """Wait for the process, which ends once its result is written."""
        process = self._processes.pop(job.attempt, None)
        self._gpus.pop(job.attempt, None)
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(RELEASE_WAIT_S)
