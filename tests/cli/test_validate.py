"""`shardwise validate` as a user meets it: the report, the payload, the picture, rows of one's own, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from number_paths import require_payload_numbers

import shardwise as sw
from shardwise.present.command_line import main
from shardwise.values.errors import InputError

HEADER = (
    "id,family,model,layers,d_model,n_heads,d_ff,vocab,gated_mlp,chip,n_devices,seq_len,micro_batch,global_batch,tp,pp,dtype,"
    "step_time_s,peak_memory_gb,memory_unit,quality,dup_group,something_else"
)
RUN = "llama,8,1024,8,4096,51200,yes,H100,8,2048,1,8,1,1"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(("validate", *arguments))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def write_rows(tmp_path: Path, lines: Sequence[str]) -> str:
    file = tmp_path / "mine.csv"
    file.write_text("\n".join((HEADER, *lines)) + "\n", encoding="utf-8")
    return str(file)


def test_report_says_errors_by_stratum_the_worst_rows_and_what_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--source", "internevo", "--chip", "a100")
    assert (code, err) == (0, "")
    for part in ("54 runs, 54 with a prediction", "mean", "median", "p90", "bias", "overall", "quality   A ", "largest errors",
                 "fsdp=", "internevo-7b-a100-"):  # fmt: skip
        assert part in out
    code, out, _ = run(capsys, "--source", "mbridge-26.08")
    assert code == 0
    assert "without a prediction" in out


def test_payload_has_rows_and_errors_by_stratum(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [
        f"one,a,{RUN},bf16,0.1,10,GiB,A,g,x", f"two,a,{RUN},bf16,0.2,,,A,g,x", f"three,a,{RUN},dots,0.1,,,A,h,x",
        f"four,a,{RUN},bf16,,,,A,i,x",
    ]  # fmt: skip
    code, out, _ = run(capsys, "--rows", write_rows(tmp_path, lines), "--json")
    payload = json.loads(out)
    assert code == 0
    assert payload["schema"] == "shardwise.validate/2"
    rows = {row["id"]: row for row in payload["rows"]}
    assert list(rows) == ["one", "two", "three", "four"]
    for row in rows.values():
        assert {"id", "predicted_step_time_s", "interval90", "predicted_peak_memory_gb", "skipped"} <= row.keys()
    assert rows["one"]["predicted_step_time_s"] == rows["two"]["predicted_step_time_s"] > 0
    assert rows["one"]["skipped"] is None
    assert rows["one"]["measured_peak_memory_gb"] == pytest.approx(10 * 2**30 / 1e9)
    assert rows["three"]["skipped"] == "no precision recipe: dots"
    assert rows["three"]["predicted_step_time_s"] is None
    assert rows["four"]["predicted_step_time_s"] == rows["one"]["predicted_step_time_s"]
    overall = payload["summary"]["overall"]["all"]
    assert (overall["num_rows"], overall["weight"]) == (2, pytest.approx(1.0))
    assert set(overall) == {"num_rows", "weight", "mean", "median", "p90", "worst", "bias", "coverage"}
    low, high = rows["one"]["interval90"]
    assert low < rows["one"]["predicted_step_time_s"] < high
    assert payload["memory_summary"]["overall"]["all"]["num_rows"] == 1
    assert set(payload["memory_summary"]) == {*payload["summary"], "measured"}
    assert payload["memory_summary"]["measured"].keys() == {"not stated"}
    assert payload["fits"] == {"stated": 0, "would_not_fit": 0, "by_over_a_tenth": 0, "tight": 0}
    assert payload["skipped"] == {"no precision recipe": {"rows": 1, "scored": 1}}
    assert set(payload["summary"]) == {
        "overall", "chip", "dtype", "model", "source", "quality", "recompute", "stack",
    }  # fmt: skip


def test_plot_has_a_mark_for_each_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "accuracy.svg"
    code, _, _ = run(capsys, "--source", "simumax", "--plot", str(target))
    marks = [element for element in ElementTree.parse(target).iter() if element.tag.endswith("circle")]
    assert code == 0
    assert len(marks) == 2 * (30 + 1)  # and one in the legend; of the step times and of what is left


def test_rows_of_ones_own_without_a_measurement_are_predicted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = write_rows(tmp_path, [f"one,a,{RUN},bf16,,,,,,"])
    code, out, _ = run(capsys, "--rows", rows)
    assert code == 0
    assert "no run that counts has both a prediction and a measured step time" in out
    code, _, err = run(capsys, "--rows", rows, "--plot", str(tmp_path / "none.svg"))
    assert code == 2
    assert "--plot: no row" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--rows", "."], "cannot read ."),
        (["--chip", "abacus"], "found none of 1059 rows with chip 'abacus'"),
        (["--source", "hearsay"], "the sources "),
        (["--plot", "/nowhere/at/all.svg", "--source", "simumax"], "/nowhere/at/all.svg"),
        (["--groups", "--chip", "h100"], "--groups: found --chip with it"),
        (["--groups", "--plot", "x.svg", "--report", "x.html"], "--groups: found --plot, --report with it"),
        (["--folds", "--bound"], "--folds: found --bound with it"),
    ],
)
def test_wrong_input_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_measured_cells_that_are_no_numbers_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [f"one,a,{RUN},bf16,16 s,,,A,g,x", f"two,a,{RUN},bf16,0.2,-3,,A,h,x"]
    code, out, _ = run(capsys, "--rows", write_rows(tmp_path, lines))
    assert code == 0
    assert "2 measured cells are not numbers above 0 and are ignored: one, step_time_s: found '16 s'" in out
    code, out, _ = run(capsys, "--rows", write_rows(tmp_path, lines), "--json")
    assert json.loads(out)["unreadable"] == [["one", "step_time_s", "16 s"], ["two", "peak_memory_gb", "-3"]]


def test_rows_that_say_the_same_are_one_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [f"{name},a,{RUN},bf16,0.2,,,A,,x" for name in ("one", "two", "three")]
    _, out, _ = run(capsys, "--rows", write_rows(tmp_path, lines), "--json")
    assert json.loads(out)["summary"]["overall"]["all"]["weight"] == pytest.approx(1.0)


@pytest.mark.parametrize(("arguments", "num_rows"), [([], None), (["--source", "internevo", "--chip", "a100"], 54)])
def test_folds_are_of_what_the_packages_constants_are_fitted_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], num_rows: int | None
) -> None:
    """The package's rows come with the study of layouts beside them; rows that someone chose come alone."""
    row_counts: list[int | None] = []

    def instead(rows: Sequence[object] | None, _: object) -> None:
        row_counts.append(None if rows is None else len(rows))
        raise InputError("folds")

    monkeypatch.setattr("shardwise.measure.calibrate.validation.fit_published", instead)
    assert run(capsys, "--folds", *arguments) == (2, "", "error: folds\n")
    assert row_counts == [num_rows]


def test_python_result_reports_the_numbers_of_the_payload() -> None:
    evaluated = sw.validate(source="mbridge-26.08")
    assert {run.row.family for run in evaluated.runs} == {"nvidia-mbridge-26.08"}
    assert require_payload_numbers(evaluated) > 60
