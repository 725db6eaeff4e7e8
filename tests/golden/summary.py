"""A pytest plugin that counts the golden cases of a run and says so at its end.

A parallel run collects in its workers only, so the controlling process has this plugin from `tests/conftest.py` or not
at all; the plugin's name keeps it from being registered twice.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

NAME = "golden_summary"
NOT_COMPUTABLE = Path(__file__).parent / "not_computable.toml"


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.has_plugin(NAME):
        config.addinivalue_line("markers", "golden_case: one worked problem of cases.toml")
        config.pluginmanager.register(Summary(), NAME)


class Summary:
    """Counts reports by their marker, which workers send along."""

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = {
            outcome: sum("golden_case" in getattr(report, "keywords", {}) for report in reports)
            for outcome, reports in terminalreporter.stats.items()
        }
        passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
        if passed or failed:
            listed = len(tomllib.loads(NOT_COMPUTABLE.read_text(encoding="utf-8"))["case"])
            terminalreporter.write_line(f"golden: {passed} passed, {listed} not computable, {failed} failed")
