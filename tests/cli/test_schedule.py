"""`shardwise schedule` as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.pipeline.compare_schedules import play_schedule
from shardwise.pipeline.timeline import PassTimes
from shardwise.present.command_line import main
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.pipeline_schedule import draw_bars, timeline_report

SIZES = ("--stages", "4", "--micro-batches", "8")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["schedule", *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def require_refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["schedule", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    return err


def test_a_timeline_of_characters(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "1f1b", "--stages", "2", "--micro-batches", "2", "--times", "f=1,b=2").splitlines()
    assert lines[0] == "1f1b: 2 stages, 2 micro-batches"
    assert (
        lines[1] == "  9 s, 33.3% of it idle; bubble 50% of the ideal time (50% from a rank's first pass to its last)"
    )
    assert lines[2] == "  4 messages between ranks"
    assert lines[4] == "rank 0 |F0>F1>......B0<<<<...B1<<<<|"
    assert lines[5] == "rank 1 |...F0>B0<<<<F1>B1<<<<......|"
    assert lines[6] == "  F> forward, B< backward, . idle"
    assert lines[8].split("  ") == ["rank", " idle", "idle between its passes", "micro-batches held", "for W only"]
    assert lines[9].split() == ["0", "33.3%", "3", "s", "2", "0"]


def test_default_times_are_stated(capsys: pytest.CaptureFixture[str]) -> None:
    stated = "  F, I and W take 1 s each, and B is I and W; --times sets others"
    assert run(capsys, "1f1b", "--stages", "2", "--micro-batches", "2").splitlines()[2] == stated
    assert stated not in run(capsys, "1f1b", "--stages", "2", "--micro-batches", "2", "--times", "f=1")


@pytest.mark.parametrize("width", [40, 60, 80, 132])
@pytest.mark.parametrize("name", ["1f1b", "dualpipe_v", "zb_v"])
def test_a_timeline_keeps_to_the_width(name: str, width: int) -> None:
    line = play_schedule(name, 4, 24)
    rows = draw_bars(line, width)
    assert len(rows) == 4
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(rows[0]) <= width


def test_a_pair_and_split_passes_are_told_apart() -> None:
    text = render_text(timeline_report(play_schedule("dualpipe", 4, 10)))
    assert "F3&B6" in text
    assert re.search(r"I5<W5=", text)
    assert "I< backward for activations, W= backward for weights, F1&B0 together, . idle" in text


def test_payload_has_slots_bubble_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    report: dict[str, Any] = json.loads(run(capsys, "gpipe", *SIZES, "--times", "f=1,b=2,p2p=0.5", "--json"))
    assert report["schema"] == "shardwise.schedule/1"
    assert list(report)[1:8] == [
        "schedule", "stages", "micro_batches", "virtual_stages", "bubble", "peak_activations", "messages",
    ]  # fmt: skip
    assert (report["schedule"], report["peak_activations"], report["messages"]) == ("afab", 8.0, 48)
    assert report["makespan_s"] == 33.0 + 2 * 3 * 0.5
    assert report["durations_s"]["backward"] == [2.0] * 4
    assert report["ranks"][3]["slots"][0] == {"actions": ["3F0"], "start_s": 4.5, "end_s": 5.5}
    assert report["messages_between"][0] == {"source": 0, "target": 1, "messages": 8}


def test_every_schedule_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "compare", "--stages", "8", "--micro-batches", "16,32,64", "--json"))
    assert rows["schema"] == "shardwise.schedule-comparison/1"
    rows = rows["schedules"]
    assert {tuple(row) for row in rows} == {
        ("schedule", "stages", "micro_batches", "virtual_stages", "bubble", "peak_activations", "messages")
    }
    by_name = {(row["schedule"], row["micro_batches"]): row for row in rows}
    assert len(by_name) == 3 * 13
    for m in (16, 32, 64):
        assert by_name["1f1b", m]["bubble"] == pytest.approx(7 / m)
        assert by_name["interleaved", m]["bubble"] == pytest.approx(7 / (2 * m))
        assert by_name["interleaved", m]["peak_activations"] == 11.5
        assert by_name["dualpipe", m]["bubble"] == pytest.approx(6 / (3 * m))
        assert by_name["zb_auto", m]["bubble"] <= by_name["zb_h1", m]["bubble"]
        assert by_name["afab", m]["peak_activations"] == m
    text = run(capsys, "compare", "--stages", "8", "--micro-batches", "16,32", "--memory-limit", "1")
    assert "8 stages, 16 micro-batches" in text
    assert "zb_h1" in text
    assert "zb_h2" not in text  # holds more
    three = json.loads(
        run(capsys, "compare", "--stages", "4", "--micro-batches", "8", "--virtual-stages", "3", "--json")
    )
    assert {row["virtual_stages"] for row in three["schedules"]} == {1, 3}


def test_picture_trace_and_csv_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, trace, csv = (tmp_path / name for name in ("a.svg", "a.json", "a.csv"))
    shown = run(capsys, "zb_h1", *SIZES, "--draw", str(svg), "--trace", str(trace), "--csv", str(csv))
    drawn = svg.read_text(encoding="utf-8")
    for text in (
        "zb_h1: 4 stages, 8 micro-batches",
        "bubble 12.5% of the ideal time",
        "rank 3",
        "W: backward for weights",
        "idle",
    ):
        assert text in drawn
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 3 * 4 * 8
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == 2 * 3 * 8
    first = next(event for event in events if event["ph"] == "X" and event["pid"] == 1)
    assert (first["name"], first["ts"], first["dur"], first["args"]["micro_batch"]) == ("1F0", 1e6, 1e6, 0)
    again = run(capsys, str(csv))
    assert again.splitlines()[1:] == shown.splitlines()[1:]
    assert again.startswith("a: 4 stages, 8 micro-batches")


def test_a_memory_limit_trades_memory_for_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("zb_auto", *SIZES, "--times", "f=1,b=1.2,w=0.7,p2p=0.1", "--json", "--memory-limit")
    little, much = (json.loads(run(capsys, *arguments, limit)) for limit in ("0.5", "2"))
    assert little["peak_activations"] <= 2 < much["peak_activations"] <= 8
    assert much["makespan_s"] < little["makespan_s"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("1f1b",), "--stages and --micro-batches: missing; a number is required"),
        (("1f2b", *SIZES), "schedule: found '1f2b' (did you mean '1f1b'?); one of none, afab"),
        (("1f1b", "--stages", "4", "--micro-batches", "8,16"), "one number, or `schedule compare`, is required"),
        (("1f1b", "--stages", "4", "--micro-batches", "x"), "--micro-batches: found 'x'"),
        (("1f1b", *SIZES, "--times", "f=1,x=2"), "--times: found 'x'; one of f, b, w, p2p, fb is required"),
        (
            ("1f1b", *SIZES, "--times", "f"),
            "--times: found 'f'; one of f, b, w, p2p, fb is required, such as f=1,b=1,w=1",
        ),
        (("1f1b", *SIZES, "--times", "f=1,f=2"), "--times: found f more than once"),
        (("1f1b", *SIZES, "--times", "f=-1"), "--times f: found '-1'; a number of at least 0 is required"),
        (("zb_h2", *SIZES, "--memory-limit", "1"), "memory limit: rank 0 of zb_h2 holds 1.75 times"),
        (("zb_auto", *SIZES, "--memory-limit", "nan"), "--memory-limit: found 'nan'; a number of at least 0"),
        (("1f1b", *SIZES, "--round-size", "4"), "round size: found 4 for 1f1b, which has no rounds"),
        (("compare", *SIZES, "--draw", "a.svg"), "--draw: of one schedule, and compare has them all"),
        (("compare", "--stages", "4", "--micro-batches", "8", "--memory-limit", "0.2"), "memory limit: found 0.2"),
        (("none.csv",), "none.csv: cannot read: No such file or directory"),
        (("none.csv", "--stages", "4"), "--stages: none.csv has its own; leave them out"),
        (("1f1b", *SIZES, "--csv", "/no/such/folder/a.csv"), "--csv: cannot write /no/such/folder/a.csv"),
        (
            ("1f1b", "--stages", "64", "--micro-batches", "1024", "--draw", "a.svg"),
            "--draw: found 131,072 slots; at most 8,192",
        ),
    ],
)
def test_wrong_input_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], problem: str) -> None:
    assert problem in require_refusal(capsys, *arguments)


def test_a_broken_list_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.csv"
    broken.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1B1,1F1\n", encoding="utf-8")
    assert (
        "action list: rank 1, slot 2 (1B1) needs 1F1, which in slot 3 of the same rank comes later"
        in require_refusal(capsys, str(broken))
    )


def test_python_function_takes_pass_times() -> None:
    assert play_schedule("1f1b", 4, 8, times=PassTimes(input_s=0.5, weight_s=0.5)).makespan == 22.0


def test_the_verb_loads_no_numpy() -> None:
    code = (
        "import sys\n"
        "from shardwise.present.command_line import main\n"
        "main(['schedule', 'zb_auto', '--stages', '2', '--micro-batches', '4'])\n"
        "assert not {'numpy', 'torch', 'jax'} & set(sys.modules), 'loaded'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
