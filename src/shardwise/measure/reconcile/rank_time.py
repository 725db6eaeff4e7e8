"""Time of each rank: busy, exposed and idle; ranks that come late to collectives; stalls.

On a rank, kernels, exposed communication by axis and gaps of the compute stream add up to its step; traffic is hidden
while kernels run. A collective cannot move data before its last rank has arrived. A stall is work that took far longer
than the same work on another rank, in another layer, or for another micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median_low

from shardwise.measure.reconcile.aligned_traces import (
    Interval,
    TracedRank,
    TracedStep,
    TraceSpan,
    event_axis,
    intersection,
    is_message,
    list_collectives,
    total_length,
    union,
)
from shardwise.records import COLLECTIVE, KERNEL, WAIT
from shardwise.records.step_inspection import PASS
from shardwise.sharding import Axes
from shardwise.values import Payload, printed


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOverlap(Payload):
    """Traffic of an axis: the seconds in which any was on its way, and those of them in which kernels ran beside it."""

    axis: str
    traffic_s: float
    hidden_s: float

    @property
    @printed
    def share(self) -> float:
        """Share of the traffic that is hidden."""
        return self.hidden_s / self.traffic_s if self.traffic_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy(Payload):
    """Seconds of a rank's step: `busy_s` with kernels, by phase in `busy`; `exposed` by axis, what the compute stream waited for;
    `gaps_s` between kernels of a pass (launch gaps, `num_gaps` of them), `between_s` outside of passes."""

    rank: int
    step_s: float
    busy: Mapping[str, float]
    exposed: Mapping[str, float]
    gaps_s: float
    num_gaps: int
    between_s: float
    overlaps: tuple[TrafficOverlap, ...]

    @property
    @printed
    def busy_s(self) -> float:
        return sum(self.busy.values())

    @property
    @printed
    def exposed_s(self) -> float:
        return sum(self.exposed.values())

    @property
    @printed
    def idle_s(self) -> float:
        """Seconds without a kernel."""
        return self.step_s - self.busy_s


def measure_occupancy(rank: TracedRank) -> Occupancy:
    """Return where the time of a rank's step went."""
    busy: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for span in rank.spans_of_kind(KERNEL):
        busy[span.event.phase] = busy.get(span.event.phase, 0.0) + span.seconds
    for span in rank.spans_of_kind(WAIT):
        axis = event_axis(span.event)
        exposed[axis] = exposed.get(axis, 0.0) + span.seconds
    passes = union((span.start, span.end) for span in rank.spans_of_kind(PASS))
    idle = find_gaps(rank)
    pass_gaps = intersection(idle, passes)
    gaps_s = total_length(pass_gaps)
    return Occupancy(
        rank=rank.trace.rank, step_s=rank.seconds, busy=busy, exposed=exposed, gaps_s=gaps_s, num_gaps=len(pass_gaps),
        between_s=total_length(idle) - gaps_s, overlaps=tuple(measure_overlaps(rank)),
    )  # fmt: skip


def measure_overlaps(rank: TracedRank) -> Iterable[TrafficOverlap]:
    """Yield the traffic of each axis, with its hidden part."""
    computing = union((span.start, span.end) for span in rank.spans_of_kind(KERNEL))
    intervals_by_axis: dict[str, list[Interval]] = {}
    for span in rank.spans_of_kind(COLLECTIVE):
        intervals_by_axis.setdefault(span.event.stream, []).append((span.start, span.end))
    for axis, intervals in intervals_by_axis.items():
        traffic = union(intervals)
        yield TrafficOverlap(
            axis=axis, traffic_s=total_length(traffic), hidden_s=total_length(intersection(traffic, computing))
        )


def find_gaps(rank: TracedRank) -> list[Interval]:
    """Return the intervals in which a rank's compute stream ran no kernel and waited for no communication."""
    gaps, busy_until = [], rank.begin
    for start, end in union((span.start, span.end) for span in rank.compute_spans):
        if start > busy_until:
            gaps.append((busy_until, start))
        busy_until = max(busy_until, end)
    return [*gaps, (busy_until, rank.end)] if rank.end > busy_until else gaps


CollectiveKey = tuple[Axes, tuple[int, ...], int]  # axes, ranks of the group, and index among the group's collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveArrivals:
    """A collective of a group: each rank's span, from its arrival until its part is done."""

    name: str
    axis: str
    spans: Mapping[int, TraceSpan]

    @property
    def last_rank(self) -> int:
        """Rank that arrived last."""
        return max(self.spans, key=lambda rank: self.spans[rank].start)

    @property
    def all_arrived(self) -> float:
        """Time at which the last rank arrived."""
        return self.spans[self.last_rank].start

    @property
    def traffic_s(self) -> float:
        """Seconds from the last arrival until all ranks are done."""
        return max(max(span.end for span in self.spans.values()) - self.all_arrived, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLateness:
    """A rank among the others: it came last to `num_last` of `num_met` collectives; at `num_kept` of them others waited for it to
    come, for longer than clocks may be off. `kept_s`: seconds of the rank that waited longest for it, by axis in `by_axis`."""

    rank: int
    num_met: int
    num_last: int
    num_kept: int
    kept_s: float
    by_axis: Mapping[str, float]


def match_collectives(step: TracedStep) -> dict[CollectiveKey, CollectiveArrivals]:
    """Match the collectives of a step across ranks; those with a single traced rank are left out."""
    spans_by_key: dict[CollectiveKey, dict[int, TraceSpan]] = {}
    for rank in step.ranks:
        for span in list_collectives(rank):
            spans_by_key.setdefault(_collective_key(step, rank, span), {})[rank.trace.rank] = span
    return {
        key: CollectiveArrivals(
            name=next(iter(spans.values())).event.name, axis=event_axis(next(iter(spans.values())).event), spans=spans
        )
        for key, spans in spans_by_key.items()
        if len(spans) > 1
    }  # fmt: skip


def _collective_key(step: TracedStep, rank: TracedRank, span: TraceSpan) -> CollectiveKey:
    axes = span.event.axes
    return axes, step.group_ranks(rank.trace, axes), span.event.number


def waits_by_last_arrival(step: TracedStep) -> dict[int, list[tuple[TraceSpan, int, float]]]:
    """Return for each rank its waits, each with the last rank to arrive and the seconds until then."""
    arrivals_by_key, waits_by_rank = match_collectives(step), dict[int, list[tuple[TraceSpan, int, float]]]()
    for rank in step.ranks:
        waits = waits_by_rank.setdefault(rank.trace.rank, [])
        for span in rank.spans_of_kind(WAIT):
            arrivals = None if is_message(span.event) else arrivals_by_key.get(_collective_key(step, rank, span))
            # Messages between stages have no group, so no rank is late to them.
            if arrivals is None or arrivals.last_rank == rank.trace.rank:
                waits.append((span, rank.trace.rank, 0.0))
            else:
                # Only the part of the wait before the last arrival is due to it; the rest is the traffic itself.
                wait_start = max(span.start, arrivals.spans[rank.trace.rank].start)
                waits.append((span, arrivals.last_rank, max(min(span.end, arrivals.all_arrived) - wait_start, 0.0)))
    return waits_by_rank


def measure_lateness(step: TracedStep) -> tuple[RankLateness, ...]:
    """Return the lateness of every rank."""
    num_met, num_last = Counter[int](), Counter[int]()
    for arrivals in match_collectives(step).values():
        num_met.update(arrivals.spans.keys())
        num_last[arrivals.last_rank] += 1
    waited_s: dict[int, dict[int, dict[str, float]]] = {}
    num_kept = Counter[int]()
    for rank, waits in waits_by_last_arrival(step).items():
        for span, late_rank, seconds in waits:
            num_kept[late_rank] += seconds > step.error_s
            if seconds:
                axis_s = waited_s.setdefault(late_rank, {}).setdefault(rank, {})
                axis_s[event_axis(span.event)] = axis_s.get(event_axis(span.event), 0.0) + seconds
    lateness = []
    for rank in (traced_rank.trace.rank for traced_rank in step.ranks):
        longest = max(waited_s.get(rank, {}).values(), key=lambda axis_s: sum(axis_s.values()), default={})
        lateness.append(
            RankLateness(
                rank=rank, num_met=num_met[rank], num_last=num_last[rank], num_kept=num_kept[rank],
                kept_s=sum(longest.values()), by_axis=longest,
            )
        )  # fmt: skip
    return tuple(lateness)


# A stall takes this share of the step, and this many times as long as usual. Below either it is noise: on two shared cores
# the longest of some hundred kernels is often three times their median (measured, 2026-11).
LEAST_SHARE, LEAST_FACTOR = 0.02, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A kernel of a rank, or the gap in front of it, that took `seconds` where `usual_s` are usual."""

    rank: int
    in_gap: bool
    name: str
    path: str
    phase: str
    action: str
    start_s: float
    seconds: float
    usual_s: float

    @property
    def excess_s(self) -> float:
        return self.seconds - self.usual_s

    @property
    def where(self) -> str:
        """Text of the work and its place in the model."""
        work = f"the host in front of {self.name}" if self.in_gap else self.name
        unit_text = " ".join(filter(None, (self.path, self.phase)))
        return f"{work} ({unit_text}{f', pass {self.action}' if self.action else ''})"


def find_stalls(step: TracedStep) -> tuple[Stall, ...]:
    """Return all stalls of a step, the longest first."""
    work_by_key: dict[tuple[str, ...], list[Stall]] = {}
    for rank in step.ranks:
        for key, stall in _work_by_kind(rank):
            work_by_key.setdefault(key, []).append(stall)
    stalls = []
    for same_work in work_by_key.values():
        usual_s = median_low(stall.seconds for stall in same_work)
        long = (stall for stall in same_work if _is_stall(stall.seconds, usual_s, step.seconds))
        stalls += [replace(stall, usual_s=usual_s) for stall in long]
    return tuple(sorted(stalls, key=lambda stall: -stall.excess_s))


def _is_stall(seconds: float, usual_s: float, step_s: float) -> bool:
    return seconds - usual_s >= LEAST_SHARE * step_s and seconds >= LEAST_FACTOR * usual_s


def _work_by_kind(rank: TracedRank) -> Iterator[tuple[tuple[str, ...], Stall]]:
    """Yield each kernel, and each gap before one, with a key that the same work shares."""
    previous_end = rank.begin
    for index, span in enumerate(rank.compute_spans):
        if span.event.kind == KERNEL:
            kind = (span.event.unit, span.event.phase, span.event.name)
            yield ("kernel", *kind), _build_stall(rank, span, span.start, span.seconds, in_gap=False)
            if index:
                yield (
                    ("gap", *kind),
                    _build_stall(rank, span, previous_end, max(span.start - previous_end, 0.0), in_gap=True),
                )
        previous_end = max(previous_end, span.end)


def _build_stall(rank: TracedRank, span: TraceSpan, start: float, seconds: float, *, in_gap: bool) -> Stall:
    event = span.event
    return Stall(
        rank=rank.trace.rank, in_gap=in_gap, name=event.name, path=event.path, phase=event.phase, action=event.action,
        start_s=start, seconds=seconds, usual_s=0.0,
    )  # fmt: skip
