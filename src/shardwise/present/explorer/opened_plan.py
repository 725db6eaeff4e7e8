"""Values of a state's names: those of the catalogue, and of the plan that the command line opened.

A name from the network is never a path: no file is read because of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from shardwise.hardware import Cluster, load_cluster
from shardwise.hardware.cluster import parse_shorthand
from shardwise.model import (
    Architecture,
    Job,
    default_seq_len,
    find_model_name,
    load_model,
    model_names,
    usual_batch_tokens,
)
from shardwise.present.explorer.state import ROOMS, State
from shardwise.price import loss_kind, with_problem_defaults
from shardwise.search import Plan
from shardwise.values import (
    InputError,
    ShardwiseError,
    apply_overrides,
    describe_unknown,
    parse_overrides,
    raise_problems,
)

OPENED = "@plan"  # suffix of a model or a cluster of the opened plan that differs from the catalogue's of that name
# Limits of what a drag can price in time; larger sizes belong on the command line.
MAX_DEVICES = 1 << 17
MAX_OF_MODEL: Mapping[str, int] = {"num_layers": 2048, "num_heads": 1024, "num_kv_heads": 1024, "num_experts": 1024}
MAX_SIZE = 1 << 22  # of any other size of a model
Value = TypeVar("Value", Architecture, Job)
CACHED_NAMES = 64  # models, and clusters


@dataclass(frozen=True, kw_only=True)
class NameResolver:
    """Resolver of a state's names, with the opened plan's models and clusters, its state and a run of it.

    `start` is the state of an address without a query.
    """

    models: Mapping[str, Architecture] = field(default_factory=dict)
    clusters: Mapping[str, Cluster] = field(default_factory=dict)
    start: State = field(default_factory=State)
    run: Path | None = None

    def model(self, state: State) -> Architecture:
        """Return the model with its changes. Raises `InputError`."""
        architecture = self.models.get(state.model) or _model(state.model)
        return _changed(architecture, state, "model")

    def cluster(self, state: State) -> Cluster:
        """Return the cluster with its calibration. Raises `InputError`, `MissingValueError`."""
        return self.clusters.get(state.cluster) or _cluster(state.cluster, state.stack, state.overlap)

    def with_usual_job(self, state: State) -> State:
        """Return the state with batch and sequence; what it leaves out is that of its model's usual job."""
        if state.batch_tokens is not None and state.seq_len is not None:
            return state
        batch_tokens, seq_len = usual_job(self.model(state))
        return replace(state, batch_tokens=state.batch_tokens or batch_tokens, seq_len=state.seq_len or seq_len)

    def job(self, state: State) -> Job:
        """Return the job with its changes. Raises `InputError`."""
        full_state = self.with_usual_job(state)
        assert full_state.batch_tokens is not None
        assert full_state.seq_len is not None
        job = Job(
            global_batch_tokens=full_state.batch_tokens, seq_len=full_state.seq_len, tokens=state.tokens,
            precision=state.precision, overlap=state.overlap,  # type: ignore[arg-type]
        )  # fmt: skip
        return _changed(job, state, "job")


def usual_job(architecture: Architecture) -> tuple[int, int]:
    """Return the tokens of a batch and of a sequence that `plan` assumes for a model; a batch is whole sequences."""
    seq_len = default_seq_len(architecture)
    return math.ceil(usual_batch_tokens(architecture) / seq_len) * seq_len, seq_len


def resolver_of_plan(plan: Plan, run: Path | None = None) -> NameResolver:
    """Return the resolver of a plan: with its model and cluster if the catalogue's of that name differ, and its state."""
    job, cluster = plan.job, plan.cluster
    stack = cluster.calibration.stack if cluster.calibration else None
    start = State(
        model=plan.model.name, cluster=cluster.name, batch_tokens=job.global_batch_tokens, seq_len=job.seq_len,
        tokens=job.tokens, precision=job.precision, overlap=job.overlap, layout=plan.layout,
        changes=tuple(sorted((f"job.{name}", str(value)) for name, value in _other_job_values(plan).items())),
        view="run" if run else "overview",
    )  # fmt: skip
    models, clusters = {}, {}
    if _catalogued_model(start) != plan.model:
        start = replace(start, model=plan.model.name + OPENED)
        models[start.model] = plan.model
    stack_name = next(
        (name for name in (None, stack) if _catalogued_cluster(replace(start, stack=name)) == cluster), ""
    )
    if stack_name == "":
        start = replace(start, cluster=cluster.name + OPENED)
        clusters[start.cluster] = cluster
    return NameResolver(models=models, clusters=clusters, start=replace(start, stack=stack_name or None), run=run)


def _other_job_values(plan: Plan) -> Mapping[str, object]:
    """Return a job's values that no field of a state has and that are not the defaults."""
    job = plan.job
    filled = loss_kind(plan.cluster, replace(job, loss=None))
    values = {
        "loss": None if job.loss == filled else job.loss,
        "document_tokens": job.document_tokens,
        "attention": job.attention,
        "dropout": job.dropout or None,
    }
    values["optimizer"] = job.optimizer if job.optimizer != Job(global_batch_tokens=1, seq_len=1).optimizer else None
    return {name: value for name, value in values.items() if value is not None}


def _catalogued_model(state: State) -> Architecture | None:
    return load_model(name) if (name := find_model_name(state.model)) else None


def _catalogued_cluster(state: State) -> Cluster | None:
    try:
        return _cluster(state.cluster, state.stack, state.overlap)
    except ShardwiseError:
        return None


@lru_cache(maxsize=CACHED_NAMES)
def _model(name: str) -> Architecture:
    catalog_name = find_model_name(name)  # never a path
    if catalog_name is None:
        raise InputError(f"model: {describe_unknown(name[:60], model_names())}")
    return load_model(catalog_name)


@lru_cache(maxsize=CACHED_NAMES)
def _cluster(name: str, stack: str | None, overlap: str | None) -> Cluster:
    parse_shorthand(name)  # raises for a path
    if stack is not None and overlap is not None:
        raise InputError(f"stack: found {stack} beside overlap {overlap}, a bound; leave out one of the two")
    cluster = load_cluster(name, stack=stack)
    if cluster.num_devices > MAX_DEVICES:
        raise InputError(f"cluster: found {cluster.num_devices:,} devices; at most {MAX_DEVICES:,} are explored")
    probe = Job(global_batch_tokens=1, seq_len=1, overlap=overlap)  # type: ignore[arg-type]
    return with_problem_defaults(cluster, probe)[0]


def _changed(value: Value, state: State, room: str) -> Value:
    """Return a model or a job with the changes of the address."""
    texts = parse_overrides((f"{key}={text}" for key, text in state.changes), ROOMS)[room]
    changed: Value = apply_overrides(value, texts, room)
    sizes = {name: getattr(changed, name) for name in texts} if room == "model" else {}
    raise_problems([
        f"{room}.{name}: found {size}; at most {MAX_OF_MODEL.get(name, MAX_SIZE):,} is explored" for name, size in sizes.items()
        if isinstance(size, int) and size > MAX_OF_MODEL.get(name, MAX_SIZE)
    ])  # fmt: skip
    return changed
