"""A plan as plain data: what `shardwise plan --json` and `shardwise estimate --json` print, and what a plan file holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from shardwise.batch.target import LossTarget
from shardwise.books.rules import Rule
from shardwise.cluster.calibration import Calibration
from shardwise.cluster.chip import Chip
from shardwise.cluster.cluster import Cluster
from shardwise.cost.estimate import Estimate
from shardwise.cost.run import Run
from shardwise.issuing import IssuePolicy
from shardwise.job import Job, Precision, precision_named
from shardwise.layout.layout import Layout
from shardwise.layout.payload import LayoutPayload, layout_payload
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.network.topology import Pods, Switched, Topology, Torus
from shardwise.optimizer.table import optimizer_named
from shardwise.planning.plan import SCHEMA, Plan, SearchSummary
from shardwise.schema import Fields

Payload = dict[str, Any]
TOPOLOGIES: Mapping[str, type[Topology]] = {"torus": Torus, "pods": Pods, "switched": Switched}


class TorusKind(TypedDict):
    """The kind of network."""

    kind: Literal["torus"]


class PodsKind(TypedDict):
    """The kind of network."""

    kind: Literal["pods"]


class SwitchedKind(TypedDict):
    """The kind of network."""

    kind: Literal["switched"]


class ClusterPayload(TypedDict):
    """A cluster: the chip by name and with all its values, the network at its rated links, and what was measured (or null)."""

    name: str
    chip: str
    num_devices: int
    chip_specification: Chip
    topology: (
        Annotated[Payload, Fields(Torus, TorusKind)]
        | Annotated[Payload, Fields(Pods, PodsKind)]
        | Annotated[Payload, Fields(Switched, SwitchedKind)]
    )
    calibration: Calibration | None


class Recipe(TypedDict):
    """The values of the job's precision recipe, and of its optimizer's fields unless a run's recipe sets others."""

    precision_recipe: Precision
    optimizer_fields: dict[str, float]


class AlternativePayload(TypedDict):
    """A layout that was not taken, its cost, and why it lost."""

    layout: LayoutPayload
    estimate: Estimate
    reason: str


class PlanPayload(TypedDict):
    """A plan. `smallest_change` is present where `estimate` prices a layout that does not fit."""

    schema: Literal["shardwise.plan/3"]
    model: ModelPayload
    cluster: ClusterPayload
    job: Annotated[Payload, Fields(Job, Recipe)]
    layout: LayoutPayload
    estimate: Estimate
    alternatives: list[AlternativePayload]
    rules: list[Rule]
    search: SearchSummary | None
    versions: dict[str, str]
    run: Run | None
    bound_s: float | None
    issue_policy: IssuePolicy
    to_loss: LossTarget | None
    smallest_change: NotRequired[str]


def plan_payload(plan: Plan) -> Payload:
    """The versioned payload that `plan --json` prints."""
    return {
        "schema": SCHEMA,
        "model": model_payload(plan.model),
        "cluster": _cluster(plan.cluster),
        "job": _job(plan.job),
        "layout": layout_of_plan(plan),
        "estimate": asdict(plan.estimate),
        "alternatives": [
            {"layout": layout_of_plan(plan, other.layout), "estimate": asdict(other.estimate), "reason": other.reason}
            for other in plan.alternatives
        ],
        "rules": [asdict(rule) for rule in plan.rules],
        "search": asdict(plan.search) if plan.search else None,
        "versions": dict(plan.versions),
        "run": asdict(plan.run) if plan.run else None,
        "bound_s": plan.bound_s,
        "issue_policy": asdict(plan.policy),
        "to_loss": asdict(plan.to_loss) if plan.to_loss else None,
    }


def estimate_payload(plan: Plan, smallest_change: str | None) -> Payload:
    """What `shardwise estimate --json` prints: the plan, and if it does not fit, the smallest change with which it does."""
    return plan_payload(plan) | ({"smallest_change": smallest_change} if smallest_change else {})


def layout_of_plan(plan: Plan, layout: Layout | None = None) -> Payload:
    """The layout of a plan, or another one of its job, as in every payload."""
    return layout_payload(layout or plan.layout, plan.model, plan.job, plan.cluster.topology)


def _job(job: Job) -> Payload:
    recipe, fields_of_optimizer = precision_named(job.precision), optimizer_named(job.optimizer).given({})
    return {**asdict(job), "precision_recipe": asdict(recipe), "optimizer_fields": fields_of_optimizer}


def _cluster(cluster: Cluster) -> Payload:
    kind = next(name for name, kind in TOPOLOGIES.items() if isinstance(cluster.topology, kind))
    return {
        "name": cluster.name,
        "chip": cluster.chip.name,
        "num_devices": cluster.num_devices,
        "chip_specification": asdict(cluster.chip),
        "topology": {"kind": kind, **asdict(cluster.topology)},
        "calibration": asdict(cluster.calibration) if cluster.calibration else None,
    }
