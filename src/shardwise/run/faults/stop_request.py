"""A run that is asked to stop, by SIGINT (Ctrl-C) or by SIGTERM (a scheduler), ends after the step that it is in.

Of the ranks of a host that end with the same error only one reports it.
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
from shardwise.values.errors import ShardwiseError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What a rank may take to end by itself when it is asked to before its first step: less than torchrun's 30 s until SIGKILL
# (torch.distributed.elastic, `shutdown_timeout`).
BEFORE_STEPS_S = 25.0


class StopRequest:
    """Notes the first of `SIGNALS`, in place of what they do otherwise, until it is closed: 0, or the number of the signal.

    Another one is ignored: a terminal and a launcher may both send theirs. The system writes signals into a pipe, which a thread
    reads, so that they are noted while the main thread waits inside a library too. With `ends_process` a request that comes
    before `in_order` is called ends the process, `BEFORE_STEPS_S` later at the latest: what it has to say until then is said.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self.signal = 0
        self.asked_at: float | None = None  # on the clock of time.monotonic
        self._noted = threading.Event()
        self._ends_process, self._in_order = ends_process, threading.Event()
        self._before: dict[signal.Signals, Any] = {}
        self._ends: tuple[int, int] | None = None
        self._wakeup = -1

    def record_signal(self, signum: int) -> None:
        """A signal has come."""
        self.signal = self.signal or signum
        self.asked_at = self.asked_at or time.monotonic()
        self._noted.set()

    def wait(self, seconds: float) -> bool:
        """Until a signal has come, or so many seconds have passed; whether one has come."""
        return self._noted.wait(seconds)

    def in_order(self) -> None:
        """From now on whoever asked sees to it that the run ends."""
        self._in_order.set()

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._ends = os.pipe()
            os.set_blocking(self._ends[1], False)
            self._wakeup = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
            self._before = {signum: signal.signal(signum, self._handle) for signum in SIGNALS}
            threading.Thread(target=self._listen, args=(self._ends[0],), name="signals", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.in_order()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self._ends is not None:
            signal.set_wakeup_fd(self._wakeup)
            os.close(self._ends[1])  # the thread ends when there is nothing more to read

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signal = (
            self.signal or signum
        )  # and no more: this may interrupt who holds a lock; the thread does the rest

    def _listen(self, pipe: int) -> None:
        while numbers := os.read(pipe, 64):
            for signum in numbers:
                if signum in SIGNALS:
                    self.record_signal(signum)
            if self._ends_process and self.signal and not self._in_order.wait(BEFORE_STEPS_S):
                os._exit(exit_code(self.signal))
        os.close(pipe)


def exit_code(signum: int) -> int:
    """What a shell gives for a program that a signal ended; 0 for none."""
    return 128 + signum if signum else 0


INTERRUPTED = exit_code(signal.SIGINT)

# How long a rank waits for the first one of its host to have reported what both have found, before it reports it itself.
REPORT_S = 60.0


@contextmanager
def report_once_per_host(stop: StopRequest | None) -> Iterator[None]:
    """Around what every rank finds alike before the ranks meet: `ShardwiseError` is raised on the first rank of a host alone.

    A launcher asks all to stop as soon as one has ended. So the others wait to be asked, and it is the first one that ends first.
    """
    try:
        yield
    except LostRankError:
        raise
    except ShardwiseError as error:
        if stop is not None and os.environ.get("LOCAL_RANK", "0") != "0" and stop.wait(REPORT_S):
            raise SystemExit(error.exit_code) from None
        raise
