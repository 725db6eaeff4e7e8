"""Requests to stop a run, by SIGINT (Ctrl-C) or SIGTERM (a scheduler): it ends after the current step.

If the ranks of a host end with the same error, one of them reports it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from shardwise.run.faults.rank_status import LostRankError
from shardwise.values import ShardwiseError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds that a rank may take to end when it is stopped before its first step: less than the 30 s until torchrun's SIGKILL
# (torch.distributed.elastic, `shutdown_timeout`).
BEFORE_STEPS_S = 25.0


class StopRequest:
    """Records the first of `SIGNALS` instead of its default action, until it is closed: 0, or the number of the signal.

    Later signals are ignored: a terminal and a launcher may both send theirs. The system writes signals into a pipe
    that a thread reads, so that they are recorded also while the main thread waits inside a library. With
    `ends_process` a request before `in_order` is called ends the process at most `BEFORE_STEPS_S` later, which leaves
    it time to report.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self.signal = 0
        self.requested_at: float | None = None  # on the clock of time.monotonic
        self._recorded = threading.Event()
        self._ends_process, self._in_order = ends_process, threading.Event()
        self._previous_handlers: dict[signal.Signals, Any] = {}
        self._pipe: tuple[int, int] | None = None
        self._wakeup = -1

    def record_signal(self, signum: int) -> None:
        """Record a signal."""
        self.signal = self.signal or signum
        self.requested_at = self.requested_at or time.monotonic()
        self._recorded.set()

    def wait(self, seconds: float) -> bool:
        """Wait for a signal for at most so many seconds; return whether one has come."""
        return self._recorded.wait(seconds)

    def in_order(self) -> None:
        """Leave the end of the process to the caller, who stops between steps from now on."""
        self._in_order.set()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            self._previous_handlers = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
            threading.Thread(target=self._listen, args=(self._pipe[0],), name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.in_order()
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._pipe[1])  # the thread reads the end of the pipe and ends

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # No more than this: the handler may interrupt code that holds a lock. The thread does the rest.
        self.signal = self.signal or signum

    def _listen(self, pipe: int) -> None:
        while numbers := os.read(pipe, 64):
            for signum in numbers:
                if signum in SIGNALS:
                    self.record_signal(signum)
            if self._ends_process and self.signal and not self._in_order.wait(BEFORE_STEPS_S):
                os._exit(exit_code(self.signal))
        os.close(pipe)


def exit_code(signum: int) -> int:
    """Return the exit code of a shell for a program that a signal ended; 0 for no signal."""
    return 128 + signum if signum else 0


INTERRUPTED = exit_code(signal.SIGINT)

# Seconds that a rank waits for the first one of its host to report the same error, before it reports it itself.
REPORT_S = 60.0


@contextmanager
def report_once_per_host(stop: StopRequest | None) -> Iterator[None]:
    """Raise a `ShardwiseError` that every rank of a host finds before the rendezvous on the first of them alone. A
    launcher stops all ranks as soon as one has ended. So the others wait for that, to let the first one end first."""
    try:
        yield
    except LostRankError:
        raise
    except ShardwiseError as error:
        if stop is not None and os.environ.get("LOCAL_RANK", "0") != "0" and stop.wait(REPORT_S):
            raise SystemExit(error.exit_code) from None
        raise
