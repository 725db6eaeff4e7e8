"""`shardwise experiments` as a user meets it."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path

import pytest
from number_paths import require_payload_numbers

from shardwise.measure import report_experiment, summarise_ledger
from shardwise.measure.experiments.ledger import Ledger
from shardwise.measure.experiments.ledger_lines import Configuration, LedgerLine, RunMeasurement, RunPrediction
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
                    prediction=RunPrediction(step_time_s=0.1 * number, interval90=(0.08 * number, 0.13 * number)),
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


def test_status_lists_states_best_pending_and_failed_runs(
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


def test_a_report_has_the_best_of_each_model_and_number_of_nodes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = report_ledger(tmp_path)
    code, out, err = run(capsys, "experiments", "report", str(path), "--out", str(tmp_path / "report.html"), "-v")
    assert (code, err) == (0, "")
    payload = json.loads(run(capsys, "experiments", "report", str(path), "--json")[1])
    best = {(cell["model_name"], cell["num_nodes"]): (cell["label"], cell["failure"]) for cell in payload["best"]}
    assert best == {
        ("a", 1): ("tp=1", ""),
        ("a", 2): ("tp=2", ""),
        ("b", 1): ("tp=1", ""),
        ("b", 2): ("", "out of memory"),
    }
    scaling = [
        (point["model_name"], point["num_devices"], round(point["efficiency"], 3)) for point in payload["scaling"]
    ]
    assert scaling == [("a", 8, 1.0), ("a", 16, 0.9), ("b", 8, 1.0)]
    assert len(payload["pairs"]) == 5
    for line in ("a          2       16               2  tp=2", "out of memory", "3 of 5 measured steps", "scaling"):
        assert line in out
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    for text in (
        "Best configuration by model and nodes",
        "Scaling: tokens/s",
        "Predicted against measured steps",
        "<table>",
    ):
        assert text in html
    assert "<script" not in html
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert require_payload_numbers(report_experiment(path)) > 30


def report_ledger(tmp_path: Path) -> Path:
    """A ledger of two models on one and two nodes, with tp=1 and 2; b runs out of memory on two nodes."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        for model, nodes, tp in itertools.product("ab", (1, 2), (1, 2)):
            configuration = Configuration(
                settings={"model": model, "tp": tp},
                label=f"tp={tp}",
                group=f"{model} on {nodes}",
                num_nodes=nodes,
                num_devices=8 * nodes,
            )
            name = configuration.fingerprint
            fails = model == "b" and (nodes, tp) != (1, 1)
            seconds = 1.0 if tp == nodes else 1.4
            measured = RunMeasurement(
                step_time_s=seconds, tokens_per_s_per_device=900.0 / seconds / (1.0 if nodes == 1 else 1 / 0.9)
            )
            ledger.append(
                LedgerLine(
                    fingerprint=name,
                    state="predicted",
                    configuration=configuration,
                    prediction=RunPrediction(step_time_s=1.0, interval90=(0.9, 1.1)),
                ),
                LedgerLine(fingerprint=name, state="pending", attempt=1),
                LedgerLine(
                    fingerprint=name,
                    attempt=1,
                    seconds=9.0,
                    **(
                        {"state": "out of memory", "cause": "out of memory", "reason": "CUDA out of memory"}
                        if fails
                        else {"state": "done", "measurement": measured}
                    ),
                ),
            )
    return path


def test_published_runs_are_reported_like_a_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    rows = Path(__file__).parents[2] / "examples" / "calibrate" / "runs.csv"
    payload = json.loads(run(capsys, "experiments", "report", str(rows), "--json")[1])
    with rows.open(encoding="utf-8") as file:
        rates = ("step_time_s", "tokens_per_s_per_device", "implied_tokens_per_s_per_device")
        published = [row for row in csv.DictReader(file) if any(row.get(name) for name in rates)]
    assert {cell["model_name"] for cell in payload["best"]} == {row["model"] for row in published}
    assert sum(cell["num_configurations"] for cell in payload["best"]) == len(published)
    assert payload["pairs"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["status", "nowhere.jsonl"], "nowhere.jsonl: cannot read: No such file or directory"),
        (["stats", "ledger.jsonl"], "found 'stats' (did you mean 'status'?)"),
        (["status", __file__], "line 1: the line is not JSON"),
        (["status", __file__, "--out", "x.html"], "--out: `experiments status` writes no report; leave it out"),
        (["report", __file__, "--out", "x.pdf"], "write a name that ends in .html"),
        (
            ["status", __file__, "--on", "slurm"],
            "--on: not of `experiments status`; leave out, or `shardwise experiments run`",
        ),
        (["run", __file__], "--ledger: found none; a file such as runs/ledger.jsonl is required"),
        (["run", __file__, "--ledger", "l.jsonl", "--set", "gpus"], "--set: found 'gpus'; KEY=VALUE is required"),
    ],
)
def test_wrong_input_is_named(capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str) -> None:
    try:
        code, _, err = run(capsys, "experiments", *arguments)
    except SystemExit as stop:
        code, err = int(str(stop.code)), capsys.readouterr().err
    assert code == 2
    assert problem in err
