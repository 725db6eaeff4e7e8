"""`plan`, `estimate` and `explain` with only a model and a cluster: defaults for the rest, which the report lists."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.present.command_line import main
from shardwise.search.plan_file import parse_plan, plan_payload

TWO_WORDS = ("gpt-2", "h100:8")
SIZES = ("--batch-tokens", "524288", "--seq-len", "1024")
HEAD = "524,288 tokens per batch (default: usual for a model of this size), sequences of 1,024 (default)"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def payload(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return dict(json.loads(run(capsys, *words, "--json")))


def without_times(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the payload of a plan without its defaults and the CPU time of its search."""
    search = plan["search"] and {**plan["search"], "cpu_seconds": 0}
    return {**{key: value for key, value in plan.items() if key != "defaults"}, "search": search}


@pytest.mark.parametrize("verb", ["plan", "estimate", "explain"])
def test_a_model_and_a_cluster_are_enough_and_the_head_says_what_was_assumed(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert HEAD in run(capsys, verb, *TWO_WORDS).splitlines()[0]


def test_a_plan_with_defaults_is_the_plan_of_these_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    default, explicit = payload(capsys, "plan", *TWO_WORDS), payload(capsys, "plan", *TWO_WORDS, *SIZES)
    assert default["defaults"] == ["seq_len", "batch_tokens"]
    assert "defaults" not in explicit
    assert without_times(default) == without_times(explicit)
    assert payload(capsys, "plan", *TWO_WORDS, *SIZES[:2])["defaults"] == ["seq_len"]
    assert "(default" not in run(capsys, "plan", *TWO_WORDS, *SIZES)


def test_an_estimate_without_a_layout_is_of_the_one_that_plan_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    planned, estimated = payload(capsys, "plan", *TWO_WORDS), payload(capsys, "estimate", *TWO_WORDS)
    assert estimated["defaults"] == ["seq_len", "batch_tokens", "layout"]
    assert (estimated["layout"], estimated["estimate"]) == (planned["layout"], planned["estimate"])
    assert estimated["search"] is None
    assert "; the layout is the one that `plan` chooses" in run(capsys, "estimate", *TWO_WORDS).splitlines()[0]
    assert payload(capsys, "estimate", *TWO_WORDS, "--layout", "dp=8")["defaults"] == ["seq_len", "batch_tokens"]
    assert "defaults" not in payload(capsys, "estimate", *TWO_WORDS, *SIZES, "--layout", "dp=8")


def test_explaining_a_model_on_a_cluster_is_explaining_its_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = str(tmp_path / "plan.json")
    run(capsys, "plan", *TWO_WORDS, "--out", file)
    assert payload(capsys, "explain", *TWO_WORDS) == payload(capsys, "explain", file)
    assert payload(capsys, "explain", file)["defaults"] == ["seq_len", "batch_tokens"]
    explicit = payload(capsys, "explain", *TWO_WORDS, *SIZES, "--stack", "megatron", "--term", "time.optimizer")
    assert explicit["stack"] == "megatron"
    assert "defaults" not in explicit


def test_a_plan_file_keeps_its_defaults_and_an_older_one_has_none(tmp_path: Path) -> None:
    plan = sw.plan(*TWO_WORDS)
    sw.dump_plan(plan, tmp_path / "plan.json")
    assert sw.load_plan(tmp_path / "plan.json") == plan
    assert plan.defaults == ("seq_len", "batch_tokens")
    older = {key: value for key, value in plan_payload(plan).items() if key != "defaults"}
    assert parse_plan(json.loads(json.dumps(older))).defaults == ()


def test_several_clusters_and_sweeps_say_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"gpt-2, {HEAD}, bf16\n" in run(capsys, "plan", "gpt-2", "h100:4,8")
    assert payload(capsys, "plan", "gpt-2", "h100:4,8")["plan"]["defaults"] == ["seq_len", "batch_tokens"]
    assert HEAD in run(capsys, "plan", *TWO_WORDS, "--sweep", "gpus=4,8").splitlines()[0]
    swept = run(capsys, "plan", *TWO_WORDS, "--sweep", "model=gpt-2,gpt-2-xl").splitlines()[0]
    assert "batches (default: usual for a model of this size)" in swept


def test_python_has_the_same_defaults() -> None:
    plan = sw.plan("gpt-2", "h100:8")
    assert (plan.job.global_batch_tokens, plan.job.seq_len) == (2**19, 1024)
    assert sw.estimate("gpt-2", "h100:8").step_time_s == sw.estimate(
        "gpt-2", "h100:8", layout=plan.layout, global_batch_tokens=2**19, seq_len=1024
    ).step_time_s  # fmt: skip
    assert sw.explain("gpt-2", cluster="h100:8", term="time.optimizer").plan.layout == plan.layout


def test_a_batch_with_fewer_sequences_than_the_layout_needs_is_multiplied(capsys: pytest.CaptureFixture[str]) -> None:
    """512 sequences are half of what 1,024 replicas need, and a third of what 1,536 need."""
    pins = ("--pin", "tp=1", "--pin", "cp=1", "--pin", "pp=1")
    text = run(capsys, "plan", "gpt-2", "h100:1024", *pins)
    assert (
        "1,048,576 tokens per batch (default: 2 times 524,288, usual for a model of this size, to fill the layout)"
        in text
    )
    assert payload(capsys, "plan", "gpt-2", "h100:1536", *pins)["job"]["global_batch_tokens"] == 3 * 2**19
    report = payload(capsys, "estimate", "gpt-2", "h100:1024", "--layout", "dp=1024 micro_batch_seqs=2")
    assert (report["job"]["global_batch_tokens"], report["estimate"]["waste"]) == (4 * 2**19, {})
    piped = payload(capsys, "estimate", "gpt-2", "h100:1024", "--layout", "dp=512 pp=2")
    assert piped["job"]["global_batch_tokens"] == 2 * 2**19  # a micro-batch for each stage
    compared = payload(capsys, "plan", "gpt-2", "h100:8,1024", *pins)
    assert compared["plan"]["job"]["global_batch_tokens"] == 2 * 2**19


def test_where_nothing_fits_whatever_the_batch_the_first_reason_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-405b", "h100:8"]) == 3
    assert "no legal layout fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["explain", "gpt-2"], "cluster: missing; what to plan gpt-2 on is required"),
        (["explain", "nowhere.json"], "cannot read nowhere.json"),
        (["explain", "gpt-2", "h10:8"], "did you mean 'h100'?"),
        (["explain", "PLAN", "h100:8"], "cluster: found with a plan, which has one"),
        (["explain", "PLAN", "--seq-len", "8Ki", "--stack", "megatron"], "--seq-len, --stack: found with a plan"),
        (["estimate", "gpt-9", "h100:8"], "found 'gpt-9'"),
    ],
)
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], problem: str
) -> None:
    file = str(tmp_path / "plan.json")
    if "PLAN" in words:
        run(capsys, "plan", *TWO_WORDS, "--out", file)
    assert main([file if word == "PLAN" else word for word in words]) == 2
    assert problem in capsys.readouterr().err
