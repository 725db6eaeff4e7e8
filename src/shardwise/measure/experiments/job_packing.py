"""Choose the jobs that start now on a pool of nodes: the most useful first, and small ones where they delay no larger one.

Source: Lifka, The ANL/IBM SP Scheduling System, 1995 (EASY backfill): the first job that does not fit has a reservation at the
time by which enough of the pool will be free; a job behind it starts if it ends before that, or leaves enough free then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedJob:
    """A job by its name, with the units of the pool that it takes and the seconds until it is expected to end."""

    name: str
    size: int
    seconds: float


def choose_jobs(queue: Sequence[PackedJob], running: Sequence[PackedJob], capacity: int | None) -> list[PackedJob]:
    """Return the jobs of a queue that start now; all of them where there is no `capacity`.

    >>> rows = (("a", 4, 9), ("b", 8, 9), ("c", 2, 5), ("d", 2, 99))
    >>> jobs = [PackedJob(name=name, size=size, seconds=seconds) for name, size, seconds in rows]
    >>> [job.name for job in choose_jobs(jobs, [], 8)]
    ['a', 'c']
    """
    if capacity is None:
        return list(queue)
    free = capacity - sum(job.size for job in running)
    chosen: list[PackedJob] = []
    reservation: _Reservation | None = None
    for job in queue:
        fits_now = job.size <= free
        if fits_now and (reservation is None or reservation.admits(job)):
            chosen.append(job)
            free -= job.size
            if reservation is not None:
                reservation = reservation.after(job)
        elif reservation is None and job.size <= capacity:
            reservation = _reserve(job, [*running, *chosen], free)
        if free <= 0:
            break
    return chosen


@dataclass(frozen=True, slots=True)
class _Reservation:
    """The time at which the first job that does not fit will start, and the units that are free beside it then."""

    start_s: float
    spare: int

    def admits(self, job: PackedJob) -> bool:
        """Return whether a job may start now without delaying the reserved one."""
        return job.seconds <= self.start_s or job.size <= self.spare

    def after(self, job: PackedJob) -> _Reservation:
        """Return the reservation once a job has been started that it admits."""
        return self if job.seconds <= self.start_s else _Reservation(self.start_s, self.spare - job.size)


def _reserve(job: PackedJob, active: Sequence[PackedJob], free: int) -> _Reservation:
    start_s = 0.0
    for ending in sorted(active, key=lambda running: running.seconds):
        if free >= job.size:
            break
        free, start_s = free + ending.size, ending.seconds
    return _Reservation(start_s, free - job.size)
