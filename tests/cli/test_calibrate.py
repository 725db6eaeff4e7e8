"""`shardwise calibrate` as a user meets it: the report, the payload, the file that plans then use, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from measurement.logs_of import megatron
from number_paths import require_payload_numbers

import shardwise as sw
from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.published_constants import published_spread
from shardwise.measure.calibrate.published_runs.run_table import published_rows
from shardwise.present.command_line import main

RUNS = str(Path(__file__).parents[2] / "examples" / "calibrate" / "runs.csv")
JOB = ("--batch-tokens", "512Ki", "--seq-len", "8192")
COPY = '{"bench": "memory", "bytes": 4e9, "seconds": 1.6e-3}\n'


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_calibrated_cluster_is_planned_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "mine.toml")
    code, text, err = run(capsys, "calibrate", "h100:8", "--runs", RUNS, "--name", "ours", "--out", out)
    assert (code, err) == (0, "")
    assert text.endswith(f"wrote {out}\n")
    cluster = load_cluster(out)
    assert (cluster.name, cluster.num_devices) == ("ours", 8)
    assert cluster.calibration is not None
    assert cluster.calibration.source.startswith("fitted to 3 runs of runs.csv, 20")
    code, text, _ = run(capsys, "plan", "llama-3.2-1b", out, *JOB, "--json")
    estimate = json.loads(text)["estimate"]
    low, high = cluster.calibration.spread["dense"]
    assert code == 0
    assert estimate["interval90"] == pytest.approx([estimate["step_time_s"] * low, estimate["step_time_s"] * high])
    _, bound, _ = run(capsys, "estimate", "llama-3.2-1b", "h100:8", "--layout", "fsdp=8", *JOB, "--json")
    _, ours, _ = run(capsys, "estimate", "llama-3.2-1b", out, "--layout", "fsdp=8", *JOB, "--json")
    assert json.loads(ours)["estimate"]["step_time_s"] != json.loads(bound)["estimate"]["step_time_s"]


def write_published_rows(folder: Path, family: str, chip: str, max_rows: int) -> str:
    """Published rows of a source in a file, as one's own."""
    rows = [
        row
        for row in published_rows()
        if row.family == family and row.cell("chip") == chip and row.quality in ("A", "A-")
    ]
    columns = sorted({column for row in rows for column, _ in row.inputs})
    lines = [",".join([*columns, "step_time_s"])]
    lines += [
        ",".join([*(f'"{row.cell(column)}"' for column in columns), repr(row.step_time_s)])
        for row in rows[::4][:max_rows]
    ]
    file = folder / "mine.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(file)


def test_many_alike_runs_narrow_the_interval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = write_published_rows(tmp_path, "mosaicml-mpt", "H100-80GB-SXM", 16)
    code, text, _ = run(capsys, "calibrate", "h100:64", "--runs", rows, "--json")
    report = json.loads(text)
    low, high = report["spread"]["dense"]
    of_three_runs = published_spread("calibrated", "h100", report["stack"], "dense")
    assert (code, report["runs"]["count"]) == (0, 16)
    assert high / low < of_three_runs[1] / of_three_runs[0]


def test_payload_has_constants_errors_and_residuals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bench = tmp_path / "machine.jsonl"
    bench.write_text(COPY, encoding="utf-8")
    code, text, _ = run(capsys, "calibrate", "h100:32", "--runs", RUNS, "--bench", str(bench), "--json")
    payload = json.loads(text)
    assert code == 0
    assert payload["schema"] == "shardwise.calibrate/1"
    assert payload["constants"].keys() == CONSTANTS.keys()
    assert payload["constants"]["memory_fraction"].keys() == {
        "name", "before", "after", "before_deviation", "after_deviation", "moved", "left", "identified",
    }  # fmt: skip
    assert payload["source"] == "fitted to 3 runs of runs.csv and 1 micro-benchmark of machine.jsonl"
    assert (payload["runs"]["count"], payload["benches"]["count"], payload["left_aside"]) == (3, 1, {})
    assert payload["runs"]["after"]["mean"] < payload["runs"]["before"]["mean"]
    errors = [abs(residual["after_s"] / residual["measured_s"] - 1) for residual in payload["residuals"]]
    assert errors == sorted(errors, reverse=True)
    assert {residual["kind"] for residual in payload["residuals"]} == {"dense", "moe", "bench"}


def test_report_names_constants_that_are_not_identified(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bench = tmp_path / "machine.jsonl"
    bench.write_text(COPY + COPY.replace("4e9", "4e6").replace("1.6e-3", "3e-6"), encoding="utf-8")
    _, text, _ = run(capsys, "calibrate", "h100:8", "--bench", str(bench), "--stack", "torchtitan")
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "not identified" not in lines["memory_fraction"]
    assert all("not identified by these measurements" in lines[name] for name in CONSTANTS if name != "memory_fraction")
    assert "set aside: 1 of the micro-benchmarks: shorter than a few launches" in text
    assert "memory 4000 MB" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("h100:8",), "calibrate: found neither --runs nor --run nor --bench; one of them, or several, is required"),
        (("h100:8", "--runs", "none.csv"), "--runs: cannot read none.csv: No such file or directory"),
        (("h100:8", "--bench", "none.jsonl"), "--bench: cannot read none.jsonl"),
        (("h200:8", "--runs", RUNS), "calibrate: nothing measured that can be used (3 of another chip, h100); a run on h200"),
        (("h100:8", "--runs", RUNS, "--stack", "mine"), "stack: found 'mine'; the stacks are llm-foundry-torch1"),
        (("h100:9", "--runs", RUNS), "cluster: h100 comes in nodes of 8"),
        (("h100:8", "--runs", RUNS, "--out", "mine.csv"), "--out: found 'mine.csv'; a name that ends in .toml is required"),
        (("h100:8", "--runs", RUNS, "--out", "/none/mine.toml"), "--out: cannot write /none/mine.toml: No such file"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, "calibrate", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


def test_help_describes_the_file_formats(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    text = capsys.readouterr().out
    lines = [json.loads(line) for line in text.splitlines() if line.strip().startswith("{")]
    assert [line["bench"] for line in lines] == ["matmul", "memory", "collective", "attention"]


CHIP = """
[chip]
name = "x1"
peak_flops_per_s = { bf16 = "800 TFLOP/s" }
memory_bytes = "96 GB"
memory_bytes_per_s = "3 TB/s"

[[tiers]]
name = "switch"
size = 8
bytes_per_s = "300 GB/s"

[[tiers]]
name = "network"
size = 8
bytes_per_s = "50 GB/s"
"""


def test_custom_chip_is_calibrated_by_a_launch_and_its_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """From a plan on it to a calibrated cluster, by the run itself and by a row of it; and once more from there."""
    cluster_file, calibrated_file, plan, rows = (
        str(tmp_path / name) for name in ("x1.toml", "mine.toml", "plan.json", "rows.csv")
    )
    Path(cluster_file).write_text(CHIP, encoding="utf-8")
    code, text, _ = run(
        capsys, "plan", "llama-3-8b", cluster_file, *JOB, "--stack", "megatron", "--out", plan, "--json"
    )
    predicted = json.loads(text)["estimate"]["step_time_s"]
    log = tmp_path / "train.log"
    log.write_text("\n".join(megatron(n, predicted * 1.25e3, batch=64) for n in range(30)) + "\n")
    code, text, err = run(
        capsys, "calibrate", cluster_file, "--run", plan, str(log), "--out", calibrated_file, "--json"
    )
    assert (code, err) == (0, "")
    (residual,) = json.loads(text)["residuals"]
    assert residual["before_s"] == pytest.approx(predicted)
    assert residual["before_s"] < residual["after_s"] < residual["measured_s"] * 1.01
    assert run(capsys, "mfu", str(log), "--plan", plan, "--row", rows)[0] == 0
    _, text, _ = run(capsys, "calibrate", cluster_file, "--runs", rows, "--json")
    assert json.loads(text)["residuals"][0]["after_s"] == pytest.approx(residual["after_s"], rel=1e-3)
    _, text, _ = run(capsys, "calibrate", calibrated_file, "--run", plan, str(log), "--json")
    assert json.loads(text)["residuals"][0]["after_s"] == pytest.approx(residual["after_s"])
    assert load_cluster(calibrated_file).chip.name == "x1"
    code, _, err = run(capsys, "calibrate", "h100:64", "--run", plan, str(log))
    assert (code, "1 of another chip, x1" in err) == (2, True)


def test_python_result_reports_the_numbers_of_the_payload(tmp_path: Path) -> None:
    out = tmp_path / "mine.toml"
    calibration = sw.calibrate("h100:8", RUNS, out=out)
    assert (calibration.name, calibration.out, len(calibration.fit.runs)) == ("mine", str(out), 3)
    assert load_cluster(str(out)).calibration is not None
    assert require_payload_numbers(calibration) > 40
    with pytest.raises(sw.InputError, match="calibrate: found neither runs nor logged_runs nor bench"):
        sw.calibrate("h100:8")


def test_calibrating_again_starts_from_the_published_constants(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "mine.toml")
    run(capsys, "calibrate", "h100:8", "--runs", RUNS, "--out", out)
    first = load_cluster(out)
    assert run(capsys, "calibrate", out, "--runs", RUNS, "--out", out)[0] == 0
    assert load_cluster(out) == first
