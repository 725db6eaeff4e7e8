"""`shardwise simulate` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.present.command_line import main, verb_parsers
from shardwise.price.simulation.stage_passes import OVERLAP_CHOICES
from shardwise.search.plan import plan_layout
from shardwise.search.plan_file import dump_plan
from shardwise.values import format_seconds


def plan_file(tmp_path: Path, layout: str, tokens: int = 2**19) -> str:
    job = Job(global_batch_tokens=tokens, seq_len=8192, overlap="sum")
    path = tmp_path / "plan.json"
    dump_plan(plan_layout(load_model("llama-3-8b"), load_cluster("h100:16"), job, Layout.parse(layout)), path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["simulate", *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def test_every_overlap_can_be_asked_for() -> None:
    (overlap,) = (action for action in verb_parsers()["simulate"]._actions if action.dest == "overlap")
    assert tuple(overlap.choices) == OVERLAP_CHOICES


def test_the_payload_equals_the_estimate_by_its_convention(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan_file(tmp_path, "fsdp=8 tp=2")
    report = json.loads(run(capsys, path, "--overlap", "sum", "--json"))
    assert report["schema"] == "shardwise.simulation/2"
    assert report["step_time_s"] == pytest.approx(report["estimate"]["step_time_s"], rel=1e-6)
    assert report["peak_bytes"] == pytest.approx(report["estimate"]["memory_bytes"], rel=1e-9)
    assert sum(report["time"].values()) == pytest.approx(report["step_time_s"])
    listed = json.loads(run(capsys, path, "--json"))
    assert listed["overlap"] == "list"
    assert listed["step_time_s"] > report["step_time_s"]
    assert listed["exposed"]["tp"] > 0.0
    assert sum(part["seconds"] for part in listed["critical_path"]) == pytest.approx(listed["step_time_s"])
    assert sum(part["share"] for part in listed["critical_path"]) == pytest.approx(1.0)
    slower = json.loads(run(capsys, path, "--contention", "1.3", "--json"))
    assert slower["contention"] == 1.3
    assert slower["step_time_s"] > listed["step_time_s"]
    published = json.loads(run(capsys, path, "--contention", "published", "--json"))
    assert published["contention"] == published["published_contention"]["factor"] == 1.189
    assert "2507.03114, abstract); not simulated" in run(capsys, path)
    assert "2507.03114, abstract); simulated as 1.19" in run(capsys, path, "--contention", "published")


def test_report_explains_the_difference_from_the_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = plan_file(tmp_path, "fsdp=8 tp=2")
    report, text = json.loads(run(capsys, path, "--json")), run(capsys, path)
    change = report["step_time_s"] / report["estimate"]["step_time_s"] - 1
    assert abs(change) > 0.005
    side = "longer" if change > 0 else "shorter"
    assert report["difference"].startswith(
        f"the simulated step is {abs(change):.1%} {side} than the estimate (exposed tp "
    )
    assert "waits for transfers where the instruction list does" in report["difference"]
    assert report["difference"] in " ".join(text.split())
    assert "print the estimate" in text
    svg = tmp_path / "step.svg"
    run(capsys, path, "--draw", str(svg))
    drawn = " ".join(ElementTree.parse(svg).getroot().itertext())
    assert f"a step simulated, {format_seconds(report['estimate']['step_time_s'])} estimated" in " ".join(drawn.split())
    alike = json.loads(run(capsys, path, "--overlap", "sum", "--json"))
    assert alike["difference"] == ""


def test_pipeline_is_printed_drawn_and_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    path = plan_file(tmp_path, "fsdp=4 tp=2 pp=2 zero_stage=1")
    text = run(capsys, path, "-v", "--draw", str(svg), "--trace", str(trace))
    assert re.search(
        r"step [\d.]+ m?s simulated \(starts and waits where the list has them\), [\d.]+ m?s estimated", text
    )
    assert re.search(r"exposed tp +[\d.]+ ms", text)
    assert re.search(r"bubble +[\d.]+ m?s +[\d.]+ m?s", text)
    assert re.search(r"block backward +[\d.]+ m?s +[\d.]+%", text)
    assert "1f1b: 2 stages, 16 micro-batches; bubble" in text
    drawn = {
        "".join(element.itertext())
        for element in ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}text")
    }
    assert {"rank 0", "rank 1", "tp", "fsdp", "memory of a device, GB", "fsdp traffic"} <= drawn
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"stage 0", "stage 1"}
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {
        "passes",
        "compute",
        "tp",
        "fsdp",
    }
    messages = [event for event in events if event["ph"] == "s"]
    assert len(messages) == 2 * 16
    forward = next(event for event in events if event["name"] == "0F0")
    kernels = [event for event in events if event["ph"] == "X" and event["cat"] == "forward" and event["pid"] == 0]
    assert forward["ts"] == min(kernel["ts"] for kernel in kernels) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contention", "much"], "--contention: found 'much'; a number of at least 1 is required"),
        (["--contention", "0.9"], "--contention: found '0.9'; a number of at least 1 is required"),
        (["--contention", "nan"], "--contention: found 'nan'; a number of at least 1 is required"),
        (["--draw", "nowhere/at/all.svg"], "--draw: cannot write nowhere/at/all.svg"),
    ],
)
def test_wrong_input_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", plan_file(tmp_path, "fsdp=16"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_steps_too_large_for_a_picture_or_a_trace_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = plan_file(tmp_path, "tp=4 pp=4", tokens=8192 * 2048)
    assert main(["simulate", path, "--draw", str(tmp_path / "step.svg")]) == 2
    assert "--draw: found 16,384 passes; at most 4,096 are drawn" in capsys.readouterr().err
    assert main(["simulate", path, "--trace", str(tmp_path / "step.json")]) == 2
    assert "--trace: found" in capsys.readouterr().err
