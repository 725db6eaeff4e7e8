"""Status of a rank: its identity, what it does or waits for, and what started it.

An `Activity` describes what a rank does, for ranks that wait for it; a `HeartbeatMessage` is what they receive.
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

from shardwise.values import ShardwiseError

MAX_SHOWN = 3  # ranks that a message describes
PREFIX = "shardwise"  # of our keys in the run's store
# Keys that the launcher reads too: the report of the first rank that lost another; that the steps have begun.
LOST_KEY, STEPS_KEY = "lost", "steps"


class LostRankError(ShardwiseError):
    """A wait for other ranks has failed: one of them ended or hangs, or the network failed. `awaits` describes the
    wait."""

    exit_code = 4

    def __init__(self, problem: str, awaits: str = "") -> None:
        super().__init__(problem)
        self.awaits = awaits


@dataclass(frozen=True, slots=True)
class Activity:
    """Activity of this rank's main thread. `stage`: the stage of the run ("step 13"); `awaits`: what it waits for,
    "" if it does not wait; `since`: seconds on this process's monotonic clock."""

    stage: str
    awaits: str
    since: float

    def __str__(self) -> str:
        return f"{self.stage}: {self.awaits}" if self.awaits else self.stage


class _ThreadActivity(threading.local):
    """The activity of the calling thread, if that thread is a rank."""

    activity: Activity | None = None


_process_activity = Activity("the start", "", time.monotonic())  # of the process, if it is one rank
_rank_thread = _ThreadActivity()


def activity() -> Activity:
    """Return what this rank does now: the main thread, or the calling thread if it is a rank itself."""
    return _rank_thread.activity or _process_activity


def track_thread_activity() -> None:
    """Give the calling thread, which is a rank, an activity of its own."""
    _rank_thread.activity = Activity("the start", "", time.monotonic())


def set_stage(stage: str) -> None:
    """Set the stage of the run that this rank reports."""
    _set_activity(Activity(stage, "", time.monotonic()))


@contextmanager
def mark_waiting(awaits: str) -> Iterator[None]:
    """Report that this rank waits, around a call that may not return while another rank hangs."""
    previous = activity()
    _set_activity(replace(previous, awaits=awaits, since=time.monotonic()))
    try:
        yield
    finally:
        _set_activity(replace(previous, since=time.monotonic()))


@contextmanager
def wait_for_ranks(awaits: str) -> Iterator[None]:
    """Wait for other ranks: report it as `mark_waiting` does, and raise `LostRankError` if the wait fails."""
    started = time.monotonic()
    try:
        with mark_waiting(awaits):
            yield
    except RuntimeError as error:  # the only error of torch.distributed
        waited_s = time.monotonic() - started
        raise LostRankError(
            f"{activity().stage}: {awaits} failed after {waited_s:.0f} s ({first_line(error)})", awaits
        ) from error


def _set_activity(current: Activity) -> None:
    global _process_activity
    if _rank_thread.activity is not None:
        _rank_thread.activity = current
    elif threading.current_thread() is threading.main_thread():
        _process_activity = current


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank: its host and process, its number among those of the host, and the ids of the GPUs that it sees."""

    rank: int
    host: str
    pid: int
    local_rank: int = 0
    gpus: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls, gpus: Sequence[str] = ()) -> Peer:
        """Return this process, numbered by the environment of torchrun if there is one."""
        rank, local = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
        return cls(rank, socket.gethostname(), os.getpid(), local, tuple(gpus))

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def join_first(descriptions: Sequence[str], rest: str = " and {} more") -> str:
    """Join the descriptions of the first ranks; `rest` counts the others."""
    num_more = len(descriptions) - MAX_SHOWN
    return ", ".join(descriptions[:MAX_SHOWN]) + (rest.format(num_more) if num_more > 0 else "")


LAUNCHER = "SHARDWISE_LAUNCHER"  # in the environment of ranks: process id of our launcher
RESTART_REASON = "SHARDWISE_RESTARTED"  # likewise: why it restarted them
PR_SET_PDEATHSIG = 1  # Linux, prctl(2); linux/prctl.h


def end_with_parent() -> None:
    """Have the system send this process SIGTERM when its parent ends (Linux), so that the run stops in order. Elsewhere
    the rank's heartbeat notices that it has another parent (`run.faults.heartbeat`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    launcher = os.environ.get(LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher):
        raise SystemExit(128 + signal.SIGTERM)  # the launcher ended before prctl took effect


def has_our_launcher() -> bool:
    """Return whether our launcher started this process; it reports how each rank has ended."""
    return LAUNCHER in os.environ


def restart_reason() -> str:
    """Return why the ranks were restarted, as far as the launcher says; "" the first time."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # set by torch.distributed.elastic
    return os.environ.get(RESTART_REASON) or ("" if attempt == "0" else f"restart {attempt} of torchrun")


LAST_HEARTBEAT = -1  # number of a rank's last heartbeat


@dataclass(frozen=True, slots=True)
class HeartbeatMessage:
    """A heartbeat: its number (`LAST_HEARTBEAT`: the last one), what the rank does, and for how many seconds."""

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
