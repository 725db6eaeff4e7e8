"""Where the time of each rank went: busy, exposed and idle; ranks that came late to collectives; stalls.

On one rank kernels, exposed communication by axis and gaps of the compute stream add up to its step; traffic is hidden as long as
kernels run beside it. A collective cannot move before its last rank has come. A stall is work that took far longer than the same
work on another rank, in another layer, or for another micro-batch.
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
from shardwise.records.step_trace import COLLECTIVE, KERNEL, PASS, WAIT
from shardwise.sharding.spec import Axes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOverlap:
    """Traffic of an axis: the seconds in which any was on its way, and those of them in which kernels ran beside it."""

    axis: str
    traffic_s: float
    hidden_s: float

    @property
    def share(self) -> float:
        """The part that is hidden."""
        return self.hidden_s / self.traffic_s if self.traffic_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
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
    def busy_s(self) -> float:
        return sum(self.busy.values())

    @property
    def exposed_s(self) -> float:
        return sum(self.exposed.values())

    @property
    def idle_s(self) -> float:
        """In which no kernel ran."""
        return self.step_s - self.busy_s


def measure_occupancy(rank: TracedRank) -> Occupancy:
    """Where a rank's step went."""
    busy: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for span in rank.spans_of_kind(KERNEL):
        busy[span.event.phase] = busy.get(span.event.phase, 0.0) + span.seconds
    for span in rank.spans_of_kind(WAIT):
        axis = event_axis(span.event)
        exposed[axis] = exposed.get(axis, 0.0) + span.seconds
    passes = union((span.start, span.end) for span in rank.spans_of_kind(PASS))
    idle = find_gaps(rank)
    within = intersection(idle, passes)
    gaps_s = total_length(within)
    return Occupancy(
        rank=rank.trace.rank, step_s=rank.seconds, busy=busy, exposed=exposed, gaps_s=gaps_s, num_gaps=len(within),
        between_s=total_length(idle) - gaps_s, overlaps=tuple(measure_overlaps(rank)),
    )  # fmt: skip


def measure_overlaps(rank: TracedRank) -> Iterable[TrafficOverlap]:
    """The traffic of each axis, and what of it is hidden."""
    computed = union((span.start, span.end) for span in rank.spans_of_kind(KERNEL))
    moving: dict[str, list[Interval]] = {}
    for span in rank.spans_of_kind(COLLECTIVE):
        moving.setdefault(span.event.stream, []).append((span.start, span.end))
    for axis, intervals in moving.items():
        traffic = union(intervals)
        yield TrafficOverlap(
            axis=axis, traffic_s=total_length(traffic), hidden_s=total_length(intersection(traffic, computed))
        )


def find_gaps(rank: TracedRank) -> list[Interval]:
    """When the compute stream of a rank had nothing to do, and waited for nothing."""
    found, now = [], rank.begin
    for start, end in union((span.start, span.end) for span in rank.compute_spans):
        if start > now:
            found.append((now, start))
        now = max(now, end)
    return [*found, (now, rank.end)] if rank.end > now else found


CollectiveKey = tuple[Axes, tuple[int, ...], int]  # the axes, the ranks of the group, and the number of those before it


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveArrivals:
    """A collective of a group: each rank's part of it, from when the rank came until it was done there."""

    name: str
    axis: str
    spans: Mapping[int, TraceSpan]

    @property
    def last_rank(self) -> int:
        """The rank that came last."""
        return max(self.spans, key=lambda rank: self.spans[rank].start)

    @property
    def all_arrived(self) -> float:
        """When all had come."""
        return self.spans[self.last_rank].start

    @property
    def skew_s(self) -> float:
        """Between the first rank and the last."""
        return self.all_arrived - min(span.start for span in self.spans.values())

    @property
    def traffic_s(self) -> float:
        """From when all had come until all were done."""
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
    """The collectives of a step with the ranks that met there; those of a single traced rank are none."""
    found: dict[CollectiveKey, dict[int, TraceSpan]] = {}
    for rank in step.ranks:
        for span in list_collectives(rank):
            found.setdefault(_collective_key(step, rank, span), {})[rank.trace.rank] = span
    return {
        meet: CollectiveArrivals(
            name=next(iter(spans.values())).event.name, axis=event_axis(next(iter(spans.values())).event), spans=spans
        )
        for meet, spans in found.items()
        if len(spans) > 1
    }  # fmt: skip


def _collective_key(step: TracedStep, rank: TracedRank, span: TraceSpan) -> CollectiveKey:
    axes = span.event.axes
    return axes, step.group_ranks(rank.trace, axes), span.event.number


def waits_for_late_ranks(step: TracedStep) -> dict[int, list[tuple[TraceSpan, int, float]]]:
    """Of each rank its waits, each with the rank that came last to what it waited for, and the seconds until that had come."""
    met, found = match_collectives(step), dict[int, list[tuple[TraceSpan, int, float]]]()
    for rank in step.ranks:
        waits = found.setdefault(rank.trace.rank, [])
        for span in rank.spans_of_kind(WAIT):
            meeting = None if is_message(span.event) else met.get(_collective_key(step, rank, span))
            if meeting is None or meeting.last_rank == rank.trace.rank:
                waits.append((span, rank.trace.rank, 0.0))
            else:
                here = max(span.start, meeting.spans[rank.trace.rank].start)
                waits.append((span, meeting.last_rank, max(min(span.end, meeting.all_arrived) - here, 0.0)))
    return found


def measure_lateness(step: TracedStep) -> tuple[RankLateness, ...]:
    """Every rank among the others."""
    met, last = Counter[int](), Counter[int]()
    for meeting in match_collectives(step).values():
        met.update(meeting.spans.keys())
        last[meeting.last_rank] += 1
    kept: dict[int, dict[int, dict[str, float]]] = {}
    times = Counter[int]()
    for rank, waits in waits_for_late_ranks(step).items():
        for span, late, seconds in waits:
            times[late] += seconds > step.error_s
            if seconds:
                axes = kept.setdefault(late, {}).setdefault(rank, {})
                axes[event_axis(span.event)] = axes.get(event_axis(span.event), 0.0) + seconds
    found = []
    for rank in (one.trace.rank for one in step.ranks):
        longest = max(kept.get(rank, {}).values(), key=lambda axes: sum(axes.values()), default={})
        found.append(
            RankLateness(
                rank=rank, num_met=met[rank], num_last=last[rank], num_kept=times[rank], kept_s=sum(longest.values()),
                by_axis=longest,
            )
        )  # fmt: skip
    return tuple(found)


# What is taken for a stall: a part of the step, and so many times as long as is usual. Below either it is noise: on two shared
# cores the longest of some hundred kernels is often three times their median (measured, 2026-11).
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
        """In words."""
        what = f"the host in front of {self.name}" if self.in_gap else self.name
        place = " ".join(filter(None, (self.path, self.phase)))
        return f"{what} ({place}{f', pass {self.action}' if self.action else ''})"


def find_stalls(step: TracedStep) -> tuple[Stall, ...]:
    """All of a step, the longest first."""
    seen: dict[tuple[str, ...], list[Stall]] = {}
    for rank in step.ranks:
        for key, one in _work_by_kind(rank):
            seen.setdefault(key, []).append(one)
    found = []
    for alike in seen.values():
        usual = median_low(one.seconds for one in alike)
        found += [_with_usual(one, usual) for one in alike if _is_stall(one.seconds, usual, step.seconds)]
    return tuple(sorted(found, key=lambda one: -one.excess_s))


def _is_stall(seconds: float, usual_s: float, step_s: float) -> bool:
    return seconds - usual_s >= LEAST_SHARE * step_s and seconds >= LEAST_FACTOR * usual_s


def _with_usual(one: Stall, usual_s: float) -> Stall:
    return replace(one, usual_s=usual_s)


def _work_by_kind(rank: TracedRank) -> Iterator[tuple[tuple[str, ...], Stall]]:
    """Each kernel and each gap in front of one, with what is alike."""
    end = rank.begin
    for place, span in enumerate(rank.compute_spans):
        if span.event.kind == KERNEL:
            kind = (span.event.unit, span.event.phase, span.event.name)
            yield ("kernel", *kind), _build_stall(rank, span, span.start, span.seconds, in_gap=False)
            if place:
                yield ("gap", *kind), _build_stall(rank, span, end, max(span.start - end, 0.0), in_gap=True)
        end = max(end, span.end)


def _build_stall(rank: TracedRank, span: TraceSpan, start: float, seconds: float, *, in_gap: bool) -> Stall:
    event = span.event
    return Stall(
        rank=rank.trace.rank, in_gap=in_gap, name=event.name, path=event.path, phase=event.phase, action=event.action,
        start_s=start, seconds=seconds, usual_s=0.0,
    )  # fmt: skip
