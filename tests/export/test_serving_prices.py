"""What the launch of an engine costs: fields with their origins, verdicts that are withheld, the report and the JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.interop.serving.price_serving import ServingLaunchRecord
from shardwise.present.command_line import main
from shardwise.present.registry import report_of
from shardwise.present.rendering.plain_text import render_text
from shardwise.serve import BatchLimits, ServingLayout, ServingProblem, Workload, estimate_serving
from shardwise.values import InputError, to_json

LINE = "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --max-num-seqs 256"


def test_a_line_is_priced_as_its_layout_and_limits_are():
    priced = sw.serve_read(LINE, "h100:4", isl=2000, osl=500, concurrency=32)
    problem = ServingProblem(
        architecture=sw.load_model("qwen3-32b"), cluster=sw.load_cluster("h100:4"),
        workload=Workload(isl=2000, osl=500, concurrency=32), batch_limits=BatchLimits(max_num_seqs=256, memory_fraction=0.92),
    )  # fmt: skip
    expected = estimate_serving(problem, ServingLayout(tp=4))
    assert (priced.estimate.tpot_s, priced.estimate.memory) == (expected.tpot_s, expected.memory)
    assert priced.verdict == "fits"
    origins = {field.name: field.origin for field in priced.fields}
    assert origins["layout.tp"] == "--tensor-parallel-size 4"
    assert origins["batch_limits.memory_fraction"] == "default of vLLM 0.32.0"
    assert origins["formats"] == "checkpoint Qwen/Qwen3-32B"


def test_faster_layouts_are_the_soonest_of_those_that_the_engine_runs():
    priced = sw.serve_read("vllm serve Qwen/Qwen3-32B -tp 2 -dp 2", "h100:4", isl=1000, osl=200, concurrency=8)
    layouts = [
        ServingLayout.parse(text) for text in ("tp=4", "tp=2 pp=2", "tp=1 pp=4", "replicas=4", "pp=2 replicas=2")
    ]
    seconds = {layout: estimate_serving(priced.estimate.problem, layout).request_s for layout in layouts}
    best = min(seconds, key=seconds.get)
    assert priced.faster[0].layout == best == ServingLayout(tp=4)
    assert priced.faster[0].request_s == seconds[best] < priced.estimate.request_s
    assert priced.faster[0].options == {"tensor-parallel-size": 4, "data-parallel-size": None}
    text = render_text(report_of(priced))
    assert "--tensor-parallel-size 4, without --data-parallel-size: a request in" in text
    assert sw.serve_read("vllm serve Qwen/Qwen3-32B -tp 2 -dp 2 --enforce-eager", "h100:4").faster == ()


def test_limits_and_formats_are_changed_too():
    """16 of 64 requests run at once: room for all, weights and cache in fp8, and all of these together are sooner."""
    line = "vllm serve Qwen/Qwen3-32B -tp 4 --max-num-seqs 16"
    priced = sw.serve_read(line, "h100:4", isl=4000, osl=500, concurrency=64)
    by_kind = {item.changes: item for item in reversed(priced.faster)}
    assert by_kind["limits"].options == {"max-num-seqs": 64}
    assert (by_kind["formats"].checkpoint, by_kind["formats"].options) == ("Qwen/Qwen3-32B-FP8", {})
    problem = replace(
        priced.estimate.problem, batch_limits=BatchLimits(max_num_seqs=64, memory_fraction=0.92),
    )  # fmt: skip
    assert by_kind["limits"].request_s == estimate_serving(problem, ServingLayout(tp=4)).request_s
    combined = priced.faster[-1]
    assert combined.changes == "all of these"
    assert combined.request_s < min(item.request_s for item in priced.faster[:-1]) < priced.estimate.request_s
    assert "checkpoint Qwen/Qwen3-32B-FP8: a request in" in render_text(report_of(priced))
    on_a100 = sw.serve_read(line, "a100-80gb:4", isl=4000, osl=500, concurrency=64)  # which has no products in fp8
    assert "formats" not in {item.changes for item in on_a100.faster}


@pytest.mark.parametrize(
    ("line", "pool"),
    [
        ("vllm serve Qwen/Qwen3-32B -tp 4 --kv-transfer-config.kv_role kv_both", None),
        ("vllm serve Qwen/Qwen3-32B -tp 4 --kv-transfer-config.kv_role kv_producer", "prefill"),
        ("vllm serve Qwen/Qwen3-32B -tp 4 --kv-transfer-config.kv_role kv_consumer", "decode"),
        ("sglang serve Qwen/Qwen3-32B --tp 4 --disaggregation-mode decode", "decode"),
        ("sglang serve Qwen/Qwen3-32B --tp 4 --disaggregation-mode null", None),
    ],
)  # fmt: skip
def test_a_pool_of_a_disaggregated_deployment_is_read_as_such(line, pool):
    priced = sw.serve_read(line, "h100:4")
    assert priced.reading.launch.pool == pool
    assert (priced.estimate is None) == (pool is not None)
    if pool is not None:
        assert priced.verdict == "not known"
        assert f"the {pool} pool of a disaggregated deployment, which is not priced by itself" in priced.reason
        assert {field.name: field.value for field in priced.fields}["pool"] == pool


def test_a_verdict_is_withheld_where_the_memory_is_not_priced():
    priced = sw.serve_read(f"{LINE} --enforce-eager", "h100:4")
    assert (priced.verdict, priced.reason) == ("not known", "enforce-eager changes the memory, which is not priced")
    text = render_text(report_of(priced))
    assert "whether it fits is not known: enforce-eager changes the memory" in text
    assert "the launch says no load: priced with 1,024 tokens in" in text
    payload = to_json(ServingLaunchRecord.of(priced))
    assert json.loads(json.dumps(payload))["not_priced"] == {"enforce-eager": "memory"}
    assert payload["price"]["tpot_s"]["low"] < payload["price"]["tpot_s"]["value"] < payload["price"]["tpot_s"]["high"]


def test_models_and_clusters_that_are_not_known_have_no_price():
    unknown = sw.serve_read("vllm serve someone/model-9b -tp 2", "h100:2")
    assert unknown.estimate is None
    assert "the catalogue has no model 'someone/model-9b'" in unknown.reason
    assert sw.serve_read("vllm serve someone/model-9b -tp 2", "h100:2", served_model="llama-3-8b").verdict == "fits"
    assert "no cluster is named" in sw.serve_read(LINE).reason
    overridden = sw.serve_read(LINE + " --hf-overrides '{\"num_hidden_layers\": 2}'", "h100:4")
    assert "hf-overrides make" in render_text(report_of(overridden))


@pytest.mark.parametrize(
    ("line", "cluster", "problem"),
    [
        (LINE, "h100:2", "4 devices"),
        ("vllm serve Qwen/Qwen3-32B -tp 3", "h100:8", "tp is 3; a divisor of the 64 query heads"),
        (f"{LINE} --max-model-len 1024", "h100:4", "requests of 2,048 tokens; at most the 1,024"),
        ("nowhere.sh", "h100:4", "nowhere.sh: No such file"),
    ],
)
def test_requests_without_a_price_are_refused(line, cluster, problem):
    with pytest.raises(InputError, match=problem):
        sw.serve_read(line, cluster)


def test_folders_files_and_variables(tmp_path):
    problem = ServingProblem(
        architecture=sw.load_model("qwen3-32b"), cluster=sw.load_cluster("h100:8"),
        workload=Workload(isl=2000, osl=500, concurrency=64), engine="sglang",
    )  # fmt: skip
    deployment = sw.serve.ServingDeployment(problem=problem, layout=ServingLayout(tp=4, replicas=2))
    sw.export_plan(deployment, "sglang", tmp_path / "run")
    folder = sw.serve_read(tmp_path / "run", "h100:8")
    script = sw.serve_read(tmp_path / "run" / "launch.sh", "h100:8", files=[tmp_path / "run" / "serve.yaml"])
    assert str(folder.reading.launch.layout) == str(script.reading.launch.layout) == "tp=4 replicas=2"
    line = "vllm serve Qwen/Qwen3-32B --tensor-parallel-size $TP"
    assert sw.serve_read(line, environment=["TP=8"]).reading.launch.layout.tp == 8


def test_plans_of_trainings_and_of_servings_are_told_apart(tmp_path):
    plan = sw.plan("gpt-2", "h100:8", global_batch_tokens="64Ki", seq_len=1024)
    with pytest.raises(InputError, match="vllm serves, and found a plan of a training"):
        sw.export_plan(plan, "vllm")
    problem = ServingProblem(
        architecture=sw.load_model("qwen3-32b"), cluster=sw.load_cluster("h100:8"),
        workload=Workload(isl=2000, osl=500, concurrency=64),
    )  # fmt: skip
    deployment = sw.serve.ServingDeployment(problem=problem, layout=ServingLayout(tp=8))
    sw.search.dump_deployment(deployment, tmp_path / "deployment.json")
    assert "vllm serve Qwen/Qwen3-32B" in sw.export_plan(tmp_path / "deployment.json", "vllm").files["launch.sh"]
    with pytest.raises(InputError, match="megatron trains, and found a serving plan"):
        sw.export_plan(tmp_path / "deployment.json", "megatron")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["plan", "qwen3-32b", "h100:8", "--isl", "9", "--osl", "9", "--env", "A=1"], "--env: of `serve read`"),
        (["estimate", "qwen3-32b", "--concurrency", "4"], "cluster: missing; `serve estimate` requires it"),
        (["read", LINE, "h100:4", "--cluster", "h100:4"], "--cluster: a cluster is named twice"),
        (["read", LINE, "h100:4", "--isl", "9"], "--osl: missing; a load is the tokens in and out"),
        (["read", LINE, "h100:4", "--tpot", "9ms"], "--tpot: of `serve plan`"),
        (["read", "vllm serve Qwen/Qwen3-32B --tp4", "h100:4"], "--tp4: no option of vLLM"),
    ],
)
def test_arguments_of_other_kinds_are_refused(capsys, flags, problem):
    assert main(["serve", *flags]) == 2
    assert problem in capsys.readouterr().err


def test_the_verb_reads_a_line_for_a_cluster_of_either_spelling(capsys):
    assert (
        main(["serve", "read", LINE, "--cluster", "h100:4", "--isl", "99", "--osl", "9", "--rate", "60/min", "--json"])
        == 0
    )
    payload = json.loads(capsys.readouterr().out)
    assert (payload["schema"], payload["workload"]["rate_per_s"]) == ("shardwise.serving-launch/1", 1.0)
    assert main(["serve", "read", LINE, "h100:4"]) == 0
    assert "--tensor-parallel-size 4" in capsys.readouterr().out


def test_a_launch_that_does_not_fit_is_answered_with_those_that_do():
    """70B in 16 bits on two devices: room comes with a larger share of memory, or with weights in 8 bits."""
    line = "vllm serve meta-llama/Llama-3.3-70B-Instruct -tp 2 --gpu-memory-utilization 0.85"
    priced = sw.serve_read(line, "h100:2")
    assert priced.verdict == "does not fit"
    assert {item.changes for item in priced.faster} >= {"limits", "formats"}
    for item in priced.faster:
        problem = replace(
            priced.estimate.problem, formats=item.formats,
            batch_limits=replace(item.batch_limits, memory_fraction=item.batch_limits.memory_fraction or 0.92),
        )  # fmt: skip
        assert estimate_serving(problem, item.layout).verdict == "fits"
    text = render_text(report_of(priced))
    assert "what fits on the same devices" in text
    assert "TPOT" not in text.split("what fits on the same devices")[0]
