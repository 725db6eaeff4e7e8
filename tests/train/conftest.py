"""No rank that a test has started outlives it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from train.copies import Trial
from train.launching import Launched

from shardwise.measure.batch_experiments import concurrent_runs


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    while Launched.started:
        Launched.started.pop().kill()


@pytest.fixture
def copied_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a sweep begin as copies of a process that has PyTorch loaded."""
    monkeypatch.setattr(concurrent_runs, "subprocess", SimpleNamespace(Popen=Trial, DEVNULL=subprocess.DEVNULL))
