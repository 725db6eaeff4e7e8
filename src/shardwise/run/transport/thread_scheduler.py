"""Decides which of several rank threads runs, and finds deadlocks when none can."""

from __future__ import annotations

import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator
from enum import Enum


class RankFailedError(RuntimeError):
    """Another rank has failed. Raised in every rank that waits, or issues an operation, after the failure."""


class DeadlockError(RuntimeError):
    """Every rank waits and none can go on. The message says what each one waits for, and for whom."""


class ThreadState(Enum):
    """State of a rank's thread."""

    NEW = "new"
    RUNNING = "running"
    BLOCKED = "blocked"
    ENDED = "ended"


class RankThread:
    """State of a thread; `can_resume` and `describe` are those of what it waits for while it is blocked.

    `rank` is None for a thread that is not a rank, such as a writer of checkpoints.
    """

    def __init__(self, rank: int | None, state: ThreadState = ThreadState.RUNNING) -> None:
        self.rank, self.state = rank, state
        self.turn = threading.Lock()  # released to let the thread run
        self.turn.acquire()
        self.can_resume: Callable[[], bool] = lambda: True
        self.describe: Callable[[], str] = lambda: ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.describe() if self.state is ThreadState.BLOCKED else self.state.value}"


class ThreadScheduler:
    """Runs one rank at a time, until it waits for a rank that has not arrived; then the next one that can go on.

    With one rank at a time no thread contends for the interpreter lock, and ranks run in the same order in every run: by their
    number, or, with a `seed`, drawn at random. `is_cooperative=False`: all run at once, as far as that lock allows.

    A thread that is not a rank may wait here too. From then on all ranks run at once: a rank may wait for that thread in a way
    that is not seen here, with a lock or a queue, and would keep the others from running. As long as such a thread is alive and
    does not wait here, no deadlock is reported.
    """

    def __init__(self, world_size: int, *, is_cooperative: bool = True, seed: int | None = None) -> None:
        self.lock = threading.RLock()
        state = ThreadState.NEW if is_cooperative else ThreadState.RUNNING
        self.ranks = [RankThread(rank, state) for rank in range(world_size)]
        self.background: dict[threading.Thread, RankThread] = {}
        self.is_cooperative = is_cooperative
        self.failure: BaseException | None = None
        self.finished = threading.Event()
        self.progress = 0  # grows with every operation
        self._last_rank = world_size - 1
        self._generator = None if seed is None else random.Random(seed)
        self._this = threading.local()

    def enter(self, rank: int) -> None:
        """Begin a rank on the calling thread. Returns when it is its turn."""
        thread = self._this.thread = self.ranks[rank]
        if self.is_cooperative:
            thread.turn.acquire()

    def start(self) -> None:
        """Let the first rank run."""
        with self.lock:
            self._dispatch()

    def leave(self, error: BaseException | None) -> None:
        """End the rank of the calling thread. With an error all other ranks fail too."""
        with self.lock:
            self._this.thread.state = ThreadState.ENDED
            if error is not None:
                self.fail(error)
            self._dispatch()
            if all(thread.state is ThreadState.ENDED for thread in self.ranks):
                self.finished.set()

    def check(self) -> None:
        """Raise `RankFailedError` if another rank has failed."""
        if self.failure is not None:
            raise RankFailedError(f"another rank failed: {self.failure}") from None

    def block(self, can_resume: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Return when `can_resume()` is true. `describe()` says what is awaited, and from whom."""
        with self.lock:
            self.check()
            self.progress += 1
            if can_resume():
                return
            _refuse_locks()
            thread = self._calling_thread()
            thread.can_resume, thread.describe, thread.state = can_resume, describe, ThreadState.BLOCKED
            self._dispatch()
        thread.turn.acquire()
        self.check()

    def notify(self) -> None:
        """Let blocked threads go on for which an operation has arrived. Called with the lock."""
        self.progress += 1
        if not self.is_cooperative:
            self._dispatch()

    def fail(self, error: BaseException) -> None:
        """Make all ranks fail that wait or issue an operation from now on. The first error is kept."""
        with self.lock:
            self.failure = self.failure or error
            for thread in self._threads():
                if thread.state in (ThreadState.NEW, ThreadState.BLOCKED):
                    _resume(thread)

    def table(self) -> str:
        """Return one line for each thread: what it does, or what it waits for."""
        return "\n".join(f"  {thread}" for thread in self._threads())

    def _threads(self) -> list[RankThread]:
        return [*self.ranks, *self.background.values()]

    def _calling_thread(self) -> RankThread:
        """Return the state of the calling thread; one that is not a rank is registered."""
        thread: RankThread | None = getattr(self._this, "thread", None)
        if thread is None:
            thread = self._this.thread = self.background[threading.current_thread()] = RankThread(None)
            self.is_cooperative = False
        return thread

    def _dispatch(self) -> None:
        free = list(self.background.values()) + ([] if self.is_cooperative else self.ranks)
        for thread in filter(_can_run, free):
            _resume(thread)
        if any(thread.state is ThreadState.RUNNING for thread in self.ranks):
            return
        ready = [thread for thread in self._in_turn() if _can_run(thread)]
        if ready and self.is_cooperative:
            thread = ready[0] if self._generator is None else self._generator.choice(ready)
            assert thread.rank is not None
            self._last_rank = thread.rank
            _resume(thread)
        elif self._is_deadlock():
            self.fail(DeadlockError(f"deadlock: every rank waits\n{self.table()}"))

    def _in_turn(self) -> Iterator[RankThread]:
        """Return the ranks, beginning with the one after the last that ran."""
        size = len(self.ranks)
        return (self.ranks[(self._last_rank + 1 + offset) % size] for offset in range(size))

    def _is_deadlock(self) -> bool:
        """Return whether a rank is blocked while none runs, and no other thread could let one go on."""
        working = any(
            thread.is_alive() and state.state is not ThreadState.BLOCKED for thread, state in self.background.items()
        )
        return (
            self.failure is None and not working and any(thread.state is ThreadState.BLOCKED for thread in self.ranks)
        )


def _can_run(thread: RankThread) -> bool:
    return thread.state is ThreadState.NEW or (thread.state is ThreadState.BLOCKED and thread.can_resume())


def _resume(thread: RankThread) -> None:
    thread.state = ThreadState.RUNNING
    thread.turn.release()


def _refuse_locks() -> None:
    """Raise `RuntimeError` if the caller waits within a `functools.cached_property`.

    Before Python 3.12 it holds a lock that all objects of the class share, so that the other ranks could never enter it.
    """
    frame, code = sys._getframe(1), functools.cached_property.__get__.__code__
    while sys.version_info < (3, 12) and frame is not None:
        if frame.f_code is code:
            raise RuntimeError("a rank waits for others within a functools.cached_property, whose lock all ranks share")
        frame = frame.f_back  # type: ignore[assignment]
