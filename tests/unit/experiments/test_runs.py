"""Experiments of tiny commands with faults, to their end: states, attempts, budgets, and drivers that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.measure import ExperimentRequest, run_experiment
from shardwise.measure.experiments.grid_file import read_grid
from shardwise.measure.experiments.ledger import Ledger, LedgerRow, read_ledger
from shardwise.measure.experiments.ledger_lines import LedgerLine
from shardwise.values import InputError

ROOT = Path(__file__).parents[3]
HEAD = 'target = "command"\nsteps = 3\nstart = "1s"\nhang_after = "20s"\ntime_limit = "30s"\n'


def write_grid(
    tmp_path: Path, line: str, more: str = "", pattern: str = "step time: (?P<step_time_s>[0-9.]+) s"
) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(f"{HEAD}{more}\n[command]\nline = '''{line}'''\npattern = '{pattern}'\n", encoding="utf-8")
    return path


def run(grid: Path) -> list[LedgerRow]:
    ledger = grid.parent / "ledger.jsonl"
    run_experiment(ExperimentRequest(grid=grid, ledger=ledger, settings={"devices": "4"}), report=lambda text: None)
    return list(read_ledger(ledger).rows.values())


def test_placeholders_are_replaced_by_values_and_the_output_is_read(tmp_path: Path) -> None:
    line = 'for i in 1 2 3; do echo "step time: {tp}.$i s, loss 3.$i"; done; X=5; echo "memory ${X} GB {num_devices}"'
    pattern = (
        "step time: (?P<step_time_s>[0-9.]+) s, loss (?P<loss>[0-9.]+)|memory (?P<memory_gb>[0-9]+) GB (?P<devices>.)"
    )
    path = write_grid(tmp_path, line, pattern=pattern)
    path.write_text(path.read_text(encoding="utf-8") + "[command.values]\ntp = [1, 2]\n", encoding="utf-8")
    rows = run(path)
    measured = [row.measurement for row in rows]
    assert [row.configuration.label for row in rows] == ["tp=1", "tp=2"]
    assert [m and (m.step_time_s, m.loss, m.memory_bytes, m.values) for m in measured] == [
        (1.25, 3.3, 5e9, {"devices": 1.0}), (2.25, 3.3, 5e9, {"devices": 1.0})
    ]  # fmt: skip
    assert all(row.line.seconds and row.attempts[1].logs.startswith("ledger.runs/") for row in rows)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    assert run(path) == rows  # nothing is left: only the start of the driver is recorded
    assert (tmp_path / "ledger.jsonl").read_bytes().startswith(before)


def test_only_transient_failures_are_repeated(tmp_path: Path) -> None:
    line = (
        "case {run} in killed) kill -9 $$;; once) if [ ! -e ../again ]; then touch ../again; kill -9 $$; fi; "
        'echo "step time: 0.1 s";; memory) echo "CUDA out of memory"; exit 1;; wrong) exit 3;; esac'
    )
    path = write_grid(tmp_path, line, "retries = 2")
    values = '[command.values]\nrun = ["killed", "once", "memory", "wrong", "silent"]\n'
    path.write_text(path.read_text(encoding="utf-8") + values, encoding="utf-8")
    rows = {row.configuration.settings["run"]: row for row in run(path)}
    assert {name: (row.state, row.line.cause, len(row.attempts)) for name, row in rows.items()} == {
        "killed": ("failed", "killed", 3), "once": ("done", "", 2), "memory": ("out of memory", "out of memory", 1),
        "wrong": ("failed", "exit code 3", 1), "silent": ("failed", "no measurement", 1),
    }  # fmt: skip


def test_a_budget_of_runs_ends_the_experiment_and_a_larger_budget_resumes_it(tmp_path: Path) -> None:
    path = write_grid(tmp_path, 'echo "step time: {n}.0 s"', "[budget]\nruns = 2")
    path.write_text(path.read_text(encoding="utf-8") + "[command.values]\nn = [1, 2, 3, 4]\n", encoding="utf-8")
    assert [row.state for row in run(path)] == ["done", "done", "predicted", "predicted"]
    path.write_text(path.read_text(encoding="utf-8").replace("runs = 2", "runs = 4"), encoding="utf-8")
    assert [row.state for row in run(path)] == ["done"] * 4


def test_a_stopped_driver_cancels_its_runs_and_the_next_repeats_them(tmp_path: Path) -> None:
    path = write_grid(tmp_path, 'touch ../started; while [ ! -e ../go ]; do sleep 0.05; done; echo "step time: 1 s"')
    ledger = tmp_path / "ledger.jsonl"
    command = [sys.executable, "-m", "shardwise", "experiments", "run", str(path), "--ledger", str(ledger)]
    driver = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: list(tmp_path.glob("ledger.runs/*/started")))
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 128 + signal.SIGTERM
    assert driver.stderr is not None
    with driver.stderr:
        assert "the same command goes on from" in driver.stderr.read()
    (row,) = read_ledger(ledger).rows.values()
    assert (row.state, row.attempts[1].cause) == ("predicted", "cancelled")
    next(tmp_path.glob("ledger.runs/*")).joinpath("go").touch()
    (row,) = run(path)
    assert (row.state, len(row.attempts)) == ("done", 2)


def test_a_run_continues_while_its_driver_is_killed_and_the_next_driver_records_it(tmp_path: Path) -> None:
    path = write_grid(tmp_path, 'touch ../started; while [ ! -e ../go ]; do sleep 0.05; done; echo "step time: 1 s"')
    ledger = tmp_path / "ledger.jsonl"
    command = [sys.executable, "-m", "shardwise", "experiments", "run", str(path), "--ledger", str(ledger)]
    driver = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_for(lambda: list(tmp_path.glob("ledger.runs/*/started")))
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    next(tmp_path.glob("ledger.runs/*")).joinpath("go").touch()
    (row,) = run(path)
    assert (row.state, len(row.attempts)) == ("done", 1)


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 60
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_configuration_that_its_target_refuses_is_skipped_with_the_reason(tmp_path: Path) -> None:
    path = write_grid(tmp_path, "echo {nothing}")
    (row,) = run(path)
    assert (row.state, row.line.cause) == ("skipped", "refused")
    assert "found 'nothing'" in row.line.reason


def test_the_ledger_of_another_experiment_is_refused(tmp_path: Path) -> None:
    path = write_grid(tmp_path, 'echo "step time: 1 s"')
    run(path)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    path.write_text(path.read_text(encoding="utf-8").replace("1 s", "2 s"), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"ledger: .* has 1 configuration of .*grid\.toml, none of which is in .*grid\.toml"
    ):
        run(path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_a_running_configuration_cannot_be_removed_from_the_grid(tmp_path: Path) -> None:
    """As after a killed driver: only the grid states how its log is read."""
    path = write_grid(tmp_path, 'echo "step time: {n} s"')
    path.write_text(path.read_text(encoding="utf-8") + "[command.values]\nn = [1, 2]\n", encoding="utf-8")
    run(path)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        first = next(iter(ledger.rows))
        ledger.append(LedgerLine(fingerprint=first, state="running", attempt=2))
    path.write_text(path.read_text(encoding="utf-8").replace("n = [1, 2]", "n = [2]"), encoding="utf-8")
    with pytest.raises(
        InputError, match=r"n=1 is under way and not in .*grid\.toml; the grid that it was started with"
    ):
        run(path)


def test_a_ledger_is_a_file(tmp_path: Path) -> None:
    path = write_grid(tmp_path, 'echo "step time: 1 s"')
    for ledger in (".", tmp_path):
        with pytest.raises(InputError, match=r"a folder; a file such as runs/ledger\.jsonl is required"):
            run_experiment(ExperimentRequest(grid=path, ledger=ledger, settings={}))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('target = "comand"', "[problem]: missing; a model and a cluster are required"),
        ('target = "command"', "[command]: missing; its line and its pattern are required"),
        ('stepz = 3\ntarget = "command"', "found 'stepz' (did you mean 'steps'?)"),
        ('[command]\nline = "x"\npattern = "("', "a regular expression is required"),
        ('[command]\nline = "x"\npattern = "loss"', "a group of a step's time is required: (?P<step_time_s>...)"),
        ('steps = 0\n[command]\nline = "x"\npattern = "(?P<step_time_s>.)"', "steps: found 0; a whole number of at least 1"),
        ('time_limit = "soon"\n[command]\nline = "x"\npattern = "(?P<step_time_s>.)"', "time_limit: found 'soon'; a time"),
        ('budget = 3', "budget: found 3; a table is required"),
        ('[budget]\nusd = -3', "usd: found -3; a number above 0"),
        ('[problem]\nmodel = "gpt-2"\ncluster = "h100:8"', "data: missing; folders that `shardwise tokenize` wrote"),
    ],
)  # fmt: skip
def test_problems_of_a_grid_are_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as raised:
        read_grid(path)
    assert problem in str(raised.value)


def test_faults_and_a_killed_driver_leave_a_correct_ledger_and_nothing_else(
    tmp_path: Path,
) -> None:
    """The small form of `benchmarks/experiment_faults.py`."""
    script = ROOT / "benchmarks" / "experiment_faults.py"
    options = [
        "--runs",
        "14",
        "--driver-kills",
        "3",
        "--devices",
        "6",
        "--patience",
        "4",
        "--folder",
        str(tmp_path / "faults"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    checked = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, env=environment, timeout=300
    )
    assert checked.returncode == 0, checked.stdout
    assert "driver killed 3 times" in checked.stdout
    lines = (tmp_path / "faults" / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    assert sum("schema" in json.loads(line) for line in lines) == 4  # each driver has recorded its start
