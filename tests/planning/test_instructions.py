"""The instruction list of a plan's step: its totals, its queries, and its text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.present.command_line import main
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.instruction_listing import list_instructions
from shardwise.search.plan import Plan
from shardwise.search.plan_file import dump_plan
from shardwise.step.unit_instructions import PHASES_OF_PASS
from shardwise.values.errors import InputError

JOB = Job(global_batch_tokens=2**19, seq_len=8192, overlap="sum")


def plan_of(layout: str, model: str = "llama-3-8b", cluster: str = "h100:16") -> Plan:
    architecture, loaded_cluster = load_model(model), load_cluster(cluster)
    chosen = Layout.parse(layout)
    return Plan(
        model=architecture,
        cluster=loaded_cluster,
        job=JOB,
        layout=chosen,
        estimate=estimate(Problem(architecture, loaded_cluster, JOB), chosen),
    )


@pytest.mark.parametrize(
    "layout",
    [
        "fsdp=16 zero_stage=3",
        "dp=2 fsdp=4 tp=2 zero_stage=1 sequence_parallel=true",
        "fsdp=8 cp=2 zero_stage=2 recompute=full",
    ],
)
def test_seconds_of_the_list_add_up_to_the_estimate(layout: str) -> None:
    """Where nothing overlaps, everything is fused and the host is infinitely fast: kernels by pass, and traffic by axis."""
    plan = plan_of(layout)
    seconds: dict[tuple[str, str], float] = {}
    for segment in list_instructions(plan):
        for stream, stream_s in segment.seconds_by_stream.items():
            seconds[segment.name, stream] = seconds.get((segment.name, stream), 0.0) + stream_s
    time, hidden = plan.estimate.time, plan.estimate.hidden
    assert seconds["forward", "compute"] == pytest.approx(time["forward"])
    assert seconds["backward", "compute"] == pytest.approx(time["backward"] + time["recompute"])
    assert seconds["update", "compute"] == pytest.approx(time["optimizer"])
    moved = sum(s for (_, stream), s in seconds.items() if stream != "compute")
    priced = sum(
        s for name, s in (*time.items(), *hidden.items()) if name in ("tp", "cp", "ep", "pp", "fsdp", "dp", "control")
    )
    assert moved == pytest.approx(priced)


def test_a_step_by_hand() -> None:
    """ZeRO-3 over 16: a block gathers its 9 weights for either pass and scatters their gradients, in each micro-batch."""
    segments = {(segment.unit, segment.name): segment for segment in list_instructions(plan_of("fsdp=16 zero_stage=3"))}
    forward, backward = segments["block", "forward"], segments["block", "backward"]
    assert (forward.layers, forward.micro_batches) == (32, 4)
    (gather,) = (instruction for instruction in forward.instructions if instruction.kind == "start")
    layer = 4096 * (4096 * 2 + 1024 * 2 + 3 * 14336 + 2)
    assert (gather.operation, gather.over, gather.count, gather.num_bytes) == ("all_gather", ("fsdp",), 1, 2 * layer)
    multiplied = sum(instruction.flops for instruction in forward.instructions if instruction.operation == "contract")
    assert multiplied == pytest.approx(
        2 * 8192 * (layer - 2 * 4096)
    )  # two for each token and weight, but for the norms'
    moved = [instruction.operation for instruction in backward.instructions if instruction.kind == "start"]
    assert moved == ["all_gather", "reduce_scatter"]
    assert [name for unit, name in segments if unit == "head"] == ["forward", "backward", "update"]
    assert list(segments)[:3] == [("embedding", "forward"), ("block", "forward"), ("head", "forward")]
    assert list(segments)[3:6] == [("head", "backward"), ("block", "backward"), ("embedding", "backward")]


def test_each_stage_has_its_own_segments() -> None:
    plan = plan_of("fsdp=8 pp=2 zero_stage=1 recompute=full recompute_layers=4")
    first, last = (list_instructions(plan, stage=stage, passes=["forward"]) for stage in (0, 1))
    assert [segment.unit for segment in first] == ["embedding", "block", "kept_block", "carry"]
    assert [segment.unit for segment in last] == ["block", "kept_block", "carry", "head"]
    assert [(segment.layers, segment.recompute) for segment in first[1:3]] == [(4, "full"), (12, "none")]
    (sent,) = (instruction for instruction in first[3].instructions if instruction.kind == "start")
    assert (sent.operation, sent.over, sent.why) == ("send_recv", ("pp",), "the next stage reads it")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stage": 1}, "stage: found 1; a stage of 0 to 0 is required"),
        ({"unit": "blok"}, "unit: found 'blok' \\(did you mean 'block'\\?\\)"),
        ({"passes": ["sideways"]}, "pass: found 'sideways'"),
    ],
)
def test_unknown_stages_units_and_passes_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        list_instructions(plan_of("fsdp=16 zero_stage=3"), **wrong)  # type: ignore[arg-type]


def test_the_verb_prints_what_a_person_and_a_program_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    dump_plan(plan_of("fsdp=16 zero_stage=3"), path)
    assert main(["instructions", str(path), "--pass", "forward", "--unit", "block"]) == 0
    text = capsys.readouterr().out
    assert "forward of block, 32 layers, 4 micro-batches" in text
    assert "start all_gather of w_down, w_gate, w_up and 6 more over fsdp" in text
    assert "contract attention_norm.out, wq -> q_flat" in text
    assert "over cp" not in text  # one device
    assert "free" not in text
    assert main(["instructions", str(path), "--pass", "forward", "--unit", "block", "--all"]) == 0
    assert "free q_flat" in capsys.readouterr().out
    assert main(["instructions", str(path), "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["schema"] == "shardwise.instructions/2"
    assert {segment["name"] for segment in payload["segments"]} == set(PHASES_OF_PASS)
    assert main(["instructions", str(path), "--unit", "nothing"]) == 2
