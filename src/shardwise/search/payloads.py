"""JSON and CSV of comparisons of clusters, sweeps, searches to a loss and explanations.

Plan files are in `search/plan_file.py`, memory in `search/layout_memory.py`, instructions in `search/instruction_listing.py`."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from shardwise.batch_size import LossTarget
from shardwise.layout import Layout, LayoutFacts, layout_degrees, num_micro_batches
from shardwise.model import ModelFacts
from shardwise.price import Limits
from shardwise.search.compare_clusters import Comparison, Contender
from shardwise.search.explain.explanation import Explanation, LayoutTerm
from shardwise.search.explain.other_layouts import LayoutComparison, RejectedLayout
from shardwise.search.explain.playbook_steps import RunnerUp
from shardwise.search.loss_time import Doubling, LossPoint, LossSearch, LossTime, NoiseSensitivity
from shardwise.search.plan import Plan
from shardwise.search.plan_file import PlanRecord, layout_of_plan
from shardwise.search.plan_sweep import SweepPoint, Swept, find_knee, step_time_parts
from shardwise.search.verdicts import NoPlanReason
from shardwise.values import (
    MEMORY_TERMS,
    SECONDS_PER_DAY,
    TIME_TERMS,
    Flat,
    MergedFields,
    OmitEmpty,
    Payload,
    to_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord(Payload):
    """Swept argument, with its values."""

    name: str
    values: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPointRecord(Payload):
    """Point of a sweep, with the figures of its plan. Without a plan these are null; `problem` and `no_plan` say why."""

    at: Mapping[str, Any]
    model: ModelFacts
    cluster: str
    num_devices: int
    global_batch_tokens: int
    seq_len: int
    problem: str | None
    no_plan: NoPlanReason | None
    layout: LayoutFacts | None
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
    usd_per_step_interval90: tuple[float, float] | None
    usd_per_token_interval90: tuple[float, float] | None
    days_interval90: tuple[float, float] | None
    chip_hours_interval90: tuple[float, float] | None
    usd_interval90: tuple[float, float] | None
    parts: Mapping[str, float] | None
    time: Mapping[str, float] | None
    memory: Mapping[str, float] | None

    @classmethod
    def of(cls, point: SweepPoint) -> SweepPointRecord:
        """Return the record of a point."""
        case, plan = point.case, point.plan
        estimate, run = (plan.estimate, plan.run) if plan else (None, None)
        return cls.from_attributes(
            point, case.job, estimate, run,
            model=ModelFacts.of(case.model), cluster=case.cluster.name, num_devices=case.cluster.num_devices,
            problem=str(point.error) if point.error else None, layout=layout_of_plan(plan) if plan else None,
            num_micro_batches=accumulation_steps(plan) if plan else None,
            tokens_per_s=case.job.global_batch_tokens / estimate.step_time_s if estimate else None,
            parts=step_time_parts(estimate) if estimate else None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class KneeRecord(Payload):
    """Knee of a series: the first point with another bound than those before it; `at` is null if there is none."""

    series: Mapping[str, Any]
    at: Mapping[str, Any] | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRecord(Payload):
    """Plans of a job over swept values; `complete` is false where the sweep was stopped before its last point."""

    SCHEMA = "shardwise.sweep/2"
    sweeps: Sequence[SweepRecord]
    complete: bool
    points: Sequence[SweepPointRecord]
    knees: Sequence[KneeRecord]

    @classmethod
    def of(cls, swept: Swept) -> SweptRecord:
        """Return the record of a sweep."""
        series = swept.series() if swept.along.is_ordered else ()
        knees = [(series_values, find_knee(points)) for series_values, points in series]
        return cls(
            sweeps=[SweepRecord.from_attributes(sweep) for sweep in swept.sweeps], complete=swept.is_complete,
            points=[SweepPointRecord.of(point) for point in swept.points],
            knees=[
                KneeRecord(series=series_values, at=knee.point.at if knee else None, reason=knee.reason if knee else None)
                for series_values, knee in knees
            ],
        )  # fmt: skip


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
    fields = to_json(SweepPointRecord.of(point))
    low, high = fields.pop("interval90") or (None, None)
    ends = {
        name: fields.pop(name) or (None, None) for name in [name for name in fields if name.endswith("_interval90")]
    }
    time, memory, swept_values = fields.pop("time") or {}, fields.pop("memory") or {}, fields.pop("at")
    del fields["parts"]
    fields["model"], fields["layout"] = fields["model"]["name"], fields["layout"] and fields["layout"]["text"]
    row = {
        **{f"sweep.{name}": value for name, value in swept_values.items()},
        **fields,
        "interval90_low_s": low,
        "interval90_high_s": high,
        **{f"{name}_{side}": pair[end] for name, pair in ends.items() for end, side in enumerate(("low", "high"))},
    }
    row |= {f"time_s.{term}": time.get(term) for term in TIME_TERMS}
    return row | {f"memory_bytes.{term}": memory.get(term) for term in MEMORY_TERMS}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPointRecord(Payload):
    """Plan of a batch on a cluster. Without a plan its figures are null; `problem` and `no_plan` say why."""

    cluster: str
    chip: str
    num_devices: int
    batch_tokens: int
    problem: str | None
    no_plan: NoPlanReason | None
    within_limits: bool
    layout: LayoutFacts | None
    mfu: float | None
    interval90: tuple[float, float] | None
    time: LossTime | None

    @classmethod
    def of(cls, point: LossPoint) -> LossPointRecord:
        """Return the record of a point."""
        plan = point.plan
        return cls.from_attributes(point, plan and plan.estimate, layout=plan and layout_of_plan(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSearchRecord(Payload):
    """Plans to a loss of every batch on every cluster; `chosen` is the number of a point, `plan` its plan.

    `diagonal` are the numbers of points with the chosen one's tokens per device: batch and devices doubled together.
    """

    SCHEMA = "shardwise.to_loss/1"
    target: LossTarget
    min_steps: float
    min_tokens: float
    goal: Literal["time", "usd"]
    deadline_days: float | None
    budget_usd: float | None
    chosen: int | None
    reason: str
    points: Sequence[LossPointRecord]
    diagonal: Sequence[int]
    doublings: Sequence[Doubling]
    sensitivity: Sequence[NoiseSensitivity]
    plan: PlanRecord | None

    @classmethod
    def of(cls, search: LossSearch) -> LossSearchRecord:
        """Return the record of a search."""
        return cls.from_attributes(
            search, search.target.tradeoff, search.limits, deadline_days=_deadline_days(search.limits),
            points=[LossPointRecord.of(point) for point in search.points],
            diagonal=[search.points.index(point) for point in search.diagonal],
            plan=search.plan and PlanRecord.of(search.plan),
        )  # fmt: skip


def _deadline_days(limits: Limits) -> float | None:
    return None if limits.deadline_s is None else limits.deadline_s / SECONDS_PER_DAY


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplanationRecord(Payload):
    """Explanation of a plan, with the requested comparisons.

    `defaults` is present where a model and a cluster were planned first and something was left out: `seq_len`, `batch_tokens`.
    """

    SCHEMA = "shardwise.explain/3"
    explanation: Annotated[Explanation, Flat]
    model: ModelFacts
    layout: LayoutFacts
    runners_up: Sequence[Annotated[dict[str, Any], MergedFields(RunnerUp, layout=LayoutFacts)]]
    options: Sequence[Annotated[dict[str, Any], MergedFields(RejectedLayout, layout=LayoutFacts)]]
    against: Annotated[dict[str, Any], MergedFields(LayoutComparison, layout=LayoutFacts)] | None
    terms: Sequence[Annotated[dict[str, Any], MergedFields(LayoutTerm, layout=LayoutFacts)]]
    defaults: Annotated[Sequence[str], OmitEmpty]

    @classmethod
    def of(cls, explanation: Explanation) -> ExplanationRecord:
        """Return the record of an explanation."""
        plan = explanation.plan

        def facts(layout: str) -> LayoutFacts:
            return layout_of_plan(plan, Layout.parse(layout))

        def with_facts(row: Any) -> dict[str, Any]:
            return {**to_json(row), "layout": facts(row.layout)}

        return cls(
            explanation=explanation, model=ModelFacts.of(plan.model), layout=facts(explanation.layout),
            against=with_facts(explanation.against) if explanation.against else None, defaults=plan.defaults,
            **{name: list(map(with_facts, getattr(explanation, name))) for name in ("runners_up", "options", "terms")},
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderRecord(Payload):
    """Cluster of a comparison, with the figures of its plan. Without a plan these are null; `problem` and `no_plan` say why."""

    cluster: str
    chip: str
    num_devices: int
    problem: str | None
    no_plan: NoPlanReason | None
    layout: LayoutFacts | None
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
    days_interval90: tuple[float, float] | None
    chip_hours_interval90: tuple[float, float] | None
    usd_interval90: tuple[float, float] | None
    energy_mwh_interval90: tuple[float, float] | None
    price_date: str | None
    missing: Sequence[str]
    in_time: bool | None
    within_budget: bool | None
    notes: Sequence[str]

    @classmethod
    def of(cls, contender: Contender) -> ContenderRecord:
        """Return the record of a contender."""
        plan, run = contender.plan, contender.run
        return cls.from_attributes(
            contender,
            plan and plan.estimate,
            run,
            layout=plan and layout_of_plan(plan),
            missing=run.missing if run else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonRecord(Payload):
    """Plans of one job on several clusters; `plan` is that of the `chosen` one."""

    SCHEMA = "shardwise.comparison/2"
    deadline_days: float | None
    budget_usd: float | None
    chosen: str | None
    reason: str
    clusters: Sequence[ContenderRecord]
    plan: PlanRecord | None

    @classmethod
    def of(cls, comparison: Comparison) -> ComparisonRecord:
        """Return the record of a comparison."""
        limits = comparison.limits
        return cls(
            deadline_days=_deadline_days(limits), budget_usd=limits.budget_usd, reason=comparison.reason,
            chosen=None if comparison.chosen is None else comparison.contenders[comparison.chosen].cluster,
            clusters=[ContenderRecord.of(contender) for contender in comparison.contenders],
            plan=PlanRecord.of(comparison.plan) if comparison.plan else None,
        )  # fmt: skip
