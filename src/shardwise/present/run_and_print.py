"""Run a verb with a line of progress on a terminal, and print its report or payload; print errors."""

from __future__ import annotations

import argparse
import sys
import threading
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from shardwise.present.rendering.plain_text import render_text
from shardwise.present.rendering.report import Report, Section, Status, short_form
from shardwise.present.rendering.terminal import open_console, render_terminal
from shardwise.price.derivation_cache import use_derivation_cache
from shardwise.values import write_error, write_text

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


def run_and_print(arguments: argparse.Namespace, *, keeps: bool) -> None:
    """Run a verb and write its answer; derivations are kept for the next process where this one is the verb's own.

    A text is for programs and written as it is; a report is for people: short unless all of it is asked for.
    """
    with use_derivation_cache() if keeps else nullcontext():
        with ProgressLine(arguments.verb, sys.stderr if arguments.shows_progress else None) as arguments.progress:
            answer: str | Report = arguments.run(arguments)
        if isinstance(answer, str):
            write_text(answer + "\n" if answer else "", sys.stdout)
        else:
            report = answer if getattr(arguments, "verbose", True) else short_form(answer)
            console = open_console(sys.stdout)
            write_text(render_terminal(report, console) if console else render_text(report) + "\n", sys.stdout)


def print_error(text: str) -> None:
    """Write what is wrong on the error stream, its first line in the colour of errors where there are colours."""
    console = open_console(sys.stderr)
    first_line, *other_lines = text.split("\n")
    section = Section([Status(first_line, "bad"), *other_lines])
    write_error(render_terminal([section], console) if console else text + "\n")
