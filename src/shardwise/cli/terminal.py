"""What a terminal gets that a file does not: lines of its width, and a line that says how far a verb is."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from shardwise.output import complain
from shardwise.units import format_seconds

NARROWEST = 40  # columns; on less nothing is folded
SHOWN_AFTER_S = 1.0  # what is done sooner needs no line
SHOWN_EVERY_S = 0.2
FURTHER = 4  # columns that a line without columns goes on at
COLUMN = re.compile(r"(?<=\S) {2,}(?=\S)")  # between two columns of a table


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream (standard output) is, as COLUMNS says or the terminal; None where it is none."""
    stream = sys.stdout if stream is None else stream
    columns = shutil.get_terminal_size().columns if stream is not None and stream.isatty() else 0
    return columns if columns >= NARROWEST else None


def folded(text: str, width: int | None) -> str:
    """The text in lines of at most `width`: what is longer goes on below its last column, or indented where that is too far out.

    >>> print(folded("  memory    80 GB   of the datasheet of the vendor, page 3", 40))
      memory    80 GB   of the datasheet of
                        the vendor, page 3
    """
    return text if width is None else "\n".join(_folded_line(line, width) for line in text.split("\n"))


def _folded_line(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indented = len(line) - len(line.lstrip()) + FURTHER
    starts = [gap.end() for gap in COLUMN.finditer(line) if gap.end() <= width // 2]
    start = max(starts, default=min(indented, width // 2))
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=" " * start, break_on_hyphens=False))


class ProgressLine:
    """One line of a terminal's error stream, written again and again until the verb is done; none on what is no terminal.

    It is a `Progress`. A thread of its own shows it, so that the seconds go on where nothing is reported for a while.
    """

    def __init__(self, verb: str, stream: TextIO | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.verb, self.clock, self.started = verb, clock, clock()
        self.stream = stream if stream is not None and stream.isatty() else None
        self.said = ""
        self.ended, self.shown = threading.Event(), False
        self.thread = threading.Thread(target=self._show, daemon=True)

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """Note what is being done; it is shown with the next writing of the line."""
        self.said = f"{what} {done / total:.0%} ({done:,} of {total:,})" if total else what

    def line(self) -> str:
        """What the line says now; empty while the verb has only begun."""
        seconds = self.clock() - self.started
        said = f": {self.said}" if self.said else ""
        return f"{self.verb}{said}, {format_seconds(float(int(seconds)))}" if seconds >= SHOWN_AFTER_S else ""

    def _show(self) -> None:
        while not self.ended.wait(SHOWN_EVERY_S):
            if line := self.line():
                self._write(line)

    def _write(self, line: str) -> None:
        self.shown = True
        width = shutil.get_terminal_size().columns
        complain(f"\r\x1b[K{line[: width - 1]}", self.stream)

    def __enter__(self) -> ProgressLine:
        if self.stream:
            self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        if self.stream:
            self.thread.join()
        if self.shown:
            complain("\r\x1b[K", self.stream)
