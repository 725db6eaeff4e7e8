"""Serving problems by the names of model and cluster, with the workload as keywords."""

from __future__ import annotations

from typing import Any

import shardwise as sw
from shardwise.serve import ServingFormats, ServingProblem, Workload

LLAMA_2_70B = {"model": "llama-2-70b", "isl": 512, "osl": 128}  # Splitwise's model and lengths


def serving_problem(
    model: str,
    cluster: str = "h100:8",
    *,
    engine: str = "vllm",
    release: str | None = None,
    weights: str = "bf16",
    **workload: Any,
) -> ServingProblem:
    """Return the problem of a model with weights of one format."""
    return ServingProblem(
        architecture=sw.load_model(model), cluster=sw.load_cluster(cluster), engine=engine, release=release,
        formats=ServingFormats(weights=weights), workload=Workload(**workload),
    )  # fmt: skip
