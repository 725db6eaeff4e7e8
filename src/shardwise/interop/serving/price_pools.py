"""Price the launches of a prefill and a decode pool together, and judge whether both fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.hardware import Cluster
from shardwise.interop.serving.faster_pools import FasterPools, list_faster_pools
from shardwise.interop.serving.price_serving import (
    DEFAULT_WORKLOAD,
    NO_LOAD_NOTE,
    PricedServing,
    ServingField,
    list_fields,
    memory_reason,
    model_reason,
    price_serving,
    require_length,
)
from shardwise.interop.serving.read_pools import ReadPools
from shardwise.interop.serving.read_serving import ReadServing
from shardwise.search import PooledFigures
from shardwise.serve import (
    BatchLimits,
    PooledEstimate,
    PooledLayout,
    ServingFormats,
    ServingProblem,
    ServingVerdict,
    Workload,
    estimate_pools,
)
from shardwise.values import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPools:
    """Launches of two pools that were read, their price, and changes on the same devices that are `faster`.

    `estimate` is None without a cluster, and where both pools cannot be priced together; `reason` says why. `verdict` says
    whether both fit; it is "not known" where something changes the memory that is not priced.
    """

    reading: ReadPools
    cluster: Cluster | None
    workload: Workload | None
    estimate: PooledEstimate | None
    verdict: ServingVerdict
    reason: str = ""
    faster: tuple[FasterPools, ...] = ()
    notes: tuple[str, ...] = ()


def price_deployment(
    reading: ReadServing | ReadPools, cluster: Cluster | None, workload: Workload | None
) -> PricedServing | PricedPools:
    """Return what was read with what it costs on a cluster; arguments and errors are those of `price_serving`."""
    if isinstance(reading, ReadPools):
        return price_pools(reading, cluster, workload)
    return price_serving(reading, cluster, workload)


def price_pools(reading: ReadPools, cluster: Cluster | None, workload: Workload | None) -> PricedPools:
    """Return two pools with what they cost on a cluster.

    Without a workload it is that of `DEFAULT_WORKLOAD`, and a note says so. Raises `InputError` for a layout that the model or
    the cluster does not allow, for a rate that the pools do not serve, and for requests that are longer than a launch takes.
    """
    load = workload or DEFAULT_WORKLOAD
    reason = "no cluster is named; --cluster prices it, such as h100:8" if cluster is None else _pair_reason(reading)
    architecture = reading.prefill.launch.architecture
    if reason or cluster is None or architecture is None:
        return PricedPools(
            reading=reading, cluster=cluster, workload=workload, estimate=None, verdict="not known", reason=reason
        )
    for pool in reading.pools.values():
        require_length(pool.launch, load)
    prefill_limits, decode_limits = (
        pool.engine.limits_with_fraction(pool.launch.batch_limits) for pool in reading.pools.values()
    )
    problem = ServingProblem(
        architecture=architecture, cluster=cluster, workload=load, engine=reading.engine.name,
        formats=reading.prefill.launch.formats, batch_limits=prefill_limits,
    )  # fmt: skip
    estimate = estimate_pools(problem, reading.layout, decode_limits)
    unknown = [f"{name}: {memory_reason(pool)}" for name, pool in reading.pools.items() if not pool.memory_is_known]
    return PricedPools(
        reading=reading, cluster=cluster, workload=load, estimate=estimate, reason="; ".join(unknown),
        verdict="not known" if unknown else estimate.verdict, notes=() if workload else (NO_LOAD_NOTE,),
        faster=tuple(list_faster_pools(reading, estimate)),
    )  # fmt: skip


def _pair_reason(reading: ReadPools) -> str:
    """Return why two pools cannot be priced together; empty if they can."""
    for pool in reading.pools.values():
        if not pool.model_is_known:
            return model_reason(pool)
    prefill, decode = reading.prefill.launch, reading.decode.launch
    if prefill.architecture != decode.architecture:
        return f"the pools load different models, {prefill.checkpoint} and {decode.checkpoint}"
    if prefill.formats != decode.formats:
        return (
            f"the pools have different formats, {prefill.formats} and {decode.formats}, which are not priced together"
        )
    problems = list(reading.engine.pools.rules(prefill, decode)) if reading.engine.pools else []
    return "; ".join(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLaunchRecord:
    """Launches of one pool: what an instance says, by field with what each was read from."""

    batch_limits: BatchLimits
    max_model_len: int | None
    fields: Sequence[ServingField]
    not_priced: Mapping[str, str]
    unread: Sequence[str]
    notes: Sequence[str]

    @classmethod
    def of(cls, reading: ReadServing) -> PoolLaunchRecord:
        """Return the record of a pool."""
        launch = reading.launch
        return cls(
            batch_limits=launch.batch_limits, max_model_len=launch.max_model_len, fields=tuple(list_fields(reading)),
            not_priced=reading.not_priced, unread=reading.unread, notes=reading.notes,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledLaunchRecord(Payload):
    """Launches of a prefill and a decode pool: what they say, and what they cost together.

    `not_priced` of a pool are options and variables with what they change. `price` is null where it is not known, and `reason`
    says why; `verdict` is "not known" where the memory is.
    """

    SCHEMA = "shardwise.serving-pools-launch/1"
    engine: str
    release: str
    checkpoint: str
    model_name: str | None
    layout: PooledLayout
    formats: ServingFormats
    prefill: PoolLaunchRecord
    decode: PoolLaunchRecord
    workload: Workload | None
    verdict: ServingVerdict
    reason: str
    price: PooledFigures | None
    faster: Sequence[FasterPools]
    notes: Sequence[str]

    @classmethod
    def of(cls, priced: PricedPools) -> PooledLaunchRecord:
        """Return the record of two pools."""
        reading, launch = priced.reading, priced.reading.prefill.launch
        return cls(
            engine=launch.engine, release=reading.engine.version, checkpoint=launch.checkpoint,
            model_name=launch.architecture.name if launch.architecture else None, layout=reading.layout, formats=launch.formats,
            prefill=PoolLaunchRecord.of(reading.prefill), decode=PoolLaunchRecord.of(reading.decode), workload=priced.workload,
            verdict=priced.verdict, reason=priced.reason, price=PooledFigures.of(priced.estimate) if priced.estimate else None,
            faster=priced.faster, notes=priced.notes,
        )  # fmt: skip
