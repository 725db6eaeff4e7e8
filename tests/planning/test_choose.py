"""Which layout a plan takes among those that predictions cannot distinguish; even batches; plan files of older
versions.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from thinned import part_of

import shardwise as sw
from shardwise.hardware.network.switches import Switched
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.layout.rules.model_and_cluster_rules import has_even_batch
from shardwise.layout.rules.stack_abilities import stack_of
from shardwise.layout.sharding_scheme import layout_degrees
from shardwise.measure.calibrate.prediction_errors import predict_rows
from shardwise.measure.calibrate.published_runs.run_table import published_rows
from shardwise.present.command_line import main
from shardwise.price import Problem
from shardwise.price.problem import with_problem_defaults
from shardwise.search.balance_stages import StageBalancer
from shardwise.search.plan_file import parse_plan, plan_payload
from shardwise.search.planner import _complexity
from shardwise.search.vectorised.search_layouts import search_layouts
from shardwise.search.verdicts import MEMORY_RESERVE, RESOLUTION

SMALL = sw.Job(global_batch_tokens=2**20, seq_len=8192)


def of_replica(layout: sw.Layout) -> tuple[int, int]:
    """Devices of a replica, and over how many axes the model or the sequence is split."""
    return layout.tp * layout.cp * layout.pp, sum(n > 1 for n in (layout.tp, layout.cp, layout.pp, layout.ep))


@pytest.mark.parametrize(
    ("model", "name", "job"),
    [
        ("llama-3-8b", "h100:8", SMALL),
        ("llama-3-8b", "h100:64", replace(SMALL, global_batch_tokens=2**21)),
        ("llama-3-70b", "tpu-v5p:4x4x4", sw.Job(global_batch_tokens=2**20, seq_len=4096)),
        ("mixtral-8x7b", "h100:64", sw.Job(global_batch_tokens=2**20, seq_len=4096)),
    ],
)
def test_the_simplest_of_what_predictions_do_not_tell_apart_is_taken(model: str, name: str, job: sw.Job) -> None:
    architecture = sw.load_model(model)
    taken = sw.plan(architecture, sw.load_cluster(name), job)
    cluster, priced_job = with_problem_defaults(sw.load_cluster(name), job)
    choices = Choices().limit_to_stack(stack_of(cluster), architecture, job)
    result = search_layouts(Problem(architecture, cluster, priced_job), choices=choices, reserve=MEMORY_RESERVE)
    room = cluster.chip.memory_bytes * (1 - MEMORY_RESERVE)
    result = StageBalancer(architecture, cluster, priced_job, room).balance_result(result)
    fastest = result.best[0].step_time_s
    assert fastest <= taken.estimate.step_time_s <= fastest * (1 + RESOLUTION)
    near = [row.layout for row in result.by_factorisation if row.step_time_s <= fastest * (1 + RESOLUTION)]
    assert len(near) > 2
    assert of_replica(taken.layout) == min(map(of_replica, near))
    assert taken.layout.cp == min(layout.cp for layout in near if of_replica(layout) == of_replica(taken.layout))


def test_many_devices_for_one_replica_are_no_simple_layout() -> None:
    """Llama 3.1 405B on 1,024 H100: pp=128 with cp=8 is two axes and within the resolution, and there would be one replica."""
    job = sw.Job(global_batch_tokens=2**24, seq_len=8192)
    taken = sw.plan(sw.load_model("llama-3-405b"), sw.load_cluster("h100:1024"), job)
    assert taken.layout.num_replicas >= 4
    assert taken.layout.pp <= 16


def test_equal_bounds_go_to_the_smaller_cp() -> None:
    """The bound without cp equals those of cp = 2 and 4 to five digits."""
    job = replace(SMALL, overlap="per_axis")
    result = search_layouts(
        Problem(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job), reserve=MEMORY_RESERVE
    )
    tied = {row.layout.cp for row in result.best if row.step_time_s <= result.best[0].step_time_s * (1 + 1e-5)}
    taken = sw.plan(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job)
    assert tied == {1, 2, 4}
    assert taken.layout.cp == 1
    assert taken.estimate.step_time_s == pytest.approx(result.best[0].step_time_s, rel=1e-5)


def test_an_even_batch_comes_before_a_ragged_one() -> None:
    """One step of 84 sequences on 8 devices: four replicas of 21 each, while eight have 10 or 11."""
    model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:8")
    job = sw.Job(global_batch_tokens=84 * 4096, seq_len=4096)
    result = search_layouts(Problem(model, cluster, job).with_defaults(), reserve=MEMORY_RESERVE)
    near = [row for row in result.best if row.step_time_s <= result.best[0].step_time_s * (1 + RESOLUTION)]
    even = [bool(has_even_batch(job, layout_degrees(row.layout))) for row in near]
    taken = sw.plan(model, cluster, job)
    assert any(even)
    assert taken.estimate.waste.get("sequences", 0.0) == 0.0


def test_divisible_leaves_only_layouts_that_share_the_batch_out_evenly(capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = sw.load_model("llama-3-8b"), sw.load_cluster("h100:8")
    job = sw.Job(global_batch_tokens=84 * 4096, seq_len=4096)
    every = search_layouts(Problem(model, cluster, job))
    even_only = search_layouts(Problem(model, cluster, job), choices=Choices(divisible=True), top=10**6)
    assert 0 < even_only.num_layouts < every.num_layouts
    assert even_only.num_illegal_by_rule["even_batch"] > 0
    assert all(has_even_batch(job, layout_degrees(row.layout)) for row in even_only.best)
    words = ["plan", "llama-3-8b", "h100:8", "--batch-tokens", str(84 * 4096), "--seq-len", "4096"]
    assert main([*words, "--divisible", "--json"]) == 0
    assert "sequences" not in json.loads(capsys.readouterr().out)["estimate"]["waste"]
    assert main([*words, "--divisible", "--pin", "fsdp=8"]) == 3
    assert "dp·fsdp·micro_batch_seqs" in capsys.readouterr().err


def test_a_plan_of_the_first_schema_is_read(tmp_path: Path) -> None:
    """Its links were at the rates that collectives reach; now they are at the rated ones, and the price is the same."""
    for name in ("h100:16", "tpu-v5e:4x4"):
        plan = sw.plan(sw.load_model("llama-3-8b"), sw.load_cluster(name), SMALL)
        payload = json.loads(json.dumps(plan_payload(plan)))
        reached = plan_payload(replace(plan, cluster=replace(plan.cluster, topology=plan.cluster.sustained_topology)))
        payload |= {"schema": "shardwise.plan/1", "cluster": json.loads(json.dumps(reached["cluster"]))}
        del payload["bound_s"]
        again = parse_plan(payload)
        priced = sw.estimate(again.model, again.cluster, again.job, again.layout)
        assert priced.step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-12)


def test_tensor_parallelism_stays_within_a_node_as_in_every_published_run() -> None:
    """With tp=16 replicas would be of fewer devices than with tp=8 and a pipeline (GPT 1T on 512 A100, arXiv 2205.05198)."""
    rows = published_rows()
    some = [*part_of(rows), *(row for row in rows if row.id == "korthikanti-2022-004")]
    predictions = {predicted.row.id: predicted.prediction for predicted in predict_rows(some)}
    for prediction in filter(None, predictions.values()):
        topology = prediction.case.cluster.topology
        assert not isinstance(topology, Switched) or prediction.case.layout.tp <= (
            topology.tiers[0].size or prediction.case.layout.tp
        )
    korthikanti = predictions["korthikanti-2022-004"]
    assert korthikanti is not None
    cluster, job = korthikanti.case.cluster, korthikanti.case.job
    wide, deep = (Layout.parse(text) for text in ("tp=16 pp=16 fsdp=2", "tp=8 pp=64"))
    assert _complexity(cluster, job, deep) < _complexity(cluster, job, wide)
    torus = sw.load_cluster("tpu-v5p:8x8x8")
    assert _complexity(torus, job, wide) < _complexity(torus, job, deep)
