"""Pools of prefill and decode: written for engines with their router, read back, and priced together."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice

import pytest
from export.random_deployments import refused_pools, runnable_pools

import shardwise as sw
from shardwise.interop.serving.engines import ENGINES
from shardwise.interop.serving.export_pools import export_pools, place_pools
from shardwise.interop.serving.price_pools import PooledLaunchRecord, PricedPools
from shardwise.interop.serving.read_pools import ReadPools, read_deployment
from shardwise.interop.serving.serving_launch import launch_of_deployment
from shardwise.present.command_line import main
from shardwise.present.registry import report_of
from shardwise.present.rendering.plain_text import render_text
from shardwise.serve import (
    BatchLimits,
    PooledLayout,
    ServingDeployment,
    ServingLayout,
    ServingProblem,
    Workload,
    estimate_pools,
)
from shardwise.values import InputError, to_json

PAIR = """
python3 -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 2 --disaggregation-mode prefill --port 30000 &
python3 -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp 4 --max-running-requests 64 --disaggregation-mode decode &
python3 -m sglang_router.launch_router --pd-disaggregation --prefill http://10.0.0.1:30000 --decode http://10.0.0.2:30000
"""
TRANSFER = '--kv-transfer-config \'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\''
PROXY = "python toy_proxy_server.py --port 8192 --prefiller-ports 8100 8101 --decoder-ports 8200"
EITHER = "\n".join(
    f"vllm serve Qwen/Qwen3-32B --port {port} -tp {tp} {TRANSFER} &" for port, tp in ((8100, 1), (8101, 1), (8200, 4))
)


def _pools(
    model="qwen3-32b", cluster="h100:16", layout="prefill: tp=2 replicas=3; decode: tp=8", engine="vllm", **more
):
    problem = ServingProblem(
        architecture=sw.load_model(model), cluster=sw.load_cluster(cluster),
        workload=Workload(isl=2000, osl=500, concurrency=64), engine=engine, batch_limits=BatchLimits(max_batched_tokens=4096),
    )  # fmt: skip
    return ServingDeployment(problem=problem, layout=PooledLayout.parse(layout), **more)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_written_pools_are_read_back_equal(engine):
    """From the scripts with their files of options, and from the manifest."""
    for deployment in islice(runnable_pools(engine, 21), 12):
        files = export_pools(deployment, ENGINES[engine]).files
        scripts = {name: text for name, text in files.items() if not name.startswith(("kube", "READ"))}
        for texts, replicas in ((scripts, False), ({"kubernetes.yaml": files["kubernetes.yaml"]}, True)):
            reading = read_deployment(texts)
            assert isinstance(reading, ReadPools)
            for pool, part in deployment.pools.items():
                launch, restored = launch_of_deployment(part, pool), reading.pools[pool].launch
                expected = launch if replicas else replace(launch, layout=launch.layout.with_replicas(1))
                assert list(expected.differences(restored)) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_pools_that_an_engine_cannot_run_are_refused_with_the_nearest(engine):
    for deployment in islice(refused_pools(engine, 22), 6):
        with pytest.raises(InputError, match="cannot run this deployment") as error:
            export_pools(deployment, ENGINES[engine])
        assert "the nearest that it runs: " in error.value.problems[-1]


def test_an_excluded_layout_names_the_pool_and_the_nearest():
    with pytest.raises(InputError, match="decode: pp is 2; 1 or that of prefill, pp=1, is required by SGLang") as error:
        export_pools(_pools(layout="prefill: tp=4; decode: tp=4 pp=2", engine="sglang"), ENGINES["sglang"])
    assert error.value.problems[-1] == "the nearest that it runs: decode: layout tp=4 replicas=2"
    hybrid = _pools("qwen3.5-397b-a17b", layout="prefill: tp=2 attention_dp=2 ep=4; decode: tp=4 ep=4")
    with pytest.raises(InputError, match=r"decode: tp is 4 and that of prefill 2; .* has recurrent states") as error:
        export_pools(hybrid, ENGINES["vllm"])
    assert error.value.problems[-1].startswith("the nearest that it runs: decode: layout tp=2 ")
    with pytest.raises(InputError, match=r"layout: prefill: tp is 3; a divisor of the 64 query heads"):
        export_pools(_pools(layout="prefill: tp=3; decode: tp=4"), ENGINES["vllm"])
    with pytest.raises(InputError, match="TensorRT-LLM: found pools of prefill and decode"):
        export_pools(_pools(), ENGINES["trtllm"])


def test_instances_lie_on_nodes_and_the_router_knows_all_of_them():
    deployment = _pools()
    files = export_pools(deployment, ENGINES["vllm"]).files
    launches = {pool: launch_of_deployment(part, pool) for pool, part in deployment.pools.items()}
    places = place_pools(launches, 8, 16)
    assert (places["decode"].nodes, places["prefill"].nodes, places["prefill"].first_devices) == (
        (0,),
        (1, 1, 1),
        (0, 2, 4),
    )
    assert "FIRST_DEVICES=(0 2 4)" in files["prefill.sh"]
    assert "CUDA_VISIBLE_DEVICES" not in files["decode.sh"]
    assert [f'--prefill "http://${{NODES[1]}}:810{index}"' in files["router.sh"] for index in range(3)] == [True] * 3
    assert '--decode "http://${NODES[0]}:9100"' in files["router.sh"]
    assert files["kubernetes.yaml"].count("kind: LeaderWorkerSet") == 2
    manifest = " ".join(files["kubernetes.yaml"].split())
    assert "--prefill http://qwen3-32b-vllm-prefill-2.qwen3-32b-vllm-prefill:8000" in manifest
    assert "| prefill 2 | 1 | 4 to 5 | 8102 |" in files["README.md"]
    with pytest.raises(InputError, match="instances of 6 and 4 devices take 3 nodes of 8; at most 2 are required"):
        export_pools(_pools("qwen3-14b", layout="prefill: tp=2 pp=3 replicas=2; decode: tp=4"), ENGINES["vllm"])
    amd = export_pools(_pools(cluster="mi300x:8", layout="prefill: tp=4; decode: tp=4"), ENGINES["vllm"]).files
    assert "HIP_VISIBLE_DEVICES" in amd["prefill.sh"]


def test_a_pair_is_priced_as_its_layouts_and_limits_are():
    reading = read_deployment({"pair.sh": PAIR})
    assert str(reading.layout) == "prefill: tp=2; decode: tp=4"
    from_text = sw.serve_read(PAIR, "h100:8", isl=2000, osl=500, concurrency=32)
    problem = ServingProblem(
        architecture=sw.load_model("qwen3-32b"), cluster=sw.load_cluster("h100:8"), engine="sglang",
        workload=Workload(isl=2000, osl=500, concurrency=32),
        batch_limits=BatchLimits(memory_fraction=ENGINES["sglang"].memory_fraction),
    )  # fmt: skip
    expected = estimate_pools(problem, reading.layout, replace(problem.batch_limits, max_num_seqs=64))
    assert (from_text.estimate.ttft_s, from_text.estimate.tpot_s) == (expected.ttft_s, expected.tpot_s)
    assert from_text.verdict == "fits"
    text = render_text(report_of(from_text))
    assert "Qwen/Qwen3-32B with SGLang 0.5.23: prefill: tp=2; decode: tp=4" in text
    payload = json.loads(json.dumps(to_json(PooledLaunchRecord.of(from_text))))
    assert payload["decode"]["batch_limits"]["max_num_seqs"] == 64
    assert payload["price"]["tpot_s"]["value"] == expected.tpot_s.value


SGLANG = (
    "python3 -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp {tp} --disaggregation-mode {mode} --port {port} &"
)
COUNTS = [(3, "prefill"), (1, "decode")]
FOUR = "\n".join(
    SGLANG.format(tp=2, mode=mode, port=30_000 + 100 * (mode == "decode") + index)
    for count, mode in COUNTS
    for index in range(count)
)


def test_faster_pools_are_the_soonest_of_those_on_as_many_devices():
    """Six instances' devices shared otherwise, and each layout of as many devices, priced one by one."""
    priced = sw.serve_read(FOUR, "h100:8", isl=500, osl=1000, concurrency=256)
    limits = BatchLimits(memory_fraction=ENGINES["sglang"].memory_fraction)
    problem = replace(priced.estimate.problem, batch_limits=limits)

    def seconds(layout: str) -> float:
        return estimate_pools(problem, PooledLayout.parse(layout), limits).request_s

    def listed(kind: str) -> list[tuple[str, float]]:
        return [(str(item.layout), item.request_s) for item in priced.faster if item.changes == kind]

    assert priced.estimate.request_s == seconds("prefill: tp=2 replicas=3; decode: tp=2")
    shares = [f"prefill: tp=2{' replicas=2' * (n == 2)}; decode: tp=2 replicas={4 - n}" for n in (1, 2)]
    assert listed("instances") == sorted(((text, seconds(text)) for text in shares), key=lambda pair: pair[1])
    layouts = [f"prefill: {text}; decode: tp=2" for text in ("replicas=6", "tp=2 replicas=3")]
    sooner = [(text, seconds(text)) for text in layouts if seconds(text) < 0.98 * priced.estimate.request_s]
    assert listed("prefill layout") == sooner
    best = next(item for item in priced.faster if item.changes == "instances")
    assert (best.prefill_options, best.decode_options, best.checkpoint) == ({}, {}, None)
    combined = [item for item in priced.faster if item.changes == "all of these"]
    assert all(item.request_s < min(other.request_s for other in priced.faster[:-1]) for item in combined)
    text = render_text(report_of(priced))
    assert "prefill: 1 instance in place of 3; decode: 3 instances in place of 1: a request in " in text
    assert "checkpoint Qwen/Qwen3-32B-FP8: a request in " in text
    payload = json.loads(json.dumps(to_json(PooledLaunchRecord.of(priced))))
    assert payload["faster"][0]["request_s"] == priced.faster[0].request_s


def test_nothing_is_faster_where_the_memory_of_a_pool_is_not_known():
    priced = sw.serve_read(
        FOUR.replace("--port 30100", "--port 30100 --speculative-algorithm EAGLE3 --speculative-draft-model-path a/b"),
        "h100:8",
    )
    assert (priced.verdict, priced.faster) == ("not known", ())
    assert "what would be faster on the same devices\n  not known" in render_text(report_of(priced))


def test_the_router_says_the_pools_of_connectors_of_either_role():
    priced = sw.serve_read(f"{EITHER}\n{PROXY}", "h100:8")
    assert isinstance(priced, PricedPools)
    assert str(priced.reading.layout) == "prefill: replicas=2; decode: tp=4"
    assert priced.reading.prefill.origins["pool"].endswith("port 8100 of the router")
    assert "the launch says no load" in render_text(report_of(priced))
    with pytest.raises(InputError, match="the instance on port 8100 may be of either pool; kv_role kv_producer"):
        sw.serve_read(EITHER, "h100:8")


def test_commands_of_further_nodes_are_no_instances():
    nodes = "\n".join(
        f"sglang serve deepseek-ai/DeepSeek-V3 --disaggregation-mode {pool} --tp 16 --nnodes 2 --node-rank {rank}"
        for pool in ("prefill", "decode") for rank in (0, 1)
    )  # fmt: skip
    assert str(read_deployment({"nodes.sh": nodes}).layout) == "prefill: tp=16; decode: tp=16"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (PAIR.replace("prefill --port", "decode --port"), "found no command of the prefill pool; commands of both pools"),
        (PAIR + "sglang serve Qwen/Qwen3-32B --tp 8 --disaggregation-mode prefill --port 1",
         "instances of the prefill pool differ: layout.tp is 2 and 8"),
        (PAIR + "sglang serve Qwen/Qwen3-32B --tp 8", "may be of either pool"),
        (PAIR + "vllm serve Qwen/Qwen3-32B --kv-transfer-config.kv_role kv_producer", "found pools of SGLang and vLLM"),
        ("vllm serve Qwen/Qwen3-32B\nvllm serve Qwen/Qwen3-14B", "2 commands start an engine"),
    ],
)  # fmt: skip
def test_commands_that_are_no_pair_are_refused(text, problem):
    with pytest.raises(InputError, match=problem):
        read_deployment({"pair.sh": text})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            ("Qwen3-32B --tp 4", "Qwen3-14B --tp 4"),
            "the pools load different models, Qwen/Qwen3-32B and Qwen/Qwen3-14B",
        ),
        (("--tp 4", "--tp 4 --kv-cache-dtype fp8_e4m3"), "the pools have different formats"),
        (("--tp 4", "--tp 4 --pp-size 2"), "decode: pp is 2"),
        (("Qwen3-32B", "Qwen9-32B"), "the catalogue has no model"),
    ],
)
def test_pairs_that_are_not_priced_together_say_why(change, reason):
    priced = sw.serve_read(PAIR.replace(*change), "h100:8")
    assert priced.estimate is None
    assert priced.verdict == "not known"
    assert reason in priced.reason
    assert reason in render_text(report_of(priced))


def test_estimates_and_plans_of_pools_are_exported_from_their_files(tmp_path, capsys):
    layout = "prefill: tp=2 replicas=2; decode: tp=4"
    load = ["--isl", "2000", "--osl", "500"]
    estimate, plan, run = (str(tmp_path / name) for name in ("estimate.json", "plan.json", "run"))
    words = ["serve", "estimate", "qwen3-32b", "h100:8", *load, "--concurrency", "9", "--out", estimate, "--layout"]
    assert main([*words, layout]) == 0
    assert main(["export", estimate, "--to", "sglang", "--out", run]) == 0
    assert str(sw.serve_read(run).reading.layout) == layout
    assert main(["serve", "plan", "deepseek-v3", "h200:32", *load, "--tpot", "30ms", "--out", plan]) == 0
    pools = sw.serve_plan("deepseek-v3", "h200:32", isl=2000, osl=500, tpot="30ms").pools.layout
    assert main(["export", plan, "--to", "vllm", "--pools", "--out", run]) == 0
    assert str(sw.serve_read(run).reading.layout) == str(pools)
    assert main([*words, "tp=8"]) == 0
    capsys.readouterr()
    assert main(["export", estimate, "--to", "vllm", "--pools"]) == 2
    assert "found no pools of prefill and decode; a plan that names some is required" in capsys.readouterr().err
    assert main(["export", estimate, "--to", "vllm"]) == 0


def test_deployments_of_pools_come_back_from_their_files(tmp_path):
    deployment = _pools(decode_limits=BatchLimits(max_num_seqs=32))
    sw.search.dump_deployment(deployment, tmp_path / "pools.json")
    assert sw.search.load_deployment(tmp_path / "pools.json") == deployment
    payload = json.loads((tmp_path / "pools.json").read_text(encoding="utf-8"))
    del payload["layout"]["decode"]
    (tmp_path / "pools.json").write_text(json.dumps(payload), encoding="utf-8")
    with pytest.raises(InputError, match="layout: the decode pool is missing"):
        sw.search.load_deployment(tmp_path / "pools.json")
    with pytest.raises(InputError, match="found limits of a decode pool; a layout of two pools is required"):
        replace(deployment, layout=ServingLayout(tp=8))
