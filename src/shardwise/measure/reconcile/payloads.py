"""A run, a rehearsal and a traced step compared with their plan, as plain data: what `reconcile --json`, `rehearse --json` and
`trace --json` print.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.layout.layout import Layout
from shardwise.layout.payload import LayoutPayload
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
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.search.explain.neighbour_layouts import Remedy
from shardwise.search.plan import Plan
from shardwise.search.plan_file import layout_of_plan
from shardwise.sharding.collectives import IssuedCollective
from shardwise.values.payload_fields import MergedFields

RECONCILE_SCHEMA = "shardwise.reconcile/3"


class TimeTermProperties(TypedDict):
    """Measured less predicted, and the share of the measured step."""

    difference_s: float
    share: float


class StepTimeProperties(TypedDict):
    """Whether the measured step is inside the interval (null: the prediction is a bound), and the share that no term has."""

    within: bool | None
    rest_share: float
    terms: list[Annotated[dict[str, Any], MergedFields(TimeTerm, TimeTermProperties)]]


class AttributionProperties(TypedDict):
    """The term by name, and measured over predicted."""

    term: str
    ratio: float | None


class MemoryTermProperties(TypedDict):
    """Whether the prediction holds; null where there is none."""

    within: bool | None


class StepMemoryProperties(TypedDict):
    """The terms, and the peak, which they add up to."""

    terms: list[Annotated[dict[str, Any], MergedFields(MemoryTerm, MemoryTermProperties)]]
    total: Annotated[dict[str, Any], MergedFields(MemoryTerm, MemoryTermProperties)]


class CollectiveCounts(TypedDict):
    """How often a collective was planned, and how often it was issued."""

    planned: int
    found: int


class CollectiveComparisonProperties(TypedDict):
    """Whether the list that was issued is the planned one, and what differs."""

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


def reconcile_payload(plan: Plan, found: Reconciliation) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    time, memory = found.time, found.memory
    return {
        "schema": RECONCILE_SCHEMA,
        "model": model_payload(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan),
        "machine": found.machine, "noisy": found.noisy, "changes": dict(found.changes), "remarks": list(found.remarks),
        "time": {
            **asdict(time), "within": time.within, "rest_share": time.rest_share,
            "terms": [
                {**asdict(one), "difference_s": one.difference_s, "share": one.measured_s / time.measured_s} for one in time.terms
            ],
        },
        "attribution": {**asdict(found.attribution), "term": found.attribution.term.name, "ratio": found.attribution.ratio}
        if found.attribution
        else None,
        "memory": {
            **asdict(memory),
            "terms": [{**asdict(one), "within": one.within} for one in memory.terms],
            "total": {**asdict(memory.total), "within": memory.total.within},
        },
        "collectives": collectives_payload(found.collectives),
        "advice": list(found.advice),
    }  # fmt: skip


def collectives_payload(found: CollectiveComparison) -> dict[str, Any]:
    """The lists' part of a payload."""
    return {**asdict(found), "equal": found.equal, "miscounted": [
        {**one.issued._asdict(), "planned": one.planned, "found": one.found} for one in found.miscounted
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


def trace_payload(found: TraceAnalysis, *, bottlenecks: bool = False) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    plan = found.plan
    return {
        "schema": TRACE_SCHEMA, "model": model_payload(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan),
        "step": found.step.step, "step_s": found.step.seconds, "planned_s": found.planned.step_time_s,
        "clock_error_s": found.step.error_s, "ranks": [_occupancy_payload(one) for one in found.occupancies],
        "differences": [{**asdict(one), "difference_s": one.difference_s} for one in found.differences],
        "lateness": [asdict(one) for one in found.lateness], "stalls": [asdict(one) for one in found.stalls],
        "bottlenecks": [_bottleneck_payload(one, plan) for one in found.bottlenecks] if bottlenecks else None,
    }  # fmt: skip


def _occupancy_payload(one: Occupancy) -> dict[str, Any]:
    overlaps = [{**asdict(traffic), "share": traffic.share} for traffic in one.overlaps]
    sums = {"busy_s": one.busy_s, "exposed_s": one.exposed_s, "idle_s": one.idle_s}
    return {**asdict(one), **sums, "overlaps": overlaps}


def _bottleneck_payload(one: Bottleneck, plan: Plan) -> dict[str, Any]:
    change = one.remedy and {**asdict(one.remedy), "layout": layout_of_plan(plan, Layout.parse(one.remedy.layout))}
    return {**asdict(one), "remedy": change}


REHEARSE_SCHEMA = "shardwise.rehearse/2"


class CommGroupPayload(TypedDict):
    """The ranks that a rank has collectives with over some axes."""

    axes: list[str]
    ranks: list[int]


class MemoryVerdict(TypedDict):
    """Whether a term is judged, and whether it is as close to the plan as is asked."""

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


def rehearsal_payload(plan: Plan, found: Rehearsal) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    seen = found.rehearsed
    return {
        "schema": REHEARSE_SCHEMA,
        "model": model_payload(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan),
        "ranks": found.ranks, "rank": seen.rank, "coordinate": dict(seen.coordinate),
        "groups": [{"axes": list(axes), "ranks": list(ranks)} for axes, ranks in seen.groups.items()],
        "num_micro_batches": seen.num_micro_batches, "seconds": seen.seconds,
        "collectives_equal": found.collectives.equal, "collectives": collectives_payload(found.collectives),
        "memory": {
            "planned": {one.name: one.predicted for one in found.terms},
            "executed": {one.name: one.compared_bytes for one in found.terms},
            "terms": [
                {**asdict(one), "is_judged": is_judged(one, found.memory.total), "holds": one.is_within(REHEARSAL_TOLERANCE)}
                for one in found.terms
            ],
        },
        "remarks": list(found.remarks), "ok": found.ok,
    }  # fmt: skip
