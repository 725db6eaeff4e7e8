"""Who a rank is, what it does or waits for, and who started it.

An `Activity` is what a rank does, in words, for whoever waits for it; a `HeartbeatMessage` is that as others receive it.
`LostRankError` is raised when a wait for other ranks fails. A rank ends with the process that started it, however that
one ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from shardwise.values.errors import ShardwiseError

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


class _ThreadActivity(threading.local):
    """The activity of the calling thread, where that thread is a rank."""

    activity: Activity | None = None


_process_activity = Activity("the start", "", time.monotonic())  # of the process, where the process is one rank
_rank_thread = _ThreadActivity()


def activity() -> Activity:
    """Return what this rank does now: the main thread, or the calling thread where it is a rank itself."""
    return _rank_thread.activity or _process_activity


def track_thread_activity() -> None:
    """Give the calling thread, which is a rank, an activity of its own."""
    _rank_thread.activity = Activity("the start", "", time.monotonic())


def set_stage(stage: str) -> None:
    """Say what the run is at from now on."""
    _set_activity(Activity(stage, "", time.monotonic()))


@contextmanager
def mark_waiting(awaits: str) -> Iterator[None]:
    """Around what may not return while another rank hangs: says so."""
    previous = activity()
    _set_activity(replace(previous, awaits=awaits, since=time.monotonic()))
    try:
        yield
    finally:
        _set_activity(replace(previous, since=time.monotonic()))


@contextmanager
def wait_for_ranks(awaits: str) -> Iterator[None]:
    """Around what returns only when other ranks have done their part: says so, and raises `LostRankError` where it fails."""
    started = time.monotonic()
    try:
        with mark_waiting(awaits):
            yield
    except RuntimeError as error:  # all that torch.distributed raises
        waited_s = time.monotonic() - started
        raise LostRankError(
            f"{activity().stage}: {awaits} failed after {waited_s:.0f} s ({_first_line(error)})", awaits
        ) from error


def _set_activity(current: Activity) -> None:
    global _process_activity
    if _rank_thread.activity is not None:
        _rank_thread.activity = current
    elif threading.current_thread() is threading.main_thread():
        _process_activity = current


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank: its host and process, its number among those of the host, and the GPUs that it sees, by their ids."""

    rank: int
    host: str
    pid: int
    local_rank: int = 0
    gpus: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls, gpus: Sequence[str] = ()) -> Peer:
        """This process, by the environment of torchrun where there is one."""
        rank, local = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        return cls(rank, socket.gethostname(), os.getpid(), local, tuple(gpus))

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


LAUNCHER = "SHARDWISE_LAUNCHER"  # in the environment of ranks that our launcher starts: its process id
RESTART_REASON = "SHARDWISE_RESTARTED"  # likewise: why it has started them again
PR_SET_PDEATHSIG = 1  # Linux, prctl(2); linux/prctl.h


def end_with_parent() -> None:
    """Have the system send this process SIGTERM when the process that started it ends (Linux): the run then ends in order.

    Elsewhere the rank's heartbeat sees that it has another parent (`run.faults.heartbeat`).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        raise SystemExit(128 + signal.SIGTERM)  # it ended before this


def has_our_launcher() -> bool:
    """Whether the process that started this one is our launcher, which reports how each rank has ended."""
    return LAUNCHER in os.environ


def restart_reason() -> str:
    """Why the ranks were started again, as far as whoever started them says; "" the first time."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torch.distributed.elastic, of each worker
    return os.environ.get(RESTART_REASON) or ("" if attempt == "0" else f"restart {attempt} of torchrun")


LAST_HEARTBEAT = -1  # the number of a rank's last sign of life


@dataclass(frozen=True, slots=True)
class HeartbeatMessage:
    """A sign of life: its number (`LAST_HEARTBEAT`: the last one), what the rank does and since how many seconds."""

    number: int
    stage: str
    awaits: str
    for_s: float

    @classmethod
    def of(cls, number: int, current: Activity, now: float) -> HeartbeatMessage:
        return cls(number, current.stage, current.awaits, now - current.since)

    @classmethod
    def parse(cls, text: bytes) -> HeartbeatMessage:
        return cls(*json.loads(text))

    def dump(self) -> str:
        return json.dumps([self.number, self.stage, self.awaits, self.for_s])

    def __str__(self) -> str:
        return f"{self.stage}: {self.awaits}" if self.awaits else self.stage
