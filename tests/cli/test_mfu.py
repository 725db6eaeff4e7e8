"""`shardwise mfu` as a user meets it, and the whole way from a launch and its log to a calibrated cluster."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from measurement.logs_of import maxtext, megatron, torchtitan
from measurement.tracked_of import FOLDER
from number_paths import require_payload_numbers

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.present.command_line import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "calibrate" / "run"
LAUNCH, LOG = str(EXAMPLE / "launch.sh"), str(EXAMPLE / "train.log")
RAN = ("--model", "llama-3-8b", "--cluster", "h100:64", "--seq-len", "8192")
BATCH = ("--batch-tokens", "1Mi")
LAYOUT = ("--layout", "fsdp=64", "--stack", "torchtitan")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def payload(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code, out, err = run(capsys, "mfu", *arguments, "--json")
    assert (code, err) == (0, "")
    parsed: dict[str, object] = json.loads(out)
    assert parsed["schema"] == "shardwise.mfu/2"
    return parsed


# Source: torchtitan 0.2.2, train.py, Trainer.__init__.
TITAN_HEADER = (
    "[titan] 2026-01-01 00:00:00,000 - root - INFO - Trainer is initialized with local batch size 2, global batch size 128, "
    "gradient accumulation steps 1, sequence length 8192, total steps 1000 (warmup 200)"
)


def test_batch_and_sequence_of_a_header_of_torchtitan_are_read(tmp_path: Path) -> None:
    path = Path(titan_log(tmp_path))
    path.write_text(TITAN_HEADER + "\n" + path.read_text())
    report = sw.mfu([str(path)], model="llama-3-8b", cluster="h100:64", stack="torchtitan")
    assert (report.setup.job.seq_len, report.setup.batch_tokens) == (8192, 128 * 8192)
    assert report.warnings == ()
    with pytest.raises(sw.InputError, match="--seq-len: found 4,096, and the log says 8,192"):
        sw.mfu([str(path)], model="llama-3-8b", cluster="h100:64", seq_len=4096)


@pytest.mark.parametrize(
    ("model", "tps", "words"),
    [
        ("llama-3-8b", 45_000.0, "is above the peak of a device, which no run reaches"),
        ("llama-3.2-1b", 6500.0, "times those of the log's own count"),
    ],
)
def test_a_measurement_that_cannot_be_of_the_run_is_said(tmp_path: Path, model: str, tps: float, words: str) -> None:
    report = sw.mfu([titan_log(tmp_path, tps)], model=model, cluster="h100:64", seq_len=8192, global_batch_tokens="1Mi")
    assert any(words in warning for warning in report.warnings)


def titan_log(folder: Path, tps: float = 6500.0) -> str:
    path = folder / "titan.log"
    path.write_text("\n".join(torchtitan(max(step, 1), tps, 10 - step / 100) for step in range(0, 310, 10)) + "\n")
    return str(path)


def test_a_rate_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "mfu", "--tokens-per-s", "416k", *RAN)
    assert (code, err) == (0, "")
    assert "6,500 tokens/s per device, 416,000 in all" in out
    assert "MFU 33.8% (causal attention)   38.1% (full attention)\n" in out
    assert "the dense bf16 peak of h100" in out
    assert "give --batch-tokens to compare the step time with the prediction" in out
    assert payload(capsys, "--tokens-per-s", "6500/device", *RAN) == payload(capsys, "--tokens-per-s", "416k", *RAN)


def test_a_step_time_beside_the_plan_s_choice(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "mfu", "--step-time", "2.5s", *RAN, *BATCH)
    assert "the layout of the run is not known (--layout); the plan's choice for the same job" in out
    report = payload(capsys, "--step-time", "2500ms", *RAN, *BATCH)
    _, planned, _ = run(capsys, "plan", "llama-3-8b", "h100:64", "--seq-len", "8192", *BATCH, "--json")
    assert report["plan"]["step_time_s"] == json.loads(planned)["estimate"]["step_time_s"]  # type: ignore[index]
    assert (report["account"], report["step_time_s"]) == (None, 2.5)


def test_a_log_against_the_prediction_of_its_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = (titan_log(tmp_path), *RAN, *BATCH, *LAYOUT)
    code, out, err = run(capsys, "mfu", *arguments)
    assert (code, err) == (0, "")
    for words in (
        "a log of torchtitan: 31 lines of steps 1 to 300", "27 lines counted", "4 of warm-up", "loss 10.0000 at first, 7.0000 at",
        "by its own count: MFU 38.0%, 1.376 PFLOP/s per device", "for torchtitan: measured is",
        "inside the interval", "memory 50.8 GB (reserved)", "where the measured step goes, by the prediction",
        "GEMM efficiency", "exposed communication over fsdp", "not explained by the prediction",
    ):  # fmt: skip
        assert words in out
    report = payload(capsys, *arguments)
    parts = report["account"]["parts"]  # type: ignore[index]
    assert sum(part["seconds"] for part in parts) == pytest.approx(report["step_time_s"])
    assert report["step_time_s"] == pytest.approx((1 << 20) / 6500 / 64)
    _, estimated, _ = run(capsys, "estimate", "llama-3-8b", "h100:64", "--seq-len", "8192", *BATCH, *LAYOUT, "--json")
    assert report["account"]["predicted_s"] == json.loads(estimated)["estimate"]["step_time_s"]  # type: ignore[index]
    assert report["log"]["rule"] in " ".join(out.split("\n"))  # type: ignore[index]


@pytest.mark.parametrize(
    ("tps", "verdict"), [(900.0, "slower than the interval"), (14000.0, "faster than the interval")]
)
def test_a_measurement_outside_the_interval(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tps: float, verdict: str
) -> None:
    _, out, _ = run(capsys, "mfu", titan_log(tmp_path, tps), *RAN, *BATCH, *LAYOUT)
    assert verdict in out


def test_the_log_says_the_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert payload(capsys, LOG, *RAN)["batch_tokens"] == 1 << 20


def test_from_a_launch_and_its_log_to_a_calibrated_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows, calibrated_file = str(tmp_path / "rows.csv"), str(tmp_path / "mine.toml")
    code, out, err = run(capsys, "mfu", LOG, "--launch", LAUNCH, "--cluster", "h100:64", "--row", rows)
    assert (code, err) == (0, "")
    assert "predicted" in out
    assert "for megatron: measured is" in out
    assert out.endswith(f"added a row to {rows}\n")
    with open(rows, newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["software"], row["chip"], row["zero_stage"], row["global_batch"]) == ("megatron", "h100", "2", "128")
    of_rows = run(capsys, "calibrate", "h100:64", "--runs", rows, "--json")
    code, text, err = run(capsys, "calibrate", "h100:64", "--run", LAUNCH, LOG, "--json", "--out", calibrated_file)
    assert (code, err) == (0, "")
    report, same = json.loads(text), json.loads(of_rows[1])
    assert report["constants"] == same["constants"]
    assert [residual["id"] for residual in report["residuals"]] == [LOG]
    assert report["source"] == "fitted to 1 run of train.log"
    calibration = load_cluster(calibrated_file).calibration
    assert calibration is not None
    assert calibration.stack == "megatron"
    before, after = (
        payload(capsys, LOG, "--launch", LAUNCH, "--cluster", cluster)["account"]["predicted_s"]  # type: ignore[index]
        for cluster in ("h100:64", calibrated_file)
    )
    measured = float(row["step_time_s"])
    assert abs(after - measured) < abs(before - measured)
    assert after < measured


def test_several_runs_by_their_launches_and_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    run(
        capsys,
        "plan",
        "llama-3-8b",
        "h100:64",
        "--seq-len",
        "8192",
        "--batch-tokens",
        "2Mi",
        "--stack",
        "megatron",
        "--out",
        plan,
    )
    log = tmp_path / "other.log"
    log.write_text("\n".join(megatron(n, 3500.0, batch=256) for n in range(30)) + "\n")
    code, out, _ = run(capsys, "calibrate", "h100:64", "--run", LAUNCH, LOG, "--run", plan, str(log), "--json")
    report = json.loads(out)
    assert code == 0
    assert {residual["id"]: residual["weight"] for residual in report["residuals"]} == {LOG: 1.0, str(log): 1.0}
    _, of_another_chip, _ = run(capsys, "calibrate", "h200:64", "--run", plan, str(log), "--run", LAUNCH, LOG, "--json")
    assert json.loads(of_another_chip)["left_aside"] == {"of another chip, h100": 1}
    assert report["source"] == "fitted to 2 runs of train.log, other.log"


def test_the_folder_of_a_run_says_what_ran(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    layout = ("--layout", "fsdp=64", "--stack", "shardwise")
    _, plan, _ = run(capsys, "estimate", "llama-3-8b", "h100:64", "--seq-len", "8192", *BATCH, *layout, "--json")
    (folder / "plan.json").write_text(plan)
    line = {
        "loss_metrics/global_avg_loss": 7.0,
        "time_metrics/end_to_end(s)": 3.0,
        "num_tokens": 1 << 20,
        "throughput(tps)": 5461.3,
    }
    (folder / "log.jsonl").write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(1, 9)))
    _, out, _ = run(capsys, "mfu", str(folder))
    assert "step 3 s measured" in out
    assert "for shardwise: measured is" in out
    assert "shardwise reconcile compares them" in out
    assert payload(capsys, str(folder)) == payload(
        capsys, str(folder / "log.jsonl"), "--plan", str(folder / "plan.json")
    )
    code, _, _ = run(capsys, "calibrate", "h100:64", "--run", str(folder))
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (RAN, "mfu: found no measurement; one of LOG, --tokens-per-s, --step-time is required"),
        (("--tokens-per-s", "1k", "--step-time", "1s", *RAN), "mfu: found --tokens-per-s and --step-time; one of"),
        (("--tokens-per-s", "1k"), "mfu: --model, --cluster, --seq-len missing; these, or --plan, --launch"),
        (("--tokens-per-s", "0", *RAN), "--tokens-per-s: found '0'; a number above 0 is required"),
        (("--tokens-per-s", "9k/node", *RAN), "--tokens-per-s: found '9k/node'"),
        (("--step-time", "8.1", *RAN, *BATCH), "--step-time: found '8.1'; a time above 0 with"),
        (("--step-time", "8.1s", *RAN), "--batch-tokens: missing; the tokens of a step that took --step-time"),
        (("none.log", *RAN), "log: cannot read none.log: No such file"),
        ((LAUNCH, *RAN), "log: found no step in"),
        ((LOG, *RAN, "--batch-tokens", "4Mi"), "--batch-tokens: found 4,194,304, and the log says 1,048,576"),
        ((LOG, "--launch", LAUNCH), "--cluster: missing; what the launch ran on is required"),
        ((LOG, "--launch", LAUNCH, "--cluster", "h100:64", "--layout", "fsdp=64"), "--layout: found beside the launch"),
        ((LOG, "--launch", LOG, "--cluster", "h100:64"), "read: "),
        ((LOG, *RAN, "--row", "/none/rows.csv"), "row: a run without a layout or the time of a step"),
        ((LOG, *RAN, *LAYOUT, "--row", "/none/rows.csv"), "--row: cannot write /none/rows.csv: No such file"),
        ((LOG, *RAN, "--layout", "fsdp=63"), "layout: "),
        (("--tokens-per-s", "1k", "--model", "llama-3-8b", "--cluster", "local:2", "--seq-len", "8192"), "mfu: local:N is"),
        ((LOG, *RAN, "--set", "model.num_layers=0"), "model"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, "mfu", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((LOG,), "--run: found "), ((str(FOLDER / "megatron"),), "--run: found "),
        (("none", LOG), "read: cannot read none"), ((LAUNCH, LAUNCH), "log: found no step in"),
        ((LAUNCH, "none.log"), "log: cannot read none.log"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_read(capsys: pytest.CaptureFixture[str], files: tuple[str, ...], message: str) -> None:
    code, out, err = run(capsys, "calibrate", "h100:64", "--run", *files)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")


TRACKED = [
    ("torchtitan", "TensorBoard events of torchtitan: 20 lines of steps 1 to 20"),
    ("megatron", "TensorBoard events of Megatron-LM: 20 lines of steps 1 to 20"),
    ("nemo", "TensorBoard events of NeMo: 20 lines of steps 1 to 20"),
    ("maxtext", "TensorBoard events of MaxText: 20 lines of steps 1 to 20"),
    ("wandb", "a W&B history of nanotron: 20 lines of steps 1 to 20"),
]


@pytest.mark.parametrize(("name", "words"), TRACKED)
def test_a_folder_of_a_tracker_of_experiments(capsys: pytest.CaptureFixture[str], name: str, words: str) -> None:
    """Steps of 2 to 2.03 s of 128 sequences of 8,192, as `tracked_of` has them."""
    code, out, err = run(capsys, "mfu", str(FOLDER / name), *RAN, *BATCH, *LAYOUT)
    assert (code, err) == (0, "")
    assert words in out
    report = payload(capsys, str(FOLDER / name), *RAN, *BATCH)
    assert report["step_time_s"] == pytest.approx(2 + 1 / 64, rel=1e-6)
    code, out, _ = run(capsys, "calibrate", "h100:64", "--run", LAUNCH, str(FOLDER / name), "--json")
    (residual,) = json.loads(out)["residuals"]
    assert (code, residual["measured_s"]) == (0, pytest.approx(2 + 1 / 64, rel=1e-6))


def test_report_says_that_times_are_by_the_clock(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "history.csv"
    path.write_text("_step,_timestamp,lm loss\n" + "".join(f"{n},{100 + 2.5 * n},8.5\n" for n in range(30)))
    _, out, _ = run(capsys, "mfu", str(path), *RAN, *BATCH)
    assert "step 2.5 s measured" in out
    assert "without times of steps: each is the time since the line before it was logged" in out
    assert payload(capsys, str(path), *RAN, *BATCH)["log"]["by_clock"] is True  # type: ignore[index]


def test_a_log_without_a_batch_has_no_account(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = payload(capsys, titan_log(tmp_path), *RAN, *LAYOUT)
    assert (report["step_time_s"], report["account"]) == (None, None)
    path = tmp_path / "max.log"
    path.write_text("\n".join(maxtext(n, 2.5, 6553.6) for n in range(20)) + "\n")
    assert payload(capsys, str(path), *RAN)["utilisation"]["mfu"] == pytest.approx(51.47e9 * 6553.6 / 989e12, rel=1e-3)  # type: ignore[index]


def test_a_plan_may_stand_where_logs_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    job = ("llama-3-8b", "h100:64", "--batch-tokens", "1Mi", "--seq-len", "8192", "--layout", "fsdp=64")
    assert run(capsys, "plan", *job[:-2], "--pin", "fsdp=64", "--out", plan)[0] == 0
    code, out, err = run(capsys, "mfu", plan, "--tokens-per-s", "416k")
    assert (code, err) == (0, "")
    assert out == run(capsys, "mfu", "--plan", plan, "--tokens-per-s", "416k")[1]
    code, _, err = run(capsys, "mfu", plan)
    assert code == 2
    assert "found no measurement; one of LOG, --tokens-per-s, --step-time is required" in err
    code, _, err = run(capsys, "mfu", plan, "--plan", plan, "--tokens-per-s", "416k")
    assert code == 2
    assert "one, of the run that was measured, is required" in err


def test_python_result_reports_the_numbers_of_the_payload(tmp_path: Path) -> None:
    ran = {"model": "llama-3-8b", "cluster": "h100:64", "seq_len": 8192}
    report = sw.mfu([titan_log(tmp_path)], **ran, global_batch_tokens="1Mi", layout="fsdp=64", stack="torchtitan")
    assert report.breakdown is not None
    assert require_payload_numbers(report) > 20
    by_time = sw.mfu(step_time=2.5, **ran, global_batch_tokens="1Mi")
    assert by_time.measured.step_time_s == 2.5
    assert by_time.plan is not None
    assert require_payload_numbers(by_time) > 10
    for arguments, problem in (
        (
            {**ran, "tokens_per_s": 1.0, "step_time": 1.0},
            "mfu: found tokens_per_s and step_time; one of logs, tokens_per_s",
        ),
        (
            {"tokens_per_s": 1.0, "model": "llama-3-8b"},
            "mfu: cluster, seq_len missing; these, or plan, launch or the folder",
        ),
        ({**ran, "step_time": "1s"}, "global_batch_tokens: missing; the tokens of a step that took step_time"),
    ):
        with pytest.raises(sw.InputError, match=problem):
            sw.mfu(**arguments)
