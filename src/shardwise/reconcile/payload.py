"""A run against its plan as plain data: what `shardwise reconcile --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.layout.payload import LayoutPayload
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.planning.payload import layout_of_plan
from shardwise.planning.plan import Plan
from shardwise.reconcile.collectives import Collectives
from shardwise.reconcile.compare import Reconciliation
from shardwise.reconcile.memory import MemoryTerm, StepMemory
from shardwise.reconcile.time import Attribution, StepTime, TimeTerm
from shardwise.schema import Fields
from shardwise.sharding.collective import Issued

SCHEMA = "shardwise.reconcile/3"


class OfTimeTerm(TypedDict):
    """Measured less predicted, and the share of the measured step."""

    difference_s: float
    share: float


class OfTime(TypedDict):
    """Whether the measured step is inside the interval (null: the prediction is a bound), and the share that no term has."""

    within: bool | None
    rest_share: float
    terms: list[Annotated[dict[str, Any], Fields(TimeTerm, OfTimeTerm)]]


class OfAttribution(TypedDict):
    """The term by name, and measured over predicted."""

    term: str
    ratio: float | None


class Within(TypedDict):
    """Whether the prediction holds; null where there is none."""

    within: bool | None


class OfMemory(TypedDict):
    """The terms, and the peak, which they add up to."""

    terms: list[Annotated[dict[str, Any], Fields(MemoryTerm, Within)]]
    total: Annotated[dict[str, Any], Fields(MemoryTerm, Within)]


class MiscountedPayload(TypedDict):
    """How often a collective was planned, and how often it was issued."""

    planned: int
    found: int


class OfCollectives(TypedDict):
    """Whether the list that was issued is the planned one, and what differs."""

    equal: bool
    miscounted: list[Annotated[dict[str, Any], Fields(Issued, MiscountedPayload)]]


CollectivesPayload = Annotated[dict[str, Any], Fields(Collectives, OfCollectives)]


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
    time: Annotated[dict[str, Any], Fields(StepTime, OfTime)]
    attribution: Annotated[dict[str, Any], Fields(Attribution, OfAttribution)] | None
    memory: Annotated[dict[str, Any], Fields(StepMemory, OfMemory)]
    collectives: CollectivesPayload
    advice: list[str]


def reconcile_payload(plan: Plan, found: Reconciliation) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    time, memory = found.time, found.memory
    return {
        "schema": SCHEMA, "model": model_payload(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan),
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


def collectives_payload(found: Collectives) -> dict[str, Any]:
    """The lists' part of a payload."""
    return {**asdict(found), "equal": found.equal, "miscounted": [
        {**one.issued._asdict(), "planned": one.planned, "found": one.found} for one in found.miscounted
    ]}  # fmt: skip
