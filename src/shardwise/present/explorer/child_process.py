"""Child processes that exchange pickled messages with this one over their standard streams."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class ChildEndedError(Exception):
    """The process ended before its message."""


class ChildProcess:
    """A process that runs the function `main` of a module, which reads messages."""

    def __init__(self, module: str) -> None:
        # Imported by its name: as `__main__` the module's classes would not be those of this process.
        command = [sys.executable, "-c", f"from {module} import main; main()"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def send(self, message: Any) -> None:
        """Send a message. Raises `ChildEndedError` if the process has ended."""
        try:
            pickle.dump(message, self.stdin)
            self.stdin.flush()
        except OSError:
            raise ChildEndedError from None

    def receive(self) -> Any:
        """Wait for a message. Raises `ChildEndedError` if the process ends before."""
        try:
            return pickle.load(self.stdout)
        except (OSError, EOFError, pickle.UnpicklingError, ValueError):
            raise ChildEndedError from None

    @contextmanager
    def limit_time(self, seconds: float) -> Iterator[threading.Event]:
        """Kill the process after some seconds in this context; the event says that it was."""
        timed_out = threading.Event()

        def stop() -> None:
            timed_out.set()
            self.kill()

        timer = threading.Timer(seconds, stop)
        timer.daemon = True
        timer.start()
        try:
            yield timed_out
        finally:
            timer.cancel()

    def kill(self) -> None:
        """End the process: its reader gets the end of the stream."""
        self.process.kill()

    def close(self) -> None:
        """End the process and its streams."""
        self.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()


def receive_from_parent() -> Any:
    """Return the next message of the parent process. Raises `EOFError` once it has closed the stream."""
    return pickle.load(sys.stdin.buffer)


def send_to_parent(message: Any) -> None:
    """Send a message to the parent process."""
    pickle.dump(message, sys.stdout.buffer)
    sys.stdout.buffer.flush()
