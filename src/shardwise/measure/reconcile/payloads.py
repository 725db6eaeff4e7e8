"""JSON of `shardwise reconcile`, `rehearse` and `trace`: a run, a rehearsal and a traced step beside their plan."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.layout import Layout, LayoutPayload
from shardwise.measure.reconcile.rank_time import Occupancy, RankLateness, Stall, TrafficOverlap
from shardwise.measure.reconcile.reconciliation import Reconciliation
from shardwise.measure.reconcile.rehearsal import REHEARSAL_TOLERANCE, Rehearsal, is_judged
from shardwise.measure.reconcile.step_differences import StepDifference
from shardwise.measure.reconcile.step_terms import (
    Attribution,
    CollectiveComparison,
    MemoryTerm,
    StepMemory,
    StepTime,
    TimeTerm,
)
from shardwise.measure.reconcile.trace_analysis import Bottleneck, TraceAnalysis
from shardwise.model import ModelPayload, model_payload
from shardwise.search import Plan, layout_of_plan
from shardwise.search.explain.neighbour_layouts import Remedy
from shardwise.sharding import IssuedCollective
from shardwise.values import MergedFields

RECONCILE_SCHEMA = "shardwise.reconcile/3"


class TimeTermProperties(TypedDict):
    """Measured less predicted, and the share of the measured step."""

    difference_s: float
    share: float


class StepTimeProperties(TypedDict):
    """Verdict on a step: whether it is in the interval (null: the prediction is a bound), and the share that no term has."""

    within: bool | None
    rest_share: float
    terms: list[Annotated[dict[str, Any], MergedFields(TimeTerm, TimeTermProperties)]]


class AttributionProperties(TypedDict):
    """The term by name, and measured over predicted."""

    term: str
    ratio: float | None


class MemoryTermProperties(TypedDict):
    """Verdict on a predicted term: whether the prediction holds; null where there is none."""

    within: bool | None


class StepMemoryProperties(TypedDict):
    """The terms, and the peak, which they add up to."""

    terms: list[Annotated[dict[str, Any], MergedFields(MemoryTerm, MemoryTermProperties)]]
    total: Annotated[dict[str, Any], MergedFields(MemoryTerm, MemoryTermProperties)]


class CollectiveCounts(TypedDict):
    """Number of times that a collective was planned, and issued."""

    planned: int
    found: int


class CollectiveComparisonProperties(TypedDict):
    """Comparison of the issued list with the planned one, and what differs."""

    equal: bool
    miscounted: list[Annotated[dict[str, Any], MergedFields(IssuedCollective, CollectiveCounts)]]


CollectivesPayload = Annotated[dict[str, Any], MergedFields(CollectiveComparison, CollectiveComparisonProperties)]


class ReconcilePayload(TypedDict):
    """A run against its plan, term by term."""

    schema: Literal["shardwise.reconcile/3"]
    model: ModelPayload
    cluster: str
    layout: LayoutPayload
    machine: str
    noisy: bool
    changes: dict[str, float]
    remarks: list[str]
    time: Annotated[dict[str, Any], MergedFields(StepTime, StepTimeProperties)]
    attribution: Annotated[dict[str, Any], MergedFields(Attribution, AttributionProperties)] | None
    memory: Annotated[dict[str, Any], MergedFields(StepMemory, StepMemoryProperties)]
    collectives: CollectivesPayload
    advice: list[str]


def reconcile_payload(reconciliation: Reconciliation) -> dict[str, Any]:
    """Return the JSON of `shardwise reconcile --json`."""
    plan = reconciliation.plan
    time, memory, attribution = reconciliation.time, reconciliation.memory, reconciliation.attribution
    return {
        "schema": RECONCILE_SCHEMA,
        "model": model_payload(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan),
        "machine": reconciliation.machine, "noisy": reconciliation.noisy, "changes": dict(reconciliation.changes),
        "remarks": list(reconciliation.remarks),
        "time": {
            **asdict(time), "within": time.within, "rest_share": time.rest_share,
            "terms": [
                {**asdict(term), "difference_s": term.difference_s, "share": term.measured_s / time.measured_s}
                for term in time.terms
            ],
        },
        "attribution": attribution
        and {**asdict(attribution), "term": attribution.term.name, "ratio": attribution.ratio},
        "memory": {
            **asdict(memory),
            "terms": [{**asdict(term), "within": term.within} for term in memory.terms],
            "total": {**asdict(memory.total), "within": memory.total.within},
        },
        "collectives": collectives_payload(reconciliation.collectives),
        "advice": list(reconciliation.advice),
    }  # fmt: skip


def collectives_payload(comparison: CollectiveComparison) -> dict[str, Any]:
    """Return the JSON of compared collectives."""
    return {**asdict(comparison), "equal": comparison.equal, "miscounted": [
        {**mismatch.issued._asdict(), "planned": mismatch.planned, "found": mismatch.found} for mismatch in comparison.miscounted
    ]}  # fmt: skip


TRACE_SCHEMA = "shardwise.trace/1"


class TrafficOverlapProperties(TypedDict):
    """The part that is hidden."""

    share: float


class OccupancyProperties(TypedDict):
    """The sums, and the traffic of each axis."""

    busy_s: float
    exposed_s: float
    idle_s: float
    overlaps: list[Annotated[dict[str, Any], MergedFields(TrafficOverlap, TrafficOverlapProperties)]]


class StepDifferenceProperties(TypedDict):
    """Measured less expected."""

    difference_s: float


class RemedyProperties(TypedDict):
    """The layout, as in every payload."""

    layout: LayoutPayload


class BottleneckProperties(TypedDict):
    """The change of layout that would save most, if any would."""

    remedy: Annotated[dict[str, Any], MergedFields(Remedy, RemedyProperties)] | None


class TracePayload(TypedDict):
    """A traced step: seconds of each rank, where it differs from the planned one, who came late to collectives, and
    what stalled; `bottlenecks` where they were asked for."""

    schema: Literal["shardwise.trace/1"]
    model: ModelPayload
    cluster: str
    layout: LayoutPayload
    step: int
    step_s: float
    planned_s: float
    clock_error_s: float
    ranks: list[Annotated[dict[str, Any], MergedFields(Occupancy, OccupancyProperties)]]
    differences: list[Annotated[dict[str, Any], MergedFields(StepDifference, StepDifferenceProperties)]]
    lateness: list[RankLateness]
    stalls: list[Stall]
    bottlenecks: list[Annotated[dict[str, Any], MergedFields(Bottleneck, BottleneckProperties)]] | None


def trace_payload(analysis: TraceAnalysis) -> dict[str, Any]:
    """Return the JSON of `shardwise trace --json`."""
    plan = analysis.plan
    return {
        "schema": TRACE_SCHEMA, "model": model_payload(plan.model), "cluster": plan.cluster.name,
        "layout": layout_of_plan(plan), "step": analysis.step.step, "step_s": analysis.step.seconds,
        "planned_s": analysis.planned.step_time_s, "clock_error_s": analysis.step.error_s,
        "ranks": [_occupancy_payload(occupancy) for occupancy in analysis.occupancies],
        "differences": [
            {**asdict(difference), "difference_s": difference.difference_s} for difference in analysis.differences
        ],
        "lateness": [asdict(rank) for rank in analysis.lateness], "stalls": [asdict(stall) for stall in analysis.stalls],
        "bottlenecks": [_bottleneck_payload(bottleneck, plan) for bottleneck in analysis.bottlenecks]
        if analysis.lists_bottlenecks else None,
    }  # fmt: skip


def _occupancy_payload(occupancy: Occupancy) -> dict[str, Any]:
    overlaps = [{**asdict(overlap), "share": overlap.share} for overlap in occupancy.overlaps]
    totals = {"busy_s": occupancy.busy_s, "exposed_s": occupancy.exposed_s, "idle_s": occupancy.idle_s}
    return {**asdict(occupancy), **totals, "overlaps": overlaps}


def _bottleneck_payload(bottleneck: Bottleneck, plan: Plan) -> dict[str, Any]:
    remedy = bottleneck.remedy and {
        **asdict(bottleneck.remedy),
        "layout": layout_of_plan(plan, Layout.parse(bottleneck.remedy.layout)),
    }
    return {**asdict(bottleneck), "remedy": remedy}


REHEARSE_SCHEMA = "shardwise.rehearse/2"


class CommGroupPayload(TypedDict):
    """The ranks that a rank has collectives with over some axes."""

    axes: list[str]
    ranks: list[int]


class MemoryVerdict(TypedDict):
    """Verdict on a term: whether it is judged, and whether it is within the tolerance."""

    is_judged: bool
    holds: bool | None


class RehearsedMemory(TypedDict):
    """Bytes by term, planned and executed, and each term with its verdict."""

    planned: dict[str, float | None]
    executed: dict[str, float]
    terms: list[Annotated[dict[str, Any], MergedFields(MemoryTerm, MemoryVerdict)]]


class RehearsePayload(TypedDict):
    """One rank of a plan's world, run without the others."""

    schema: Literal["shardwise.rehearse/2"]
    model: ModelPayload
    cluster: str
    layout: LayoutPayload
    ranks: int
    rank: int
    coordinate: dict[str, int]
    groups: list[CommGroupPayload]
    num_micro_batches: int
    seconds: float
    collectives_equal: bool
    collectives: CollectivesPayload
    memory: RehearsedMemory
    remarks: list[str]
    ok: bool


def rehearsal_payload(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return the JSON of `shardwise rehearse --json`."""
    plan, rehearsed = rehearsal.plan, rehearsal.rehearsed
    return {
        "schema": REHEARSE_SCHEMA,
        "model": model_payload(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan),
        "ranks": rehearsal.ranks, "rank": rehearsed.rank, "coordinate": dict(rehearsed.coordinate),
        "groups": [{"axes": list(axes), "ranks": list(ranks)} for axes, ranks in rehearsed.groups.items()],
        "num_micro_batches": rehearsed.num_micro_batches, "seconds": rehearsed.seconds,
        "collectives_equal": rehearsal.collectives.equal, "collectives": collectives_payload(rehearsal.collectives),
        "memory": {
            "planned": {term.name: term.predicted for term in rehearsal.terms},
            "executed": {term.name: term.compared_bytes for term in rehearsal.terms},
            "terms": [
                {
                    **asdict(term), "is_judged": is_judged(term, rehearsal.memory.total),
                    "holds": term.is_within(REHEARSAL_TOLERANCE),
                }
                for term in rehearsal.terms
            ],
        },
        "remarks": list(rehearsal.remarks), "ok": rehearsal.ok,
    }  # fmt: skip
