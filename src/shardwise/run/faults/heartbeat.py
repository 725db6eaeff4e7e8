"""Heartbeats of the ranks of a run: a rank that hangs is named, with what the others wait for, and can be given up.

`FailureDetector` does no input or output: it keeps what was received from each rank, and when, by this rank's clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from shardwise.run.faults.rank_status import LAST_HEARTBEAT, Activity, HeartbeatMessage, activity, join_first
from shardwise.run.faults.rendezvous import MISSING_KEY, Rendezvous, heartbeat_key
from shardwise.run.faults.stop_request import StopRequest, exit_code
from shardwise.run.faults.torch_stores import Store
from shardwise.run.recipe import TrainingRecipe


@dataclass(slots=True)
class FailureDetector:
    """The heartbeats that one rank has received. A rank is missing when its last new heartbeat is `silent_after_s` old.

    >>> detector = FailureDetector(silent_after_s=30.0)
    >>> detector.receive({1: HeartbeatMessage(1, "step 5", "", 0.1)}, now=100.0)
    >>> detector.receive({1: HeartbeatMessage(1, "step 5", "", 0.1)}, now=140.0)
    >>> detector.missing(now=140.0)
    {1: 40.0}
    """

    silent_after_s: float
    beats: dict[int, HeartbeatMessage] = field(default_factory=dict)
    _received_at: dict[int, float] = field(default_factory=dict)

    def receive(self, beats: Mapping[int, HeartbeatMessage], now: float) -> None:
        """Record the newest heartbeat of each rank."""
        for rank, beat in beats.items():
            if rank not in self.beats or self.beats[rank].number != beat.number:
                self.beats[rank], self._received_at[rank] = beat, now

    def reset(self, now: float) -> None:
        """Restart all ages: this process itself did not run for a while, so that missing heartbeats mean nothing."""
        self._received_at = dict.fromkeys(self._received_at, now)

    def missing(self, now: float) -> dict[int, float]:
        """Return the missing ranks, with the seconds since their last heartbeat."""
        running = [rank for rank, beat in self.beats.items() if beat.number != LAST_HEARTBEAT]
        silent_s = {rank: now - self._received_at[rank] for rank in running}
        return {rank: seconds for rank, seconds in sorted(silent_s.items()) if seconds >= self.silent_after_s}

    def is_reporter(self, rank: int, now: float) -> bool:
        """Return whether rank `rank`, whose detector this is, reports: all ranks before it are missing."""
        missing = self.missing(now)
        return all(earlier_rank in missing for earlier_rank in range(rank))

    def ranks_to_read(self, rank: int, size: int, now: float) -> list[int]:
        """Return the ranks that rank `rank` of `size` reads. The reporter reads all others; other ranks read the first
        one that is not missing, and those before it."""
        missing = self.missing(now)
        first = next((peer_rank for peer_rank in range(rank) if peer_rank not in missing), size)
        return [peer_rank for peer_rank in range(min(first + 1, size)) if peer_rank != rank]


HEARTBEATS_PER_TIMEOUT = 6  # heartbeats in the time after which a rank counts as missing
TICK_S = 0.2  # seconds between two checks
WAKE_DIVISOR = 3  # a stopped rank that the same request wakes has this part of that time to send again
OVERSLEPT_S = 5.0  # a check so late means that this process did not run: it was stopped, or had no CPU


def print_line(text: str) -> None:
    """Print a line to stderr, if anybody still reads it."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class HeartbeatMonitor:
    """Sends heartbeats of this rank and watches those of the others, while it is entered.

    One thread writes what this rank does into the run's store and reads what others do; it alone may block. Another
    checks every `TICK_S` and never waits. One rank prints a line about a rank that is missing for `silent_after_s`. The
    run goes on if that rank comes back, and fails when a wait lasts `timeout_s`. A request to stop that cannot be met,
    because the main thread waits for a missing rank, ends this process. `remains` returns a text about the latest
    checkpoint and how to go on.
    """

    def __init__(
        self, rendezvous: Rendezvous, stop: StopRequest, recipe: TrainingRecipe, *,
        remains: Callable[[], str] = lambda: "", report: Callable[[str], None] = print_line,
        end: Callable[[int], object] = os._exit,
    ) -> None:  # fmt: skip
        self.rendezvous, self.stop, self.remains, self.report, self.end = rendezvous, stop, remains, report, end
        self.silent_after_s, self.timeout_s, self.rank = recipe.silent_after_s, recipe.timeout_s, rendezvous.rank
        self.detector, self._lock = FailureDetector(recipe.silent_after_s), threading.Lock()
        self._reported: dict[int, float] = {}  # missing ranks that were reported, and for how many seconds
        self._missing_elsewhere = False  # whether the reporter's list in the store has missing ranks
        self._request_started: float | None = None  # when the pending request to the store was made
        self._store_gone = self._store_reported = False
        self._checked_at, self._parent = time.monotonic(), os.getppid()
        self._ended = threading.Event()

    def __enter__(self) -> HeartbeatMonitor:
        for run in (self._exchange, self._watch):
            threading.Thread(target=run, name="heartbeat", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    # Thread 1, the only one that may block: asks the store. It writes `_request_started`, `_missing_elsewhere` and `_store_gone`.

    def _exchange(self) -> None:
        keys, number = self.rendezvous.keys(), 0
        try:
            while not self._ended.is_set():
                number, self._request_started = number + 1, time.monotonic()
                keys.set(
                    heartbeat_key(self.rank), HeartbeatMessage.of(number, activity(), self._request_started).dump()
                )
                self._read_beats(keys)
                self._request_started = None
                self._ended.wait(self.silent_after_s / HEARTBEATS_PER_TIMEOUT)
            keys.set(heartbeat_key(self.rank), HeartbeatMessage.of(LAST_HEARTBEAT, activity(), time.monotonic()).dump())
        except RuntimeError:
            self._store_gone = True  # with the process that owned it

    def _read_beats(self, keys: Store) -> None:
        with self._lock:
            peer_ranks = self.detector.ranks_to_read(self.rank, self.rendezvous.size, time.monotonic())
        *beats, reported_missing = keys.multi_get([*map(heartbeat_key, peer_ranks), MISSING_KEY])
        now = time.monotonic()
        with self._lock:
            self.detector.receive(dict(zip(peer_ranks, map(HeartbeatMessage.parse, beats), strict=True)), now)
            local_missing = json.dumps(list(self.detector.missing(now)))
            is_reporter = self.detector.is_reporter(self.rank, now)
        self._missing_elsewhere = json.loads(reported_missing) != []
        if is_reporter and local_missing.encode() != reported_missing:
            keys.set(MISSING_KEY, local_missing)

    # Thread 2, never blocks: reports. It writes `_checked_at`, `_reported` and `_store_reported`; `detector` has a lock.

    def _watch(self) -> None:
        while not self._ended.wait(TICK_S):
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Report missing ranks and a silent store; end the process if a request to stop cannot be met."""
        with self._lock:
            if now - self._checked_at > OVERSLEPT_S:
                self.detector.reset(now)
            missing, is_reporter = self.detector.missing(now), self.detector.is_reporter(self.rank, now)
            beats = dict(self.detector.beats)
        self._checked_at, orphaned = now, os.getppid() != self._parent
        if orphaned:
            self.stop.record_signal(signal.SIGTERM)
        if is_reporter:
            self._report(missing, beats, now)
        store_is_silent = self.store_is_silent
        if store_is_silent and not self._store_reported and not orphaned:
            self._report_store(now)
        waited_s = now - activity().since if activity().awaits else 0.0
        is_unheard = self._missing_elsewhere or missing or store_is_silent
        requested_at = now - self.silent_after_s if self.stop.requested_at is None else self.stop.requested_at
        in_grace_period = now - requested_at < self.silent_after_s / WAKE_DIVISOR
        if self.stop.signal and waited_s >= self.silent_after_s and is_unheard and not in_grace_period:
            self._end_process(activity(), list(missing or self._reported), is_reporter=is_reporter)

    @property
    def store_is_silent(self) -> bool:
        """True if the store does not answer."""
        requested_at = self._request_started
        return self._store_gone or (requested_at is not None and time.monotonic() - requested_at >= self.silent_after_s)

    def _report(self, missing: Mapping[int, float], beats: Mapping[int, HeartbeatMessage], now: float) -> None:
        for rank in [rank for rank in self._reported if rank not in missing]:
            self.report(f"rank {rank} is back, after {self._reported.pop(rank):.0f} s or more")
        waiting_rank = self._who_waits(missing, beats)
        # Without a waiting rank a report can wait longer: at first another rank may have no detector yet.
        newly_missing = [
            rank
            for rank in missing
            if rank not in self._reported and (waiting_rank or missing[rank] >= 2 * self.silent_after_s)
        ]
        if newly_missing:
            longest = max(missing[rank] for rank in newly_missing)
            waiting_rank = waiting_rank or f"rank {self.rank} is in {activity()}"
            self.report(
                f"no sign of life for {longest:.0f} s from {self._names(newly_missing)}; {waiting_rank}. The run goes on if it "
                f"comes back, and ends where a wait lasts {self.timeout_s:g} s; SIGTERM ends it now"
            )
        self._reported |= {rank: missing[rank] for rank in missing if rank in newly_missing or rank in self._reported}

    def _who_waits(self, missing: Mapping[int, float], beats: Mapping[int, HeartbeatMessage]) -> str:
        """Describe a rank that waits, and for what; "" where none does."""
        current = activity()
        if current.awaits:
            return f"rank {self.rank} waits in {current}"
        waiting = [(rank, beat) for rank, beat in sorted(beats.items()) if beat.awaits and rank not in missing]
        return f"rank {waiting[0][0]} waits in {waiting[0][1]}" if waiting else ""

    def _names(self, ranks: list[int]) -> str:
        return join_first([str(self.rendezvous.peers[rank]) for rank in ranks])

    def _report_store(self, now: float) -> None:
        """Report a silent store from the first rank; if a rank owns the store, from the next one."""
        self._store_reported, owner = True, self.rendezvous.store_owner
        if not self._store_gone and self.rank == (0 if owner is None else owner.rank + 1):
            owner_text = "the launcher" if owner is None else str(owner)
            self.report(
                f"no sign of life for {self.silent_after_s:g} s from {owner_text}, which has the run's store; "
                f"rank {self.rank} is in {activity()}. The run goes on if it comes back; SIGTERM ends it now"
            )

    def _end_process(self, current: Activity, missing: list[int], *, is_reporter: bool) -> None:
        """End this process, which is to stop but whose main thread is stuck in a wait."""
        name = signal.Signals(self.stop.signal).name
        if is_reporter:
            missing_text = f" for {self._names(missing)}" if missing else ""
            self.report(
                f"stopped by {name} while rank {self.rank} waits in {current}{missing_text}: "
                f"no checkpoint of it; {self.remains()}"
            )
        self.end(exit_code(self.stop.signal))
