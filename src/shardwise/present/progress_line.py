"""Progress of a verb that takes long, on a terminal: the task, its done and total units, and the seconds since the start."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from shardwise.present.rendering.terminal import open_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

SHOWN_AFTER_S = 1.0  # verbs that end sooner have no line


class ProgressLine:
    """Line of a terminal's error stream until the verb is done; none on a stream that is no terminal. It is a `Progress`."""

    def __init__(self, verb: str, stream: TextIO | None, shown_after_s: float = SHOWN_AFTER_S) -> None:
        self.verb, self.shown_after_s = verb, shown_after_s
        self.console = open_console(stream)
        self.task, self.done, self.total = "", 0, 0
        self.line: tuple[Progress, TaskID] | None = None
        self.lock = threading.Lock()
        self.timer = threading.Timer(shown_after_s, self._show)
        self.timer.daemon = True

    def __call__(self, task: str, done: int = 0, total: int = 0) -> None:
        """Set the task and its progress, and update the line if it is visible."""
        with self.lock:
            self.task, self.done, self.total = task, done, total
            self._renew()

    @property
    def description(self) -> str:
        """The verb and its task, with the done and total units where these are known."""
        title = f"{self.verb}: {self.task}" if self.task else self.verb
        return f"{title} {self.done:,} of {self.total:,}" if self.total else title

    def _renew(self) -> None:
        if self.line:
            progress, task = self.line
            progress.update(task, description=self.description, completed=self.done, total=self.total or None)

    def _show(self) -> None:
        assert self.console is not None
        with self.lock:
            if not self.timer.finished.is_set():
                self.line = _line(self.console, self.description, self.shown_after_s)
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


def _line(console: Console, description: str, elapsed_s: float) -> tuple[Progress, TaskID]:
    """Start a line with a bar and the seconds, `elapsed_s` of which have passed before it; it is removed at the end."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    task = progress.add_task(description, total=None)
    started = progress.tasks[0].start_time
    assert started is not None
    progress.tasks[0].start_time = started - elapsed_s
    progress.start()
    return progress, task
