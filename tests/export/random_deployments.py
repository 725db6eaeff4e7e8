"""Random deployments of serving engines: models of the catalogue with layouts, formats, limits and flags of all kinds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

from shardwise.hardware import Cluster, load_cluster
from shardwise.interop.serving.engines import ENGINES
from shardwise.interop.serving.export_pools import export_pools
from shardwise.interop.serving.export_serving import place_instances
from shardwise.interop.serving.serving_launch import launch_of_deployment
from shardwise.model import hub_ids, load_model, model_names, num_params
from shardwise.serve import (
    BatchLimits,
    PooledLayout,
    ServingDeployment,
    ServingFormats,
    ServingLayout,
    ServingProblem,
    Workload,
)
from shardwise.values import InputError

CLUSTERS = ("h100:8", "h100:16", "h200:8", "h200:16", "b200:8", "b200:32", "a100-80gb:8", "h200:64")
DEGREES = (1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 32)
WEIGHTS = ("bf16", "bf16", "fp8", "fp8_block", "nvfp4", "mxfp4", "int4", "int4_g32", "int8")
# Options that no field of a deployment has: numbers, switches, lists and JSON.
FLAGS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "vllm": {
        "trust-remote-code": (True,), "enable-prefix-caching": (True, False), "served-model-name": (["chat"], ["a", "b c"]),
        "seed": (0, 7), "block-size": (16, 64), "enforce-eager": (True,), "hf-overrides": ({"rope_theta": 1e6},),
        "attention-backend": ("FLASH_ATTN",), "cudagraph-capture-sizes": ([1, 2, 4],),
        "async-scheduling": (True, False), "expert-placement-strategy": ("linear",), "reasoning-parser": ("qwen3",),
    },
    "sglang": {
        "trust-remote-code": (True,), "served-model-name": ("chat", "b c"), "random-seed": (3,), "page-size": (64,),
        "cuda-graph-max-bs-decode": (128,), "attention-backend": ("fa3", "triton"), "deepep-mode": ("auto",),
        "schedule-conservativeness": (0.3,), "log-requests-target": (["stdout"],), "disable-radix-cache": (True,),
        "enable-tf32-matmul": (True, False), "json-model-override-args": ('{"rope_theta": 1000000.0}',),
    },
    "trtllm": {
        "trust_remote_code": (True,), "kv_cache_config.enable_block_reuse": (True, False), "stream_interval": (10,),
        "moe_config.backend": ("DEEPGEMM", "CUTLASS"), "cuda_graph_config.max_batch_size": (128,),
        "cuda_graph_config.enable_padding": (True,), "disable_overlap_scheduler": (True,), "attn_backend": ("FLASHINFER",),
    },
}  # fmt: skip


@cache
def _cluster(name: str) -> Cluster:
    return load_cluster(name)


@cache
def _models(has_experts: bool) -> tuple[str, ...]:
    """Models that a hub has and that are worth serving, with experts or without."""
    named = (name for name in model_names() if hub_ids(name) and num_params(load_model(name)) > 5e8)
    return tuple(name for name in named if (load_model(name).num_experts > 0) == has_experts)


def random_deployments(engine: str, seed: int) -> Iterator[ServingDeployment]:
    """Deployments without an end; an engine may run them or not."""
    generator = random.Random(f"{engine} {seed}")
    while True:
        try:
            yield _random_deployment(engine, generator)
        except InputError:
            continue  # more devices than the cluster has, or degrees that no layout has


def _random_deployment(engine: str, generator: random.Random) -> ServingDeployment:
    choose = generator.choice
    has_experts = choose((True, False))
    architecture, cluster = load_model(choose(_models(has_experts))), _cluster(choose(CLUSTERS))
    tp, copies = choose(DEGREES), choose(DEGREES) if has_experts else 1
    if generator.random() < 0.1:
        tp = choose((3, 5, 6, 7))
    splits = [degree for degree in range(1, tp * copies + 1) if tp * copies % degree == 0]
    layout = ServingLayout(
        tp=tp, attention_dp=copies, pp=choose((1, 1, 1, 2, 4)), cp=choose((1,) * 8 + (2,)), replicas=choose((1, 1, 2, 3, 4)),
        ep=choose([*splits, 1, tp * copies]) if has_experts else 1,
    )  # fmt: skip
    if layout.ep > 1:
        forms = {"dispatch": choose(("all_gather", "all_to_all")), "redundant_experts": choose((0, 0, layout.ep))}
        layout = replace(layout, **forms)
    weights = choose(WEIGHTS)
    formats = ServingFormats(
        weights=weights, attention=choose((None, None, None, "bf16")), cache=choose(("bf16", "fp8")),
        experts=choose((None, None, "mxfp4")) if has_experts else None,
    )  # fmt: skip
    limits = BatchLimits(
        max_num_seqs=choose((None, 1, 64, 256, 1000)), max_batched_tokens=choose((None, 512, 2048, 8192, 16384)),
        memory_fraction=choose((None, 0.8, 0.9, 0.95)), chunked_prefill=choose((True, True, False)),
        mtp_tokens=choose((0, 0, 1, 2) if architecture.num_predict_layers else (0,) * 8 + (1,)),
        admission_passes=choose((1, 1, 10)) if "batch_limits.admission_passes" in ENGINES[engine].field_options else 1,
    )  # fmt: skip
    names = generator.sample(sorted(FLAGS[engine]), choose((0, 1, 2, 4)))
    flags = {name: choose(FLAGS[engine][name]) for name in names if FLAGS[engine][name]}
    problem = ServingProblem(
        architecture=architecture, cluster=cluster, workload=Workload(isl=1000, osl=200, concurrency=8.0), engine=engine,
        formats=formats, batch_limits=limits,
    )  # fmt: skip
    length = choose((None, 2048, 8192, 131072))
    return ServingDeployment(problem=problem, layout=layout, max_model_len=length, flags=flags)


def is_runnable(deployment: ServingDeployment) -> bool:
    """Whether the rules of a deployment's engine allow it, and its instances fill nodes evenly."""
    engine = ENGINES[deployment.problem.engine]
    launch = launch_of_deployment(deployment)
    try:
        place_instances(engine, launch, deployment)
    except InputError:
        return False
    return not engine.violations(launch)


def runnable_deployments(engine: str, seed: int) -> Iterator[ServingDeployment]:
    """Deployments that an engine runs, without an end."""
    return filter(is_runnable, random_deployments(engine, seed))


def random_pools(engine: str, seed: int) -> Iterator[ServingDeployment]:
    """Deployments of two pools without an end, each made of two random ones of a model; an engine may run them or not."""
    generator = random.Random(f"pools {engine} {seed}")
    decode = {item.problem.architecture.name: item for item in islice(random_deployments(engine, seed + 1), 200)}
    for prefill in random_deployments(engine, seed):
        partner = decode.get(prefill.problem.architecture.name)
        if partner is None:
            continue
        layouts = {"prefill": prefill.layout, "decode": partner.layout}
        assert all(isinstance(layout, ServingLayout) for layout in layouts.values())
        limits = replace(
            partner.problem.batch_limits, mtp_tokens=prefill.problem.batch_limits.mtp_tokens,
            acceptance=prefill.problem.batch_limits.acceptance,
        )  # fmt: skip
        try:
            yield replace(
                prefill, layout=PooledLayout(**layouts), problem=replace(prefill.problem, cluster=_cluster("h200:64")),
                decode_limits=generator.choice((None, limits)),
            )  # fmt: skip
        except InputError:
            continue  # more devices than the cluster has


def runnable_pools(engine: str, seed: int) -> Iterator[ServingDeployment]:
    """Deployments of two pools that an engine runs and whose instances lie on nodes of a cluster, without an end."""
    return (deployment for deployment in random_pools(engine, seed) if _pools_problem(deployment) is None)


def refused_pools(engine: str, seed: int) -> Iterator[ServingDeployment]:
    """Deployments of two pools that an engine's rules exclude, without an end."""
    return (
        deployment for deployment in random_pools(engine, seed) if "cannot run" in str(_pools_problem(deployment))
    )  # fmt: skip


def _pools_problem(deployment: ServingDeployment) -> InputError | None:
    """The reason that pools are not written."""
    try:
        export_pools(deployment, ENGINES[deployment.problem.engine])
    except InputError as error:
        return error
    return None


def refused_deployments(engine: str, seed: int) -> Iterator[ServingDeployment]:
    """Deployments that an engine's rules exclude, without an end."""
    rules = ENGINES[engine]
    return (
        deployment
        for deployment in random_deployments(engine, seed)
        if rules.violations(launch_of_deployment(deployment))
    )
