"""Changes of two pools on the same devices with which requests are answered sooner: of either layout, of how many instances each
pool has, of limits and of formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardwise.hardware import Chip
from shardwise.interop.serving.faster_launches import (
    longest_request_s,
    option_changes,
    other_formats,
    other_layouts,
    other_limits,
)
from shardwise.interop.serving.read_pools import ReadPools
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.serve import BatchLimits, PooledEstimate, PooledLayout, Prediction, ServingFormats, estimate_pools
from shardwise.serve.pooled_layout import POOLS
from shardwise.values import InputError

MAX_LAYOUTS = 40  # layouts of each pool that are priced, the nearest first
INSTANCES, LIMITS, FORMATS, ALL = "instances", "limits", "formats", "all of these"
MAX_LISTED: Mapping[str, int] = {
    "prefill layout": 2, "decode layout": 2, INSTANCES: 2, LIMITS: 1, FORMATS: 2, ALL: 1,
}  # fmt: skip
CHANGED_FIELDS = ("layout", "batch_limits", "formats", "checkpoint")  # of a launch


class PoolLaunches(NamedTuple):
    """Launches of an instance of each pool; the replicas of their layouts are instances."""

    prefill: ServingLaunch
    decode: ServingLaunch

    @property
    def layout(self) -> PooledLayout:
        """Layout of both pools."""
        return PooledLayout(prefill=self.prefill.layout, decode=self.decode.layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class FasterPools:
    """A change of two pools: what `changes`, the options of an instance of each pool with their new values (None: left out), the
    checkpoint where it is another one, and what it gives."""

    changes: str
    layout: PooledLayout
    prefill_limits: BatchLimits
    decode_limits: BatchLimits
    formats: ServingFormats
    checkpoint: str | None
    prefill_options: Mapping[str, Any]
    decode_options: Mapping[str, Any]
    ttft_s: Prediction
    tpot_s: Prediction
    request_s: float


def list_faster_pools(reading: ReadPools, estimate: PooledEstimate) -> Sequence[FasterPools]:
    """Return changes that answer a request sooner under the same load on as many devices, by what changes, the soonest first.

    Only pools that the engine runs and that fit are listed. Nothing is listed where an option changes the memory of a pool
    without being priced.
    """
    if not all(pool.memory_is_known for pool in reading.pools.values()):
        return ()
    launches = PoolLaunches(reading.prefill.launch, reading.decode.launch)
    listed: list[FasterPools] = []
    best = launches
    for kind, candidates in _list_variants(launches, estimate).items():
        priced = _price(reading, estimate, kind, candidates)
        listed += [faster for faster, _ in priced]
        if priced and kind != INSTANCES:  # their numbers follow from the layouts
            best = _combine(launches, best, priced[0][1])
    if len({item.changes for item in listed}) > 1:
        combined = [faster for faster, _ in _price(reading, estimate, ALL, [best])]
        listed += [item for item in combined if item.request_s < min(single.request_s for single in listed)]
    return listed


def _list_variants(launches: PoolLaunches, estimate: PooledEstimate) -> Mapping[str, Sequence[PoolLaunches]]:
    """Return pools with one thing changed, by what it is."""
    variants: dict[str, Sequence[PoolLaunches]] = {
        f"{name} layout": [
            _with_pool(launches, name, candidate) for candidate in _other_layouts(getattr(launches, name))
        ]
        for name in POOLS
    }
    tokens_s = estimate.tpot_s.value * max(estimate.problem.workload.osl - 1, 0)
    present = {"prefill": estimate.requests_per_s * estimate.ttft_s.value, "decode": estimate.requests_per_s * tokens_s}
    return {
        **variants,
        INSTANCES: [*_other_instances(launches)],
        LIMITS: [
            _with_pool(launches, name, candidate)
            for name in POOLS
            for candidate in other_limits(getattr(launches, name), present[name])
        ],
        FORMATS: [*_other_formats(launches, estimate.problem.cluster.chip)],
    }


def _other_layouts(launch: ServingLaunch) -> list[ServingLaunch]:
    """Return launches with the other layouts of as many devices; stages and forms are those of the launch, as nothing measured
    says how well pools do with them (`search.serving.pool_search`)."""
    layout = launch.layout
    candidates = [
        candidate
        for candidate in other_layouts(launch)
        if candidate.layout.pp == layout.pp and candidate.layout.forms in (layout.forms, ())
    ]
    return candidates[:MAX_LAYOUTS]


def _with_pool(launches: PoolLaunches, name: str, launch: ServingLaunch) -> PoolLaunches:
    return launches._replace(**{name: launch})


def _other_instances(launches: PoolLaunches) -> Iterator[PoolLaunches]:
    """Yield pools in which instances of one replace instances of the other, on at most as many devices."""
    prefill, decode = launches
    capacity, sizes = launches.layout.num_devices, [launch.layout.devices_per_replica for launch in launches]
    for num_prefill in range(1, (capacity - sizes[1]) // sizes[0] + 1):
        num_decode = (capacity - num_prefill * sizes[0]) // sizes[1]
        yield PoolLaunches(
            replace(prefill, layout=prefill.layout.with_replicas(num_prefill)),
            replace(decode, layout=decode.layout.with_replicas(num_decode)),
        )


def _other_formats(launches: PoolLaunches, chip: Chip) -> Iterator[PoolLaunches]:
    """Yield pools with the formats of another checkpoint, or of another cache, which both then have."""
    for prefill in other_formats(launches.prefill, chip):
        decode = replace(launches.decode, formats=prefill.formats, checkpoint=prefill.checkpoint)
        yield PoolLaunches(prefill, decode)


def _price(
    reading: ReadPools, estimate: PooledEstimate, kind: str, candidates: Sequence[PoolLaunches]
) -> list[tuple[FasterPools, PoolLaunches]]:
    """Return the candidates that are sooner, as many as are listed of a kind of change."""
    before = PoolLaunches(reading.prefill.launch, reading.decode.launch)
    priced = [
        (changed, candidate)
        for candidate in candidates
        if candidate != before and (changed := _estimate(reading, estimate, candidate)) is not None
    ]
    faster = [pair for pair in priced if pair[0].request_s < longest_request_s(estimate)]
    faster.sort(key=lambda pair: pair[0].request_s)
    return [
        (_describe(reading, kind, candidate, changed), candidate) for changed, candidate in faster[: MAX_LISTED[kind]]
    ]


def _estimate(reading: ReadPools, estimate: PooledEstimate, launches: PoolLaunches) -> PooledEstimate | None:
    """Return the estimate of pools under the same load; None where the engine does not run them, or where they do not fit."""
    engine = reading.engine
    rules = engine.pools.rules(*launches) if engine.pools else ()
    if any(engine.violations(launch) for launch in launches) or any(rules):
        return None
    prefill_limits, decode_limits = (engine.limits_with_fraction(launch.batch_limits) for launch in launches)
    problem = replace(estimate.problem, formats=launches.prefill.formats, batch_limits=prefill_limits)
    try:
        changed = estimate_pools(problem, launches.layout, decode_limits)
    except InputError:
        return None  # the cluster, or the engine that is priced, does not have it
    return changed if changed.verdict == "fits" else None


def _describe(reading: ReadPools, kind: str, launches: PoolLaunches, changed: PooledEstimate) -> FasterPools:
    """Return a change with the options of an instance of each pool that differ."""
    to_options = reading.engine.to_options
    options = {
        name: option_changes(to_options(_single_instance(pool.launch)), to_options(_single_instance(launch)))
        for (name, pool), launch in zip(reading.pools.items(), launches, strict=True)
    }
    checkpoint = launches.prefill.checkpoint
    return FasterPools(
        changes=kind, layout=launches.layout, prefill_limits=launches.prefill.batch_limits,
        decode_limits=launches.decode.batch_limits, formats=launches.prefill.formats,
        checkpoint=None if checkpoint == reading.prefill.launch.checkpoint else checkpoint, prefill_options=options["prefill"],
        decode_options=options["decode"], ttft_s=changed.ttft_s, tpot_s=changed.tpot_s, request_s=changed.request_s,
    )  # fmt: skip


def _single_instance(launch: ServingLaunch) -> ServingLaunch:
    return replace(launch, layout=launch.layout.with_replicas(1))


def _combine(before: PoolLaunches, best: PoolLaunches, changed: PoolLaunches) -> PoolLaunches:
    """Return pools with what one kind of change is about beside the changes of others."""
    pools = []
    for unchanged, current, candidate in zip(before, best, changed, strict=True):
        names = [name for name in CHANGED_FIELDS if getattr(candidate, name) != getattr(unchanged, name)]
        pools.append(replace(current, **{name: getattr(candidate, name) for name in names}))
    return PoolLaunches(*pools)
