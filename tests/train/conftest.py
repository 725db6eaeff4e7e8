"""Processes that a test starts are ended with it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from train.copies import CopiedAttempt
from train.launching import Launched

from shardwise.measure.experiments import backends


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    while Launched.started:
        Launched.started.pop().kill()


@pytest.fixture
def copied_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts of experiments, and what they run, begin as copies of a process that has PyTorch loaded."""
    names = {"Popen": CopiedAttempt, "DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(backends, "subprocess", SimpleNamespace(**names))
