"""What a rank does, in words, for whoever waits for it; and what it means when a wait for other ranks fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shardwise.errors import ShardwiseError

PREFIX = "shardwise"  # of the keys in the run's store
LOST_KEY = "lost"  # what the first rank has to say that has lost another; the launcher reads it too


class LostRankError(ShardwiseError):
    """A wait for other ranks, for what `awaits` says, has failed: one of them has ended or hangs, or the network has."""

    exit_code = 4

    def __init__(self, problem: str, awaits: str = "") -> None:
        super().__init__(problem)
        self.awaits = awaits


@dataclass(frozen=True, slots=True)
class Activity:
    """What the main thread of this rank does: `stage` of the run ("step 13"), and what it waits for, "" where it does not wait;
    `since` on this process's monotonic clock."""

    stage: str
    awaits: str
    since: float

    def __str__(self) -> str:
        return f"{self.stage}: {self.awaits}" if self.awaits else self.stage


class _RankThread(threading.local):
    """The activity of the calling thread, where that thread is a rank."""

    activity: Activity | None = None


_main = Activity("the start", "", time.monotonic())  # of the process, where the process is one rank
_rank_thread = _RankThread()


def activity() -> Activity:
    """Return what this rank does now: the main thread, or the calling thread where it is a rank itself."""
    return _rank_thread.activity or _main


def track_thread_activity() -> None:
    """Give the calling thread, which is a rank, an activity of its own."""
    _rank_thread.activity = Activity("the start", "", time.monotonic())


def begin_stage(stage: str) -> None:
    """Say what the run is at from now on."""
    _set(Activity(stage, "", time.monotonic()))


@contextmanager
def waiting(awaits: str) -> Iterator[None]:
    """Around what may not return while another rank hangs: says so."""
    before = activity()
    _set(replace(before, awaits=awaits, since=time.monotonic()))
    try:
        yield
    finally:
        _set(replace(before, since=time.monotonic()))


@contextmanager
def waits_for(awaits: str) -> Iterator[None]:
    """Around what returns only when other ranks have done their part: says so, and raises `LostRankError` where it fails."""
    begun = time.monotonic()
    try:
        with waiting(awaits):
            yield
    except RuntimeError as error:  # all that torch.distributed raises
        waited_s = time.monotonic() - begun
        raise LostRankError(
            f"{activity().stage}: {awaits} failed after {waited_s:.0f} s ({_first_line(error)})", awaits
        ) from error


def _set(found: Activity) -> None:
    global _main
    if _rank_thread.activity is not None:
        _rank_thread.activity = found
    elif threading.current_thread() is threading.main_thread():
        _main = found


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
