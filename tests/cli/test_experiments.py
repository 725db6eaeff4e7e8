"""`shardwise experiments` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from number_paths import require_payload_numbers

from shardwise.measure import summarise_ledger
from shardwise.measure.experiments.ledger import Ledger
from shardwise.measure.experiments.ledger_lines import Configuration, LedgerLine, Prediction, RunMeasurement
from shardwise.present.command_line import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.fixture
def ledger_file(tmp_path: Path) -> Path:
    """A ledger with a run that was done, one that failed, and one that is left."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        for number, label in enumerate(("tp=1", "tp=2", "tp=4"), start=1):
            configuration = Configuration(settings={"tp": number}, label=label, group="gpt-2 on h100:8")
            ledger.append(
                LedgerLine(
                    fingerprint=configuration.fingerprint, state="predicted", configuration=configuration,
                    prediction=Prediction(step_time_s=0.1 * number, interval90=(0.08 * number, 0.13 * number)),
                )
            )  # fmt: skip
        first, second, _ = ledger.rows
        ledger.append(LedgerLine(fingerprint=first, state="pending", attempt=1))
        ledger.append(
            LedgerLine(
                fingerprint=first, state="done", attempt=1, seconds=90.0, measurement=RunMeasurement(step_time_s=0.11)
            )
        )
        ledger.append(
            LedgerLine(
                fingerprint=second,
                state="failed",
                attempt=1,
                seconds=5.0,
                cause="disk full",
                reason="No space left on device",
            )
        )
    return path


def test_status_says_states_the_best_what_is_left_and_what_failed(
    capsys: pytest.CaptureFixture[str], ledger_file: Path
) -> None:
    code, out, err = run(capsys, "experiments", "status", str(ledger_file))
    assert (code, err) == (0, "")
    for line in (
        "3 configurations", "1 predicted, 1 done, 1 failed", "0.03 device-hours spent in 2 attempts", "for the 1 that are left",
        "1 of 1 measured steps in the 90% intervals that were predicted before", "gpt-2 on h100:8  tp=1  110 ms",
        "1  disk full  No space left on device",
    ):  # fmt: skip
        assert line in out
    payload = json.loads(run(capsys, "experiments", "status", str(ledger_file), "--json")[1])
    assert payload["states"] == {"predicted": 1, "done": 1, "failed": 1}


def test_numbers_of_the_status_are_those_of_the_payload(ledger_file: Path) -> None:
    assert require_payload_numbers(summarise_ledger(ledger_file)) > 8


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["status", "nowhere.jsonl"], "nowhere.jsonl: cannot read: No such file or directory"),
        (["stats", "ledger.jsonl"], "found 'stats' (did you mean 'status'?)"),
        (["status", __file__], "line 1: the line is not JSON"),
    ],
)
def test_wrong_input_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str) -> None:
    try:
        code, _, err = run(capsys, "experiments", *arguments)
    except SystemExit as stop:
        code, err = int(str(stop.code)), capsys.readouterr().err
    assert code == 2
    assert problem in err
