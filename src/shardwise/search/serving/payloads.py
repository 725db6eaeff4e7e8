"""JSON of serving estimates and plans."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from shardwise.model import ModelFacts
from shardwise.search.plan_file import ClusterFacts
from shardwise.search.serving.serving_plan import RejectedServingLayout, ServingPlan, ServingPoint
from shardwise.search.serving_file import POOLED_ESTIMATE_SCHEMA, SERVING_ESTIMATE_SCHEMA, SERVING_PLAN_SCHEMA
from shardwise.serve import (
    BatchLimits,
    LatencyLimits,
    PooledEstimate,
    PooledLayout,
    PoolFigures,
    Prediction,
    ServingEstimate,
    ServingFormats,
    ServingLayout,
    ServingMemory,
    Workload,
)
from shardwise.values import Flat, InputError, Payload, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFigures(Payload):
    """Figures of one layout under a workload. Times are seconds; `low` and `high` are the ends of 90% prediction intervals."""

    ttft_s: Prediction
    tpot_s: Prediction
    tokens_per_s_per_device: Prediction
    requests_per_s: float
    max_rate_per_s: float
    request_s: float
    concurrency: float
    running: float
    decode_pass_s: float
    prefill_s: float
    decode_terms: Mapping[str, float]
    prefill_terms: Mapping[str, float]
    bound: str
    memory: ServingMemory
    usd_per_million_output_tokens: Prediction | None
    watts_per_device: Prediction | None
    joules_per_output_token: Prediction | None
    is_measured: bool
    notes: Sequence[str]

    @classmethod
    def of(cls, estimate: ServingEstimate) -> ServingFigures:
        """Return the figures of an estimate."""
        return cls.from_attributes(estimate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEstimateRecord(Payload):
    """Estimate of one layout: the deployment that was priced, and its figures."""

    SCHEMA = SERVING_ESTIMATE_SCHEMA
    model: ModelFacts
    cluster: ClusterFacts
    workload: Workload
    engine: str
    release: str | None
    formats: ServingFormats
    batch_limits: BatchLimits
    layout: ServingLayout
    num_devices: int
    figures: Annotated[ServingFigures, Flat]

    @classmethod
    def of(cls, estimate: ServingEstimate) -> ServingEstimateRecord:
        """Return the record of an estimate."""
        problem = estimate.problem
        return cls.from_attributes(
            estimate, problem, model=ModelFacts.of(problem.architecture), cluster=ClusterFacts.of(problem.cluster),
            num_devices=estimate.layout.num_devices, figures=ServingFigures.of(estimate),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledFigures(Payload):
    """Figures of a prefill and a decode pool under a workload. Times are seconds; `low` and `high` are the ends of 90% prediction
    intervals."""

    layout: PooledLayout
    num_devices: int
    ttft_s: Prediction
    tpot_s: Prediction
    tokens_per_s_per_device: Prediction
    requests_per_s: float
    max_rate_per_s: float
    request_s: float
    concurrency: float
    running: float
    ttft_terms: Mapping[str, float]
    transfer_bytes: float
    prefill: PoolFigures
    decode: PoolFigures
    bound: str
    prefill_devices_per_decode_device: float
    usd_per_million_output_tokens: Prediction | None
    joules_per_output_token: Prediction | None
    is_measured: bool
    notes: Sequence[str]

    @classmethod
    def of(cls, estimate: PooledEstimate) -> PooledFigures:
        """Return the figures of an estimate."""
        return cls.from_attributes(estimate, num_devices=estimate.layout.num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledEstimateRecord(Payload):
    """Estimate of two pools: the deployment that was priced, and its figures."""

    SCHEMA = POOLED_ESTIMATE_SCHEMA
    model: ModelFacts
    cluster: ClusterFacts
    workload: Workload
    engine: str
    release: str | None
    formats: ServingFormats
    batch_limits: BatchLimits
    figures: Annotated[PooledFigures, Flat]

    @classmethod
    def of(cls, estimate: PooledEstimate) -> PooledEstimateRecord:
        """Return the record of an estimate."""
        problem = estimate.problem
        return cls.from_attributes(
            problem, model=ModelFacts.of(problem.architecture), cluster=ClusterFacts.of(problem.cluster),
            figures=PooledFigures.of(estimate),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPointRecord(Payload):
    """Configuration of a search and what one instance of it gives."""

    layout: ServingLayout
    concurrency: float
    ttft_s: float
    tpot_s: float
    tokens_per_s_per_device: float
    requests_per_s: float
    reason: str | None = None

    @classmethod
    def of(cls, point: ServingPoint, reason: str | None = None) -> ServingPointRecord:
        """Return the record of a point."""
        return cls.from_attributes(point, reason=reason)

    @classmethod
    def of_rejected(cls, rejected: RejectedServingLayout) -> ServingPointRecord:
        """Return the record of a layout that was not chosen."""
        return cls.of(rejected.point, rejected.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlanRecord(Payload):
    """Chosen serving layout under a load, with the keys of a deployment (`serving_file`), so that it is exported as it is.

    `doubled` is null without a rate, and where the instances cannot serve twice of it."""

    SCHEMA = SERVING_PLAN_SCHEMA
    model: ModelFacts
    cluster: ClusterFacts
    workload: Workload
    engine: str
    release: str | None
    formats: ServingFormats
    batch_limits: BatchLimits
    latency_limits: LatencyLimits
    layout: ServingLayout
    num_devices: int
    idle_devices: int
    concurrency: float
    estimate: ServingFigures
    alternatives: Sequence[ServingPointRecord]
    front: Sequence[ServingPointRecord]
    curve: Sequence[ServingPointRecord]
    knee: ServingPointRecord
    smallest: ServingLayout
    doubled: ServingFigures | None
    doubled_devices: int | None
    prefill_devices_per_decode_device: float
    num_configurations: int
    pools: PooledFigures | None
    pools_gain: float | None

    @classmethod
    def of(cls, plan: ServingPlan) -> ServingPlanRecord:
        """Return the record of a plan."""
        question, estimate = plan.question, plan.estimate
        return cls.from_attributes(
            plan, question, plan.layout, model=ModelFacts.of(question.architecture), cluster=ClusterFacts.of(question.cluster),
            workload=estimate.problem.workload, estimate=ServingFigures.of(estimate),
            alternatives=tuple(map(ServingPointRecord.of_rejected, plan.alternatives)),
            front=tuple(map(ServingPointRecord.of, plan.front)), curve=tuple(map(ServingPointRecord.of, plan.curve)),
            knee=ServingPointRecord.of(plan.knee),
            doubled=ServingFigures.of(plan.doubled) if plan.doubled else None,
            pools=PooledFigures.of(plan.pools) if plan.pools else None,
        )  # fmt: skip


def serving_record(answer: ServingPlan | ServingEstimate | PooledEstimate) -> Payload:
    """Return the payload of a plan or of an estimate."""
    if isinstance(answer, ServingPlan):
        return ServingPlanRecord.of(answer)
    return PooledEstimateRecord.of(answer) if isinstance(answer, PooledEstimate) else ServingEstimateRecord.of(answer)


def dump_serving_plan(answer: ServingPlan | ServingEstimate | PooledEstimate, path: str) -> None:
    """Write a plan or an estimate as JSON, which `load_deployment` reads. Raises `InputError` if the file cannot be written."""
    try:
        Path(path).write_text(json.dumps(to_json(serving_record(answer)), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"serving plan: cannot write {path}: {error.strerror}; choose a writable path") from None
