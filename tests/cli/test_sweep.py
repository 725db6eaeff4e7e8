"""`shardwise plan --sweep` as a user meets it: points, reports, files, what cannot be planned, Ctrl-C."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import shardwise as sw
from shardwise.present.command_line import main, verb_parsers
from shardwise.present.verbs.planning import PLAN_FLAGS, SWEEP_FLAGS
from shardwise.search import plan_sweep as points_module
from shardwise.search import planner
from shardwise.search.plan_sweep import SweepCase, SweepPoint, Swept, find_knee, plan_cases, step_time_parts
from shardwise.search.sweep_values import Sweep
from shardwise.values.progress import Progress

JOB = ["--batch-tokens", "512Ki", "--seq-len", "4096"]
PLAN = ["plan", "llama-3-8b", "h100:8", *JOB]
GPUS = [*PLAN, "--sweep", "gpus=8:32:x2"]
MODEL = sw.load_model("llama-3-8b")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def exit_code(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The same where argparse may end the program."""
    try:
        return run(capsys, *arguments)
    except SystemExit as ended:
        shown = capsys.readouterr()
        return int(str(ended.code)), shown.out, shown.err


def payload(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    parsed = json.loads(out)
    assert isinstance(parsed, dict)
    return parsed


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def row(report: str, *cells: str) -> list[str]:
    """The words of the first line that begins with some cells."""
    return next(line.split() for line in report.splitlines() if line.split()[: len(cells)] == list(cells))


def same(point: dict[str, Any], plan: dict[str, Any]) -> None:
    """Require that a point has the figures of a plan made by itself."""
    for name in (
        "step_time_s",
        "mfu",
        "hfu",
        "bound",
        "tokens_per_s_per_device",
        "memory_bytes",
        "time",
        "memory",
        "interval90",
    ):
        assert point[name] == plan["estimate"][name], name
    assert point["layout"] == plan["layout"]
    assert point["num_micro_batches"] == plan["layout"]["num_micro_batches"]
    assert point["seq_len"] == plan["job"]["seq_len"]
    assert point["global_batch_tokens"] == plan["job"]["global_batch_tokens"]


def test_points_are_the_plans_of_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    report = payload(capsys, *GPUS, "--tokens", "1T")
    assert report["schema"] == "shardwise.sweep/2"
    assert report["complete"]
    assert report["sweeps"] == [{"name": "gpus", "values": [8, 16, 32]}]
    for point in report["points"]:
        (gpus,) = point["at"].values()
        single_plan = payload(capsys, "plan", "llama-3-8b", f"h100:{gpus}", *JOB, "--tokens", "1T")
        same(point, single_plan)
        assert point["num_devices"] == gpus
        assert point["days"] == single_plan["run"]["days"]
        assert point["usd"] == single_plan["run"]["usd"]
        price = next(
            quantity["value"] for quantity in single_plan["run"]["inputs"] if quantity["name"] == "price_usd_per_hour"
        )
        assert point["usd_per_step"] == pytest.approx(gpus * point["step_time_s"] / 3600 * price, rel=1e-12)
        assert point["usd_per_token"] == pytest.approx(point["usd_per_step"] / 2**19, rel=1e-12)
        assert point["tokens_per_s"] == pytest.approx(point["tokens_per_s_per_device"] * gpus, rel=1e-12)
        assert sum(point["parts"].values()) == pytest.approx(point["step_time_s"], rel=1e-12)


@pytest.mark.parametrize(
    ("sweep", "value", "plan_arguments"),
    [
        ("seq_len=4096,8192", 8192, ["h100:8", "--batch-tokens", "512Ki", "--seq-len", "8192"]),
        ("batch=512Ki:1Mi:x2", 2**20, ["h100:8", "--batch-tokens", "1Mi", "--seq-len", "4096"]),
        ("tp=1,2", 2, ["h100:8", *JOB, "--pin", "tp=2"]),
        ("recompute=none,full", "full", ["h100:8", *JOB, "--pin", "recompute=full"]),
        ("sequence_parallel=false,true", True, ["h100:8", *JOB, "--pin", "sequence_parallel=true"]),
    ],
)
def test_any_name_is_swept_as_its_flag(
    capsys: pytest.CaptureFixture[str], sweep: str, value: int | str, plan_arguments: list[str]
) -> None:
    report = payload(capsys, *PLAN, "--sweep", sweep)
    assert report["points"][1]["at"] == {sweep.partition("=")[0]: value}
    same(report["points"][1], payload(capsys, "plan", "llama-3-8b", *plan_arguments))


def test_flags_of_a_plan_hold_at_every_point(capsys: pytest.CaptureFixture[str]) -> None:
    extra = [
        "--pin",
        "recompute=full",
        "--max",
        "tp=2",
        "--set",
        "model.num_layers=8",
        "--stack",
        "nemo-25",
        "--divisible",
    ]
    report = payload(capsys, *GPUS, *extra)
    same(report["points"][0], payload(capsys, *PLAN, *extra))
    assert all(point["layout"]["recompute"] == "full" for point in report["points"])


def test_a_torus_is_swept_by_its_shape(capsys: pytest.CaptureFixture[str]) -> None:
    report = payload(capsys, "plan", "llama-3-8b", "tpu-v5p:4x4x4", "--batch-tokens", "8Ki/device", "--seq-len", "4096",
                    "--sweep", "gpus=2x2x4,4x4x4")  # fmt: skip
    assert [point["num_devices"] for point in report["points"]] == [16, 64]
    assert [point["global_batch_tokens"] for point in report["points"]] == [16 * 8192, 64 * 8192]


def test_report_has_efficiency_memory_and_the_knee(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *GPUS, "--tokens", "1T")
    assert (code, err) == (0, "")
    points = payload(capsys, *GPUS, "--tokens", "1T")["points"]
    assert "llama-3-8b on h100, 524,288 tokens per batch, sequences of 4,096, bf16, predicted for fused" in out
    assert "90% prediction interval:" in out
    head, *_ = (line for line in out.splitlines() if line.startswith("gpus "))
    for column in (
        "step",
        "tokens/s per device",
        "efficiency",
        "MFU",
        "exposed",
        "bubble",
        "memory",
        "bound by",
        "1B tokens",
        "the run",
    ):
        assert column in head
    assert "100.0%" in row(out, "8")
    ratio = points[2]["tokens_per_s_per_device"] / points[0]["tokens_per_s_per_device"]
    assert f"{ratio:.1%}" in row(out, "32")
    assert f"{points[2]['mfu']:.1%}" in row(out, "32")
    for point in points:
        assert any(line.endswith(f"  {point['layout']['text']}") for line in out.splitlines())
    assert out.count("note: a prediction for fused") == 1
    assert "no knee: every step is bound by compute" in out


def test_a_chip_without_a_price_has_no_dollars(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "sweep.svg"
    free = ["plan", "llama-3-8b", "h800:8", *JOB, "--sweep", "gpus=8,16"]
    _, out, _ = run(capsys, *free, "--draw", str(target))
    assert "no sourced price_usd_per_hour of h800: dollars are left out" in out
    assert "1B tokens" not in out
    assert "dollars for a billion tokens" not in texts(target)
    _, out, _ = run(capsys, *free, "--set", "chip.price_usd_per_hour=3")
    assert "1B tokens" in out
    assert "dollars are left out" not in out


def test_one_point_that_does_not_fit_does_not_lose_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "sweep.svg"
    arguments = ["plan", "llama-3-70b", "h100:8", *JOB, "--sweep", "gpus=8,32"]
    report = payload(capsys, *arguments, "--draw", str(target))
    small, large = report["points"]
    assert small["problem"].startswith("no legal layout fits: the leanest")
    assert small["layout"] is small["step_time_s"] is small["usd_per_step"] is small["time"] is None
    assert large["problem"] is None
    assert large["layout"]
    _, out, _ = run(capsys, *arguments)
    assert row(out, "8")[1:3] == ["nothing", "fits"]
    assert "100.0%" in row(out, "32")  # efficiency is that of the first point with a plan
    assert small["problem"].splitlines()[0] in out
    assert "nothing fits" in texts(target)


def test_dollars_and_days_carry_the_interval_of_the_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "sweep.csv"
    arguments = [*PLAN, "--tokens", "10B", "--stack", "torchtitan", "--sweep", "tp=1,2"]
    report = payload(capsys, *arguments, "--csv", str(target))
    for point in report["points"]:
        ratios = [end / point["step_time_s"] for end in point["interval90"]]
        for name in ("usd_per_step", "usd_per_token", "days", "chip_hours", "usd"):
            assert [end / point[name] for end in point[f"{name}_interval90"]] == pytest.approx(ratios, rel=0.01)
    with target.open(encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    assert float(first["usd_interval90_high"]) == report["points"][0]["usd_interval90"][1]
    _, out, _ = run(capsys, *arguments)
    low, high = (end / report["points"][0]["step_time_s"] for end in report["points"][0]["interval90"])
    assert f"{low:.2f} to {high:.2f} times each step and its dollars" in out


def test_a_point_without_a_legal_layout_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *PLAN, "--sweep", "tp=1,3")
    assert row(out, "3")[1:4] == ["no", "legal", "layout"]
    assert "dp·fsdp·tp·cp·pp cannot be 8 with tp = 3" in out


def test_what_a_model_refuses_is_a_problem_of_its_points(capsys: pytest.CaptureFixture[str]) -> None:
    report = payload(
        capsys, "plan", "gpt-2", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "1024", "--sweep", "seq_len=1Ki,2Ki"
    )
    assert report["points"][0]["problem"] is None
    assert "2048" in report["points"][1]["problem"] or "2,048" in report["points"][1]["problem"]
    assert [point["no_plan"] for point in report["points"]] == [None, "job refused"]
    _, out, _ = run(
        capsys, "plan", "gpt-2", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "1024", "--sweep", "seq_len=1Ki,2Ki"
    )
    assert row(out, "2,048")[1:3] == ["job", "refused"]


def test_where_no_point_has_a_plan_the_exit_code_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "plan", "llama-3-405b", "h100:8", *JOB, "--sweep", "gpus=8,16")
    assert (code, out) == (3, "")
    assert "gpus=8: no legal layout fits" in err
    assert "gpus=16: no legal layout fits" in err
    code, out, err = run(
        capsys, "plan", "gpt-2", "h100:8", "--batch-tokens", "64Ki", "--seq-len", "4096", "--sweep", "tp=1,2"
    )
    assert (code, out) == (2, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*PLAN, "--sweep", "gpu=8,16"], "--sweep: found 'gpu' (did you mean 'gpus'?)"),
        ([*PLAN, "--sweep", "gpus=8:64:x1"], "leads nowhere"),
        ([*PLAN, "--sweep", "gpus=8,100"], "h100 comes in nodes of 8; 100 is not a multiple of it"),
        ([*PLAN, "--sweep", "seq_len=4096,5000"], "not a whole number of sequences of 5000"),
        ([*PLAN, "--sweep", "model=llama-3-8b,llama-3-9b"], "found 'llama-3-9b' (did you mean 'llama-3-8b'"),
        ([*PLAN, "--sweep", "zero_stage=3,4"], "zero_stage: found 4; 0, 1, 2 or 3 is required"),
        ([*PLAN, "--sweep", "tp=1,2", "--pin", "tp=2"], "--pin tp: found --sweep tp with it; leave out one of the two"),
        ([*PLAN, "--sweep", "seq_len=4Ki,8Ki", "--set", "job.seq_len=4Ki"], "--set job.seq_len: found --sweep seq_len with it"),
        ([*PLAN, "--sweep", "batch=1Mi,2Mi", "--set", "job.global_batch_tokens=1Mi"], "found --sweep batch with it"),
        ([*PLAN, "--sweep", "tp=1,2", "--out", "plan.json"], "--out: found --sweep beside it"),
        ([*PLAN, "--sweep", "tp=1,2", "--export", "run"], "--export: found --sweep beside it"),
        ([*PLAN, "--sweep", "tp=1,2", "--deadline", "3d"], "--deadline: found --sweep beside it"),
        ([*PLAN, "--sweep", "tp=1,2", "--budget", "2M"], "--budget: found --sweep beside it"),
        ([*PLAN, "--draw", "a.svg"], "--draw: of sweeps; --sweep is required beside it"),
        ([*PLAN, "--csv", "a.csv"], "--csv: of sweeps; --sweep is required beside it"),
        ([*PLAN, "--sweep", "tp=1,2", "--draw", "/nowhere/a.svg"], "cannot write /nowhere/a.svg: no such folder"),
        ([*PLAN, "--sweep", "tp=1,2", "--csv", "/nowhere/a.csv"], "cannot write /nowhere/a.csv: no such folder"),
        ([*PLAN, "--sweep", "tp=1,2", "--draw", "a.gif"], "a name that ends in .svg, .png, .pdf is required"),
        (["plan", "llama-3-8b", "h100:8", "b200:8", *JOB, "--sweep", "tp=1,2"], "found 2 clusters (h100:8, b200:8)"),
        (["plan", "llama-3-8b", "mine.toml", *JOB, "--sweep", "gpus=8,16"], "a file that has one size; CHIP:COUNT is required"),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(points_module, "make_plan", None)  # it is said before anything is searched
    code, out, err = exit_code(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_no_flag_of_a_plan_is_passed_over() -> None:
    """Each flag of `plan` holds at every point or is refused beside `--sweep`."""
    flags = {action.dest for action in verb_parsers()["plan"]._actions if action.option_strings}
    passed_on = {
        "global_batch_tokens",
        "seq_len",
        "tokens",
        "precision",
        "overlap",
        "stack",
        "overrides",
        "pins",
        "maxima",
        "runnable",
        "divisible",
    }
    printed = {"help", "json", "verbose", "report"}
    assert flags == passed_on | printed | {"over", *SWEEP_FLAGS} | {*PLAN_FLAGS} | REFUSED.keys()


# Flags that are refused beside `--sweep` by their own rooms.
REFUSED = {
    "noise_scale": ("--noise-scale", "1Mi"),
    "to_loss": ("--to-loss", "3"),
    "goal": ("--minimise", "usd"),
    "batch_schedule": ("--batch-schedule", "0:512Ki,1G:1Mi"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_flags_of_single_plans_are_refused_beside_a_sweep(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flag, value = REFUSED[name]
    code, out, err = run(capsys, *PLAN, "--tokens", "10G", "--sweep", "gpus=8,16", flag, value)
    assert (code, out) == (2, "")
    assert flag in err


def test_problems_of_every_point_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *PLAN, "--sweep", "gpus=8,100,200", "--set", "job.loss=lean")
    assert code == 2
    assert err.count("job: loss is 'lean'") == 1


def test_a_csv_file_has_a_row_for_each_point(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "sweep.csv"
    report = payload(capsys, "plan", "llama-3-70b", "h100:8", *JOB, "--sweep", "gpus=8,32", "--csv", str(target))
    with target.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["sweep.gpus"] for row in rows] == ["8", "32"]
    for written_row, point in zip(rows, report["points"], strict=True):
        assert written_row["layout"] == (point["layout"]["text"] if point["layout"] else "")
        for name in ("step_time_s", "mfu", "usd_per_token", "bound", "problem"):
            assert written_row[name] == ("" if point[name] is None else str(point[name])), name
        for term, seconds in (point["time"] or {}).items():
            assert float(written_row[f"time_s.{term}"]) == seconds
        for term, size in (point["memory"] or {}).items():
            assert float(written_row[f"memory_bytes.{term}"]) == size
    assert [rows[1]["interval90_low_s"], rows[1]["interval90_high_s"]] == [
        str(s) for s in report["points"][1]["interval90"]
    ]


def test_draw_has_every_panel_of_a_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "sweep.svg"
    points = payload(capsys, *GPUS, "--draw", str(target))["points"]
    written = texts(target)
    for panel in ("step", "MFU", "dollars for a billion tokens", "where the time of a step goes", "memory of a device"):
        assert panel in written
    for point in points:
        assert f"{point['num_devices']:,}" in written
        assert f"{100 * point['mfu']:.3g}%" in written
        assert f"gas={point['num_micro_batches']} mbs=" in " ".join(written)
    assert "fsdp=32" in written
    assert "linear scaling" in written


def test_weak_scaling_has_no_ideal_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "sweep.svg"
    weak = [
        "plan",
        "llama-3-8b",
        "h100:8",
        "--batch-tokens",
        "32Ki/device",
        "--seq-len",
        "4096",
        "--sweep",
        "gpus=8,16",
    ]
    _, out, _ = run(capsys, *weak, "--draw", str(target))
    assert "32,768 tokens per device and batch" in out
    assert "linear scaling" not in texts(target)


def test_a_batch_per_device_is_taken_by_a_single_plan(capsys: pytest.CaptureFixture[str]) -> None:
    per_device = ["--batch-tokens", "64Ki/device", "--seq-len", "4096"]
    report = payload(capsys, "plan", "llama-3-8b", "h100:8", *per_device)
    assert report["job"]["global_batch_tokens"] == 2**19
    for cluster, batch, message in (
        (["h100:8"], "64Ki/gpu", "found '64Ki/gpu'; tokens, or tokens per device such as 32Ki/device, are required"),
        (["h100:8"], "half/device", "found 'half'; a number with a prefix is required"),
        (["h100:8", "h200:16"], "64Ki/device", "for clusters of 8, 16 devices"),
    ):
        code, out, err = run(capsys, "plan", "llama-3-8b", *cluster, "--batch-tokens", batch, "--seq-len", "4096")
        assert (code, out) == (2, "")
        assert "--batch-tokens" in err
        assert message in err
    code, _, err = run(capsys, "plan", "llama-3-8b", "h900:8", *per_device)
    assert (code, err.count("h900")) == (2, 1)


def test_two_sweeps_make_a_grid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "grid.svg"
    arguments = [*PLAN, "--sweep", "model=llama-3.2-1b,llama-3-70b", "--sweep", "gpus=8,32"]
    report = payload(capsys, *arguments, "--draw", str(target))
    assert [list(point["at"].values()) for point in report["points"]] == [
        ["llama-3.2-1b", 8], ["llama-3.2-1b", 32], ["llama-3-70b", 8], ["llama-3-70b", 32]
    ]  # fmt: skip
    assert [knee["series"] for knee in report["knees"]] == [{"model": "llama-3.2-1b"}, {"model": "llama-3-70b"}]
    written = texts(target)
    for point in report["points"]:
        assert (f"{point['mfu']:.1%}" if point["layout"] else "nothing fits") in written
    assert any(text.startswith("MFU, predicted for ") and ": 0% to" in text for text in written)
    assert "ZeRO 1" in written
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert row(out, "llama-3-70b")[1:] == ["nothing", "fits", f"{report['points'][3]['mfu']:.1%}"]
    same(report["points"][1], payload(capsys, "plan", "llama-3.2-1b", "h100:32", *JOB))


def test_ctrl_c_prints_the_points_found_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole, target = payload(capsys, *GPUS), tmp_path / "sweep.csv"
    plan, calls = planner.make_plan, [0]

    def stops(*operands: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return plan(*operands, **options)

    monkeypatch.setattr(points_module, "make_plan", stops)
    code, out, err = run(capsys, *GPUS, "--json", "--csv", str(target))
    assert code == 130
    assert json.loads(err)["error"] == {"problems": ["stopped after 2 of 3 points"], "exit_code": 130}
    report = json.loads(out)
    assert report["points"] == whole["points"][:2]
    assert not report["complete"]
    assert len(target.read_text(encoding="utf-8").splitlines()) == 3
    calls[0] = 0
    code, out, err = run(capsys, *GPUS, "--draw", str(tmp_path / "sweep.svg"))
    assert (code, err) == (130, "stopped after 2 of 3 points\n")
    assert "stopped after 2 of 3 points; not planned:\n  gpus=32" in out
    assert "2 points of 3 planned, in these no knee:" in " ".join(out.split())
    calls[0] = 2
    assert run(capsys, *GPUS)[:2] == (130, "")
    calls[0] = 1
    assert run(capsys, "plan", "llama-3-70b", "h100:8", *JOB, "--sweep", "gpus=8,32")[:2] == (130, "")


def test_a_grid_that_was_stopped_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan, calls, target = planner.make_plan, [0], tmp_path / "grid.svg"

    def stops(*operands: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt
        return plan(*operands, **options)

    monkeypatch.setattr(points_module, "make_plan", stops)
    code, out, _ = run(capsys, *PLAN, "--sweep", "tp=1,2", "--sweep", "recompute=none,full", "--draw", str(target))
    assert code == 130
    assert "not planned" in texts(target)
    assert "tp=2, recompute=full" in out


def case(gpus: int, **changes: Any) -> SweepCase:
    job = sw.Job(global_batch_tokens=2**16, seq_len=4096)
    pins = {"dp": 1, "fsdp": 1, "cp": 1, "tp": 1, "micro_batch_seqs": 1, "num_virtual_stages": 1, **changes}
    choices = sw.Choices().with_pins(pins, {})
    return SweepCase(at={"gpus": gpus}, model=MODEL, cluster=sw.load_cluster(f"h100:{gpus}"), job=job, choices=choices)


def test_the_knee_is_where_waiting_takes_longer_or_something_else_bounds_the_step() -> None:
    points = list(plan_cases([case(gpus) for gpus in (4, 8, 16, 32)]))
    knee = find_knee(points)
    assert knee is not None

    def waits_longer(point: SweepPoint) -> bool:
        assert point.plan is not None
        by_part = step_time_parts(point.plan.estimate)
        return by_part["bubble"] + by_part["exposed communication"] > by_part["compute"] + by_part["recompute"]

    first = next(number for number, point in enumerate(points) if waits_longer(point))
    assert first > 0
    assert knee.point is points[first]
    assert "longer than compute" in knee.reason
    assert find_knee(points[:first]) is None
    assert find_knee([]) is None


def test_a_change_of_what_bounds_the_step_is_a_knee(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "sweep.svg"
    slow = [
        "--pin",
        "offload=optimizer",
        "--set",
        "chip.pcie_bytes_per_s=5GB/s",
        "--sweep",
        "batch=512Ki,256Ki,64Ki,32Ki",
    ]
    report = payload(capsys, *PLAN, *slow, "--draw", str(target))
    bounds = [point["bound"] for point in report["points"]]
    assert bounds[0] == "compute"
    assert bounds[-1] == "the host's link"
    (knee,) = report["knees"]
    first = next(point for point in report["points"] if point["bound"] != "compute")
    assert knee == {"series": {}, "at": first["at"], "reason": "bound by the host's link in place of compute"}
    assert "knee: bound by the host's link in place of compute" in texts(target)


def test_points_without_a_plan_are_passed_over() -> None:
    cases = [case(4), case(8, tp=3), case(8)]
    points = list(plan_cases(cases))
    assert [point.plan is None for point in points] == [False, True, False]
    assert isinstance(points[1].error, sw.NothingFitsError)
    assert find_knee(points) is None
    assert Swept(sweeps=(Sweep(name="gpus", values=(4, 8)),), points=tuple(points), num_points=3).series() == [
        ({}, tuple(points))
    ]


def test_progress_says_which_point_it_is() -> None:
    messages: list[str] = []

    def record_message(message: str, done: int = 0, total: int = 0) -> None:
        messages.append(message)

    progress: Progress = record_message
    points: list[SweepPoint] = list(plan_cases([case(4), case(8)], progress=progress))
    assert len(points) == 2
    assert messages[0].startswith("1 of 2: ")
    assert messages[-1].startswith("2 of 2: ")
