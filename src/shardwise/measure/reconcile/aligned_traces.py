"""Traces of all ranks of a step, aligned on one clock, and unions of time intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.records import COLLECTIVE, KERNEL, WAIT, RankTrace, RunFolder, TraceEvent
from shardwise.records.step_inspection import list_traced_steps, read_trace, trace_path
from shardwise.step import CONTROL, charged_axis
from shardwise.values import InputError

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return the intersection of two unions.

    >>> intersection([(0, 4)], [(1, 2), (3, 6)])
    [(1, 2), (3, 4)]
    """
    common, left, right = [], list(first), list(second)
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def total_length(intervals: Iterable[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


MESSAGES = ("send", "receive")  # between two stages: no rank of a group waits for all of the others


class TraceSpan(NamedTuple):
    """An event, in seconds from the begin of the step on the first rank that began."""

    event: TraceEvent
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class TracedRank:
    """A rank's step; `begin` and `end` in seconds on the common clock."""

    trace: RankTrace
    begin: float

    @property
    def end(self) -> float:
        return self.begin + self.trace.step_ns / 1e9

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.trace.step_ns / 1e9

    @cached_property
    def spans(self) -> tuple[TraceSpan, ...]:
        """Events in the order in which they began."""
        return tuple(
            TraceSpan(event, self.begin + event.start_ns / 1e9, self.begin + event.end_ns / 1e9)
            for event in self.trace.events
        )

    def spans_of_kind(self, *kinds: str) -> Iterator[TraceSpan]:
        """Return the events of some kinds."""
        return (span for span in self.spans if span.event.kind in kinds)

    @cached_property
    def traffic(self) -> tuple[Interval, ...]:
        """Intervals in which any collective moved data."""
        return tuple(union((span.start, span.end) for span in self.spans_of_kind(COLLECTIVE)))

    def traffic_s(self, start: float, end: float) -> float:
        """Return the seconds with traffic between two times."""
        low = bisect_left(self.traffic, start, key=lambda interval: interval[1])
        high = bisect_right(self.traffic, end, key=lambda interval: interval[0])
        return total_length(intersection([(start, end)], self.traffic[low:high]))

    @cached_property
    def compute_spans(self) -> tuple[TraceSpan, ...]:
        """Kernels and waits of the compute stream, in order."""
        return tuple(self.spans_of_kind(KERNEL, WAIT))


@dataclass(frozen=True)
class TracedStep:
    """A step on all ranks that were traced."""

    step: int
    ranks: tuple[TracedRank, ...]

    @property
    def seconds(self) -> float:
        """Seconds from the first rank's begin to the last one's end."""
        return max(rank.end for rank in self.ranks)

    @property
    def error_s(self) -> float:
        """Bound on the difference of two ranks' clocks."""
        return max(rank.trace.error_ns for rank in self.ranks) / 1e9

    def group_ranks(self, rank: RankTrace, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ranks of a rank's group over some axes: those with the same coordinate on all other axes."""
        other_coordinates = {axis: index for axis, index in rank.coordinate.items() if axis not in axes}
        return tuple(
            traced_rank.trace.rank
            for traced_rank in self.ranks
            if all(traced_rank.trace.coordinate[axis] == index for axis, index in other_coordinates.items())
        )


def align_clocks(traces: list[RankTrace]) -> TracedStep:
    """Align the traces of one step on the clock of rank 0, with the origin at the earliest begin of any rank. Times of
    two ranks are comparable up to `TracedStep.error_s`."""
    begins_ns = [trace.begin_ns - trace.offset_ns for trace in traces]
    origin_ns = min(begins_ns)
    ranks = (TracedRank(trace, (begin_ns - origin_ns) / 1e9) for trace, begin_ns in zip(traces, begins_ns, strict=True))
    return TracedStep(traces[0].step, tuple(ranks))


def read_traced_step(run: RunFolder, step: int | None = None) -> TracedStep:
    """Read a traced step of a run, by default the last one. Raises `InputError` if there is none."""
    ranks_by_step = list_traced_steps(run)
    if not ranks_by_step:
        raise InputError(
            f"trace: {run.path} holds no traces; some of the run's steps are required: shardwise train ... --profile 10:13"
        )
    chosen_step = max(ranks_by_step) if step is None else step
    if chosen_step not in ranks_by_step:
        raise InputError(
            f"--step: found {chosen_step}; {', '.join(map(str, ranks_by_step))} were traced, one of which is required"
        )
    return align_clocks([read_trace(trace_path(run, chosen_step, rank)) for rank in ranks_by_step[chosen_step]])


def event_axis(event: TraceEvent) -> str:
    """Return the axis that a collective, or the wait for it, is charged to."""
    return CONTROL if event.role == CONTROL else charged_axis(event.axes)


def list_collectives(rank: TracedRank) -> Iterator[TraceSpan]:
    """Return the collectives that a rank issued, without messages."""
    return (span for span in rank.spans_of_kind(COLLECTIVE) if not is_message(span.event))


def is_message(event: TraceEvent) -> bool:
    """Return True for a send or receive between two stages."""
    return event.name.split(" ")[0] in MESSAGES
