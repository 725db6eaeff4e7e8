"""Where a measured step differs from the planned one, operation by operation, and why.

Differences are means over the ranks. On each rank kernels, exposed communication and gaps add up to its step, as kernels, exposed
communication and the bubble add up to the planned one: so the differences add up to that of the steps. A call of the engine may
make what several kernels of the plan make, and the other way round: kernels that share a result are one operation, named after
the first kernel of the plan among them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

from shardwise.measure.reconcile.aligned_traces import TracedRank, TracedStep, TraceSpan, event_axis
from shardwise.measure.reconcile.rank_time import (
    CollectiveArrivals,
    Occupancy,
    RankLateness,
    find_gaps,
    match_collectives,
    measure_lateness,
    measure_occupancy,
    waits_for_late_ranks,
)
from shardwise.price.simulation.simulated_step import SimulatedStep
from shardwise.price.simulation.streams import TimedKernel, Transfer
from shardwise.records.step_trace import KERNEL
from shardwise.step.instructions import START, UPDATE, WAIT
from shardwise.values.units import format_percent, format_seconds

COPIES_AROUND_COLLECTIVES = "copies around collectives"  # what starts and waits of collectives do beside them


class OperationKey(NamedTuple):
    """An operation: the kind of unit, the phase, and the name."""

    unit: str
    phase: str
    name: str


@dataclass(slots=True)
class TracedOperation:
    """What an operation takes in a step: `expected_s` as planned, and the kernels that were measured."""

    key: OperationKey
    expected_s: float = 0.0
    spans: list[tuple[TracedRank, TraceSpan]] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        return sum(span.seconds for _, span in self.spans)

    @property
    def core_share(self) -> float | None:
        """The part of the time that the thread had a core; None where that is not known, as on a GPU."""
        known = sum(span.event.cpu_ns for _, span in self.spans) / 1e9
        return known / self.measured_s if known and self.measured_s else None

    def slowdown_beside_traffic(self) -> float | None:
        """How many times as long it takes while traffic is on its way; None where it never, or always, is."""
        beside: list[float] = []
        alone: list[float] = []
        for rank, span in self.spans:
            (beside if rank.traffic_s(span.start, span.end) > span.seconds / 2 else alone).append(span.seconds)
        if min(len(beside), len(alone)) < 2 or not sum(alone):
            return None
        return (sum(beside) / len(beside)) / (sum(alone) / len(alone))


def rank_core_share(rank: TracedRank) -> float | None:
    """The part of its kernels' time in which a rank's thread had a core; None where that is not known."""
    whole = TracedOperation(OperationKey("", "", ""))
    whole.spans = [(rank, span) for span in rank.spans_of_kind(KERNEL)]
    return whole.core_share


def match_operations(rank: TracedRank, planned: SimulatedStep) -> dict[OperationKey, TracedOperation]:
    """The kernels of a rank's step, and of its planned stage, by operation."""
    expected, measured = (
        list(_planned_kernels(planned, rank.trace.coordinate.get("pp", 0))),
        list(rank.spans_of_kind(KERNEL)),
    )
    joined = _UnionFind()
    for kernel in expected:
        joined.join(OperationKey(kernel.unit, kernel.phase, kernel.name), kernel.results)
    for span in measured:
        joined.join(_operation_key(span), span.event.results)
    found: dict[OperationKey, TracedOperation] = {}
    for kernel in expected:
        key = joined.key(OperationKey(kernel.unit, kernel.phase, kernel.name))
        found.setdefault(key, TracedOperation(key)).expected_s += kernel.seconds
    for span in measured:
        key = joined.key(_operation_key(span))
        found.setdefault(key, TracedOperation(key)).spans.append((rank, span))
    return found


def _planned_kernels(planned: SimulatedStep, stage: int) -> Iterator[TimedKernel]:
    """The kernels of a stage; those of the update as one."""
    plays = [*planned.slot_timelines[stage], planned.updates[stage]]
    kernels = (one.what for played in plays for one in played.events if isinstance(one.what, TimedKernel))
    for one in kernels:
        is_update = one.phase == UPDATE
        yield TimedKernel(seconds=one.seconds, unit="", phase=UPDATE, name=UPDATE) if is_update else one


def _operation_key(span: TraceSpan) -> OperationKey:
    event = span.event
    if event.phase == UPDATE:
        return OperationKey("", UPDATE, UPDATE)
    if event.name.startswith((f"{START} ", f"{WAIT} ")):
        return OperationKey(event.unit, event.phase, COPIES_AROUND_COLLECTIVES)
    return OperationKey(event.unit, event.phase, event.name)


class _UnionFind:
    """Keys with what they make: those that share a result are one."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}
        self.first: dict[Hashable, OperationKey] = {}

    def join(self, key: OperationKey, results: Iterable[str]) -> None:
        root = self._root(key)
        self.first.setdefault(root, key)
        for name in results:
            other = self._root((key.unit, key.phase, name))
            if other != root:
                first = self.first.pop(other, None) or self.first[root]
                self.first.pop(root, None)
                self.parent[root] = other
                root = other
                self.first[root] = first

    def key(self, key: OperationKey) -> OperationKey:
        return self.first[self._root(key)]

    def _root(self, one: Hashable) -> Hashable:
        self.parent.setdefault(one, one)
        while self.parent[one] != one:
            one = self.parent[one]
        return one


Cause = Literal[
    "kernel slower than its roofline", "contention", "collective slower than alpha-beta", "less hidden than planned",
    "waiting for a late peer", "waiting for another stage", "host gap", "faster than planned", "as planned",
]  # fmt: skip
TOLERANCE = 0.1  # of what was expected: what is as close as that is as planned
LEAST_CORE_SHARE = (
    0.8  # of the time of kernels that a thread has a core: below that cores are shared, and gaps are waits for one
)
CONTENTION_SLOWDOWN = 1.25  # times as long beside traffic as alone: contention
PIPELINE = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """Something of a step that takes `measured_s` in place of `expected_s`, `count` times on a rank. `where`: the unit and
    phase of a kernel, otherwise the axis."""

    kind: Literal["kernel", "exposed", "late", "gap"]
    name: str
    where: str
    count: float
    expected_s: float
    measured_s: float
    cause: Cause
    why: str

    @property
    def difference_s(self) -> float:
        return self.measured_s - self.expected_s


def compare_step(step: TracedStep, planned: SimulatedStep) -> tuple[StepDifference, ...]:
    """All of them, the largest first."""
    spent = [measure_occupancy(rank) for rank in step.ranks]
    found = [
        *_kernel_differences(step, planned),
        *_traffic_differences(step, planned, spent),
        *_gap_differences(step, spent),
    ]
    return tuple(sorted(found, key=lambda one: -abs(one.difference_s)))


def _mean(values: Iterable[float], number: int) -> float:
    return sum(values) / number


def _kernel_differences(step: TracedStep, planned: SimulatedStep) -> Iterator[StepDifference]:
    every: dict[OperationKey, list[TracedOperation]] = {}
    for rank in step.ranks:
        for key, operation in match_operations(rank, planned).items():
            every.setdefault(key, []).append(operation)
    number = len(step.ranks)
    for key, alike in every.items():
        whole = TracedOperation(
            key, sum(one.expected_s for one in alike), [span for one in alike for span in one.spans]
        )
        cause, why = _explain_kernel(whole)
        yield StepDifference(
            kind="kernel", name=key.name, where=" ".join(filter(None, (key.unit, key.phase))), count=len(whole.spans) / number,
            expected_s=whole.expected_s / number, measured_s=whole.measured_s / number, cause=cause, why=why,
        )  # fmt: skip


def _explain_kernel(one: TracedOperation) -> tuple[Cause, str]:
    """Why a kernel takes another time than planned: contention, where it is at least half of the difference."""
    excess, on_core, beside = one.measured_s - one.expected_s, one.core_share, one.slowdown_beside_traffic()
    if abs(excess) <= TOLERANCE * one.expected_s:
        return "as planned", ""
    if excess < 0:
        return (
            "faster than planned",
            f"{one.expected_s / one.measured_s:.2g} times as fast" if one.measured_s else "not there",
        )
    if on_core is not None and one.measured_s * (1.0 - on_core) >= excess / 2:
        return "contention", f"its thread had a core for {format_percent(on_core)} of the time"
    if beside is not None and beside >= CONTENTION_SLOWDOWN:
        return "contention", f"{beside:.2f} times as long while traffic is on its way"
    if not one.expected_s:
        return "kernel slower than its roofline", "the plan has no seconds for it"
    core = "" if on_core is None else f", with a core for {format_percent(on_core)} of the time"
    return "kernel slower than its roofline", f"{one.measured_s / one.expected_s:.3g} times as long{core}"


def _traffic_differences(step: TracedStep, planned: SimulatedStep, spent: list[Occupancy]) -> Iterator[StepDifference]:
    stages = [planned.ranks[rank.trace.coordinate.get(PIPELINE, 0)] for rank in step.ranks]
    late, number, met = _late_by_axis(step), len(step.ranks), list(match_collectives(step).values())
    axes = dict.fromkeys(
        [axis for one in spent for axis in one.exposed] + [axis for one in stages for axis in one.exposed]
    )
    if any(stage.bubble_s for stage in stages):
        axes.setdefault(PIPELINE)
    for axis in axes:
        expected = _mean((one.exposed.get(axis, 0.0) for one in stages), number)
        waited = _mean((one.exposed.get(axis, 0.0) for one in spent), number)
        if axis == PIPELINE:
            yield _pipeline_difference(expected + _mean((one.bubble_s for one in stages), number), waited)
            continue
        kept = late.get(axis, 0.0) / number
        own = [one for one in met if one.axis == axis]
        moving = sum(one.traffic_s * len(one.spans) for one in own) / number
        cause, why = explain_traffic(expected, waited - kept, _transfers_s(step, planned, axis), moving)
        yield StepDifference(
            kind="exposed", name=f"exposed {axis}", where=axis, count=sum(len(one.spans) for one in own) / number,
            expected_s=expected, measured_s=waited - kept, cause=cause, why=why,
        )  # fmt: skip
        if kept:
            yield _late_difference(axis, kept, own, measure_lateness(step))


def _pipeline_difference(expected_s: float, waited_s: float) -> StepDifference:
    """Waits for another stage: what is planned as the bubble, and as messages."""
    slower = waited_s > (1 + TOLERANCE) * expected_s
    return StepDifference(
        kind="exposed", name="bubble and messages", where=PIPELINE, count=1, expected_s=expected_s, measured_s=waited_s,
        cause="waiting for another stage" if slower else "as planned",
        why="stages that take longer than planned, or unlike times, keep the others" if slower else "",
    )  # fmt: skip


def _transfers_s(step: TracedStep, planned: SimulatedStep, axis: str) -> float:
    """Planned seconds of an axis' transfers, the mean of the ranks."""
    found = 0.0
    for rank in step.ranks:
        stage = rank.trace.coordinate.get(PIPELINE, 0)
        for played in (*planned.slot_timelines[stage], planned.updates[stage]):
            moved = (one.what for one in played.events if isinstance(one.what, Transfer))
            found += sum(one.seconds for one in moved if one.axis == axis)
    return found / len(step.ranks)


def explain_traffic(expected_s: float, exposed_s: float, planned_s: float, moving_s: float) -> tuple[Cause, str]:
    """Why traffic is exposed for another time than planned."""
    moved = f"on its way for {format_seconds(moving_s)} once all ranks had come, {format_seconds(planned_s)} planned"
    if abs(exposed_s - expected_s) <= TOLERANCE * expected_s:
        return "as planned", ""
    if exposed_s < expected_s:
        return "faster than planned", moved
    slower = moving_s > (1 + TOLERANCE) * planned_s
    return "collective slower than alpha-beta" if slower else "less hidden than planned", moved


def _late_by_axis(step: TracedStep) -> dict[str, float]:
    """Seconds in which ranks waited for one that had not come, of all ranks together."""
    found: dict[str, float] = {}
    for waits in waits_for_late_ranks(step).values():
        for span, _, seconds in waits:
            found[event_axis(span.event)] = found.get(event_axis(span.event), 0.0) + seconds
    return found


def _late_difference(
    axis: str, kept_s: float, met: list[CollectiveArrivals], late: tuple[RankLateness, ...]
) -> StepDifference:
    last = max(late, key=lambda one: one.by_axis.get(axis, 0.0))
    times = sum(one.last_rank == last.rank for one in met)
    return StepDifference(
        kind="late", name=f"waiting over {axis} for a rank to come", where=axis, count=len(met), expected_s=0.0,
        measured_s=kept_s, cause="waiting for a late peer", why=f"rank {last.rank} came last to {times} of {len(met)}",
    )  # fmt: skip


def _gap_differences(step: TracedStep, spent: list[Occupancy]) -> Iterator[StepDifference]:
    """Time in which the compute stream did nothing; the plan has launches in the seconds of kernels."""
    number = len(step.ranks)
    lengths = [end - start for rank in step.ranks for start, end in find_gaps(rank)]
    usual = format_seconds(median(lengths)) if lengths else "0 s"
    cause, more = _explain_gaps([one for one in map(rank_core_share, step.ranks) if one is not None])
    for name, where, seconds, why in (
        (
            "gaps between kernels",
            "passes",
            [one.gaps_s for one in spent],
            f"{len(lengths):,}, {usual} the median{more}",
        ),
        ("outside of passes", "step", [one.between_s for one in spent], f"between passes and around the update{more}"),
    ):
        yield StepDifference(
            kind="gap", name=name, where=where, count=_mean((one.num_gaps for one in spent), number), expected_s=0.0,
            measured_s=_mean(seconds, number), cause=cause, why=why,
        )  # fmt: skip


def _explain_gaps(on_core: list[float]) -> tuple[Cause, str]:
    """Why there are gaps: threads that have no core for their kernels have none between them either."""
    if on_core and min(on_core) < LEAST_CORE_SHARE:
        return "contention", f"; a thread had a core for {format_percent(min(on_core))} of the time of its kernels"
    return "host gap", ""
