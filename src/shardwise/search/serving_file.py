"""Serving files: a deployment as JSON, written and read again.

A file of a serving plan has the same keys and more, so that both are read: what a deployment does not have is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.model import Architecture, ModelFacts
from shardwise.search.plan_file import ClusterFacts, parse_cluster
from shardwise.serve import (
    BatchLimits,
    LatencyLimits,
    ServingDeployment,
    ServingFormats,
    ServingLayout,
    ServingProblem,
    Workload,
)
from shardwise.values import FileMessages, InputError, Payload, parse_dataclass, read_json, short_repr, to_json
from shardwise.values.payload import known_fields

DEPLOYMENT_SCHEMA = "shardwise.deployment/1"
SERVING_PLAN_SCHEMA = "shardwise.serving_plan/1"
SERVING_SCHEMAS = ("shardwise.deployment/", "shardwise.serving_plan/")
REQUIRED_KEYS = ("model", "cluster", "workload", "layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord(Payload):
    """A deployment with all that it depends on. `flags` are the engine's own."""

    SCHEMA = DEPLOYMENT_SCHEMA
    model: ModelFacts
    cluster: ClusterFacts
    workload: Workload
    engine: str
    release: str | None
    formats: ServingFormats
    batch_limits: BatchLimits
    latency_limits: LatencyLimits
    layout: ServingLayout
    checkpoint: str | None
    max_model_len: int | None
    flags: Mapping[str, Any]

    @classmethod
    def of(cls, deployment: ServingDeployment) -> DeploymentRecord:
        """Return the record of a deployment."""
        problem = deployment.problem
        return cls(
            model=ModelFacts.of(problem.architecture), cluster=ClusterFacts.of(problem.cluster), workload=problem.workload,
            engine=problem.engine, release=problem.release, formats=problem.formats, batch_limits=problem.batch_limits,
            latency_limits=problem.latency_limits, layout=deployment.layout, checkpoint=deployment.checkpoint,
            max_model_len=deployment.max_model_len, flags=dict(deployment.flags),
        )  # fmt: skip


def dump_deployment(deployment: ServingDeployment, path: str | Path) -> None:
    """Write a deployment as JSON; `load_deployment` reads it. Raises `InputError` if the file cannot be written.

    >>> import pathlib, tempfile
    >>> import shardwise as sw
    >>> from shardwise.serve import ServingDeployment, ServingLayout, ServingProblem, Workload
    >>> problem = ServingProblem(
    ...     architecture=sw.load_model("qwen3-32b"), cluster=sw.load_cluster("h100:8"),
    ...     workload=Workload(isl=2000, osl=500, rate_per_s=4),
    ... )
    >>> path = pathlib.Path(tempfile.mkdtemp(), "deployment.json")
    >>> dump_deployment(ServingDeployment(problem=problem, layout=ServingLayout(tp=8)), path)
    >>> load_deployment(path).layout
    ServingLayout.parse('tp=8')
    """
    try:
        Path(path).write_text(json.dumps(to_json(DeploymentRecord.of(deployment)), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"deployment file: cannot write {path}: {error.strerror}; choose a writable path") from None


def load_deployment(path: str | Path) -> ServingDeployment:
    """Read the deployment of a file of `dump_deployment` or of a serving plan.

    Raises `InputError` for a file that is missing or is not JSON, for another schema, and with one line for each wrong field.
    """
    payload = read_json(Path(path), FileMessages("deployment file: "), finite=True)
    return parse_deployment(payload, f"deployment file {path}")


def is_serving_file(path: str | Path) -> bool:
    """Return True if a file has the schema of a deployment or of a serving plan; it may still be a broken one."""
    try:
        payload = read_json(path)
    except InputError:
        return False
    return isinstance(payload, dict) and str(payload.get("schema", "")).startswith(SERVING_SCHEMAS)


def parse_deployment(payload: Any, label: str = "deployment") -> ServingDeployment:
    """Parse a deployment from its payload; `label` names it in errors. Raises `InputError` with each wrong field."""
    schema = payload.get("schema") if isinstance(payload, dict) else type(payload).__name__
    if not isinstance(payload, dict) or not str(schema).startswith(SERVING_SCHEMAS):
        fix = "`shardwise serve plan MODEL CLUSTER --out FILE` writes one"
        raise InputError(f"{label}: found schema {short_repr(schema)}; {DEPLOYMENT_SCHEMA!r} is required: {fix}")
    missing = [key for key in REQUIRED_KEYS if not isinstance(payload.get(key), dict)]
    if missing:
        raise InputError(f"{label}: {', '.join(missing)} missing; plan again with this version")
    problem = ServingProblem(
        architecture=parse_dataclass(Architecture, known_fields(Architecture, payload["model"]), "model"),
        cluster=parse_cluster(payload["cluster"]),
        workload=parse_dataclass(Workload, payload["workload"], "workload"),
        engine=parse_dataclass(str, payload.get("engine", "vllm"), "engine"),
        release=parse_dataclass(str | None, payload.get("release"), "release"),  # type: ignore[arg-type]
        formats=parse_dataclass(ServingFormats, payload.get("formats") or {}, "formats"),
        batch_limits=parse_dataclass(BatchLimits, payload.get("batch_limits") or {}, "batch_limits"),
        latency_limits=parse_dataclass(LatencyLimits, payload.get("latency_limits") or {}, "latency_limits"),
    )
    return ServingDeployment(
        problem=problem,
        layout=parse_dataclass(ServingLayout, payload["layout"], "layout"),
        checkpoint=parse_dataclass(str | None, payload.get("checkpoint"), "checkpoint"),  # type: ignore[arg-type]
        max_model_len=parse_dataclass(int | None, payload.get("max_model_len"), "max_model_len"),  # type: ignore[arg-type]
        flags=parse_dataclass(dict[str, Any], payload.get("flags") or {}, "flags"),
    )
