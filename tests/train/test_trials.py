"""Runs of an experiment on the batch size under the driver: what is recorded, run again, needless, and refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shardwise.measure.batch_experiments.experiment_folder import ExperimentFolder, ProcessBudget, parse_batches
from shardwise.measure.batch_experiments.trial_runs import run_trials
from shardwise.measure.experiments.ledger import Ledger, read_ledger
from shardwise.records.step_log import MfuFormula, StepRecord, format_step_line
from shardwise.values.errors import InputError

STEP = StepRecord(
    step=1, loss=3.0, grad_norm=1.0, learning_rate=1e-3, num_tokens=8, num_targets=8, step_time_s=0.5,
)  # fmt: skip
RATES = MfuFormula(
    num_devices=1, chip="a CPU", peak_format="fp32", peak_flops_per_s=None, flops_per_token=1e6, hardware_ratio=1.0
)


@dataclass(frozen=True)
class Numbered:
    """A run that is refused by `train`, whose process therefore ends with exit code 2."""

    name: str

    @property
    def settings(self) -> Mapping[str, str]:
        return {"name": self.name}


@dataclass
class Refused:
    """Runs of which "whole" has a log with all steps once its process has begun, whatever that does then.

    "late" is needless once a line is there, and "lost" cannot be prepared.
    """

    folder: ExperimentFolder
    names: tuple[str, ...] = ("whole", "torn")
    begun: set[str] = field(default_factory=set)

    def lines(self) -> dict[str, str | None]:
        text = self.folder.runs.read_text(encoding="utf-8") if self.folder.runs.exists() else ""
        return {line["name"]: line["failed"] for line in map(json.loads, text.splitlines())}

    def pending_trials(self) -> list[Numbered]:
        done = self.lines()
        return [Numbered(name) for name in self.names if name not in done and not (done and name == "late")]

    def trial_of(self, settings: Mapping[str, Any]) -> Numbered:
        return Numbered(settings["name"])

    def prepare(self, trial: Numbered) -> None:
        if trial.name == "lost":
            raise InputError("lost: no checkpoint")
        self.begun.add(trial.name)
        if trial.name == "whole":
            log = self.folder.run_of(trial.name).log
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(json.dumps(format_step_line(STEP, RATES, {})) + "\n", encoding="utf-8")

    def command(self, trial: Numbered) -> list[str]:
        return ["nowhere.json", "--data=nowhere", f"--out={self.folder.path / 'x'}", "--steps=nine"]

    def is_complete(self, trial: Numbered) -> bool:
        return trial.name == "whole" and trial.name in self.begun

    def line(self, trial: Numbered, failed: str | None) -> dict[str, Any]:
        return {"name": trial.name, "failed": failed}

    def progress_line(self, trial: Numbered, line: Mapping[str, Any]) -> str:
        return trial.name

    def run(self, num_processes: int = 2) -> list[str]:
        """Run to the end; return the lines of progress."""
        messages: list[str] = []
        run_trials(self, ProcessBudget(num_processes=num_processes, num_threads=1), 1, {"what": 1}, messages.append)
        return messages

    def attempts(self) -> dict[str, tuple[str, int]]:
        """State and number of attempts of each run, by its name."""
        rows = read_ledger(self.folder.ledger).rows.values()
        return {row.configuration.label: (row.state, len(row.attempts)) for row in rows}


@pytest.fixture
def folder(tmp_path: Path) -> ExperimentFolder:
    return ExperimentFolder(path=tmp_path / "trials", kind="trial", schema="trial/1", lines="trials.jsonl")


@pytest.mark.usefixtures("copied_attempts")
def test_a_run_with_all_its_steps_has_not_failed_whatever_its_process_ended_with(folder: ExperimentFolder) -> None:
    trials = Refused(folder)
    messages = trials.run()
    ended = trials.lines()
    assert ended["whole"] is None
    assert "--steps: found 'nine'" in (ended["torn"] or "")
    assert trials.attempts() == {"whole": ("done", 1), "torn": ("failed", 1)}
    assert messages[0] == "0 of the trial's runs are done; 2 run side by side"
    assert messages[-1].endswith("(2 runs done, 0 under way)")
    assert trials.run() == ["2 of the trial's runs are done; 2 run side by side"]


@pytest.mark.usefixtures("copied_attempts")
def test_a_run_without_a_line_is_recorded_from_its_log_or_run_again(folder: ExperimentFolder) -> None:
    """As after a driver that was killed before it wrote the lines, or once the user has taken them out."""
    trials = Refused(folder)
    trials.run()
    folder.runs.unlink()
    trials.run()
    assert set(trials.lines()) == {"whole", "torn"}
    assert trials.attempts() == {"whole": ("done", 1), "torn": ("failed", 2)}


@pytest.mark.usefixtures("copied_attempts")
def test_a_run_that_others_make_needless_is_skipped(folder: ExperimentFolder) -> None:
    trials = Refused(folder, ("whole", "late"))
    trials.run(num_processes=1)
    assert trials.attempts() == {"whole": ("done", 1), "late": ("skipped", 0)}


def test_a_run_that_cannot_be_prepared_is_an_error(folder: ExperimentFolder) -> None:
    trials = Refused(folder, ("lost",))
    for _ in range(2):
        with pytest.raises(InputError, match="lost: no checkpoint"):
            trials.run()


def test_a_folder_that_another_process_writes_or_of_other_runs_is_refused(
    folder: ExperimentFolder, tmp_path: Path
) -> None:
    with (
        Ledger(folder.ledger),
        pytest.raises(InputError, match=r"--out: .*ledger.jsonl is written by process \d+ on .*, or choose another"),
    ):
        Refused(folder).run()
    folder.open_or_resume({"what": 1})
    folder.open_or_resume({"what": 1})
    with pytest.raises(InputError, match=r"what: found 2; the trial in .* has 1, which is required"):
        folder.open_or_resume({"what": 2})
    with pytest.raises(InputError, match="holds other files"):
        ExperimentFolder(path=tmp_path, kind="trial", schema="trial/1", lines="trials.jsonl").require_usable({})


def test_cores_are_shared_among_the_runs() -> None:
    single = ProcessBudget.of("1", 1)
    assert ProcessBudget.of(str(single.num_threads), 1).num_threads == 1
    assert ProcessBudget.of(None, single.num_threads) == ProcessBudget(num_processes=1, num_threads=1)
    with pytest.raises(InputError, match="processes"):
        ProcessBudget.of("none", 1)
    with pytest.raises(InputError, match="batches"):
        parse_batches("2:1:x2")
