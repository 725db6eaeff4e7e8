"""The traces of all ranks of a step, aligned on one clock, and unions of intervals of time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.records.run_folder import RunFolder
from shardwise.records.step_trace import (
    COLLECTIVE,
    KERNEL,
    WAIT,
    RankTrace,
    TraceEvent,
    list_traced_steps,
    read_trace,
    trace_path,
)
from shardwise.step.instructions import CONTROL, charged_axis
from shardwise.values.errors import InputError

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, in order.

    >>> union([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def intersection(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What two unions have in common.

    >>> intersection([(0, 4)], [(1, 2), (3, 6)])
    [(1, 2), (3, 4)]
    """
    found, left, right = [], list(some), list(others)
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def total_length(intervals: Iterable[Interval]) -> float:
    """Their length."""
    return sum(end - start for start, end in intervals)


MESSAGES = ("send", "receive")  # between two stages: no rank of a group waits for all of the others


class TraceSpan(NamedTuple):
    """An event in seconds from the beginning of the step on the first rank that began."""

    event: TraceEvent
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class TracedRank:
    """A rank's step; `begin` and `end` in seconds on the clock of all."""

    trace: RankTrace
    begin: float

    @property
    def end(self) -> float:
        return self.begin + self.trace.step_ns / 1e9

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.trace.step_ns / 1e9

    @cached_property
    def spans(self) -> tuple[TraceSpan, ...]:
        """Everything, in the order in which it began."""
        return tuple(
            TraceSpan(one, self.begin + one.start_ns / 1e9, self.begin + one.end_ns / 1e9) for one in self.trace.events
        )

    def spans_of_kind(self, *kinds: str) -> Iterator[TraceSpan]:
        """The events of some kinds."""
        return (span for span in self.spans if span.event.kind in kinds)

    @cached_property
    def traffic(self) -> tuple[Interval, ...]:
        """When anything was on its way."""
        return tuple(union((span.start, span.end) for span in self.spans_of_kind(COLLECTIVE)))

    def traffic_s(self, start: float, end: float) -> float:
        """Seconds of a time in which anything was on its way."""
        first = bisect_left(self.traffic, start, key=lambda one: one[1])
        last = bisect_right(self.traffic, end, key=lambda one: one[0])
        return total_length(intersection([(start, end)], self.traffic[first:last]))

    @cached_property
    def compute_spans(self) -> tuple[TraceSpan, ...]:
        """What the compute stream did, kernels and waits, in order."""
        return tuple(self.spans_of_kind(KERNEL, WAIT))


@dataclass(frozen=True)
class TracedStep:
    """A step on all ranks that were traced."""

    step: int
    ranks: tuple[TracedRank, ...]

    @property
    def seconds(self) -> float:
        """From the first rank's beginning to the last one's end."""
        return max(rank.end for rank in self.ranks)

    @property
    def error_s(self) -> float:
        """How far the clocks of two ranks may be apart."""
        return max(rank.trace.error_ns for rank in self.ranks) / 1e9

    def group_ranks(self, rank: RankTrace, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that a rank has collectives with over some axes: those that are where it is on all others."""
        others = {axis: place for axis, place in rank.coordinate.items() if axis not in axes}
        return tuple(
            one.trace.rank
            for one in self.ranks
            if all(one.trace.coordinate[axis] == place for axis, place in others.items())
        )


def align_clocks(traces: list[RankTrace]) -> TracedStep:
    """The traces of one step, on one clock that begins with the first rank."""
    begins = [trace.begin_ns - trace.offset_ns for trace in traces]
    first = min(begins)
    ranks = (TracedRank(trace, (begin - first) / 1e9) for trace, begin in zip(traces, begins, strict=True))
    return TracedStep(traces[0].step, tuple(ranks))


def read_traced_step(run: RunFolder, step: int | None = None) -> TracedStep:
    """A traced step of a run, or the last one. Raises `InputError` where there is none."""
    found = list_traced_steps(run)
    if not found:
        raise InputError(
            f"trace: {run.path} holds no traces; some of the run's steps are required: shardwise train ... --profile 10:13"
        )
    number = max(found) if step is None else step
    if number not in found:
        raise InputError(f"--step: found {number}; {', '.join(map(str, found))} were traced, one of which is required")
    return align_clocks([read_trace(trace_path(run, number, rank)) for rank in found[number]])


def event_axis(event: TraceEvent) -> str:
    """The axis that a collective, or the wait for it, is charged to."""
    return CONTROL if event.role == CONTROL else charged_axis(event.axes)


def list_collectives(rank: TracedRank) -> Iterator[TraceSpan]:
    """Those that a rank issued, without messages."""
    return (one for one in rank.spans_of_kind(COLLECTIVE) if not is_message(one.event))


def is_message(event: TraceEvent) -> bool:
    """Whether something goes between two stages."""
    return event.name.split(" ")[0] in MESSAGES
