"""The progress of a verb that takes long, on a terminal: what is being done, how much of it, and for how long."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from shardwise.present.rendering.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SHOWN_AFTER_S = 1.0  # what is done sooner needs no line


class ProgressLine:
    """One line of a terminal's error stream until the verb is done; none on what is no terminal. It is a `Progress`."""

    def __init__(self, verb: str, stream: TextIO | None, shown_after_s: float = SHOWN_AFTER_S) -> None:
        self.verb, self.shown_after_s = verb, shown_after_s
        self.console = open_console(stream)
        self.said, self.done, self.total = "", 0, 0
        self.line: tuple[Progress, TaskID] | None = None
        self.lock = threading.Lock()
        self.timer = threading.Timer(shown_after_s, self._show)
        self.timer.daemon = True

    def __call__(self, task: str, done: int = 0, total: int = 0) -> None:
        """Note what is being done; the line says it, once it is there."""
        with self.lock:
            self.said, self.done, self.total = task, done, total
            self._renew()

    @property
    def words(self) -> str:
        """What is being done, with how much of it where that is known."""
        said = f"{self.verb}: {self.said}" if self.said else self.verb
        return f"{said} {self.done:,} of {self.total:,}" if self.total else said

    def _renew(self) -> None:
        if self.line:
            progress, task = self.line
            progress.update(task, description=self.words, completed=self.done, total=self.total or None)

    def _show(self) -> None:
        assert self.console is not None
        with self.lock:
            if not self.timer.finished.is_set():
                self.line = _line(self.console, self.words, self.shown_after_s)
                self._renew()

    def __enter__(self) -> ProgressLine:
        if self.console:
            self.timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.timer.cancel()
        with self.lock:
            if self.line:
                self.line[0].stop()


def _line(console: Console, words: str, elapsed_s: float) -> tuple[Progress, TaskID]:
    """A line with a bar and the seconds, of which some have passed before it; it is taken away at the end."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = progress.add_task(words, total=None)
    started = progress.tasks[0].start_time
    assert started is not None
    progress.tasks[0].start_time = started - elapsed_s
    progress.start()
    return progress, task
