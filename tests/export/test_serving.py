"""Launches of serving engines: written from deployments and read back, and what engines cannot run. The engines' own parsers
judge 200 of each in `make export-check`."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
from export.random_deployments import is_runnable, random_deployments, refused_deployments, runnable_deployments

import shardwise as sw
from shardwise.interop.serving.engines import ENGINES
from shardwise.interop.serving.export_serving import export_serving
from shardwise.interop.serving.nearest_launch import nearest_launch
from shardwise.interop.serving.read_serving import read_serving
from shardwise.interop.serving.serving_launch import launch_of_deployment
from shardwise.serve import BatchLimits, ServingDeployment, ServingFormats, ServingLayout, ServingProblem, Workload
from shardwise.values import InputError


@pytest.mark.parametrize("engine", ENGINES)
def test_written_deployments_are_read_back_equal(engine):
    for deployment in islice(runnable_deployments(engine, 11), 25):
        launch = launch_of_deployment(deployment)
        files = export_serving(deployment, ENGINES[engine]).files
        restored = read_serving(files).launch
        if "kubernetes.yaml" not in files:  # the script starts one of several instances
            restored = replace(restored, layout=restored.layout.with_replicas(launch.layout.replicas))
        assert list(launch.differences(restored)) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unsupported_layout_is_refused_with_the_nearest(engine):
    for deployment in islice(refused_deployments(engine, 12), 10):
        with pytest.raises(InputError, match="cannot run this deployment") as error:
            export_serving(deployment, ENGINES[engine])
        launch = launch_of_deployment(deployment)
        nearest = nearest_launch(ENGINES[engine], launch)
        assert nearest is not None
        assert (
            f"the nearest that it runs: {'layout' if nearest.layout != launch.layout else ''}"
            in error.value.problems[-1]
        )
        problem = replace(deployment.problem, formats=nearest.formats, batch_limits=nearest.batch_limits)
        repaired = replace(deployment, problem=problem, layout=nearest.layout)
        if is_runnable(repaired):  # if its devices fill nodes evenly
            export_serving(repaired, ENGINES[engine])


def test_no_other_layout_of_as_many_devices_is_nearer():
    deployment = next(
        item for item in random_deployments("vllm", 5)
        if item.problem.architecture.name == "qwen3-30b-a3b" and 1 < item.layout.ep < item.layout.tp * item.layout.attention_dp
    )  # fmt: skip
    launch = replace(launch_of_deployment(deployment), batch_limits=BatchLimits(), formats=ServingFormats())
    launch = replace(launch, layout=ServingLayout(tp=4, attention_dp=2, ep=4))
    assert str(nearest_launch(ENGINES["vllm"], launch).layout) == "tp=4 attention_dp=2 ep=8"
    assert nearest_launch(ENGINES["sglang"], launch).layout == launch.layout


def _deployment(model="qwen3-32b", cluster="h100:8", layout="tp=4 replicas=2", engine="vllm", **more):
    problem = ServingProblem(
        architecture=sw.load_model(model), cluster=sw.load_cluster(cluster),
        workload=Workload(isl=2000, osl=500, concurrency=64), engine=engine, **more,
    )  # fmt: skip
    return ServingDeployment(problem=problem, layout=ServingLayout.parse(layout))


def test_copies_on_one_node_are_one_start_and_larger_ones_are_replicas_of_the_manifest():
    inside = export_serving(_deployment(), ENGINES["vllm"]).files
    assert "data-parallel-size: 2" in inside["serve.yaml"]
    assert "replicas: 1\n" in inside["kubernetes.yaml"]
    outside = export_serving(_deployment(cluster="h100:16", layout="tp=8 replicas=2"), ENGINES["vllm"]).files
    assert "data-parallel-size" not in outside["serve.yaml"]
    assert "replicas: 2\n" in outside["kubernetes.yaml"]
    spread = export_serving(_deployment("deepseek-v3", "h200:16", "attention_dp=16 ep=16"), ENGINES["vllm"]).files
    assert "kind: LeaderWorkerSet" in spread["kubernetes.yaml"]
    assert "size: 2\n" in spread["kubernetes.yaml"]
    assert "--nnodes 2" in spread["launch.sh"]
    names = [line for line in spread["kubernetes.yaml"].splitlines() if line.startswith("  name: ")]
    # a set's own service has its name
    assert names == ["  name: deepseek-v3-bf16-vllm", "  name: deepseek-v3-bf16-vllm-leader"]


def test_formats_are_said_by_the_checkpoint_or_by_an_option():
    published = export_serving(_deployment(formats=ServingFormats(weights="fp8_block")), ENGINES["vllm"])
    assert "vllm serve Qwen/Qwen3-32B-FP8" in published.files["launch.sh"]
    assert "quantization" not in published.files["serve.yaml"]
    named = replace(_deployment(formats=ServingFormats(weights="fp8")), checkpoint="Qwen/Qwen3-32B")
    assert "quantization: fp8" in export_serving(named, ENGINES["vllm"]).files["serve.yaml"]
    folder = export_serving(_deployment(formats=ServingFormats(weights="nvfp4")), ENGINES["sglang"])
    assert "checkpoints/Qwen3-32B-NVFP4" in folder.files["launch.sh"]
    assert any("no published checkpoint of qwen3-32b in nvfp4" in warning for warning in folder.warnings)
    unsaid = replace(_deployment(formats=ServingFormats(weights="int4")), checkpoint="Qwen/Qwen3-32B")
    notes = export_serving(unsaid, ENGINES["vllm"]).not_expressible
    assert any(
        "formats.weights is int4: vLLM takes the formats from the checkpoint's config.json" in note for note in notes
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"flags": {"enable-prefx-caching": True}}, "enable-prefx-caching: no option of vLLM 0.32.0 .did you mean"),
        ({"flags": {"tensor-parallel-size": 2}}, "flags: tensor-parallel-size is set by layout.tp"),
        ({"flags": {"seed": "x"}}, "seed: found 'x'; a value of type int is required"),
        (
            {"checkpoint": "Qwen/Qwen3-14B"},
            "architecture is qwen3-32b, which vLLM has no option for; there it is qwen3-14b",
        ),
    ],
)
def test_flags_and_checkpoints_that_contradict_the_deployment_are_refused(change, problem):
    with pytest.raises(InputError, match=problem):
        export_serving(replace(_deployment(), **change), ENGINES["vllm"])


def test_chips_that_an_engine_is_not_written_for_are_refused():
    with pytest.raises(InputError, match="chips of NVIDIA are required"):
        export_serving(_deployment(cluster="mi300x:8", layout="tp=8", engine="trtllm"), ENGINES["trtllm"])
    files = export_serving(_deployment(cluster="mi300x:8", layout="tp=8"), ENGINES["vllm"]).files
    assert "amd.com/gpu: 8" in files["kubernetes.yaml"]
    with pytest.raises(InputError, match=r"tp is 12; a divisor"):
        export_serving(_deployment(cluster="h100:16", layout="tp=12"), ENGINES["vllm"])
