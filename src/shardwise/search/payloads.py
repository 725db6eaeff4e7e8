"""JSON and CSV of comparisons of clusters, sweeps, searches to a loss and explanations.

Plan files are in `search/plan_file.py`, memory in `search/layout_memory.py`, instructions in `search/instruction_listing.py`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from shardwise.batch_size import LossTarget
from shardwise.layout import Layout, LayoutPayload, layout_degrees, num_micro_batches
from shardwise.model import ModelPayload, model_payload
from shardwise.search.compare_clusters import Comparison, Contender
from shardwise.search.explain.explanation import Explanation, LayoutTerm
from shardwise.search.explain.other_layouts import LayoutComparison, RejectedLayout
from shardwise.search.explain.playbook_steps import RunnerUp
from shardwise.search.loss_time import Doubling, LossPoint, LossSearch, LossTime, NoiseSensitivity
from shardwise.search.plan import Plan
from shardwise.search.plan_file import PlanPayload, layout_of_plan, plan_payload
from shardwise.search.plan_sweep import SweepPoint, Swept, find_knee, step_time_parts
from shardwise.values import MEMORY_TERMS, SECONDS_PER_DAY, TIME_TERMS, MergedFields
from shardwise.values.payload_fields import payload_names

SWEEP_SCHEMA = "shardwise.sweep/2"
ESTIMATE_FIELDS = (
    "step_time_s", "tokens_per_s_per_device", "mfu", "hfu", "bound", "memory_bytes", "memory_capacity_bytes",
)  # fmt: skip
RUN_FIELDS = ("days", "chip_hours", "usd")


class SweptName(TypedDict):
    """A swept name, and its values."""

    name: str
    values: list[Any]


class SweepPointPayload(TypedDict):
    """A point: its values, and its plan's figures. Where it has no plan, `problem` says why and they are null."""

    at: dict[str, Any]
    model: ModelPayload
    cluster: str
    num_devices: int
    global_batch_tokens: int
    seq_len: int
    problem: str | None
    layout: LayoutPayload | None
    num_micro_batches: int | None
    step_time_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    hfu: float | None
    bound: str | None
    memory_bytes: float | None
    memory_capacity_bytes: float | None
    interval90: tuple[float, float] | None
    tokens_per_s: float | None
    usd_per_step: float | None
    usd_per_token: float | None
    days: float | None
    chip_hours: float | None
    usd: float | None
    parts: dict[str, float] | None
    time: dict[str, float] | None
    memory: dict[str, float] | None


class KneePayload(TypedDict):
    """The knee of one series: the first point with another bound than those before it; null where there is none."""

    series: dict[str, Any]
    at: dict[str, Any] | None
    reason: str | None


class SweepPayload(TypedDict):
    """Plans of a job over swept values; `complete` is false where the sweep was stopped before its last point."""

    schema: Literal["shardwise.sweep/2"]
    sweeps: list[SweptName]
    complete: bool
    points: list[SweepPointPayload]
    knees: list[KneePayload]


def sweep_payload(swept: Swept) -> dict[str, Any]:
    """Return the versioned payload; `complete` is false if the sweep stopped before its last point."""
    return {
        "schema": SWEEP_SCHEMA,
        "sweeps": [{"name": sweep.name, "values": list(sweep.values)} for sweep in swept.sweeps],
        "complete": swept.is_complete,
        "points": [sweep_point_payload(point) for point in swept.points],
        "knees": [
            {
                "series": dict(series_values),
                "at": dict(knee.point.at) if knee else None,
                "reason": knee.reason if knee else None,
            }
            for series_values, knee in ((series_values, find_knee(points)) for series_values, points in swept.series())
        ]
        if swept.along.is_ordered
        else [],
    }


def sweep_point_payload(point: SweepPoint) -> dict[str, Any]:
    """Return the payload of a point: its values and its plan's figures, each None without a plan."""
    case, plan = point.case, point.plan
    return {
        "at": dict(point.at), "model": model_payload(case.model), "cluster": case.cluster.name,
        "num_devices": case.cluster.num_devices,
        "global_batch_tokens": case.job.global_batch_tokens, "seq_len": case.job.seq_len,
        "problem": str(point.error) if point.error else None, "layout": layout_of_plan(plan) if plan else None,
        "num_micro_batches": accumulation_steps(plan) if plan else None,
        **{name: getattr(plan.estimate, name) if plan else None for name in ESTIMATE_FIELDS},
        "interval90": list(plan.estimate.interval90) if plan and plan.estimate.interval90 else None,
        "tokens_per_s": case.job.global_batch_tokens / plan.estimate.step_time_s if plan else None,
        "usd_per_step": point.usd_per_step, "usd_per_token": point.usd_per_token,
        **{name: getattr(plan.run, name) if plan and plan.run else None for name in RUN_FIELDS},
        "parts": step_time_parts(plan.estimate) if plan else None,
        "time": dict(plan.estimate.time) if plan else None, "memory": dict(plan.estimate.memory) if plan else None,
    }  # fmt: skip


def accumulation_steps(plan: Plan) -> int:
    """Return the micro-batches of the fullest replica in a step: the steps of gradient accumulation."""
    return int(num_micro_batches(plan.job, layout_degrees(plan.layout)))


def sweep_csv(swept: Swept) -> str:
    """Return a CSV row for each point: swept values, figures, then seconds and bytes of each term."""
    out = io.StringIO()
    rows = [_csv_row(point) for point in swept.points]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_row(point: SweepPoint) -> dict[str, Any]:
    """Flatten the payload of a point."""
    fields = sweep_point_payload(point)
    low, high = fields.pop("interval90") or (None, None)
    time, memory, swept_values = fields.pop("time") or {}, fields.pop("memory") or {}, fields.pop("at")
    del fields["parts"]
    fields["model"], fields["layout"] = fields["model"]["name"], fields["layout"] and fields["layout"]["text"]
    row = {
        **{f"sweep.{name}": value for name, value in swept_values.items()},
        **fields,
        "interval90_low_s": low,
        "interval90_high_s": high,
    }
    row |= {f"time_s.{term}": time.get(term) for term in TIME_TERMS}
    return row | {f"memory_bytes.{term}": memory.get(term) for term in MEMORY_TERMS}


TO_LOSS_SCHEMA = "shardwise.to_loss/1"


class LossPointPayload(TypedDict):
    """A batch on a cluster. Where it has no plan, `problem` says why and the rest is null."""

    cluster: str
    chip: str
    num_devices: int
    batch_tokens: int
    problem: str | None
    within_limits: bool
    layout: LayoutPayload | None
    mfu: float | None
    interval90: tuple[float, float] | None
    time: LossTime | None


class ToLossPayload(TypedDict):
    """Every batch on every cluster to a loss; `chosen` is the number of a point, `plan` its plan.

    `diagonal` are the numbers of points with the chosen one's tokens per device: batch and devices doubled together.
    """

    schema: Literal["shardwise.to_loss/1"]
    target: LossTarget
    min_steps: float
    min_tokens: float
    goal: Literal["time", "usd"]
    deadline_days: float | None
    budget_usd: float | None
    chosen: int | None
    reason: str
    points: list[LossPointPayload]
    diagonal: list[int]
    doublings: list[Doubling]
    sensitivity: list[NoiseSensitivity]
    plan: PlanPayload | None


def to_loss_payload(search: LossSearch) -> dict[str, Any]:
    """Return the versioned payload of a search to a loss."""
    tradeoff, deadline = search.target.tradeoff, search.limits.deadline_s
    return {
        "schema": TO_LOSS_SCHEMA, "target": asdict(search.target), "min_steps": tradeoff.min_steps,
        "min_tokens": tradeoff.min_tokens, "goal": search.goal,
        "deadline_days": None if deadline is None else deadline / SECONDS_PER_DAY,
        "budget_usd": search.limits.budget_usd, "chosen": search.chosen, "reason": search.reason,
        "points": [_loss_point_payload(point) for point in search.points],
        "diagonal": [search.points.index(point) for point in search.diagonal],
        "doublings": [asdict(doubling) for doubling in search.doublings],
        "sensitivity": [asdict(sensitivity) for sensitivity in search.sensitivity],
        "plan": plan_payload(search.plan) if search.plan else None,
    }  # fmt: skip


def _loss_point_payload(point: LossPoint) -> dict[str, Any]:
    estimate = point.plan.estimate if point.plan else None
    return {
        "cluster": point.cluster, "chip": point.chip, "num_devices": point.num_devices, "batch_tokens": point.batch_tokens,
        "problem": point.problem, "within_limits": point.within_limits,
        "layout": layout_of_plan(point.plan) if point.plan else None, "mfu": estimate.mfu if estimate else None,
        "interval90": list(estimate.interval90) if estimate and estimate.interval90 else None,
        "time": asdict(point.time) if point.time else None,
    }  # fmt: skip


EXPLAIN_SCHEMA = "shardwise.explain/3"
Payload = dict[str, Any]


class LayoutOfPart(TypedDict):
    """The layout, as in every payload."""

    layout: LayoutPayload


class ExplanationFields(TypedDict):
    """Why a plan is what it is, in the order of its decisions, with the comparisons that were requested.

    `defaults` is present where a model and a cluster were planned first and something was left out: `seq_len`, `batch_tokens`.
    """

    schema: Literal["shardwise.explain/3"]
    model: ModelPayload
    layout: LayoutPayload
    runners_up: list[Annotated[Payload, MergedFields(RunnerUp, LayoutOfPart)]]
    options: list[Annotated[Payload, MergedFields(RejectedLayout, LayoutOfPart)]]
    against: Annotated[Payload, MergedFields(LayoutComparison, LayoutOfPart)] | None
    terms: list[Annotated[Payload, MergedFields(LayoutTerm, LayoutOfPart)]]
    defaults: NotRequired[list[str]]


ExplanationPayload = Annotated[Payload, MergedFields(Explanation, ExplanationFields)]


def explanation_payload(explanation: Explanation) -> Payload:
    """Return the versioned payload of an explanation."""
    plan = explanation.plan

    def with_layout(part: Mapping[str, Any]) -> Payload:
        return {**part, "layout": layout_of_plan(plan, Layout.parse(part["layout"]))}

    fields = asdict(explanation)
    payload = with_layout({name: fields[name] for name in payload_names(explanation)})
    lists = {name: [with_layout(part) for part in payload[name]] for name in ("runners_up", "options", "terms")}
    against = with_layout(payload["against"]) if explanation.against else None
    return {
        "schema": EXPLAIN_SCHEMA, **payload, **lists, "model": model_payload(plan.model), "against": against,
        **({"defaults": list(plan.defaults)} if plan.defaults else {}),
    }  # fmt: skip


COMPARISON_SCHEMA = "shardwise.comparison/2"


class ContenderPayload(TypedDict):
    """One cluster. Where it has no plan, `problem` says why, and the plan's fields are null."""

    cluster: str
    chip: str
    num_devices: int
    problem: str | None
    layout: LayoutPayload | None
    stack: str | None
    interval90: tuple[float, float] | None
    step_time_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    memory_bytes: float | None
    ideal_days: float | None
    goodput: float | None
    days: float | None
    chip_hours: float | None
    usd: float | None
    energy_mwh: float | None
    missing: list[str]
    in_time: bool | None
    within_budget: bool | None
    notes: list[str]


class ComparisonPayload(TypedDict):
    """Plans of one job on several clusters; `plan` is that of the `chosen` one."""

    schema: Literal["shardwise.comparison/2"]
    deadline_days: float | None
    budget_usd: float | None
    chosen: str | None
    reason: str
    clusters: list[ContenderPayload]
    plan: PlanPayload | None


def comparison_payload(comparison: Comparison) -> dict[str, Any]:
    """Return the versioned payload that `plan --json` prints for several clusters; `plan` is that of the chosen one."""
    limits, chosen = comparison.limits, comparison.plan
    return {
        "schema": COMPARISON_SCHEMA,
        "deadline_days": None if limits.deadline_s is None else limits.deadline_s / SECONDS_PER_DAY,
        "budget_usd": limits.budget_usd,
        "chosen": None if comparison.chosen is None else comparison.contenders[comparison.chosen].cluster,
        "reason": comparison.reason,
        "clusters": [_contender_payload(contender) for contender in comparison.contenders],
        "plan": plan_payload(chosen) if chosen else None,
    }


def _contender_payload(contender: Contender) -> dict[str, Any]:
    estimate, run = contender.plan.estimate if contender.plan else None, contender.run
    return {
        "cluster": contender.cluster, "chip": contender.chip, "num_devices": contender.num_devices, "problem": contender.problem,
        "layout": layout_of_plan(contender.plan) if contender.plan else None, "stack": contender.stack,
        "interval90": list(contender.interval90) if contender.interval90 else None,
        **{name: getattr(estimate, name, None) for name in ("step_time_s", "tokens_per_s_per_device", "mfu", "memory_bytes")},
        **{name: getattr(run, name, None) for name in ("ideal_days", "goodput", "days", "chip_hours", "usd", "energy_mwh")},
        "missing": list(run.missing) if run else [], "in_time": contender.in_time, "within_budget": contender.within_budget,
        "notes": list(contender.notes),
    }  # fmt: skip
