"""Deployments: refusals, and their files."""

import json
from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.search import dump_deployment, is_serving_file, load_deployment
from shardwise.serve import (
    BatchLimits,
    LatencyLimits,
    ServingDeployment,
    ServingFormats,
    ServingLayout,
    ServingProblem,
    Workload,
)
from shardwise.values import InputError

PROBLEM = ServingProblem(
    architecture=sw.load_model("deepseek-v3"), cluster=sw.load_cluster("h200:16"),
    workload=Workload(isl=4000, osl=1000, rate_per_s=3.5, cached_tokens=100), engine="sglang", release="0.5.23",
    formats=ServingFormats(weights="fp8_block", cache="fp8"),
    batch_limits=BatchLimits(max_num_seqs=128, max_batched_tokens=8192, memory_fraction=0.85, mtp_tokens=1, acceptance=0.8),
    latency_limits=LatencyLimits(tpot_s=0.03),
)  # fmt: skip
DEPLOYMENT = ServingDeployment(
    problem=PROBLEM, layout=ServingLayout(tp=2, attention_dp=8, ep=16), checkpoint="deepseek-ai/DeepSeek-V3",
    max_model_len=8192, flags={"enable-eplb": True},
)  # fmt: skip


def test_a_deployment_is_read_back_from_its_file(tmp_path):
    dump_deployment(DEPLOYMENT, tmp_path / "deployment.json")
    restored = load_deployment(tmp_path / "deployment.json")
    assert restored == DEPLOYMENT
    assert is_serving_file(tmp_path / "deployment.json")


def test_keys_of_a_serving_plan_are_ignored(tmp_path):
    dump_deployment(DEPLOYMENT, tmp_path / "deployment.json")
    payload = json.loads((tmp_path / "deployment.json").read_text(encoding="utf-8"))
    plan = {**payload, "schema": "shardwise.serving_plan/1", "front": [], "estimate": {"ttft_s": 1.0}}
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    assert load_deployment(tmp_path / "plan.json") == DEPLOYMENT


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schema": "shardwise.plan/3"}, "found schema 'shardwise.plan/3'"),
        ({"workload": None}, "workload missing"),
        ({"layout": {"tp": 0}}, "tp is 0"),
        ({"formats": {"weights": "fp9"}}, "weights is 'fp9'"),
        ({"engine": 3}, "engine: value: found 3"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, change, problem):
    dump_deployment(DEPLOYMENT, tmp_path / "deployment.json")
    payload = json.loads((tmp_path / "deployment.json").read_text(encoding="utf-8"))
    (tmp_path / "deployment.json").write_text(json.dumps({**payload, **change}), encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        load_deployment(tmp_path / "deployment.json")


def test_incompatible_lengths_and_devices_are_refused():
    with pytest.raises(InputError, match="isl \\+ osl = 5000 tokens"):
        replace(DEPLOYMENT, max_model_len=4096)
    with pytest.raises(InputError, match="takes 32 devices; at most the 16 of"):
        replace(DEPLOYMENT, layout=ServingLayout(tp=16, replicas=2))
