"""Random deployments of a serving engine, each written to a folder of its own: what the judges beside this file read.

PYTHONPATH=src:tests python benchmarks/export_check/write_serving.py ENGINE COUNT FOLDER

Each folder has `expected.json` too: what the engine's own parser must find, derived from the deployment without the writer.
Beside COUNT deployments that the engine runs, a quarter as many that it does not: the export must refuse each and name the
nearest, which is written in its place; and half as many of two pools. Where ENGINE is "kubernetes", all engines take turns.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from export.random_deployments import is_runnable, refused_deployments, runnable_deployments, runnable_pools

from shardwise.interop.launches.launch import cluster_machines
from shardwise.interop.serving.engines import ENGINES, get_engine
from shardwise.interop.serving.export_pools import export_pools, place_pools
from shardwise.interop.serving.export_serving import describe_difference, export_serving, place_instances
from shardwise.interop.serving.nearest_launch import nearest_launch
from shardwise.interop.serving.serving_launch import launch_of_deployment
from shardwise.serve import ServingDeployment, ServingLayout
from shardwise.values import InputError


def main(name: str, count: str, folder: str) -> None:
    names = list(ENGINES) if name == "kubernetes" else [name]
    share = -(-int(count) // len(names))
    for engine in names:
        for index, deployment in enumerate(islice(runnable_deployments(engine, 7), share)):
            write_deployment(deployment, Path(folder, f"{engine}-{index:04}"))
        for index, deployment in enumerate(islice(nearest_deployments(engine), share // 4)):
            write_deployment(deployment, Path(folder, f"{engine}-nearest-{index:04}"))
        if get_engine(engine).pools is not None:
            for index, deployment in enumerate(islice(runnable_pools(engine, 9), share // 2)):
                write_pools(deployment, Path(folder, f"{engine}-pools-{index:04}"))


def write_deployment(deployment: ServingDeployment, place: Path) -> None:
    """Write the files of a deployment, and what a parser must find in them."""
    engine = get_engine(deployment.problem.engine)
    launch = launch_of_deployment(deployment)
    nodes = place_instances(engine, launch, deployment)
    place.mkdir(parents=True, exist_ok=True)
    for file, text in export_serving(deployment, engine).files.items():
        (place / file).write_text(text, encoding="utf-8")
    expected = {
        **expected_values(deployment), "checkpoint": launch.checkpoint, "num_nodes": nodes.num_nodes,
        "devices": nodes.devices * nodes.num_nodes, "starts": nodes.num_starts, "copies": nodes.replicas,
    }  # fmt: skip
    (place / "expected.json").write_text(json.dumps(expected, indent=2), encoding="utf-8")


def write_pools(deployment: ServingDeployment, place: Path) -> None:
    """Write the files of a deployment of two pools, and what a parser must find in those of each."""
    engine = get_engine(deployment.problem.engine)
    launches = {pool: launch_of_deployment(part, pool) for pool, part in deployment.pools.items()}
    per_node = cluster_machines(deployment.problem.cluster).devices_per_node
    places = place_pools(launches, per_node, deployment.problem.cluster.num_devices)
    place.mkdir(parents=True, exist_ok=True)
    for file, text in export_pools(deployment, engine).files.items():
        (place / file).write_text(text, encoding="utf-8")
    pools = {
        pool: {
            **expected_values(part), "checkpoint": launches[pool].checkpoint, "num_nodes": places[pool].num_nodes,
            "devices": launches[pool].layout.devices_per_replica, "starts": launches[pool].layout.replicas, "copies": 1,
            "pool": pool,
        }
        for pool, part in deployment.pools.items()
    }  # fmt: skip
    (place / "expected.json").write_text(json.dumps({"pools": pools}, indent=2), encoding="utf-8")


def nearest_deployments(name: str) -> Iterator[ServingDeployment]:
    """Yield the nearest runnable deployment of each that an engine refuses. Raises `ValueError` unless the refusal names it."""
    engine = get_engine(name)
    for deployment in refused_deployments(name, 8):
        launch = launch_of_deployment(deployment)
        nearest = nearest_launch(engine, launch)
        try:
            export_serving(deployment, engine)
        except InputError as error:
            refusal = str(error)
        else:
            raise ValueError(f"{name} is said not to run {launch.layout}, which was written")
        if nearest is None or describe_difference(launch, nearest) not in refusal:
            raise ValueError(f"the refusal of {launch.layout} names no nearest deployment: {refusal}")
        problem = replace(deployment.problem, formats=nearest.formats, batch_limits=nearest.batch_limits)
        repaired = replace(deployment, problem=problem, layout=nearest.layout)
        if is_runnable(repaired):  # if its devices fill nodes evenly
            yield repaired


def expected_values(deployment: ServingDeployment) -> dict[str, object]:
    """Values that a parser must find, under names that no engine has."""
    problem, layout = deployment.problem, deployment.layout
    assert isinstance(layout, ServingLayout)
    limits = problem.batch_limits
    return {
        "has_experts": problem.architecture.num_experts > 0, "tp": layout.tp, "attention_dp": layout.attention_dp,
        "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "exchanges_tokens": layout.dispatch == "all_to_all",
        "redundant_experts": layout.redundant_experts, "admission_passes": limits.admission_passes,
        "cache_is_fp8": problem.formats.cache == "fp8",
        "max_num_seqs": limits.max_num_seqs, "max_batched_tokens": limits.max_batched_tokens,
        "memory_fraction": limits.memory_fraction, "chunked_prefill": limits.chunked_prefill,
        "mtp_tokens": limits.mtp_tokens, "max_model_len": deployment.max_model_len, "flags": dict(deployment.flags),
    }  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
