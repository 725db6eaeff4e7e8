"""Random deployments of a serving engine, each written to a folder of its own: what the judges beside this file read.

PYTHONPATH=src:tests python benchmarks/export_check/write_serving.py ENGINE COUNT FOLDER

Each folder has `expected.json` too: what the engine's own parser must find, derived from the deployment without the writer.
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

from export.random_deployments import runnable_deployments

from shardwise.interop.serving.engines import get_engine
from shardwise.interop.serving.export_serving import export_serving, place_instances
from shardwise.interop.serving.serving_launch import launch_of_deployment
from shardwise.serve import ServingDeployment


def main(name: str, count: str, folder: str) -> None:
    engine = get_engine(name)
    for i, deployment in enumerate(islice(runnable_deployments(name, 7), int(count))):
        launch = launch_of_deployment(deployment)
        nodes = place_instances(engine, launch, deployment)
        place = Path(folder, f"{i:04}")
        place.mkdir(parents=True, exist_ok=True)
        for file, text in export_serving(deployment, engine).files.items():
            (place / file).write_text(text, encoding="utf-8")
        expected = {
            **expected_values(deployment), "checkpoint": launch.checkpoint, "num_nodes": nodes.num_nodes,
            "devices": nodes.devices * nodes.num_nodes, "starts": nodes.num_starts, "copies": nodes.replicas,
        }  # fmt: skip
        (place / "expected.json").write_text(json.dumps(expected, indent=2), encoding="utf-8")


def expected_values(deployment: ServingDeployment) -> dict[str, object]:
    """Values that a parser must find, under names that no engine has."""
    problem, layout = deployment.problem, deployment.layout
    limits = problem.batch_limits
    return {
        "has_experts": problem.architecture.num_experts > 0, "tp": layout.tp, "attention_dp": layout.attention_dp,
        "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "cache_is_fp8": problem.formats.cache == "fp8",
        "max_num_seqs": limits.max_num_seqs, "max_batched_tokens": limits.max_batched_tokens,
        "memory_fraction": limits.memory_fraction, "chunked_prefill": limits.chunked_prefill,
        "mtp_tokens": limits.mtp_tokens, "max_model_len": deployment.max_model_len, "flags": dict(deployment.flags),
    }  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
