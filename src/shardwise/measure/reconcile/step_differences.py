"""Differences of a measured step from the planned one, operation by operation, with their causes.

Differences are means over ranks. On each rank kernels, exposed communication and gaps add up to its step, as kernels,
exposed communication and the bubble add up to the planned step, so the differences add up to that of the steps. A call
of the engine may compute what several kernels of the plan do, or the reverse: kernels that share a result are one
operation, named after the first kernel of the plan among them.
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
    waits_by_last_arrival,
)
from shardwise.price import SimulatedStep, TimedKernel
from shardwise.price.simulation.streams import Transfer
from shardwise.records import KERNEL
from shardwise.step import START, UPDATE
from shardwise.step.instructions import WAIT
from shardwise.values import Payload, format_percent, format_seconds, printed

COPIES_AROUND_COLLECTIVES = "copies around collectives"  # kernels that run when collectives are started or awaited


class OperationKey(NamedTuple):
    """An operation: kind of unit, phase, and name."""

    unit: str
    phase: str
    name: str


@dataclass(slots=True)
class TracedOperation:
    """An operation of a step: `expected_s` as planned, and its measured kernels with their ranks."""

    key: OperationKey
    expected_s: float = 0.0
    spans: list[tuple[TracedRank, TraceSpan]] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        return sum(span.seconds for _, span in self.spans)

    @property
    def core_share(self) -> float | None:
        """Share of the time in which the thread had a core; None if it is not known, as on a GPU."""
        cpu_s = sum(span.event.cpu_ns for _, span in self.spans) / 1e9
        return cpu_s / self.measured_s if cpu_s and self.measured_s else None

    def slowdown_beside_traffic(self) -> float | None:
        """Return the mean time with concurrent traffic over that without; None with fewer than two kernels of either."""
        overlapped: list[float] = []
        alone: list[float] = []
        for rank, span in self.spans:
            (overlapped if rank.traffic_s(span.start, span.end) > span.seconds / 2 else alone).append(span.seconds)
        if min(len(overlapped), len(alone)) < 2 or not sum(alone):
            return None
        return (sum(overlapped) / len(overlapped)) / (sum(alone) / len(alone))


def rank_core_share(rank: TracedRank) -> float | None:
    """Return the share of its kernels' time in which a rank's thread had a core; None if it is not known."""
    operation = TracedOperation(OperationKey("", "", ""))
    operation.spans = [(rank, span) for span in rank.spans_of_kind(KERNEL)]
    return operation.core_share


def match_operations(rank: TracedRank, planned: SimulatedStep) -> dict[OperationKey, TracedOperation]:
    """Return the kernels of a rank's step and of its planned stage, by operation."""
    expected = list(_planned_kernels(planned, rank.trace.coordinate.get("pp", 0)))
    measured = list(rank.spans_of_kind(KERNEL))
    groups = _UnionFind()
    for kernel in expected:
        groups.join(OperationKey(kernel.unit, kernel.phase, kernel.name), kernel.results)
    for span in measured:
        groups.join(_operation_key(span), span.event.results)
    operations: dict[OperationKey, TracedOperation] = {}
    for kernel in expected:
        key = groups.key(OperationKey(kernel.unit, kernel.phase, kernel.name))
        operations.setdefault(key, TracedOperation(key)).expected_s += kernel.seconds
    for span in measured:
        key = groups.key(_operation_key(span))
        operations.setdefault(key, TracedOperation(key)).spans.append((rank, span))
    return operations


def _planned_kernels(planned: SimulatedStep, stage: int) -> Iterator[TimedKernel]:
    """Yield the kernels of a stage; those of the update as one."""
    timelines = [*planned.slot_timelines[stage], planned.updates[stage]]
    kernels = (event.work for timeline in timelines for event in timeline.events if isinstance(event.work, TimedKernel))
    for kernel in kernels:
        is_update = kernel.phase == UPDATE
        yield TimedKernel(seconds=kernel.seconds, unit="", phase=UPDATE, name=UPDATE) if is_update else kernel


def _operation_key(span: TraceSpan) -> OperationKey:
    event = span.event
    if event.phase == UPDATE:
        return OperationKey("", UPDATE, UPDATE)
    if event.name.startswith((f"{START} ", f"{WAIT} ")):
        return OperationKey(event.unit, event.phase, COPIES_AROUND_COLLECTIVES)
    return OperationKey(event.unit, event.phase, event.name)


class _UnionFind:
    """Keys of operations with the results that they compute; keys that share a result become one."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}
        self.first: dict[Hashable, OperationKey] = {}

    def join(self, key: OperationKey, results: Iterable[str]) -> None:
        root = self._root(key)
        self.first.setdefault(root, key)
        for name in results:
            name_root = self._root((key.unit, key.phase, name))
            if name_root != root:
                # The name of the group that exists wins: the plan's kernels join before those of the trace.
                first = self.first.pop(name_root, None) or self.first[root]
                self.first.pop(root, None)
                self.parent[root] = name_root
                root = name_root
                self.first[root] = first

    def key(self, key: OperationKey) -> OperationKey:
        return self.first[self._root(key)]

    def _root(self, node: Hashable) -> Hashable:
        self.parent.setdefault(node, node)
        while self.parent[node] != node:
            node = self.parent[node]
        return node


Cause = Literal[
    "kernel slower than its roofline", "contention", "collective slower than alpha-beta", "less hidden than planned",
    "waiting for a late peer", "waiting for another stage", "host gap", "faster than planned", "as planned",
]  # fmt: skip
TOLERANCE = 0.1  # of the expected seconds: closer counts as planned
# Share of its kernels' time in which a thread has a core. Below it cores are shared, and gaps are waits for a core.
LEAST_CORE_SHARE = 0.8
CONTENTION_SLOWDOWN = 1.25  # of kernels while traffic moves: from here on it is contention
PIPELINE = "pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference(Payload):
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
    @printed
    def difference_s(self) -> float:
        return self.measured_s - self.expected_s


def compare_step(step: TracedStep, planned: SimulatedStep) -> tuple[StepDifference, ...]:
    """Return all differences, the largest first."""
    occupancies = [measure_occupancy(rank) for rank in step.ranks]
    differences = [
        *_kernel_differences(step, planned),
        *_traffic_differences(step, planned, occupancies),
        *_gap_differences(step, occupancies),
    ]
    return tuple(sorted(differences, key=lambda difference: -abs(difference.difference_s)))


def _mean(values: Iterable[float], count: int) -> float:
    return sum(values) / count


def _kernel_differences(step: TracedStep, planned: SimulatedStep) -> Iterator[StepDifference]:
    operations_by_key: dict[OperationKey, list[TracedOperation]] = {}
    for rank in step.ranks:
        for key, operation in match_operations(rank, planned).items():
            operations_by_key.setdefault(key, []).append(operation)
    num_ranks = len(step.ranks)
    for key, rank_operations in operations_by_key.items():
        total = TracedOperation(
            key,
            sum(rank_operation.expected_s for rank_operation in rank_operations),
            [span for rank_operation in rank_operations for span in rank_operation.spans],
        )
        cause, why = _explain_kernel(total)
        yield StepDifference(
            kind="kernel", name=key.name, where=" ".join(filter(None, (key.unit, key.phase))),
            count=len(total.spans) / num_ranks, expected_s=total.expected_s / num_ranks,
            measured_s=total.measured_s / num_ranks, cause=cause, why=why,
        )  # fmt: skip


def _explain_kernel(operation: TracedOperation) -> tuple[Cause, str]:
    """Return why a kernel's time differs from the plan; contention, if it is at least half of the difference."""
    expected_s, measured_s = operation.expected_s, operation.measured_s
    excess_s, core_share, slowdown = measured_s - expected_s, operation.core_share, operation.slowdown_beside_traffic()
    if abs(excess_s) <= TOLERANCE * expected_s:
        return "as planned", ""
    if excess_s < 0:
        return "faster than planned", f"{expected_s / measured_s:.2g} times as fast" if measured_s else "not there"
    if core_share is not None and measured_s * (1.0 - core_share) >= excess_s / 2:
        return "contention", f"its thread had a core for {format_percent(core_share)} of the time"
    if slowdown is not None and slowdown >= CONTENTION_SLOWDOWN:
        return "contention", f"{slowdown:.2f} times as long while traffic is on its way"
    if not expected_s:
        return "kernel slower than its roofline", "the plan has no seconds for it"
    core_text = "" if core_share is None else f", with a core for {format_percent(core_share)} of the time"
    return "kernel slower than its roofline", f"{measured_s / expected_s:.3g} times as long{core_text}"


def _traffic_differences(
    step: TracedStep, planned: SimulatedStep, occupancies: list[Occupancy]
) -> Iterator[StepDifference]:
    stages = [planned.ranks[rank.trace.coordinate.get(PIPELINE, 0)] for rank in step.ranks]
    late_s, num_ranks, arrivals = _late_by_axis(step), len(step.ranks), list(match_collectives(step).values())
    axes = dict.fromkeys(
        [axis for occupancy in occupancies for axis in occupancy.exposed]
        + [axis for stage in stages for axis in stage.exposed]
    )
    if any(stage.bubble_s for stage in stages):
        axes.setdefault(PIPELINE)
    for axis in axes:
        expected_s = _mean((stage.exposed.get(axis, 0.0) for stage in stages), num_ranks)
        waited_s = _mean((occupancy.exposed.get(axis, 0.0) for occupancy in occupancies), num_ranks)
        if axis == PIPELINE:
            yield _pipeline_difference(expected_s + _mean((stage.bubble_s for stage in stages), num_ranks), waited_s)
            continue
        axis_late_s = late_s.get(axis, 0.0) / num_ranks
        axis_collectives = [collective for collective in arrivals if collective.axis == axis]
        traffic_s = sum(collective.traffic_s * len(collective.spans) for collective in axis_collectives) / num_ranks
        cause, why = explain_traffic(expected_s, waited_s - axis_late_s, _transfers_s(step, planned, axis), traffic_s)
        yield StepDifference(
            kind="exposed", name=f"exposed {axis}", where=axis,
            count=sum(len(collective.spans) for collective in axis_collectives) / num_ranks, expected_s=expected_s,
            measured_s=waited_s - axis_late_s, cause=cause, why=why,
        )  # fmt: skip
        if axis_late_s:
            yield _late_difference(axis, axis_late_s, axis_collectives, measure_lateness(step))


def _pipeline_difference(expected_s: float, waited_s: float) -> StepDifference:
    """Return the waits for other stages, which are planned as the bubble and as messages."""
    slower = waited_s > (1 + TOLERANCE) * expected_s
    return StepDifference(
        kind="exposed", name="bubble and messages", where=PIPELINE, count=1, expected_s=expected_s, measured_s=waited_s,
        cause="waiting for another stage" if slower else "as planned",
        why="stages that take longer than planned, or unlike times, keep the others" if slower else "",
    )  # fmt: skip


def _transfers_s(step: TracedStep, planned: SimulatedStep, axis: str) -> float:
    """Return the planned seconds of an axis' transfers, the mean over ranks."""
    total_s = 0.0
    for rank in step.ranks:
        stage = rank.trace.coordinate.get(PIPELINE, 0)
        for timeline in (*planned.slot_timelines[stage], planned.updates[stage]):
            transfers = (simulated.work for simulated in timeline.events if isinstance(simulated.work, Transfer))
            total_s += sum(transfer.seconds for transfer in transfers if transfer.axis == axis)
    return total_s / len(step.ranks)


def explain_traffic(expected_s: float, exposed_s: float, planned_s: float, traffic_s: float) -> tuple[Cause, str]:
    """Return why the exposed time of an axis differs from the plan."""
    traffic_text = (
        f"on its way for {format_seconds(traffic_s)} once all ranks had come, {format_seconds(planned_s)} planned"
    )
    if abs(exposed_s - expected_s) <= TOLERANCE * expected_s:
        return "as planned", ""
    if exposed_s < expected_s:
        return "faster than planned", traffic_text
    slower = traffic_s > (1 + TOLERANCE) * planned_s
    return "collective slower than alpha-beta" if slower else "less hidden than planned", traffic_text


def _late_by_axis(step: TracedStep) -> dict[str, float]:
    """Return the seconds in which ranks waited for a late rank, over all ranks."""
    late_s: dict[str, float] = {}
    for waits in waits_by_last_arrival(step).values():
        for span, _, seconds in waits:
            late_s[event_axis(span.event)] = late_s.get(event_axis(span.event), 0.0) + seconds
    return late_s


def _late_difference(
    axis: str, waited_s: float, collectives: list[CollectiveArrivals], lateness: tuple[RankLateness, ...]
) -> StepDifference:
    latest = max(lateness, key=lambda rank_lateness: rank_lateness.by_axis.get(axis, 0.0))
    num_last = sum(collective.last_rank == latest.rank for collective in collectives)
    return StepDifference(
        kind="late", name=f"waiting over {axis} for a rank to come", where=axis, count=len(collectives), expected_s=0.0,
        measured_s=waited_s, cause="waiting for a late peer",
        why=f"rank {latest.rank} came last to {num_last} of {len(collectives)}",
    )  # fmt: skip


def _gap_differences(step: TracedStep, occupancies: list[Occupancy]) -> Iterator[StepDifference]:
    """Yield the time in which the compute stream did nothing; the plan counts launches as part of kernels."""
    num_ranks = len(step.ranks)
    lengths = [end - start for rank in step.ranks for start, end in find_gaps(rank)]
    median_text = format_seconds(median(lengths)) if lengths else "0 s"
    cause, suffix = _explain_gaps([share for share in map(rank_core_share, step.ranks) if share is not None])
    for name, where, seconds, why in (
        (
            "gaps between kernels",
            "passes",
            [occupancy.gaps_s for occupancy in occupancies],
            f"{len(lengths):,}, {median_text} the median{suffix}",
        ),
        (
            "outside of passes",
            "step",
            [occupancy.between_s for occupancy in occupancies],
            f"between passes and around the update{suffix}",
        ),
    ):
        yield StepDifference(
            kind="gap", name=name, where=where,
            count=_mean((occupancy.num_gaps for occupancy in occupancies), num_ranks), expected_s=0.0,
            measured_s=_mean(seconds, num_ranks), cause=cause, why=why,
        )  # fmt: skip


def _explain_gaps(core_shares: list[float]) -> tuple[Cause, str]:
    """Return why there are gaps: a thread without a core for its kernels has none between them either."""
    if core_shares and min(core_shares) < LEAST_CORE_SHARE:
        return "contention", f"; a thread had a core for {format_percent(min(core_shares))} of the time of its kernels"
    return "host gap", ""
