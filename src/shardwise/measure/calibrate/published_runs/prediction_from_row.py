"""A row as the values that an estimate takes (model, cluster, job, layout), and its prediction."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.hardware import Cluster, Pods, relative_clock, with_calibration
from shardwise.layout import Layout, layers_by_stage, layout_as_run
from shardwise.measure.calibrate.published_runs.layout_from_row import (
    REFUTED,
    is_partly_recomputed,
    list_approximations,
    read_degrees,
    read_job,
    read_layout,
    read_recomputes,
)
from shardwise.measure.calibrate.published_runs.model_and_cluster_from_row import (
    RowSoftware,
    read_architecture,
    read_cluster,
    read_software,
)
from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow
from shardwise.model import Architecture, Job
from shardwise.price import Estimate, Pricing, Problem
from shardwise.price.device_memory import TIGHT_MARGIN
from shardwise.price.estimate import estimate
from shardwise.values import ShardwiseError, describe_error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCase:
    """The four values of a row and its software. `recomputes` are tried in turn until one fits; `approximations` say
    what is priced as something else. The cluster is as its vendor describes it, without calibration."""

    architecture: Architecture
    cluster: Cluster
    job: Job
    layout: Layout
    software: RowSoftware
    recomputes: tuple[str, ...]
    approximations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrediction:
    """A case with the recompute that was chosen, and its estimate."""

    case: RunCase
    estimate: Estimate


def read_case(cells: RowCells, user_cluster: Cluster | None = None) -> RunCase:
    """Return the case of a row; `user_cluster` is the cluster of a chip that the catalogue does not have. Raises
    `SkippedRow` with the reason for a row that states too little or cannot be expressed."""
    try:
        architecture, cluster = read_architecture(cells), read_cluster(cells, user_cluster)
        degrees = read_degrees(cells, cluster.num_devices)
        job = read_job(cells, degrees)
        chips_per_node = cells.size("chips_per_node") or cluster.chip.devices_per_host or 1
        num_slices = cluster.topology.num_pods if isinstance(cluster.topology, Pods) else 1
        software = read_software(cells, relative_clock(cluster.chip))
        layout = layout_as_run(
            software.stack, read_layout(cells, degrees, job, architecture, chips_per_node, num_slices)
        )
    except ShardwiseError as error:
        raise _to_skipped(error) from None
    return RunCase(
        architecture=architecture, cluster=cluster, job=job, layout=layout, software=software,
        recomputes=read_recomputes(cells), approximations=list_approximations(cells),
    )  # fmt: skip


def predict_row(cells: RowCells, user_cluster: Cluster | None = None, *, bound: bool = False) -> RowPrediction:
    """Price a row with the first of its possible recomputes that fits, or the last. Raises `SkippedRow`.

    `user_cluster`: as for `read_case`. `bound`: at the rates of micro-benchmarks, not at the constants of published
    runs.
    """
    case = read_case(cells, user_cluster)
    cluster = case.cluster if bound else with_calibration(case.cluster, case.software.calibration(case.cluster.chip))
    stated = cells.text("recompute").lower()
    # From the least recomputation to the most. A stated policy was run, so that only memory far above the capacity
    # refutes it; one that is not stated must fit at least tightly, and then as few layers are recomputed as fit.
    memory_limit = REFUTED if stated else 1.0
    for recompute in case.recomputes:
        layout = replace(case.layout, recompute=recompute)
        predicted = _price(case, cluster, layout)
        if predicted.memory_bytes <= memory_limit * predicted.memory_capacity_bytes:
            break
    is_partial = is_partly_recomputed(cells)
    if (is_partial or not stated) and recompute != "none":
        layout, predicted = _fewest_layers(case, cluster, layout, predicted)
    approximations = case.approximations
    if stated not in ("", recompute) and not is_partial:
        approximations += (f"{stated} recompute would not fit; priced as {recompute}",)
    return RowPrediction(case=replace(case, layout=layout, approximations=approximations), estimate=predicted)


def _price(case: RunCase, cluster: Cluster, layout: Layout) -> Estimate:
    try:
        return estimate(Problem(case.architecture, cluster, case.job), layout)
    except ShardwiseError as error:
        raise _to_skipped(error) from None


def _fewest_layers(case: RunCase, cluster: Cluster, layout: Layout, predicted: Estimate) -> tuple[Layout, Estimate]:
    """Return the layout with the fewest recomputed layers per stage that fit, at most all of them, and its estimate."""
    max_layers = max(layers_by_stage(case.architecture, layout))
    pricing = Pricing(Problem(case.architecture, cluster, case.job), replace(layout, recompute_layers=max_layers))
    costs, capacity = pricing.unit_costs(), cluster.chip.capacity_bytes

    def fits(num_layers: int) -> bool:
        partial_pricing = pricing.with_recompute_layers(num_layers)
        return sum(partial_pricing.fullest_device(partial_pricing.stages(costs))[1].values()) <= capacity * (
            1.0 - TIGHT_MARGIN
        )

    fewest = 1 + bisect_left(range(1, max_layers), True, key=fits)
    if fewest == max_layers:
        return layout, predicted
    layout = replace(layout, recompute_layers=fewest)
    return layout, _price(case, cluster, layout)


# The key is the row's cells: the published constants must not change within a process.
@lru_cache(maxsize=4096)
def predict_cached(cells: tuple[tuple[str, str], ...], *, bound: bool = False) -> RowPrediction | SkippedRow:
    """Return the prediction of a row's cells, or the reason for none; rows with the same cells are priced once."""
    return try_predict(RowCells(dict(cells)), None, bound=bound)


def try_predict(cells: RowCells, user_cluster: Cluster | None, *, bound: bool = False) -> RowPrediction | SkippedRow:
    """Return the prediction of a row, for a chip of the catalogue or of `user_cluster`, or the reason for none."""
    try:
        return predict_row(cells, user_cluster, bound=bound)
    except SkippedRow as skipped:
        return skipped


def _to_skipped(error: ShardwiseError) -> SkippedRow:
    """Return an error of our values or of the estimate as a reason to skip the row, counted by the rule's name."""
    problem = describe_error(error)
    parts = problem.split(": ")
    kind = ": ".join(parts[:2]) if parts[0] == "layout" and len(parts) > 2 else parts[0].split(" ")[0]
    return SkippedRow(f"refused by the {kind}" if kind.isalpha() else f"refused by rule {kind}", problem)
