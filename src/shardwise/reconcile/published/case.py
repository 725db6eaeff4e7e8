"""A row as what an estimate takes: model, cluster, job, layout. The one rule that maps rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.topology import Pods
from shardwise.cost.estimate import Estimate, estimate
from shardwise.errors import ShardwiseError
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.stages import held_layers
from shardwise.model.architecture import Architecture
from shardwise.reconcile.published.architecture import architecture_of
from shardwise.reconcile.published.facts import Facts, SkippedRow
from shardwise.reconcile.published.machine import cluster_of
from shardwise.reconcile.published.training import (
    REFUTED,
    approximations,
    degrees_of_row,
    job_of,
    layout_of,
    partly_recomputed,
    recomputes_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row's four values; `recomputes` are tried in turn until one fits, `approximations` say what is priced otherwise."""

    architecture: Architecture
    cluster: Cluster
    job: Job
    layout: Layout
    recomputes: tuple[str, ...]
    approximations: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The case with the recompute that was taken, and its estimate."""

    case: Case
    estimate: Estimate


def case_of(facts: Facts) -> Case:
    """The case of a row. Raises `SkippedRow` with the reason for a row that says too little or that cannot be expressed."""
    try:
        architecture, cluster = architecture_of(facts), cluster_of(facts)
        degrees = degrees_of_row(facts, cluster.num_devices)
        job = job_of(facts, degrees)
        node = facts.size("chips_per_node") or cluster.chip.devices_per_host or 1
        slices = cluster.topology.num_pods if isinstance(cluster.topology, Pods) else 1
        layout = layout_of(facts, degrees, job, architecture, node, slices)
    except ShardwiseError as error:
        raise _refused(error) from None
    return Case(
        architecture=architecture, cluster=cluster, job=job, layout=layout, recomputes=recomputes_of(facts),
        approximations=approximations(facts),
    )  # fmt: skip


def predict(facts: Facts) -> Prediction:
    """Price a row: of the recomputes in question the first that fits, or the last. Raises `SkippedRow`.

    Where a row does not say how much is recomputed, the fastest that fits: that is what its authors will have looked for.
    """
    case = case_of(facts)
    if partly := partly_recomputed(facts):
        return _fastest(case, partly)
    stated = facts.text("recompute").lower()
    most = REFUTED if stated else 1.0
    for recompute in case.recomputes:
        layout = replace(case.layout, recompute=recompute)
        found = _priced(case, layout)
        if found.memory_bytes <= most * found.memory_capacity_bytes:
            break
    words = (f"{stated} recompute would not fit; priced as {recompute}",) if stated not in ("", recompute) else ()
    return Prediction(case=replace(case, layout=layout, approximations=case.approximations + words), estimate=found)


def _priced(case: Case, layout: Layout) -> Estimate:
    try:
        return estimate(case.architecture, case.cluster, case.job, layout)
    except ShardwiseError as error:
        raise _refused(error) from None


def _fastest(case: Case, policies: tuple[str, ...]) -> Prediction:
    """Of policies, each for the fewest layers that fit, the fastest; where none fits, the last for all layers."""
    found = [_fewest(case, policy) for policy in policies]
    fitting = [one for one in found if one.estimate.fits]
    return min(fitting, key=lambda one: one.estimate.step_time_s) if fitting else found[-1]


def _fewest(case: Case, policy: str) -> Prediction:
    """The policy for the fewest layers of a stage that fit, by bisection; for all of them where that is what it takes."""
    layout = replace(case.layout, recompute=policy, recompute_layers=None)
    best, found = layout, _priced(case, layout)
    few, enough = 0, max(held_layers(case.architecture, layout))
    while policy != "none" and found.fits and enough - few > 1:
        number = (few + enough) // 2
        tried = replace(layout, recompute_layers=number)
        priced = _priced(case, tried)
        if priced.fits:
            enough, best, found = number, tried, priced
        else:
            few = number
    return Prediction(case=replace(case, layout=best), estimate=found)


@lru_cache(maxsize=4096)
def predict_cells(cells: tuple[tuple[str, str], ...]) -> Prediction | SkippedRow:
    """The prediction of a row's cells, or why there is none; rows that say the same are priced once."""
    try:
        return predict(Facts(dict(cells)))
    except SkippedRow as skipped:
        return skipped


def _refused(error: ShardwiseError) -> SkippedRow:
    """Why one of our values, or the estimate, refused the row: the rule's name is the kind."""
    problem = str(error).splitlines()[0]
    parts = problem.split(": ")
    kind = ": ".join(parts[:2]) if parts[0] == "layout" and len(parts) > 2 else parts[0].split(" ")[0]
    return SkippedRow(f"refused by the {kind}" if kind.isalpha() else f"refused by rule {kind}", problem)
