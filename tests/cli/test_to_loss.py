"""`shardwise plan --noise-scale` and `explain` as a user meets them: the table of doublings, the choice, files, wrong
input.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.present.command_line import main
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.sweep import to_loss_report
from shardwise.search.loss_time import Doubling
from shardwise.values.units import SECONDS_PER_DAY

SIZES = ["--seq-len", "1024", "--pin", "pp=1", "--pin", "cp=1", "--pin", "tp=1"]  # pins: nine plans take long
PLAN = ["plan", "gpt-2", "h100:4,8,16", *SIZES]
NOISE = 2**17
BATCHES = ["--noise-scale", "128Ki", "--batch-tokens", "64Ki:256Ki:x2"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@cache  # most tests look at one table, whose nine plans take long
def run_verb(*arguments: str) -> str:
    """Return the output of a command that succeeds."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    assert (code, err.getvalue()) == (0, "")
    return out.getvalue()


def payload(*arguments: str) -> dict[str, Any]:
    parsed = json.loads(run_verb(*arguments, "--json"))
    assert isinstance(parsed, dict)
    return parsed


def test_every_batch_is_planned_on_every_cluster_and_the_soonest_chosen() -> None:
    report = payload(*PLAN, *BATCHES)
    points = [(point["cluster"], point["batch_tokens"]) for point in report["points"]]
    assert points == [(f"h100:{n}", batch) for n in (4, 8, 16) for batch in (2**16, 2**17, 2**18)]
    best = min(point["time"]["loss_s"] for point in report["points"])
    chosen = report["points"][report["chosen"]]
    assert chosen["time"]["loss_s"] <= 1.03 * best
    assert chosen["cluster"] == report["plan"]["cluster"]["name"]
    assert report["plan"]["to_loss"]["noise"]["tokens"] == NOISE


def test_times_to_the_loss_are_steps_of_the_law_times_the_step() -> None:
    """By hand: E_min of a billion tokens, S = 1e9·(1/B_noise + 1/B); interruptions of sixteen devices are few."""
    for point in payload(*PLAN, *BATCHES)["points"]:
        time, batch = point["time"], point["batch_tokens"]
        steps = 1e9 * (1 / NOISE + 1 / batch)
        assert time["steps"] == pytest.approx(steps)
        assert time["tokens"] == pytest.approx(steps * batch)
        assert time["loss_s"] == pytest.approx(steps * time["step_time_s"], rel=0.01)
        assert time["token_s"] == pytest.approx(1e9 / batch * time["step_time_s"], rel=0.01)
        assert time["loss_s"] / time["token_s"] == pytest.approx(1 + batch / NOISE)
        assert time["side"] == {0.5: "below", 1.0: "at", 2.0: "above"}[batch / NOISE]


def test_a_point_is_the_plan_of_its_batch() -> None:
    point = payload(*PLAN, *BATCHES)["points"][4]
    planned = payload("plan", "gpt-2", "h100:8", *SIZES, "--batch-tokens", "128Ki")
    assert point["layout"]["text"] == planned["layout"]["text"]
    assert point["time"]["step_time_s"] == planned["estimate"]["step_time_s"]


def test_tokens_are_those_of_the_smallest_batch_and_the_run_goes_to_the_loss() -> None:
    """Batches of 64Ki are half the noise scale, 10G tokens of them E_min = 10G / 1.5: batches of 128Ki take twice E_min."""
    report = payload(*PLAN, *BATCHES, "--tokens", "10G")
    assert report["min_tokens"] == pytest.approx(10e9 / 1.5)
    tokens = {point["batch_tokens"]: point["time"]["tokens"] for point in report["points"]}
    assert tokens == pytest.approx({2**16: 10e9, 2**17: 10e9 / 1.5 * 2, 2**18: 10e9 / 1.5 * 3})
    chosen = report["points"][report["chosen"]]
    assert report["plan"]["run"]["tokens"] == pytest.approx(tokens[chosen["batch_tokens"]])
    assert chosen["time"]["loss_s"] == pytest.approx(report["plan"]["run"]["days"] * SECONDS_PER_DAY)
    assert chosen["time"]["usd"] == pytest.approx(report["plan"]["run"]["usd"])


def test_without_batches_they_are_doublings_around_the_noise_scale() -> None:
    report = payload("plan", "gpt-2", "h100:8", *SIZES, "--noise-scale", "16Ki")
    assert [point["batch_tokens"] for point in report["points"]] == [1024 * 2**i for i in range(9)]


def test_the_goal_is_time_or_dollars_and_with_a_deadline_dollars() -> None:
    def chosen(*flags: str) -> dict[str, Any]:
        report = payload(
            "plan", "gpt-2", "h100:4,16", *SIZES, "--noise-scale", "128Ki", "--batch-tokens", "64Ki,128Ki", *flags
        )
        return dict(report["points"][report["chosen"]])

    soonest, cheapest = chosen(), chosen("--minimise", "usd")
    assert (soonest["num_devices"], cheapest["num_devices"]) == (16, 4)
    assert cheapest["time"]["chip_hours"] < soonest["time"]["chip_hours"]
    days = chosen("--tokens", "100G")["time"]["loss_s"] / SECONDS_PER_DAY
    late = chosen("--tokens", "100G", "--deadline", f"{1.5 * days}d")
    assert late["num_devices"] > 4
    assert late["time"]["loss_s"] <= 1.5 * days * SECONDS_PER_DAY
    assert chosen("--tokens", "100G", "--deadline", "999d")["num_devices"] == 4


def test_batch_and_devices_double_along_the_diagonal() -> None:
    """The note, 2.2.1: token time halves as long as the step stays, loss time by S(2B) / S(B) of it."""
    report = payload(*PLAN, *BATCHES)
    points = [report["points"][number] for number in report["diagonal"]]
    assert len({point["batch_tokens"] / point["num_devices"] for point in points}) == 1
    assert len(points) > 1
    for small, large in pairwise(points):
        tokens = large["time"]["token_s"] / small["time"]["token_s"]
        law = (1 + large["batch_tokens"] / NOISE) / (1 + small["batch_tokens"] / NOISE)
        assert large["time"]["loss_s"] / small["time"]["loss_s"] == pytest.approx(tokens * law)


def test_the_next_doubling_is_planned() -> None:
    report = payload(*PLAN, *BATCHES)
    doubled_both, doubled_batch, doubled_devices = report["doublings"]
    chosen = report["points"][report["chosen"]]
    assert [doubling["doubled"] for doubling in report["doublings"]] == ["batch and devices", "batch", "devices"]
    assert (doubled_both["cluster"], doubled_batch["cluster"]) == ("h100:32", "h100:16")
    assert doubled_both["batch_tokens"] == 2 * chosen["batch_tokens"] == 2 * doubled_devices["batch_tokens"]
    assert doubled_batch["usd_ratio"] == pytest.approx(doubled_batch["loss_ratio"])
    assert doubled_both["usd_ratio"] == pytest.approx(2 * doubled_both["loss_ratio"], rel=0.01)
    again = payload(
        "plan",
        "gpt-2",
        "h100:32",
        *SIZES,
        "--noise-scale",
        "128Ki",
        "--batch-tokens",
        str(doubled_both["batch_tokens"]),
    )
    assert doubled_both["loss_ratio"] == pytest.approx(again["points"][0]["time"]["loss_s"] / chosen["time"]["loss_s"])


def test_a_doubling_without_a_plan_says_why() -> None:
    search = sw.plan_to_loss("gpt-2", ["h100:8"], noise_scale="64Ki", batches=["64Ki"], seq_len=1024)
    unplanned = Doubling(
        doubled="devices", cluster="h100:8", batch_tokens=2**16, problem="no cluster of twice its size"
    )
    report = render_text(to_loss_report(replace(search, doublings=(unplanned,))))
    assert "no plan of twice the devices: no cluster of twice its size" in report


def test_report_has_times_doublings_and_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *PLAN, *BATCHES)
    assert (code, err) == (0, "")
    for text in (
        "noise scale 131K tokens: given", "times and dollars are of a billion of the fewest tokens", "token time", "loss time",
        "* h100:16", "batch and devices together", "the next doubling of the chosen plan", "the choice at half and twice",
        "times the critical batch of 131K", "next, with --out plan.json: shardwise explain plan.json",
    ):  # fmt: skip
        assert text in out


def test_a_loss_alone_has_the_noise_scale_of_the_published_law(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "plan", "gpt-2", "h100:8", *SIZES, "--to-loss", "2.5", "--batch-tokens", "256Ki")
    assert code == 0
    assert "noise scale 2.55M tokens: published law at a loss of 2.5 (Kaplan et al." in out
    assert "note: the noise scale is that of another data set" in out


def test_a_measured_noise_scale_is_read_with_its_interval(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = {"schema": "shardwise.noise/1", "tokens": NOISE, "interval90": [NOISE / 4, NOISE * 4], "source": "x"}
    (tmp_path / "noise.json").write_text(json.dumps(measured), encoding="utf-8")
    code, out, _ = run(capsys, *PLAN[:3], *SIZES, "--noise-scale", str(tmp_path), "--batch-tokens", "64Ki,128Ki")
    assert code == 0
    assert "90% interval 32.8K to 524K: measured: " in out
    assert "the choice at the interval's ends:" in out


def test_a_plan_file_keeps_its_target_and_explain_says_the_side(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "plan.json")
    assert run(capsys, *PLAN[:2], "h100:8", *SIZES, *BATCHES[:2], "--batch-tokens", "512Ki", "--out", file)[0] == 0
    plan = sw.load_plan(file)
    assert plan.to_loss is not None
    assert (plan.to_loss.noise.tokens, plan.to_loss.batch_tokens) == (NOISE, None)
    report = payload("explain", file)["critical_batch"]
    assert (report["time"]["side"], len(report["doublings"])) == ("above", 3)
    _, out, _ = run(capsys, "explain", file)
    assert (
        "4. does the batch pay? 524,288 tokens are 4 times the critical batch of 131K, above it: 1.25 times the fewest"
        in out
    )
    assert "twice the batch would take 90% of these steps and 180% of these tokens" in out


def test_explain_takes_a_noise_scale_for_any_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    assert (
        run(capsys, "plan", "gpt-2", "h100:8", *SIZES, "--batch-tokens", "64Ki", "--tokens", "10G", "--out", file)[0]
        == 0
    )
    assert payload("explain", file)["critical_batch"] is None
    report = payload("explain", file, "--noise-scale", "128Ki")["critical_batch"]
    assert report["time"]["tokens"] == pytest.approx(10e9)
    assert report["time"]["side"] == "below"


def test_draw_has_times_over_clusters_and_batches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, where in (("clusters.svg", "h100:4,8,16"), ("batches.svg", "h100:8")):
        target = tmp_path / name
        assert run(capsys, "plan", "gpt-2", where, *SIZES, *BATCHES, "--draw", str(target))[0] == 0
        text = target.read_text(encoding="utf-8")
        for words in ("time to the loss", "time of the tokens", "halved by each doubling"):
            assert words in text


def test_python_result_equals_the_command_line() -> None:
    planned = sw.plan_to_loss(
        "gpt-2",
        ["h100:4", "h100:8", "h100:16"],
        noise_scale="128Ki",
        batches=[2**16, 2**17, 2**18],
        seq_len=1024,
        pins="pp=1 cp=1 tp=1",
    )
    by_command_line = payload(*PLAN, *BATCHES)
    assert [point.time.loss_s for point in planned.points if point.time] == [
        point["time"]["loss_s"] for point in by_command_line["points"]
    ]
    assert planned.chosen == by_command_line["chosen"]
    assert "h100:16" in planned._repr_html_()
    assert planned.plan is not None
    explained = sw.explain(planned.plan)
    assert explained.critical_batch is not None
    doubled, shown = explained.critical_batch.doublings[0], by_command_line["doublings"][0]
    assert (doubled.doubled, doubled.cluster, doubled.batch_tokens) == (
        shown["doubled"],
        shown["cluster"],
        shown["batch_tokens"],
    )


@pytest.mark.parametrize(
    ("arguments", "code", "problems"),
    [
        ([*PLAN[:3], "--batch-tokens", "64Ki", "--minimise", "usd"], 2, ["--minimise: found it without"]),
        ([*PLAN, "--noise-scale", "lots"], 2, ["--noise-scale: found 'lots'; tokens such as 1.2Mi"]),
        ([*PLAN, "--noise-scale", "-5"], 2, ["--noise-scale"]),
        ([*PLAN, "--to-loss", "0"], 2, ["--to-loss: found 0; nats per token"]),
        ([*PLAN, "--noise-scale", "1Mi", "--batch-tokens", "64Ki,x"], 2, ["--batch-tokens batch: found 'x'"]),
        ([*PLAN, "--noise-scale", "1Mi", "--batch-tokens", "1000,2048"], 2, ["found 1,000; multiples of --seq-len 1,024"]),
        ([*PLAN, "--noise-scale", "1Mi", "--sweep", "tp=1,2"], 2, ["--sweep: found beside --noise-scale"]),
        ([*PLAN, "--noise-scale", "1Mi", "--set", "job.tokens=5"], 2, ["--set job.tokens=5: found beside"]),
        ([*PLAN, *BATCHES, "--deadline", "1d"], 2, ["--deadline: found no --tokens"]),
        ([*PLAN, *BATCHES, "--tokens", "10T", "--deadline", "1h"], 3,
         ["no batch on any cluster meets the deadline", "the nearest, h100:16 with batches of", "more than the deadline"]),
        (["plan", "llama-3-70b", "h100:1,2", "--noise-scale", "64Ki", "--batch-tokens", "64Ki"], 3,
         ["h100:1 with batches of 64Ki:", "h100:2 with batches of 64Ki:"]),
    ],
)  # fmt: skip
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, problems: list[str]
) -> None:
    try:
        exit_code, _, err = run(capsys, *arguments)
    except SystemExit as ended:
        exit_code, err = int(str(ended.code)), capsys.readouterr().err
    assert exit_code == code
    for problem in problems:
        assert problem in err
    assert "Traceback" not in err


def test_several_sizes_of_a_chip_are_several_clusters() -> None:
    report = payload("plan", "gpt-2", "h100:4,8", *SIZES, "--batch-tokens", "64Ki")
    assert [described["cluster"] for described in report["clusters"]] == ["h100:4", "h100:8"]
