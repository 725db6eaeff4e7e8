"""`plan --pin` and `--max`: exactly the requested layouts are searched."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shardwise as sw
from shardwise.layout.choices import Choices
from shardwise.present.command_line import main
from shardwise.price import Problem
from shardwise.search.vectorised.candidates import build_space
from shardwise.search.vectorised.search_layouts import SearchChecks, search_layouts
from shardwise.values.errors import InputError, NothingFitsError

PLAN = ["plan", "llama-3-8b", "h100:16", "--batch-tokens", "512Ki", "--seq-len", "8192"]
MODEL, CLUSTER = sw.load_model("llama-3-8b"), sw.load_cluster("h100:16")
JOB = sw.Job(global_batch_tokens=2**19, seq_len=8192)


def run_plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*PLAN, *flags, "--json"]) == 0
    payload: dict[str, Any] = json.loads(capsys.readouterr().out)
    return payload


@pytest.mark.parametrize(
    ("pin", "name", "value"),
    [
        ("dp=2", "dp", 2), ("fsdp=4", "fsdp", 4), ("tp=4", "tp", 4), ("cp=2", "cp", 2), ("pp=2", "pp", 2),
        ("zero_stage=1", "zero_stage", 1), ("recompute=full", "recompute", "full"), ("micro_batch_seqs=2", "micro_batch_seqs", 2),
        ("sequence_parallel=true", "sequence_parallel", True), ("num_virtual_stages=2", "num_virtual_stages", 2),
        ("cp_variant=ring", "cp_variant", "ring"), ("async_tp=true", "async_tp", True),
        ("recompute_layers=3", "recompute_layers", 3), ("offload=optimizer", "offload", "optimizer"),
        ("schedule=zb_h1", "schedule", "zb_h1"), ("schedule=dualpipe", "schedule", "dualpipe"),
        ("schedule=none", "schedule", "none"),
    ],
)  # fmt: skip
def test_a_pin_holds_for_the_plan_and_all_runners_up(
    pin: str, name: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = run_plan(capsys, "--pin", pin)
    assert all(planned_layout["layout"][name] == value for planned_layout in (payload, *payload["alternatives"]))
    assert payload["search"]["space"][name] == [value]


@pytest.mark.parametrize(
    ("maximum", "name", "value"),
    [("tp=2", "tp", 2), ("fsdp=8", "fsdp", 8), ("zero_stage=1", "zero_stage", 1), ("micro_batch_seqs=2", "micro_batch_seqs", 2)],
)  # fmt: skip
def test_a_maximum_holds(maximum: str, name: str, value: int, capsys: pytest.CaptureFixture[str]) -> None:
    payload = run_plan(capsys, "--max", maximum)
    assert all(planned_layout["layout"][name] <= value for planned_layout in (payload, *payload["alternatives"]))
    assert max(payload["search"]["space"][name]) == value


def test_a_narrowed_search_equals_the_filtered_whole() -> None:
    """As many layouts, and the best of them, as in the whole space filtered afterwards."""
    pinned = search_layouts(
        Problem(MODEL, CLUSTER, JOB), choices=Choices().with_pins({"tp": 4, "recompute": "none"}, {"pp": 2})
    )
    every = search_layouts(Problem(MODEL, CLUSTER, JOB), checks=SearchChecks(num_samples=10**9)).sampled
    expected = [row for row in every if row.layout.tp == 4 and row.layout.pp <= 2 and row.layout.recompute == "none"]
    assert len(expected) == pinned.num_layouts > 100
    fitting = [row.step_time_s for row in expected if row.memory_bytes <= CLUSTER.chip.memory_bytes]
    assert pinned.best[0].step_time_s == min(fitting)


def test_a_pinned_value_that_is_not_listed_is_searched_all_the_same() -> None:
    assert 7 not in Choices().micro_batch_seqs
    plan = sw.plan(MODEL, CLUSTER, JOB, choices=Choices().with_pins({"micro_batch_seqs": 7, "dp": 1}, {"fsdp": 2}))
    assert plan.layout.micro_batch_seqs == 7
    assert plan.search is not None
    assert plan.search.space["micro_batch_seqs"] == [7]


@pytest.mark.parametrize(
    ("model", "ep", "problem"),
    [
        ("llama-3-8b", 8, "pin: llama-3-8b has no experts for ep = 8 or an etp to split; leave both out"),
        ("mixtral-8x7b", 3, "pin: ep = 3 does not divide the 8 experts of mixtral-8x7b; one of 1, 2, 4, 8 is required"),
    ],
)
def test_experts_that_a_model_lacks_are_wrong_input(
    model: str, ep: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [model if word == "llama-3-8b" else word for word in PLAN]
    assert main([*words, "--pin", f"ep={ep}"]) == 2
    assert capsys.readouterr().err == f"error: {problem}\n"


def test_a_layout_with_experts_that_a_model_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", *PLAN[1:], "--layout", "fsdp=16 ep=8"]) == 2
    expected = "layout: experts: llama-3-8b has no experts for ep = 8 or an etp to split; leave both out"
    assert capsys.readouterr().err == f"error: {expected}\n"
    assert main([*PLAN, "--pin", "ep=1"]) == main([*PLAN, "--max", "ep=8"]) == 0  # which ask for nothing more


def test_the_default_space_is_not_narrowed() -> None:
    assert Choices().with_pins({}, {}) == Choices()
    whole = build_space(MODEL, JOB, 16, Choices())
    halves = [build_space(MODEL, JOB, 16, Choices().with_pins({"sequence_parallel": sp}, {})) for sp in (False, True)]
    assert whole.num_candidates == sum(half.num_candidates for half in halves)
    assert len(whole.factorisation) == sum(len(half.factorisation) for half in halves)


WRONG = [
    (["--pin", "colour=3"], ["'colour'", "recompute"]),
    (["--max", "recompute=full"], ["'recompute'", "zero_stage"]),
    (["--pin", "tp"], ["'tp'", "KEY=VALUE"]),
    (["--pin", "tp=0"], ["tp: found 0", "1 to 10,000,000"]),
    (["--pin", "tp=many"], ["'many'", "number"]),
    (["--pin", "zero_stage=4"], ["found 4", "0, 1, 2 or 3"]),
    (["--pin", "recompute=some"], ["'some'", "selective"]),
    (["--pin", "sequence_parallel=2"], ["'2'", "true or false"]),
    (["--pin", "tp=2", "--pin", "tp=4"], ["tp is given twice"]),
    (["--pin", "tp=4", "--max", "tp=2"], ["tp = 4", "maximum 2"]),
    (["--pin", "tp=0", "--max", "pp=0", "--pin", "colour=1"], ["tp: found 0", "pp: found 0", "'colour'"]),
]


@pytest.mark.parametrize(("flags", "parts"), WRONG, ids=lambda value: " ".join(value))
def test_wrong_pins_exit_2_with_the_problem(
    flags: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *flags]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in parts:
        assert part in shown.err


IMPOSSIBLE = [
    (["--pin", "tp=3"], ["no legal layout", "devices", "tp = 3"]),
    (["--pin", "num_virtual_stages=33"], ["no legal layout", "stages"]),
    (["--pin", "micro_batch_seqs=4096"], ["no legal layout", "micro_batch"]),
    (
        ["--pin", "sequence_parallel=true", "--pin", "tp=1"],
        [
            "with tp, sequence_parallel as asked for",
            "sequence_parallel_axis: sequence_parallel splits over tp, which is 1",
        ],
    ),
    (["--pin", "zero_stage=3", "--pin", "fsdp=1", "--pin", "cp=1"], ["zero_axes: zero_stage = 3 with fsdp·cp = 1"]),
    (
        ["--pin", "num_virtual_stages=4", "--max", "pp=1"],
        ["num_virtual_stages=4", "virtual_stages: num_virtual_stages = 4 needs"],
    ),
]


@pytest.mark.parametrize(("flags", "parts"), IMPOSSIBLE, ids=lambda value: " ".join(value))
def test_pins_that_leave_nothing_exit_3_with_the_rules(
    flags: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *flags]) == 3
    shown = capsys.readouterr()
    for part in parts:
        assert part in shown.err


def test_pins_under_which_nothing_fits_are_named_as_a_way_out() -> None:
    with pytest.raises(NothingFitsError, match="loosen a pin"):
        sw.plan(MODEL, CLUSTER, JOB, choices=Choices().with_pins({"dp": 16}, {}))


def test_choices_are_checked_in_python_too() -> None:
    with pytest.raises(InputError, match="tp: found True"):
        Choices().with_pins({"tp": True}, {})


def test_runnable_plans_only_what_train_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Together with the user's pins."""
    payload = run_plan(capsys, "--runnable", "--pin", "dp=2")
    assert [payload["layout"][axis] for axis in ("dp", "fsdp", "tp", "cp", "pp", "ep")] == [2, 8, 1, 1, 1, 1]
    assert payload["layout"]["offload"] == "none"
    assert payload["job"]["loss"] == "in_place"
    layouts = [alternative["layout"] for alternative in run_plan(capsys, "--runnable")["alternatives"]]
    assert any(layout["tp"] > 1 for layout in layouts)


def test_a_pin_that_does_not_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--runnable", "--pin", "offload=optimizer"]) == 2
    assert (
        "--runnable: offload=optimizer is planned, not yet runnable; offload=none is required"
        in capsys.readouterr().err
    )


def test_runnable_searches_what_the_engine_splits(capsys: pytest.CaptureFixture[str]) -> None:
    """An uneven vocabulary over any tp."""
    gpt = ["plan", "gpt-2", "h100:8", "--batch-tokens", "512Ki", "--seq-len", "1Ki", "--runnable", "--json"]
    assert main([*gpt, "--pin", "tp=2"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert (payload["model"]["vocab_size"], payload["layout"]["tp"]) == (50_257, 2)


def test_a_budget_is_given_to_the_fastest_layouts() -> None:
    """None of the layouts of the search exceeds it, and the plan has the set; a stack that has no sets refuses it."""
    job = {"global_batch_tokens": 2**16, "seq_len": 4096}
    pins = "dp=1 tp=1 cp=1 pp=1 micro_batch_seqs=2 recompute=budget:10GB"
    plan = sw.plan("llama-3-8b", "h100:8", pins=pins, runnable=True, **job)
    assert plan.layout.recompute.startswith("keep:")
    assert plan.estimate.memory["activations"] <= 10e9
    assert plan.estimate.fits
    with pytest.raises(InputError, match="megatron has no recompute=budget:10gb"):
        sw.plan("llama-3-8b", "h100:8", stack="megatron", pins=pins, **job)
    with pytest.raises(
        NothingFitsError,
        match=r"recompute: budget:1MB: none of the \d+ fastest layouts fits with it, others were not tried",
    ):
        sw.plan("llama-3-8b", "h100:8", pins=pins.replace("10GB", "1MB"), runnable=True, **job)
