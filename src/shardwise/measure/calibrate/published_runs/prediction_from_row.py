"""A row as what an estimate takes: model, cluster, job, layout. The one rule that maps rows."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.hardware.chips import relative_clock
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.network.pods import Pods
from shardwise.hardware.published_constants import with_calibration
from shardwise.layout.layers_per_stage import layers_by_stage
from shardwise.layout.layout import Layout
from shardwise.layout.rules.stack_abilities import layout_as_run
from shardwise.measure.calibrate.published_runs.cluster_from_row import RowSoftware, read_cluster, read_software
from shardwise.measure.calibrate.published_runs.layout_from_row import (
    REFUTED,
    is_partly_recomputed,
    list_approximations,
    read_degrees,
    read_job,
    read_layout,
    read_recomputes,
)
from shardwise.measure.calibrate.published_runs.model_from_row import read_architecture
from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price.estimate import Estimate, estimate
from shardwise.price.layout_pricer import Pricing
from shardwise.values.errors import ShardwiseError


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCase:
    """A row's four values and its software; `recomputes` are tried in turn until one fits, `approximations` say what is priced
    otherwise. The cluster is as its vendor describes it, without what was measured."""

    architecture: Architecture
    cluster: Cluster
    job: Job
    layout: Layout
    software: RowSoftware
    recomputes: tuple[str, ...]
    approximations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The case with the recompute that was taken, and its estimate."""

    case: RunCase
    estimate: Estimate


def read_case(facts: RowCells, own: Cluster | None = None) -> RunCase:
    """The case of a row; `own`: the cluster whose chip a row names that the catalogue does not have.

    Raises `SkippedRow` with the reason for a row that says too little or that cannot be expressed.
    """
    try:
        architecture, cluster = read_architecture(facts), read_cluster(facts, own)
        degrees = read_degrees(facts, cluster.num_devices)
        job = read_job(facts, degrees)
        node = facts.size("chips_per_node") or cluster.chip.devices_per_host or 1
        slices = cluster.topology.num_pods if isinstance(cluster.topology, Pods) else 1
        software = read_software(facts, relative_clock(cluster.chip))
        layout = layout_as_run(software.stack, read_layout(facts, degrees, job, architecture, node, slices))
    except ShardwiseError as error:
        raise _to_skipped(error) from None
    return RunCase(
        architecture=architecture, cluster=cluster, job=job, layout=layout, software=software, recomputes=read_recomputes(facts),
        approximations=list_approximations(facts),
    )  # fmt: skip


def predict_row(facts: RowCells, own: Cluster | None = None, *, bound: bool = False) -> Prediction:
    """Price a row: of the recomputes in question the first that fits, or the last. Raises `SkippedRow`.

    `own`: as for `read_case`. `bound`: at what micro-benchmarks reach, not at the constants of the published runs.
    """
    case = read_case(facts, own)
    cluster = case.cluster if bound else with_calibration(case.cluster, case.software.calibration(case.cluster.chip))
    stated = facts.text("recompute").lower()
    most = REFUTED if stated else 1.0
    for recompute in case.recomputes:
        layout = replace(case.layout, recompute=recompute)
        found = _price(case, cluster, layout)
        if found.memory_bytes <= most * found.memory_capacity_bytes:
            break
    partly = is_partly_recomputed(facts)
    if (partly or not stated) and recompute != "none":
        layout, found = _fewest_layers(case, cluster, layout, found)
    words = (
        (f"{stated} recompute would not fit; priced as {recompute}",)
        if stated not in ("", recompute) and not partly
        else ()
    )
    return Prediction(case=replace(case, layout=layout, approximations=case.approximations + words), estimate=found)


def _price(case: RunCase, cluster: Cluster, layout: Layout) -> Estimate:
    try:
        return estimate(case.architecture, cluster, case.job, layout)
    except ShardwiseError as error:
        raise _to_skipped(error) from None


def _fewest_layers(case: RunCase, cluster: Cluster, layout: Layout, found: Estimate) -> tuple[Layout, Estimate]:
    """The layout with as few layers recomputed on each stage as fit; all of them where fewer do not."""
    most = max(layers_by_stage(case.architecture, layout))
    pricing = Pricing(case.architecture, cluster, case.job, replace(layout, recompute_layers=most))
    costs, capacity = pricing.unit_costs(), cluster.chip.memory_bytes

    def fits(num_layers: int) -> bool:
        some = pricing.with_recompute_layers(num_layers)
        return sum(some.fullest_device(some.stages(costs))[1].values()) <= capacity

    fewest = 1 + bisect_left(range(1, most), True, key=fits)
    if fewest == most:
        return layout, found
    layout = replace(layout, recompute_layers=fewest)
    return layout, _price(case, cluster, layout)


@lru_cache(maxsize=4096)
def predict_cached(cells: tuple[tuple[str, str], ...], *, bound: bool = False) -> Prediction | SkippedRow:
    """The prediction of a row's cells, or why there is none; rows that say the same are priced once."""
    return try_predict(RowCells(dict(cells)), None, bound=bound)


def try_predict(facts: RowCells, own: Cluster | None, *, bound: bool = False) -> Prediction | SkippedRow:
    """The prediction of a row, of a chip of the catalogue or of `own`, or why there is none."""
    try:
        return predict_row(facts, own, bound=bound)
    except SkippedRow as skipped:
        return skipped


def _to_skipped(error: ShardwiseError) -> SkippedRow:
    """Why one of our values, or the estimate, refused the row: the rule's name is the kind."""
    problem = str(error).splitlines()[0]
    parts = problem.split(": ")
    kind = ": ".join(parts[:2]) if parts[0] == "layout" and len(parts) > 2 else parts[0].split(" ")[0]
    return SkippedRow(f"refused by the {kind}" if kind.isalpha() else f"refused by rule {kind}", problem)
