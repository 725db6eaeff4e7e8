"""Serving files: a deployment as JSON, written and read again.

Files of serving plans and estimates have the same keys and more, so that all are read: what a deployment does not have is left
out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.model import Architecture, ModelFacts
from shardwise.search.plan_file import ClusterFacts, parse_cluster
from shardwise.serve import (
    BatchLimits,
    LatencyLimits,
    PooledLayout,
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
SERVING_ESTIMATE_SCHEMA = "shardwise.serving_estimate/1"
POOLED_ESTIMATE_SCHEMA = "shardwise.serving_pools/1"
SERVING_SCHEMAS = tuple(
    schema.rstrip("1") for schema in (DEPLOYMENT_SCHEMA, SERVING_PLAN_SCHEMA, SERVING_ESTIMATE_SCHEMA, POOLED_ESTIMATE_SCHEMA)
)  # fmt: skip
REQUIRED_KEYS = ("model", "cluster", "workload", "layout")
POOLS = {"prefill", "decode"}


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
    layout: ServingLayout | PooledLayout
    checkpoint: str | None
    max_model_len: int | None
    flags: Mapping[str, Any]
    decode_limits: BatchLimits | None

    @classmethod
    def of(cls, deployment: ServingDeployment) -> DeploymentRecord:
        """Return the record of a deployment."""
        problem = deployment.problem
        return cls(
            model=ModelFacts.of(problem.architecture), cluster=ClusterFacts.of(problem.cluster), workload=problem.workload,
            engine=problem.engine, release=problem.release, formats=problem.formats, batch_limits=problem.batch_limits,
            latency_limits=problem.latency_limits, layout=deployment.layout, checkpoint=deployment.checkpoint,
            max_model_len=deployment.max_model_len, flags=dict(deployment.flags), decode_limits=deployment.decode_limits,
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


def load_deployment(path: str | Path, *, pools: bool = False) -> ServingDeployment:
    """Read the deployment of a file of `dump_deployment`, of a serving plan or of an estimate.

    `pools`: of a plan, the best pools of prefill and decode beside its layout. Raises `InputError` for a file that is missing or
    is not JSON, for another schema, and with one line for each wrong field.
    """
    payload = read_json(Path(path), FileMessages("deployment file: "), finite=True)
    return parse_deployment(payload, f"deployment file {path}", pools=pools)


def is_serving_file(path: str | Path) -> bool:
    """Return True if a file has the schema of a deployment, a serving plan or an estimate; it may still be a broken one."""
    try:
        payload = read_json(path)
    except InputError:
        return False
    return isinstance(payload, dict) and str(payload.get("schema", "")).startswith(SERVING_SCHEMAS)


def parse_deployment(payload: Any, label: str = "deployment", *, pools: bool = False) -> ServingDeployment:
    """Parse a deployment from its payload; `label` names it in errors. `pools`: of a plan, the best pools beside its layout.

    Raises `InputError` with each wrong field, and for a file without the pools that were asked for.
    """
    schema = payload.get("schema") if isinstance(payload, dict) else type(payload).__name__
    if not isinstance(payload, dict) or not str(schema).startswith(SERVING_SCHEMAS):
        fix = "`shardwise serve plan` and `serve estimate` with `--out FILE` write one"
        raise InputError(f"{label}: found schema {short_repr(schema)}; {DEPLOYMENT_SCHEMA!r} is required: {fix}")
    missing = [key for key in REQUIRED_KEYS if not isinstance(payload.get(key), dict)]
    if missing:
        raise InputError(f"{label}: {', '.join(missing)} missing; plan again with this version")
    is_choice = pools and not POOLS & payload["layout"].keys()  # of the pools beside a plan's layout
    batch_limits = parse_dataclass(BatchLimits, payload.get("batch_limits") or {}, "batch_limits")
    problem = ServingProblem(
        architecture=parse_dataclass(Architecture, known_fields(Architecture, payload["model"]), "model"),
        cluster=parse_cluster(payload["cluster"]),
        workload=parse_dataclass(Workload, payload["workload"], "workload"),
        engine=parse_dataclass(str, payload.get("engine", "vllm"), "engine"),
        release=parse_dataclass(str | None, payload.get("release"), "release"),  # type: ignore[arg-type]
        formats=parse_dataclass(ServingFormats, payload.get("formats") or {}, "formats"),
        batch_limits=replace(batch_limits, max_num_seqs=None)
        if is_choice
        else batch_limits,  # that of the layout's instances
        latency_limits=parse_dataclass(LatencyLimits, payload.get("latency_limits") or {}, "latency_limits"),
    )
    decode_limits = payload.get("decode_limits")
    return ServingDeployment(
        problem=problem,
        layout=_parse_layout(payload, label, pools=pools),
        checkpoint=parse_dataclass(str | None, payload.get("checkpoint"), "checkpoint"),  # type: ignore[arg-type]
        max_model_len=parse_dataclass(int | None, payload.get("max_model_len"), "max_model_len"),  # type: ignore[arg-type]
        flags=parse_dataclass(dict[str, Any], payload.get("flags") or {}, "flags"),
        decode_limits=None if decode_limits is None else parse_dataclass(BatchLimits, decode_limits, "decode_limits"),
    )


def _parse_layout(payload: Mapping[str, Any], label: str, *, pools: bool) -> ServingLayout | PooledLayout:
    """Return the layout of a payload, or that of the pools of a plan."""
    layout = payload["layout"]
    if pools and not POOLS & layout.keys():
        best = payload.get("pools")
        if not isinstance(best, dict) or not isinstance(best.get("layout"), dict):
            raise InputError(
                f"{label}: found no pools of prefill and decode; a plan that names some is required, or an estimate of "
                '`shardwise serve estimate --layout "prefill: ...; decode: ..." --out FILE`'
            )
        layout = best["layout"]
    if not POOLS & layout.keys():
        return parse_dataclass(ServingLayout, layout, "layout")
    if missing := POOLS - layout.keys():
        raise InputError(f"{label}: layout: the {missing.pop()} pool is missing; layouts of both are required")
    return PooledLayout(**{pool: parse_dataclass(ServingLayout, layout[pool], f"layout: {pool}") for pool in POOLS})
