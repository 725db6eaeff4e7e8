"""Work of a library that ignores Ctrl-C, so that Ctrl-C ends a program all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def fed(work: Callable[[Iterator[Item]], object], items: Iterable[Item]) -> None:
    """Run `work` on the items in a thread of its own, and wait for its end or for Ctrl-C, which only the main thread receives.

    After Ctrl-C it gets no further item, and `KeyboardInterrupt` is raised as soon as it asks for none: what it then does
    outside Python ends with the process. Raises what the work raises.
    """
    stopped, left = threading.Event(), threading.Event()
    problems: list[BaseException] = []

    def handed_over() -> Iterator[Item]:
        try:
            for item in items:
                if stopped.is_set():
                    return
                yield item
        finally:
            left.set()

    def run() -> None:
        try:
            work(handed_over())
        except BaseException as error:
            problems.append(error)
        finally:
            left.set()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()  # inside: Ctrl-C may come before it has returned, and the work runs on unless it is stopped
        thread.join()
    except KeyboardInterrupt:
        stopped.set()
        if thread.is_alive():
            left.wait()
        raise
    if problems:
        raise problems[0]
