"""`shardwise reconcile` as a user meets it: after runs of the engine itself, and what it refuses."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from train import stand_in
from train.launching import launch_command
from train.stand_in import SEQ_LEN, small_plan, write_inputs

from shardwise import train
from shardwise.model.job import Job
from shardwise.model.optimizers.definition import get_optimizer, optimizer_names
from shardwise.present.command_line import main
from shardwise.records.run_folder import read_json
from shardwise.records.step_log import read_log
from shardwise.search.plan import Plan, plan_layout
from shardwise.search.plan_file import dump_plan
from shardwise.values.durable_files import write_json_atomic
from shardwise.values.estimate_term_names import TIME_TERMS

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("shardwise.run.trainer.machine_probe.BUDGET_S", 0.0)


@pytest.fixture
def small_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "build_components", stand_in.parts)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def train_plan(capsys: pytest.CaptureFixture[str], place: Path, plan: Plan, *flags: str) -> list[str]:
    """Train a plan, and give what names it and its run."""
    words = write_inputs(place, plan)
    command = ["train", *words, "--device", "cpu", *flags]
    if plan.layout.num_devices == 1:
        assert run(capsys, *command)[0] == 0
    else:
        launched = launch_command(*command)
        assert launched.ended() == 0, launched.err
    return [words[0], words[4]]


def in_place(devices: int = 1, **layout: object) -> Plan:
    """A plan whose loss is the engine's, of a vocabulary that tells logits from hidden states, and a head of its own; norms are
    as wide as the optimizer's blocks at least, which they would be padded to."""
    plan = small_plan(devices, vocab_size=48, **layout)
    width = max(plan.model.d_model, get_optimizer(plan.job.optimizer).block)
    model = replace(plan.model, tied_embeddings=False, d_model=width)
    return plan_layout(model, plan.cluster, replace(plan.job, loss="in_place"), plan.layout)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("optimizer", optimizer_names())
def test_a_run_of_the_engine_in_one_process(capsys: pytest.CaptureFixture[str], tmp_path: Path, optimizer: str) -> None:
    named = train_plan(capsys, tmp_path, in_place(optimizer=optimizer), "--steps", "6")
    picture = tmp_path / "reconciled.svg"
    code, out, err = run(capsys, "reconcile", *named, "-v", "--plot", str(picture))
    assert (code, err) == (0, "")
    for part in (
        "against " + named[1], "local:N is a cluster", "predicted", "measured", "unexplained", "forward", "backward",
        "optimizer", "activations", "none planned, none issued", "shardwise bench machine --processes 1",
    ):  # fmt: skip
        assert part in out
    drawn = {element.text for element in ElementTree.parse(picture).iter(f"{SVG}text")}
    assert {"predicted", "measured", "forward", "activations", "Time of a step: predicted and measured"} <= drawn
    payload = json.loads(run(capsys, "reconcile", *named, "--json")[1])
    assert payload["schema"] == "shardwise.reconcile/3"
    assert payload["time"]["num_steps"] == 4  # not the first, and not the second, which is watched
    terms = {term["name"]: term for term in payload["time"]["terms"]}
    assert list(terms) == [*TIME_TERMS, "data", "other"]
    assert terms["data"]["predicted_s"] is None
    assert all(terms[name]["measured_s"] > 0 for name in ("forward", "backward", "optimizer"))
    memory = {term["name"]: term for term in payload["memory"]["terms"]}
    assert all(memory[name]["within"] for name in ("parameters", "gradients", "optimizer", "activations"))
    assert sum(term["measured"] for term in memory.values()) == payload["memory"]["total"]["measured"]
    assert read_log(Path(named[1]) / "log.jsonl").inspected == {2}


def test_two_ranks_issue_what_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    named = train_plan(capsys, tmp_path, in_place(2, fsdp=2, zero_stage=3, micro_batch_seqs=2), "--steps", "5")
    code, out, _ = run(capsys, "reconcile", *named)
    assert code == 0
    assert "equal in kind, axes, format, bytes and count" in out
    measured = read_json(Path(named[1]) / "measured.json")
    assert measured["before"].keys() == measured["after"].keys() == {"products", "memory", "collectives"}
    measured["collectives"].pop()
    write_json_atomic(Path(named[1]) / "measured.json", measured)
    out = run(capsys, "reconcile", *named)[1]
    assert "NOT as planned" in out
    assert "reduce_scatter over fsdp of " in out


def test_multi_token_prediction_issues_and_holds_what_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside the loss of the next token, which is the one that is shown, the log has that of the further ones."""
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    plan = in_place(2, dp=2, micro_batch_seqs=2)
    plan = plan_layout(replace(plan.model, num_predict_layers=1), plan.cluster, plan.job, plan.layout)
    flags = [
        "--steps",
        "12",
        "--learning-rate",
        "1e-2",
        "--set",
        "recipe.respect_documents=true",
        "--validate-every",
        "6",
    ]
    named = train_plan(capsys, tmp_path, plan, *flags)
    code, out, _ = run(capsys, "reconcile", *named, "--json")
    payload = json.loads(out)
    assert code == 0
    assert payload["collectives"]["equal"]
    terms = {term["name"]: term for term in payload["memory"]["terms"]}
    assert all(terms[name]["within"] for name in ("parameters", "gradients", "optimizer", "activations"))
    assert payload["memory"]["total"]["measured"] == pytest.approx(payload["memory"]["total"]["predicted"], rel=0.02)
    log = read_log(Path(named[1]) / "log.jsonl")
    further = [record.prediction_loss or 0.0 for record in log.steps]
    assert log.steps[0].loss == pytest.approx(math.log(48), rel=0.02)
    assert (
        0.8 * math.log(48) < further[0] < math.log(48)
    )  # over as many targets, of which a last one of each document is none
    assert sum(further[-3:]) < 0.95 * sum(further[:3])
    assert list(log.validation) == [6, 12]
    assert log.validation[12] < log.validation[6] < log.steps[0].loss


@pytest.mark.usefixtures("small_trainer")
def test_runs_that_cannot_be_reconciled_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan, folder = train_plan(capsys, tmp_path, small_plan(), "--steps", "4")

    def refused(*arguments: str) -> str:
        code, out, err = run(capsys, "reconcile", *arguments)
        assert (code, out) == (2, "")
        return err

    assert "holds no run" in refused(plan, str(tmp_path / "data"))
    assert "found 2 steps" in refused(plan, folder)
    dump_plan(small_plan(batch_seqs=4), tmp_path / "other.json")
    assert "found job.global_batch_tokens 64 in the plan" in refused(str(tmp_path / "other.json"), folder)
    dump_plan(small_plan(optimizer="lion"), tmp_path / "lion.json")
    assert "found job.optimizer lion in the plan; the run in " in refused(str(tmp_path / "lion.json"), folder)
    dump_plan(small_plan(recompute="full"), tmp_path / "full.json")
    assert "found layout.recompute full in the plan; the run in " in refused(str(tmp_path / "full.json"), folder)
    measured = Path(folder) / "measured.json"
    payload = read_json(measured)
    write_json_atomic(measured, {**payload, "step": None})
    assert "has not come to the step" in refused(plan, folder)
    write_json_atomic(measured, {**payload, "collectives": [{"kind": "all_reduce"}]})
    assert "a file as `train` writes it is required" in refused(plan, folder)
    measured.unlink()
    assert "an older version ran it" in refused(plan, folder)


@pytest.mark.usefixtures("small_trainer")
def test_a_run_that_goes_on_is_judged_by_its_latest_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    named = train_plan(capsys, tmp_path, small_plan(), "--steps", "6")
    goes_on = ["train", named[0], "--data", str(tmp_path / "data"), "--out", named[1], "--resume", "--steps", "11"]
    assert run(capsys, *goes_on)[0] == 0
    payload = json.loads(run(capsys, "reconcile", *named, "--json")[1])
    assert payload["time"]["num_steps"] == 3  # of 7 to 11, the first two left out
    assert read_json(Path(named[1]) / "measured.json")["step"] == 8
    assert read_log(Path(named[1]) / "log.jsonl").inspected == {2, 8}


@pytest.mark.usefixtures("small_trainer")
def test_the_same_layout_priced_on_another_cluster_is_held_against_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """So that a plan that was calibrated after the run can be."""
    plan, folder = train_plan(capsys, tmp_path, small_plan(), "--steps", "6")
    job = Job(global_batch_tokens=8 * SEQ_LEN, seq_len=SEQ_LEN, precision="fp32")
    chip = small_plan().cluster.chip
    faster = replace(small_plan().cluster, chip=replace(chip, name="my own", memory_bytes_per_s=1e12))
    dump_plan(plan_layout(small_plan().model, faster, job, small_plan().layout), plan)
    code, out, _ = run(capsys, "reconcile", plan, folder)
    assert code == 0
    assert "another machine" not in out
    assert "--set job.loss=in_place" in out
