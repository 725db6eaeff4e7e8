"""Hypothesis runs the same examples every time, and no example has a time limit; the golden cases' counts and the reasons of
skipped tests are printed.

The longest test is the first, so that at the end no process waits for it alone; those after it predict the same published runs,
once for all in one process. Python looks for cycles less often than by default (700 new objects), and never among what was
there before the first test: derivations make many objects and no cycles, and a third of their time went there. PyTorch has one
thread: those of several workers wait for one another, and a step of a small model then takes five times as long.
"""

from __future__ import annotations

import gc
import os
from collections import Counter

import pytest
from golden.summary import pytest_configure
from hypothesis import settings
from thinned import thin

__all__ = ["pytest_configure"]

FIRST = (
    "calibrate/test_published_fit.py", "calibrate/test_accuracy.py", "reconcile/test_memory.py", "planning/test_choose.py",
)  # fmt: skip

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before PyTorch is loaded
gc.set_threshold(10_000)
settings.register_profile("shardwise", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("shardwise")


@pytest.hookimpl(tryfirst=True)  # before cases are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    thin(items)
    order = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(order)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each device or program that was missing: the progress line has only a letter for it."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, number in reasons.items():
        terminalreporter.write_line(f"skipped: {number}: {reason}")
