"""`shardwise rehearse` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from number_paths import require_payload_numbers

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.present.command_line import main
from shardwise.present.verbs.training import rehearse
from shardwise.run.trainer.rehearsal import MAX_MICRO_BATCHES
from shardwise.search.plan import plan_layout
from shardwise.search.plan_file import dump_plan

SMALL = Architecture(
    name="small", num_layers=2, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=48
)


def run(capsys: pytest.CaptureFixture[str], place: Path, *flags: str, **layout: Any) -> tuple[int, str, str]:
    parsed_layout = Layout(**layout)
    job = Job(global_batch_tokens=64 * 16, seq_len=16, precision="fp32", loss="in_place")
    dump_plan(
        plan_layout(SMALL, load_cluster(f"local:{parsed_layout.num_devices}"), job, parsed_layout), place / "plan.json"
    )
    code = main(["rehearse", str(place / "plan.json"), *flags])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_report_has_memory_and_collectives(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, tmp_path, "--rank", "19", fsdp=16, tp=2, zero_stage=3)
    for part in (
        "small, rank 19 of 32: fsdp=16 tp=2 zero_stage=3", "at fsdp=9 tp_kv=1",
        "a step of 3 micro-batches of the 4, rehearsed in",
        "18 and 19", "1 to 31 by 2", "equal in kind, axes, format, bytes and count", "parameters", "peak",
    ):  # fmt: skip
        assert part in out, part
    assert err == ""
    assert out.splitlines()[-1].startswith("ok" if code == 0 else "NOT ok: ")


def test_payload_has_ranks_groups_and_memory_terms(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, tmp_path, "--rank", "3", "--json", dp=8)
    report = json.loads(out)
    assert (report["schema"], report["ranks"], report["rank"], err) == ("shardwise.rehearse/2", 8, 3, "")
    assert (report["model"]["name"], report["layout"]["text"]) == ("small", str(Layout(dp=8)))
    assert report["cluster"] == load_cluster("local:8").name
    assert {axis: place for axis, place in report["coordinate"].items() if place} == {"dp": 3}
    assert report["num_micro_batches"] == MAX_MICRO_BATCHES  # of eight
    assert report["groups"] == [{"axes": ["dp"], "ranks": list(range(8))}]
    assert report["collectives_equal"] is report["collectives"]["equal"] is True
    planned, executed = report["memory"]["planned"], report["memory"]["executed"]
    terms = {term["name"]: term for term in report["memory"]["terms"]}
    assert [term["predicted"] for term in terms.values()] == list(planned.values())
    assert {name for name, term in terms.items() if not term["is_judged"]} == {"workspace"}
    assert report["ok"] == all(term["holds"] for term in terms.values() if term["is_judged"])
    assert (
        terms.keys()
        == planned.keys()
        == executed.keys()
        >= {"parameters", "gradients", "optimizer", "activations", "peak"}
    )
    assert executed["optimizer"] == planned["optimizer"] == 2 * planned["parameters"]
    assert report["seconds"] > 0
    assert report["ok"] is (code == 0)


def test_a_difference_from_the_plan_exits_3(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "shardwise.run.parallel.mesh_collectives.MeshCollectives.sum_and_wait", lambda self, values, axes: values
    )
    code, out, _ = run(capsys, tmp_path, dp=8)
    assert code == 3
    assert "all_reduce over dp of 4 B in fp32: 1 planned, 0 issued" in out
    assert "NOT ok: the list of collectives is not the planned one" in out
    assert run(capsys, tmp_path, "--json", dp=8)[0] == 3


@pytest.mark.parametrize(
    ("flags", "layout", "message"),
    [
        (("--rank", "8"), {"dp": 8}, "rank: found 8; the plan's ranks are 0 to 7"),
        (
            (),
            {"dp": 2, "pp": 2, "tp": 2, "sequence_parallel": True, "async_tp": True, "schedule": "zb_h1"},
            "async_tp with schedule=zb_h1",
        ),
        (("--set", "recipe.balanse=none"), {"dp": 8}, "recipe has no 'balanse'"),
        (("--set", "job.seq_len=3"), {"dp": 8}, "recipe.NAME=VALUE is required"),
    ],
)
def test_wrong_input_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: tuple[str, ...], layout: dict[str, Any], message: str
) -> None:
    code, out, err = run(capsys, tmp_path, *flags, **layout)
    assert (code, out) == (2, "")
    assert message in err


def test_python_result_reports_the_numbers_of_the_payload(tmp_path: Path) -> None:
    job = Job(global_batch_tokens=64 * 16, seq_len=16, precision="fp32", loss="in_place")
    plan = plan_layout(SMALL, load_cluster("local:8"), job, Layout(dp=8))
    rehearsal = rehearse(plan, rank=3)
    assert (rehearsal.ok, rehearsal.rehearsed.rank) == (True, 3)
    assert require_payload_numbers(rehearsal) > 10
