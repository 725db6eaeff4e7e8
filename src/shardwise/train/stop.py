"""A run that is asked to stop: by SIGINT (Ctrl-C) or by SIGTERM (a scheduler). It ends after the step that it is in."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Notes the first of `SIGNALS`, in place of what they do otherwise, until it is closed: 0, or the number of the signal.

    Another one is ignored: a terminal and a launcher may both send theirs.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {one: signal.signal(one, self._note) for one in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number


def exit_code(number: int) -> int:
    """What a shell gives for a program that a signal ended; 0 for none."""
    return 128 + number if number else 0


INTERRUPTED = exit_code(signal.SIGINT)
