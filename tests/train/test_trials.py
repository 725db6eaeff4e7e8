"""Runs side by side: what the line of a run says when its process ends in one way or another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwise.measure.batch_experiments.concurrent_runs import ExperimentFolder, ProcessBudget, Runner, parse_batches
from shardwise.run.faults.stop_request import StopRequest
from shardwise.values.errors import InputError


@dataclass(frozen=True)
class Numbered:
    """A run that is refused by `train`, whose process therefore ends with exit code 2."""

    name: str

    @property
    def key(self) -> str:
        return self.name


@dataclass
class Refused:
    """Two runs; the log of one of them has all its steps once its process has begun, whatever the process does then."""

    folder: ExperimentFolder
    begun: set[str] = field(default_factory=set)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def pending_trials(self) -> list[Numbered]:
        done = [line["name"] for line in self.lines]
        return [Numbered(name) for name in ("whole", "torn") if name not in done]

    def prepare(self, trial: Numbered) -> None:
        self.begun.add(trial.name)

    def command(self, trial: Numbered) -> list[str]:
        return ["nowhere.json", "--data=nowhere", f"--out={self.folder.path / 'x'}", "--steps=nine"]

    def is_complete(self, trial: Numbered) -> bool:
        return trial.name == "whole" and trial.name in self.begun

    def line(self, trial: Numbered, failed: str | None) -> dict[str, Any]:
        self.lines.append({"name": trial.name, "failed": failed})
        return self.lines[-1]

    def progress_line(self, trial: Numbered, line: Mapping[str, Any]) -> str:
        return trial.name


def test_a_run_with_all_its_steps_has_not_failed_whatever_its_process_ended_with(tmp_path: Path) -> None:
    folder = ExperimentFolder(path=tmp_path / "trials", kind="trial", schema="trial/1", lines="trials.jsonl")
    folder.open_or_resume({"what": 1})
    trials, said = Refused(folder), list[str]()
    with StopRequest() as stop:
        assert Runner(trials, ProcessBudget(num_processes=2, num_threads=1), said.append).run(stop) == 0
    found = {line["name"]: line["failed"] for line in trials.lines}
    assert found["whole"] is None
    assert "--steps: found 'nine'" in found["torn"]
    assert folder.num_ended() == len(said) == 2


def test_a_folder_of_other_runs_is_refused(tmp_path: Path) -> None:
    folder = ExperimentFolder(path=tmp_path / "trials", kind="trial", schema="trial/1", lines="trials.jsonl")
    folder.open_or_resume({"what": 1})
    folder.open_or_resume({"what": 1})
    with pytest.raises(InputError, match=r"what: found 2; the trial in .* has 1, which is required"):
        folder.open_or_resume({"what": 2})
    with pytest.raises(InputError, match="holds other files"):
        ExperimentFolder(path=tmp_path, kind="trial", schema="trial/1", lines="trials.jsonl").open_or_resume({})


def test_cores_are_shared_among_the_runs() -> None:
    alone = ProcessBudget.of("1", 1)
    assert ProcessBudget.of(str(alone.num_threads), 1).num_threads == 1
    assert ProcessBudget.of(None, alone.num_threads) == ProcessBudget(num_processes=1, num_threads=1)
    with pytest.raises(InputError, match="processes"):
        ProcessBudget.of("none", 1)
    with pytest.raises(InputError, match="batches"):
        parse_batches("2:1:x2")
