"""Hypothesis runs the same examples every time, and no example has a time limit; the golden cases' counts and the reasons of
skipped tests are printed.

Test files come in the order of `order.py`, and each worker takes the next one; without workers, files that are named come in
the order of their names. Python looks for cycles less often than by default (700 new objects), and never among what was there
before the first test: derivations make many objects and no cycles, and a third of their time went there. PyTorch has one
thread: those of several workers wait for one another, and a step of a small model then takes five times as long.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import thinned
from golden.summary import pytest_configure
from hypothesis import settings
from order import OrderedScheduling, named_files, order_files
from searched import REMEMBERED, install

__all__ = ["pytest_configure"]

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is loaded
os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded: its kernels run without a GPU
gc.set_threshold(10_000)
TESTS = Path(__file__).parent
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=15)
settings.register_profile("matrix", derandomize=True, deadline=None, max_examples=300)
settings.load_profile("suite")  # `make matrix` passes --hypothesis-profile matrix


def pytest_sessionstart(session: pytest.Session) -> None:
    thinned.is_suite = session.config.getoption("markexpr") == "not matrix"


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thinned.thin(items)
    files = {item.path: item.path.relative_to(TESTS).as_posix() for item in items}
    named = [] if hasattr(config, "workerinput") else named_files(config.args)
    order = named or order_files(files.values())
    positions = {file: position for position, file in enumerate(order)}
    items.sort(key=lambda item: positions[files[item.path]])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OrderedScheduling:
    return OrderedScheduling(config, log)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.testsfailed:  # the package may not even be imported
        install()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _recipes_of_the_catalogue() -> Iterator[None]:
    """A precision recipe that a module of tests registers ends with it."""
    from shardwise.values.precision import PRECISIONS

    before = dict(PRECISIONS)
    yield
    PRECISIONS.clear()
    PRECISIONS.update(before)


@pytest.fixture
def fresh_searches() -> Iterator[Callable[[], None]]:
    """Searches of this test are its own: it changes what they read, or looks at how they go. Gives what forgets those so far."""
    before = dict(REMEMBERED)
    REMEMBERED.clear()
    yield REMEMBERED.clear
    REMEMBERED.clear()
    REMEMBERED.update(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each device or program that was missing: the progress line has only a letter for it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, number in reasons.items():
        terminalreporter.write_line(f"skipped: {number}: {reason}")
