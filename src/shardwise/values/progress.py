"""Progress of long work: a callback that is passed down, so that nothing global is written to."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Callback of long work: `task` is being done, and `done` of `total` units; a total of 0 is unknown.

    >>> def show(task: str, done: int = 0, total: int = 0) -> None:
    ...     print(f"{task}: {done} of {total}" if total else task)
    >>> show("layouts priced", 10, 40)
    layouts priced: 10 of 40
    """

    def __call__(self, task: str, done: int = 0, total: int = 0) -> None: ...


def ignore_progress(task: str, done: int = 0, total: int = 0) -> None:
    """Ignore a report."""


def prefix_progress(progress: Progress, name: str) -> Progress:
    """Return a callback for one part of the work, whose reports begin with the part's name.

    >>> prefix_progress(lambda task, done=0, total=0: print(task), "h100:512")("layouts priced", 1, 2)
    h100:512: layouts priced
    """
    return lambda task, done=0, total=0: progress(f"{name}: {task}", done, total)
