"""Sensitivity of a plan to measured constants: each is made a tenth worse in turn, and the plan is priced again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.hardware import (
    BENCH_ONLY_CONSTANTS,
    CONSTANTS,
    Calibration,
    Cluster,
    Pods,
    Switched,
    Tier,
    Topology,
    Torus,
    with_calibration,
)
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.search.plan import Plan
from shardwise.values import get_precision

SCALE = 0.9
CALIBRATED_CONSTANTS = {**CONSTANTS, **BENCH_ONLY_CONSTANTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantSensitivity:
    """A constant, and the plan with it a tenth worse: its step time, whether it fits, and the runner-up that is then better.

    `meaning` and `source` are those of a calibration's constants.
    """

    name: str
    value: float
    step_time_s: float
    change: float
    fits: bool
    overtaken_by: str | None
    meaning: str = ""
    source: str = ""


def rank_constants(plan: Plan) -> tuple[ConstantSensitivity, ...]:
    """Return the constants of the chip and its links, by their effect on the step; first those without which the plan does not
    fit.

    A calibrated cluster has the constants of its calibration instead of those of the chip and its memory."""
    calibration = plan.cluster.calibration
    meanings = {_owned_name(name): spec.meaning for name, spec in CALIBRATED_CONSTANTS.items()} if calibration else {}
    constants = [
        replace(
            _price_worsened(plan, name, value, cluster), meaning=meanings.get(name, ""),
            source=calibration.source if calibration and name in meanings else "",
        )
        for name, value, cluster in worsen_constants(plan)
    ]  # fmt: skip
    return tuple(
        sorted(constants, key=lambda constant: (constant.fits or not plan.estimate.fits, -abs(constant.change)))
    )


def worsen_constants(plan: Plan) -> Iterator[tuple[str, float, Cluster]]:
    """Yield each constant's name and value, and the plan's cluster with this one a tenth worse."""
    yield from _worsen_cluster(plan, plan.cluster)
    if plan.cluster.calibration is not None:
        yield from _worsen_calibration(plan.cluster, plan.cluster.calibration)


def _price_worsened(plan: Plan, name: str, value: float, cluster: Cluster) -> ConstantSensitivity:
    worsened = estimate(Problem(plan.model, cluster, plan.job), plan.layout)
    step_s = worsened.step_time_s
    rivals = [
        (estimate(Problem(plan.model, cluster, plan.job), rival.layout), rival.layout) for rival in plan.alternatives
    ]
    faster = [
        (priced.step_time_s, str(layout))
        for priced, layout in rivals
        if priced.fits and (priced.step_time_s < step_s or not worsened.fits)
    ]
    return ConstantSensitivity(
        name=name, value=value, step_time_s=step_s, change=step_s / plan.estimate.step_time_s - 1,
        fits=worsened.fits, overtaken_by=min(faster)[1] if faster else None,
    )  # fmt: skip


def _owned_name(constant: str) -> str:
    """Name of a calibration constant with its owner."""
    return f"{CALIBRATED_CONSTANTS[constant].owner}.{constant}"


def _worsen_calibration(cluster: Cluster, calibration: Calibration) -> Iterator[tuple[str, float, Cluster]]:
    for name, spec in CALIBRATED_CONSTANTS.items():
        if name in calibration.constants:
            constants = {**calibration.constants, name: spec.make_worse(name, calibration[name], SCALE)}
            worse = with_calibration(cluster, replace(calibration, constants=constants))
            yield _owned_name(name), calibration[name], worse


def _chip_constants(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Yield the constants of the chip that the plan's estimate uses."""
    if cluster.calibration is None:
        yield "matmul_fraction"
        if cluster.chip.fp8_matmul_fraction is not None and get_precision(plan.job.precision).matmul == "fp8":
            yield "fp8_matmul_fraction"
        yield "memory_bytes_per_s"
    yield "memory_bytes"
    if plan.layout.offload != "none":
        yield "pcie_bytes_per_s"


def _worsen_cluster(plan: Plan, cluster: Cluster) -> Iterator[tuple[str, float, Cluster]]:
    """Yield each constant's name and value, and the cluster with this one scaled."""
    for name in _chip_constants(plan, cluster):
        value: float = getattr(cluster.chip, name)
        worse = {name: value * SCALE}
        if name == "memory_bytes":  # of all that there is
            value = cluster.chip.capacity_bytes
            worse = {name: value * SCALE, "usable_bytes": value * SCALE}
        yield f"chip.{name}", value, replace(cluster, chip=replace(cluster.chip, **worse))  # type: ignore[arg-type]
    for name, value, topology in _worsen_links(cluster.topology):
        yield name, value, replace(cluster, topology=topology)


def _worsen_links(topology: Topology) -> Iterator[tuple[str, float, Topology]]:
    if isinstance(topology, Pods):
        for name, value, torus in _worsen_links(topology.torus):
            assert isinstance(torus, Torus)
            yield name, value, replace(topology, torus=torus)
        yield "pods.bytes_per_s", topology.bytes_per_s, replace(topology, bytes_per_s=topology.bytes_per_s * SCALE)
        return
    if not isinstance(topology, Switched):
        yield "torus.bytes_per_s", topology.bytes_per_s, replace(topology, bytes_per_s=topology.bytes_per_s * SCALE)
        latency = topology.hop_latency_s
        yield "torus.hop_latency_s", latency, replace(topology, hop_latency_s=latency / SCALE)
        return
    for number, tier in enumerate(topology.tiers):
        if tier.size > 1:
            for name in ("bytes_per_s", "hop_latency_s", "base_latency_s"):
                base: float = getattr(tier, name)
                tiers = list[Tier](topology.tiers)
                tiers[number] = replace(tier, **{name: base * SCALE if name == "bytes_per_s" else base / SCALE})  # type: ignore[arg-type]
                yield f"{tier.name}.{name}", base, Switched(tiers=tuple(tiers))
