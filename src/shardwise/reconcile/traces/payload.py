"""A traced step as plain data: what `shardwise trace --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.layout.layout import Layout
from shardwise.layout.payload import LayoutPayload
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.planning.neighbours import Remedy
from shardwise.planning.payload import layout_of_plan
from shardwise.planning.plan import Plan
from shardwise.reconcile.traces.arrivals import Lateness
from shardwise.reconcile.traces.bottlenecks import Bottleneck
from shardwise.reconcile.traces.differences import Difference
from shardwise.reconcile.traces.found import Traced
from shardwise.reconcile.traces.occupancy import Occupancy, Overlap
from shardwise.reconcile.traces.stalls import Stall
from shardwise.schema import Fields

SCHEMA = "shardwise.trace/1"


class OfOverlap(TypedDict):
    """The part that is hidden."""

    share: float


class OfOccupancy(TypedDict):
    """The sums, and the traffic of each axis."""

    busy_s: float
    exposed_s: float
    idle_s: float
    overlaps: list[Annotated[dict[str, Any], Fields(Overlap, OfOverlap)]]


class OfDifference(TypedDict):
    """Measured less expected."""

    difference_s: float


class OfRemedy(TypedDict):
    """The layout, as in every payload."""

    layout: LayoutPayload


class OfBottleneck(TypedDict):
    """The change of layout that would save most, if any would."""

    remedy: Annotated[dict[str, Any], Fields(Remedy, OfRemedy)] | None


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
    ranks: list[Annotated[dict[str, Any], Fields(Occupancy, OfOccupancy)]]
    differences: list[Annotated[dict[str, Any], Fields(Difference, OfDifference)]]
    lateness: list[Lateness]
    stalls: list[Stall]
    bottlenecks: list[Annotated[dict[str, Any], Fields(Bottleneck, OfBottleneck)]] | None


def trace_payload(found: Traced, *, bottlenecks: bool = False) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    plan = found.plan
    return {
        "schema": SCHEMA, "model": model_payload(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan),
        "step": found.step.step, "step_s": found.step.seconds, "planned_s": found.planned.step_time_s,
        "clock_error_s": found.step.error_s, "ranks": [_occupancy(one) for one in found.occupancies],
        "differences": [{**asdict(one), "difference_s": one.difference_s} for one in found.differences],
        "lateness": [asdict(one) for one in found.lateness], "stalls": [asdict(one) for one in found.stalls],
        "bottlenecks": [_bottleneck(one, plan) for one in found.bottlenecks] if bottlenecks else None,
    }  # fmt: skip


def _occupancy(one: Occupancy) -> dict[str, Any]:
    overlaps = [{**asdict(traffic), "share": traffic.share} for traffic in one.overlaps]
    sums = {"busy_s": one.busy_s, "exposed_s": one.exposed_s, "idle_s": one.idle_s}
    return {**asdict(one), **sums, "overlaps": overlaps}


def _bottleneck(one: Bottleneck, plan: Plan) -> dict[str, Any]:
    change = one.remedy and {**asdict(one.remedy), "layout": layout_of_plan(plan, Layout.parse(one.remedy.layout))}
    return {**asdict(one), "remedy": change}
