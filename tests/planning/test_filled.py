"""A layout with only some choices given, compared with a search for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.layout.choices import choices_from_pins
from shardwise.present.command_line import main
from shardwise.search.nearest_fitting_layout import added_fields_text, complete_layout
from shardwise.search.plan import Plan

FIELDS = {"global_batch_tokens": 2**21, "seq_len": 8192}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return sw.plan("llama-3-70b", "h100:128", stack="nemo-25", **FIELDS)


@pytest.mark.parametrize("text", ["tp=8 pp=4 fsdp=4", "tp=4 pp=8 fsdp=4 num_virtual_stages=1", "tp=2 pp=8"])
def test_missing_choices_equal_a_search_with_the_given_ones_pinned(plan: Plan, text: str) -> None:
    pins = {key: int(value) for key, value in (word.split("=") for word in text.split())}
    completed = complete_layout(plan.problem, pins)
    assert all(getattr(completed, name) == value for name, value in pins.items())
    unused_axes = {"dp": 1, "cp": 1} if "fsdp" in pins else {}
    again = sw.plan(plan.model, plan.cluster, plan.job, choices=choices_from_pins({**unused_axes, **pins}, {}))
    against = sw.explain(plan, text).against
    assert against is not None
    assert against.estimate.step_time_s <= again.estimate.step_time_s * 1.001
    assert against.filled == added_fields_text(completed, pins)
    assert "async_tp=true" in against.filled  # which the stack always has


def test_filled_layouts_may_interleave_like_the_plan(plan: Plan) -> None:
    """The plan's own degrees alone come to the plan's own step."""
    degrees = {
        axis: getattr(plan.layout, axis) for axis in ("tp", "cp", "pp", "dp", "fsdp") if getattr(plan.layout, axis) > 1
    }
    against = sw.explain(plan, " ".join(f"{axis}={degree}" for axis, degree in degrees.items())).against
    assert against is not None
    assert abs(against.lead) < 0.03


def test_explain_prints_the_filled_choices(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    job = ("llama-3-8b", "h100:16", "--batch-tokens", "1Mi", "--seq-len", "8192", "--stack", "megatron")
    assert main(["plan", *job, "--out", path]) == 0
    capsys.readouterr()
    assert main(["explain", path, "--against", "tp=4 fsdp=4"]) == 0
    shown = capsys.readouterr().out
    assert "  not said, and chosen as a search does: zero_stage=" in shown
    assert main(["explain", path, "--against", "tp=4 fsdp=4", "--json"]) == 0
    assert "micro_batch_seqs=" in json.loads(capsys.readouterr().out)["against"]["filled"]


def test_degrees_that_miss_the_devices_are_refused(plan: Plan) -> None:
    with pytest.raises(sw.InputError, match="devices"):
        sw.explain(plan, "tp=8 pp=4 fsdp=2 dp=3")
