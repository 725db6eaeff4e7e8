"""Comparisons of clusters, sweeps, searches to a loss and explanations as plain data: what `--json` and `--csv` print of them.

Plan files are in `search/plan_file.py`, memory in `search/layout_memory.py`, instructions in `search/plan_instructions.py`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.batch_size.tradeoff import LossTarget
from shardwise.layout.degrees import layout_degrees, num_micro_batches
from shardwise.layout.layout import Layout
from shardwise.layout.payload import LayoutPayload
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.search.compare_clusters import Comparison, Contender
from shardwise.search.explain.explanation import Explanation, LayoutTerm
from shardwise.search.explain.other_layouts import LayoutComparison, RejectedLayout
from shardwise.search.explain.playbook_steps import RunnerUp
from shardwise.search.loss_time import Doubling, LossPoint, LossSearch, LossTime, NoiseSensitivity
from shardwise.search.plan import Plan
from shardwise.search.plan_file import PlanPayload, layout_of_plan, plan_payload
from shardwise.search.plan_sweep import SweepPoint, Swept, find_knee, step_time_parts
from shardwise.values.estimate_terms import MEMORY_TERMS, TIME_TERMS
from shardwise.values.payload_fields import MergedFields
from shardwise.values.units import SECONDS_PER_DAY

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
    """The versioned payload; `complete` is false where it was stopped before its last point."""
    return {
        "schema": SWEEP_SCHEMA,
        "sweeps": [{"name": sweep.name, "values": list(sweep.values)} for sweep in swept.sweeps],
        "complete": len(swept.points) == swept.num_points,
        "points": [sweep_point_payload(point) for point in swept.points],
        "knees": [
            {
                "series": dict(at),
                "at": dict(found.point.at) if found else None,
                "reason": found.reason if found else None,
            }
            for at, found in ((at, find_knee(points)) for at, points in swept.series())
        ]
        if swept.along.is_ordered
        else [],
    }


def sweep_point_payload(point: SweepPoint) -> dict[str, Any]:
    """A point: its values, and its plan's figures, each of them None where there is no plan."""
    case, found = point.case, point.plan
    return {
        "at": dict(point.at), "model": model_payload(case.model), "cluster": case.cluster.name,
        "num_devices": case.cluster.num_devices,
        "global_batch_tokens": case.job.global_batch_tokens, "seq_len": case.job.seq_len,
        "problem": str(point.error) if point.error else None, "layout": layout_of_plan(found) if found else None,
        "num_micro_batches": accumulation_steps(found) if found else None,
        **{name: getattr(found.estimate, name) if found else None for name in ESTIMATE_FIELDS},
        "interval90": list(found.estimate.interval90) if found and found.estimate.interval90 else None,
        "tokens_per_s": case.job.global_batch_tokens / found.estimate.step_time_s if found else None,
        "usd_per_step": point.usd_per_step, "usd_per_token": point.usd_per_token,
        **{name: getattr(found.run, name) if found and found.run else None for name in RUN_FIELDS},
        "parts": step_time_parts(found.estimate) if found else None,
        "time": dict(found.estimate.time) if found else None, "memory": dict(found.estimate.memory) if found else None,
    }  # fmt: skip


def accumulation_steps(plan: Plan) -> int:
    """Micro-batches of the fullest replica in a step: the steps of gradient accumulation."""
    return int(num_micro_batches(plan.job, layout_degrees(plan.layout)))


def sweep_csv(swept: Swept) -> str:
    """A row for each point: the values of the sweeps, then the figures; seconds and bytes of each term last."""
    out = io.StringIO()
    rows = [_csv_row(point) for point in swept.points]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _csv_row(point: SweepPoint) -> dict[str, Any]:
    """The payload of a point without lists and tables in it."""
    found = sweep_point_payload(point)
    low, high = found.pop("interval90") or (None, None)
    time, memory, at = found.pop("time") or {}, found.pop("memory") or {}, found.pop("at")
    del found["parts"]
    found["model"], found["layout"] = found["model"]["name"], found["layout"] and found["layout"]["text"]
    row = {
        **{f"sweep.{name}": value for name, value in at.items()},
        **found,
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


def to_loss_payload(found: LossSearch, doublings: Sequence[Doubling] = ()) -> dict[str, Any]:
    """The versioned payload."""
    law, deadline = found.target.tradeoff, found.limits.deadline_s
    return {
        "schema": TO_LOSS_SCHEMA, "target": asdict(found.target), "min_steps": law.min_steps, "min_tokens": law.min_tokens,
        "goal": found.goal, "deadline_days": None if deadline is None else deadline / SECONDS_PER_DAY,
        "budget_usd": found.limits.budget_usd, "chosen": found.chosen, "reason": found.reason,
        "points": [_loss_point_payload(point) for point in found.points],
        "diagonal": [found.points.index(point) for point in found.diagonal],
        "doublings": [asdict(one) for one in doublings], "sensitivity": [asdict(one) for one in found.sensitivity],
        "plan": plan_payload(found.plan) if found.plan else None,
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
    """Why a plan is what it is, in the order of its decisions, with the comparisons that were requested."""

    schema: Literal["shardwise.explain/3"]
    model: ModelPayload
    layout: LayoutPayload
    runners_up: list[Annotated[Payload, MergedFields(RunnerUp, LayoutOfPart)]]
    options: list[Annotated[Payload, MergedFields(RejectedLayout, LayoutOfPart)]]
    against: Annotated[Payload, MergedFields(LayoutComparison, LayoutOfPart)] | None
    terms: list[Annotated[Payload, MergedFields(LayoutTerm, LayoutOfPart)]]


ExplanationPayload = Annotated[Payload, MergedFields(Explanation, ExplanationFields)]


def explanation_payload(found: Explanation, plan: Plan) -> Payload:
    """The versioned payload of the explanation of a plan."""

    def laid(part: Mapping[str, Any]) -> Payload:
        return {**part, "layout": layout_of_plan(plan, Layout.parse(part["layout"]))}

    whole = laid(asdict(found))
    lists = {name: [laid(part) for part in whole[name]] for name in ("runners_up", "options", "terms")}
    against = laid(whole["against"]) if found.against else None
    return {"schema": EXPLAIN_SCHEMA, **whole, **lists, "model": model_payload(plan.model), "against": against}


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
    """The versioned payload that `plan --json` prints for several clusters; `plan` is that of the chosen one."""
    limits, chosen = comparison.limits, comparison.plan
    return {
        "schema": COMPARISON_SCHEMA,
        "deadline_days": None if limits.deadline_s is None else limits.deadline_s / SECONDS_PER_DAY,
        "budget_usd": limits.budget_usd,
        "chosen": None if comparison.chosen is None else comparison.contenders[comparison.chosen].cluster,
        "reason": comparison.reason,
        "clusters": [_contender_payload(one) for one in comparison.contenders],
        "plan": plan_payload(chosen) if chosen else None,
    }


def _contender_payload(one: Contender) -> dict[str, Any]:
    estimate, run = one.plan.estimate if one.plan else None, one.run
    return {
        "cluster": one.cluster, "chip": one.chip, "num_devices": one.num_devices, "problem": one.problem,
        "layout": layout_of_plan(one.plan) if one.plan else None, "stack": one.stack,
        "interval90": list(one.interval90) if one.interval90 else None,
        **{name: getattr(estimate, name, None) for name in ("step_time_s", "tokens_per_s_per_device", "mfu", "memory_bytes")},
        **{name: getattr(run, name, None) for name in ("ideal_days", "goodput", "days", "chip_hours", "usd", "energy_mwh")},
        "missing": list(run.missing) if run else [], "in_time": one.in_time, "within_budget": one.within_budget,
        "notes": list(one.notes),
    }  # fmt: skip
