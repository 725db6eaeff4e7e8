"""JSON of `shardwise reconcile`, `rehearse` and `trace`: a run, a rehearsal and a traced step beside their plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from shardwise.layout import Layout, LayoutFacts
from shardwise.measure.reconcile.rank_time import Occupancy, RankLateness, Stall
from shardwise.measure.reconcile.reconciliation import REHEARSAL_TOLERANCE, Reconciliation, Rehearsal, is_judged
from shardwise.measure.reconcile.step_differences import StepDifference
from shardwise.measure.reconcile.step_terms import Attribution, CollectiveComparison, StepMemory, StepTime, TimeTerm
from shardwise.measure.reconcile.trace_analysis import Bottleneck, TraceAnalysis
from shardwise.model import ModelFacts
from shardwise.search import Plan, layout_of_plan
from shardwise.search.explain.neighbour_layouts import Remedy
from shardwise.values import Flat, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTermRecord(Payload):
    """Term of time, with its share of the measured step."""

    term: Annotated[TimeTerm, Flat]
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeRecord(Payload):
    """Time of a step, with its terms and their shares."""

    time: Annotated[StepTime, Flat]
    terms: Sequence[TimeTermRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributionRecord(Payload):
    """Attribution of the step's error to a term, which it has by name."""

    attribution: Annotated[Attribution, Flat]
    term: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconciliationRecord(Payload):
    """Comparison of a run with its plan, term by term."""

    SCHEMA = "shardwise.reconcile/3"
    model: ModelFacts
    cluster: str
    layout: LayoutFacts
    machine: str
    noisy: bool
    changes: Mapping[str, float]
    remarks: Sequence[str]
    time: StepTimeRecord
    attribution: AttributionRecord | None
    memory: StepMemory
    collectives: CollectiveComparison
    advice: Sequence[str]

    @classmethod
    def of(cls, reconciliation: Reconciliation) -> ReconciliationRecord:
        """Return the record of a reconciliation."""
        time, attribution = reconciliation.time, reconciliation.attribution
        terms = [TimeTermRecord(term=term, share=term.measured_s / time.measured_s) for term in time.terms]
        return cls.from_attributes(
            reconciliation, **_plan_facts(reconciliation.plan), time=StepTimeRecord(time=time, terms=terms),
            attribution=AttributionRecord(attribution=attribution, term=attribution.term.name) if attribution else None,
        )  # fmt: skip


def _plan_facts(plan: Plan) -> dict[str, Any]:
    return {"model": ModelFacts.of(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemedyRecord(Payload):
    """Change of layout, with the facts of the new layout."""

    remedy: Annotated[Remedy, Flat]
    layout: LayoutFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class BottleneckRecord(Payload):
    """Bottleneck, and the change of layout that would save most, if any would."""

    bottleneck: Annotated[Bottleneck, Flat]
    remedy: RemedyRecord | None

    @classmethod
    def of(cls, bottleneck: Bottleneck, plan: Plan) -> BottleneckRecord:
        """Return the record of a bottleneck of a plan's step."""
        remedy = bottleneck.remedy
        if remedy is None:
            return cls(bottleneck=bottleneck, remedy=None)
        layout = layout_of_plan(plan, Layout.parse(remedy.layout))
        return cls(bottleneck=bottleneck, remedy=RemedyRecord(remedy=remedy, layout=layout))


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord(Payload):
    """A traced step: seconds of each rank, where it differs from the planned one, who came late to collectives, and
    what stalled; `bottlenecks` where they were asked for."""

    SCHEMA = "shardwise.trace/1"
    model: ModelFacts
    cluster: str
    layout: LayoutFacts
    step: int
    step_s: float
    planned_s: float
    clock_error_s: float
    ranks: Sequence[Occupancy]
    differences: Sequence[StepDifference]
    lateness: Sequence[RankLateness]
    stalls: Sequence[Stall]
    bottlenecks: Sequence[BottleneckRecord] | None

    @classmethod
    def of(cls, analysis: TraceAnalysis) -> TraceRecord:
        """Return the record of a traced step."""
        plan, step = analysis.plan, analysis.step
        return cls.from_attributes(
            analysis, **_plan_facts(plan), step=step.step, step_s=step.seconds, planned_s=analysis.planned.step_time_s,
            clock_error_s=step.error_s, ranks=analysis.occupancies,
            bottlenecks=(
                [BottleneckRecord.of(bottleneck, plan) for bottleneck in analysis.bottlenecks]
                if analysis.lists_bottlenecks else None
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CommGroupRecord(Payload):
    """The ranks that a rank has collectives with over some axes."""

    axes: Sequence[str]
    ranks: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedTermRecord(Payload):
    """A term in bytes, whether it is judged by itself, and whether it is within the tolerance of a rehearsal."""

    name: str
    predicted: float | None
    measured: float
    largest: float | None
    is_judged: bool
    holds: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedMemoryRecord(Payload):
    """Bytes by term, planned and executed, and each term with its verdict."""

    planned: Mapping[str, float | None]
    executed: Mapping[str, float]
    terms: Sequence[RehearsedTermRecord]
    undeclared_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalRecord(Payload):
    """Rehearsal of one rank of a plan, which ran without the others."""

    SCHEMA = "shardwise.rehearse/2"
    model: ModelFacts
    cluster: str
    layout: LayoutFacts
    ranks: int
    rank: int
    coordinate: Mapping[str, int]
    groups: Sequence[CommGroupRecord]
    num_micro_batches: int
    seconds: float
    collectives_equal: bool
    collectives: CollectiveComparison
    memory: RehearsedMemoryRecord
    remarks: Sequence[str]
    ok: bool

    @classmethod
    def of(cls, rehearsal: Rehearsal) -> RehearsalRecord:
        """Return the record of a rehearsal."""
        terms, total = rehearsal.terms, rehearsal.memory.total
        memory = RehearsedMemoryRecord(
            planned={term.name: term.predicted for term in terms}, executed={term.name: term.compared_bytes for term in terms},
            terms=[
                RehearsedTermRecord.from_attributes(
                    term, is_judged=is_judged(term, total), holds=term.is_within(REHEARSAL_TOLERANCE)
                )
                for term in terms
            ],
            undeclared_bytes=rehearsal.memory.undeclared_bytes,
        )  # fmt: skip
        groups = [CommGroupRecord(axes=axes, ranks=ranks) for axes, ranks in rehearsal.rehearsed.groups.items()]
        return cls.from_attributes(
            rehearsal, rehearsal.rehearsed, **_plan_facts(rehearsal.plan), groups=groups, memory=memory,
            collectives_equal=rehearsal.collectives.equal,
        )  # fmt: skip
