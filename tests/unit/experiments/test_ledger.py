"""The ledger: whole lines or none, one driver, and the state of every configuration from its lines."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.measure.experiments.ledger import Ledger, read_ledger
from shardwise.measure.experiments.ledger_lines import (
    STATES,
    Configuration,
    LedgerLine,
    RunMeasurement,
    RunPrediction,
    SessionLine,
    dump_line,
    load_line,
)
from shardwise.measure.experiments.ledger_summary import summarise_ledger
from shardwise.values import InputError, parse_json_line
from shardwise.values.errors import OutputError


def predicted_line(label: str, step_s: float = 1.0, group: str = "") -> LedgerLine:
    configuration = Configuration(settings={"name": label}, label=label, group=group, num_devices=8)
    return LedgerLine(
        fingerprint=configuration.fingerprint, state="predicted", configuration=configuration,
        prediction=RunPrediction(step_time_s=step_s, interval90=(0.8 * step_s, 1.25 * step_s), usd_per_hour=16.0),
    )  # fmt: skip


def attempt(first: LedgerLine, state: str, **fields: object) -> LedgerLine:
    return LedgerLine(fingerprint=first.fingerprint, state=state, attempt=1, **fields)  # type: ignore[arg-type]


def test_written_lines_are_read_back_unchanged(tmp_path: Path) -> None:
    first = predicted_line("a")
    lines = [
        SessionLine(written_at="2026-11-28T20:00:00.000Z", experiment={"steps": 10}, versions={}),
        first, attempt(first, "pending", prediction=first.prediction), attempt(first, "running", job="77", logs="l.runs/a"),
        attempt(first, "done", seconds=12.5, measurement=RunMeasurement(step_time_s=1.1, values={"score": 3.0})),
    ]  # fmt: skip
    with Ledger(tmp_path / "runs" / "ledger.jsonl") as ledger:
        ledger.append(*lines)
        rows = dict(ledger.rows)
    content = read_ledger(tmp_path / "runs" / "ledger.jsonl")
    assert content.rows == rows
    row = content.rows[first.fingerprint]
    assert (row.state, row.measurement, row.predicted_before) == ("done", lines[-1].measurement, first.prediction)  # type: ignore[union-attr]
    assert row.line.written_at
    assert content.sessions[0].experiment == {"steps": 10}


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_read_back(state: str) -> None:
    line = LedgerLine(fingerprint="ab", state=state, attempt=1)  # type: ignore[arg-type]
    assert load_line(parse_json_line(dump_line(line))) == line


def test_a_torn_last_line_is_ignored_and_then_removed(tmp_path: Path) -> None:
    path, (first, second) = tmp_path / "ledger.jsonl", (predicted_line("a"), predicted_line("b"))
    with Ledger(path) as ledger:
        ledger.append(first)
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(dump_line(second).encode()[:40])
    assert list(read_ledger(path).rows) == [first.fingerprint]
    assert summarise_ledger(path).torn_bytes == 40
    with Ledger(path) as ledger:
        assert path.read_bytes() == content
        ledger.append(second)
    assert list(read_ledger(path).rows) == [first.fingerprint, second.fingerprint]


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        ("{", "line 2: the line is not JSON"), ("[]", "line 2: not an object"),
        ('{"fingerprint": "ab", "state": "ended"}', "state: found 'ended'; one of predicted, pending"),
        ('{"fingerprint": "ab", "state": "done"}', "ab: no line before it describes this configuration"),
        ('{"schema": "shardwise.ledger/9"}', "the schema is 'shardwise.ledger/9'; shardwise.ledger/1 is required"),
        ('{"fingerprint": "ab", "state": "done", "colour": 1}', "unexpected keyword argument 'colour'"),
        ('{"fingerprint": "ab", "state": "done", "configuration": {"settings": 3}}', "settings are missing"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named_and_never_skipped(tmp_path: Path, damaged: str, problem: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(
        f"{dump_line(predicted_line('a'))}\n{damaged}\n{dump_line(predicted_line('b'))}\n", encoding="utf-8"
    )
    with pytest.raises(InputError) as raised:
        read_ledger(path)
    assert problem in str(raised.value)
    with pytest.raises(InputError), Ledger(path):
        pass


HOLD = """
import sys, time
from shardwise.measure.experiments.ledger import Ledger
with Ledger(sys.argv[1]):
    print("entered", flush=True)
    time.sleep(60)
"""


def test_a_second_driver_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    driver = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    with driver:
        assert driver.stdout.readline() == "entered\n"
        with (
            pytest.raises(InputError, match=rf"is written by process {driver.pid} on .*choose another"),
            Ledger(path),
        ):
            pass
        assert read_ledger(path).rows == {}  # a reader is not refused
        driver.send_signal(signal.SIGKILL)
    with Ledger(path) as ledger:
        ledger.append(predicted_line("a"))


def test_no_partial_line_remains_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, real_write = tmp_path / "ledger.jsonl", os.write

    def write_a_part(file: int, block: bytes) -> int:
        if len(block) > 100:
            return real_write(file, block[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with Ledger(path) as ledger:
        ledger.append(predicted_line("a"))
        content = path.read_bytes()
        monkeypatch.setattr(os, "write", write_a_part)
        with pytest.raises(OutputError, match="No space left on device; the same command goes on"):
            ledger.append(predicted_line("b"))
        monkeypatch.undo()
        assert path.read_bytes() == content
        ledger.append(predicted_line("c"))
        assert [row.configuration.label for row in ledger.rows.values()] == ["a", "c"]


def test_the_fingerprint_depends_only_on_the_executed_settings() -> None:
    first = Configuration(settings={"tp": 2, "dp": 4}, label="a", group="x")
    assert first.fingerprint == Configuration(settings={"dp": 4, "tp": 2}, label="b", group="y").fingerprint
    different = [
        Configuration(settings={"tp": 4, "dp": 2}), Configuration(settings=first.settings, num_nodes=2),
        Configuration(settings=first.settings, num_devices=8),
    ]  # fmt: skip
    assert len({first.fingerprint, *(configuration.fingerprint for configuration in different)}) == 4


def test_a_summary_counts_states_costs_causes_and_intervals(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    fast, slow, over, lost, skipped, remaining = (
        predicted_line(label, step_s, "g")
        for label, step_s in zip("abcdef", (1.0, 2.0, 1.5, 1.0, 9.0, 3.0), strict=True)
    )
    ends = [
        attempt(fast, "done", seconds=3600.0, measurement=RunMeasurement(step_time_s=1.2)),
        attempt(slow, "done", seconds=1800.0, measurement=RunMeasurement(step_time_s=2.9)),
        attempt(over, "out of memory", seconds=600.0, cause="out of memory", reason="CUDA out of memory"),
        attempt(lost, "failed", seconds=60.0, cause="exit code 1", reason="ended with exit code 1"),
    ]  # fmt: skip
    with Ledger(path) as ledger:
        ledger.append(SessionLine(written_at="t", experiment={"steps": 100}, versions={}))
        ledger.append(fast, slow, over, lost, skipped, remaining)
        ledger.append(*(attempt(first, "pending", prediction=first.prediction) for first in (fast, slow, over, lost)))
        ledger.append(*ends)
        ledger.append(
            LedgerLine(
                fingerprint=skipped.fingerprint,
                state="skipped",
                cause="cannot win",
                reason="begins at 7.2 s",
                bound_s=1.2,
            )
        )
    status = summarise_ledger(path)
    assert status.states == {"predicted": 1, "done": 2, "out of memory": 1, "failed": 1, "skipped": 1}
    assert (status.num_attempts, status.coverage.num_inside, status.coverage.num_runs) == (4, 1, 2)
    assert status.spent.device_hours == pytest.approx((3600 + 1800 + 600 + 60) * 8 / 3600)
    assert status.spent.usd == pytest.approx(16.0 * (3600 + 1800 + 600 + 60) / 3600)
    starts = (3600 - 120 + 1800 - 290) / 2  # the mean of two is their median
    assert status.left.num_runs == 1
    assert status.left.device_hours == pytest.approx((starts + 100 * 3.0) * 8 / 3600)
    (group,) = status.groups
    assert group.best is not None
    assert (group.best.label, group.best.predicted_s, group.least_left_s, group.settled) == (
        "a",
        1.0,
        2.4000000000000004,
        False,
    )
    assert [(cause.cause, cause.count) for cause in status.failures] == [("out of memory", 1), ("exit code 1", 1)]
    assert [(cause.cause, cause.example) for cause in status.skipped] == [("cannot win", "begins at 7.2 s")]
