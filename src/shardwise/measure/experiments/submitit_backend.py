"""Attempts as jobs of submitit: arrays of SLURM, its local executor, and its debug executor, which runs them in this process.

An array has one shape: the same nodes and the same time limit, in steps of a factor. A cap (`slurm_array_parallelism`) limits how
many of its jobs run at a time, and SLURM requeues what it preempts. Source: submitit 1.5, `AutoExecutor`; SLURM, sbatch.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.measure.experiments.backends import GONE, NOT_STARTED, RUNNING, Submission, SubmittedJob
from shardwise.measure.experiments.job_process import run_attempt
from shardwise.measure.experiments.process_cleanup import end_processes
from shardwise.values import InputError, describe_error

SECONDS_PER_MINUTE = 60
TIME_STEP = 1.5  # factor between the time limits of two arrays: within it jobs share one
# What the scheduler gives a job beyond its own limit: the clean-up, and the signal that submitit has SLURM send before the end.
CLEAN_UP_S, SIGNAL_S = 120.0, 30
SLURM_TICK_S, LOCAL_TICK_S = 15.0, 0.2
MOST_ARRAY_JOBS = 1000  # of one array: SLURM's default MaxArraySize is 1001 (slurm.conf)


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Settings that the jobs of an array share: nodes, devices of each, and minutes."""

    num_nodes: int
    devices_per_node: int
    minutes: int


def arrays_of(submissions: Sequence[Submission], most_minutes: int | None = None) -> dict[ArrayShape, list[Submission]]:
    """Return submissions by the array that they are in; no limit is above `most_minutes`."""
    arrays: dict[ArrayShape, list[Submission]] = {}
    for submission in submissions:
        minutes = (submission.time_limit_s + CLEAN_UP_S) / SECONDS_PER_MINUTE
        rounded = math.ceil(TIME_STEP ** math.ceil(math.log(minutes, TIME_STEP)))
        devices = -(-submission.num_devices // submission.num_nodes)
        shape = ArrayShape(submission.num_nodes, devices, min(rounded, most_minutes or rounded))
        arrays.setdefault(shape, []).append(submission)
    return arrays


def split_arrays(
    arrays: Mapping[ArrayShape, Sequence[Submission]],
) -> Iterator[tuple[ArrayShape, Sequence[Submission]]]:
    """Yield arrays that are no larger than SLURM takes."""
    for shape, members in arrays.items():
        for start in range(0, len(members), MOST_ARRAY_JOBS):
            yield shape, members[start : start + MOST_ARRAY_JOBS]


@dataclass(slots=True)
class SubmititBackend:
    """Jobs of a `cluster` of submitit ("slurm", "local" or "debug"), whose files are in `folder`.

    `capacity` nodes run at a time, devices of the local executor. `parameters` are those of submitit's executor, `most_minutes`
    the longest that the partition allows.
    """

    cluster: str
    folder: Path
    capacity: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    most_minutes: int | None = None
    uses_gpus: bool = True
    hands_over: bool = False
    _jobs: dict[str, Any] = field(default_factory=dict)

    @property
    def outlive_stop(self) -> bool:
        """True for SLURM: its jobs go on, and the next driver collects them."""
        return self.cluster == "slurm"

    @property
    def tick_s(self) -> float:
        """Seconds between two polls."""
        return SLURM_TICK_S if self.cluster == "slurm" else LOCAL_TICK_S

    def size_of(self, num_nodes: int, num_devices: int) -> int:
        """Return the nodes of a job under SLURM, else its devices."""
        return min(num_nodes if self.cluster == "slurm" else num_devices, self.capacity)

    def submit(self, submissions: Sequence[Submission]) -> Sequence[str]:
        """Submit attempts as arrays, and return the ids of their jobs. Raises `InputError` where the scheduler refuses them."""
        names: dict[str, str] = {}
        for shape, members in split_arrays(arrays_of(submissions, self.most_minutes)):
            try:
                jobs = self._executor(shape).map_array(run_attempt, [str(s.folder.path.resolve()) for s in members])
            except Exception as error:  # of submitit, or of its calls of sbatch
                fix = "a machine that submits to SLURM, and settings that its sbatch takes, are required"
                raise InputError(f"{self.cluster}: {describe_error(error)}; {fix}") from None
            for submission, job in zip(members, jobs, strict=True):
                self._jobs[submission.attempt] = job
                names[submission.attempt] = job.job_id
                if self.cluster == "debug":
                    job.results()
        return [names[submission.attempt] for submission in submissions]

    def _executor(self, shape: ArrayShape) -> Any:
        import submitit

        executor = submitit.AutoExecutor(folder=self.folder, cluster=self.cluster)
        executor.update_parameters(
            timeout_min=shape.minutes, nodes=shape.num_nodes, tasks_per_node=1,
            gpus_per_node=shape.devices_per_node if self.uses_gpus else 0,
        )  # fmt: skip
        if self.cluster == "slurm":
            executor.update_parameters(
                slurm_signal_delay_s=SIGNAL_S, slurm_additional_parameters={"requeue": True}, **self.parameters
            )
        return executor

    def poll(self, jobs: Sequence[SubmittedJob]) -> Sequence[str]:
        """Return the state of each job, by one call of `sacct` for all of them, or by their processes."""
        if self.cluster != "slurm":
            return [self._local_state(job) for job in jobs]
        submitted = {job.attempt: self._slurm_job(job) for job in jobs if job.job}
        if submitted:
            with suppress(OSError):
                next(iter(submitted.values())).watcher.update()
        return [
            submitted[job.attempt].watcher.get_state(job.job, mode="cache") if job.job else self._unnamed_state(job)
            for job in jobs
        ]

    def _slurm_job(self, job: SubmittedJob) -> Any:
        if job.attempt not in self._jobs:  # another driver submitted it
            from submitit.slurm.slurm import SlurmJob

            self._jobs[job.attempt] = SlurmJob(folder=self.folder, job_id=job.job)
        return self._jobs[job.attempt]

    def _unnamed_state(self, job: SubmittedJob) -> str:
        """Return the state of a job whose submission the driver did not survive: if it runs, its files say so."""
        return RUNNING if job.folder.is_claimed else NOT_STARTED

    def _local_state(self, job: SubmittedJob) -> str:
        submitted = self._jobs.get(job.attempt)
        if job.folder.is_alive or (submitted is not None and self.cluster == "local" and submitted.state == "RUNNING"):
            return RUNNING
        if submitted is None and not job.folder.is_claimed:
            return NOT_STARTED
        end_processes(job.attempt, 0.0)
        return GONE

    def cancel(self, jobs: Sequence[SubmittedJob]) -> None:
        """Cancel jobs of this machine, by the process that runs each: its controller would kill that before it has cleaned up."""
        for job in jobs:
            watcher = job.folder.watcher
            if watcher is not None:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(watcher, signal.SIGTERM)

    def release(self, job: SubmittedJob) -> None:
        """Wait for the process of the local executor, which ends once its result is written."""
        submitted = self._jobs.pop(job.attempt, None)
        if submitted is not None and self.cluster == "local":
            with suppress(Exception):
                submitted.wait()
