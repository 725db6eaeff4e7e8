"""Which constant moves the answer the most: each is made a tenth worse in turn, and the plan is priced again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.topology import Pods, Switched, Tier, Topology, Torus
from shardwise.cost.estimate import estimate
from shardwise.planning.plan import Plan

SCALE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A constant, the step's time when it is a tenth worse, and the runner-up that would then be faster, if any."""

    name: str
    value: float
    step_time_s: float
    change: float
    overtaken_by: str | None


def constants(plan: Plan) -> tuple[Constant, ...]:
    """The constants of the chip and its links, the one that moves the step the most first."""
    found = [_priced(plan, name, value, cluster) for name, value, cluster in _scaled(plan.cluster)]
    return tuple(sorted(found, key=lambda constant: -abs(constant.change)))


def _priced(plan: Plan, name: str, value: float, cluster: Cluster) -> Constant:
    step_s = estimate(plan.model, cluster, plan.job, plan.layout).step_time_s
    others = [(estimate(plan.model, cluster, plan.job, a.layout), a.layout) for a in plan.alternatives]
    faster = [
        (priced.step_time_s, str(layout)) for priced, layout in others if priced.fits and priced.step_time_s < step_s
    ]
    return Constant(
        name=name, value=value, step_time_s=step_s, change=step_s / plan.estimate.step_time_s - 1,
        overtaken_by=min(faster)[1] if faster else None,
    )  # fmt: skip


def _scaled(cluster: Cluster) -> Iterator[tuple[str, float, Cluster]]:
    """Each constant's name and value, and the cluster with this one scaled."""
    for name in ("matmul_fraction", "memory_bytes_per_s"):
        value: float = getattr(cluster.chip, name)
        yield f"chip.{name}", value, replace(cluster, chip=replace(cluster.chip, **{name: value * SCALE}))  # type: ignore[arg-type]
    for name, value, topology in _scaled_links(cluster.topology):
        yield name, value, replace(cluster, topology=topology)


def _scaled_links(topology: Topology) -> Iterator[tuple[str, float, Topology]]:
    if isinstance(topology, Pods):
        for name, value, torus in _scaled_links(topology.torus):
            assert isinstance(torus, Torus)
            yield name, value, replace(topology, torus=torus)
        yield "pods.bytes_per_s", topology.bytes_per_s, replace(topology, bytes_per_s=topology.bytes_per_s * SCALE)
        return
    if not isinstance(topology, Switched):
        yield "torus.bytes_per_s", topology.bytes_per_s, replace(topology, bytes_per_s=topology.bytes_per_s * SCALE)
        return
    for number, tier in enumerate(topology.tiers):
        if tier.size > 1:
            tiers = list[Tier](topology.tiers)
            tiers[number] = replace(tier, bytes_per_s=tier.bytes_per_s * SCALE)
            yield f"{tier.name}.bytes_per_s", tier.bytes_per_s, Switched(tiers=tuple(tiers))
