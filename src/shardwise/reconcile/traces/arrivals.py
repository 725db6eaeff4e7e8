"""Who came when to each collective: it cannot move before the last rank has come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.measurement.trace import WAIT
from shardwise.reconcile.traces.traced_step import Span, TracedRank, TracedStep, axis_of, collectives, is_message
from shardwise.sharding.spec import Axes

Meet = tuple[Axes, tuple[int, ...], int]  # the axes, the ranks of the group, and the number of those before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A collective of a group: each rank's part of it, from when the rank came until it was done there."""

    name: str
    axis: str
    spans: Mapping[int, Span]

    @property
    def last(self) -> int:
        """The rank that came last."""
        return max(self.spans, key=lambda rank: self.spans[rank].start)

    @property
    def begun(self) -> float:
        """When all had come."""
        return self.spans[self.last].start

    @property
    def skew_s(self) -> float:
        """Between the first rank and the last."""
        return self.begun - min(span.start for span in self.spans.values())

    @property
    def moving_s(self) -> float:
        """From when all had come until all were done."""
        return max(max(span.end for span in self.spans.values()) - self.begun, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """A rank among the others: it came last to `num_last` of `num_met` collectives; at `num_kept` of them others waited for it to
    come, for longer than clocks may be off. `kept_s`: seconds of the rank that waited longest for it, by axis in `by_axis`."""

    rank: int
    num_met: int
    num_last: int
    num_kept: int
    kept_s: float
    by_axis: Mapping[str, float]


def meetings(step: TracedStep) -> dict[Meet, Meeting]:
    """The collectives of a step with the ranks that met there; those of a single traced rank are none."""
    found: dict[Meet, dict[int, Span]] = {}
    for rank in step.ranks:
        for span in collectives(rank):
            found.setdefault(_meet(step, rank, span), {})[rank.trace.rank] = span
    return {
        meet: Meeting(name=next(iter(spans.values())).event.name, axis=axis_of(next(iter(spans.values())).event), spans=spans)
        for meet, spans in found.items()
        if len(spans) > 1
    }  # fmt: skip


def _meet(step: TracedStep, rank: TracedRank, span: Span) -> Meet:
    axes = span.event.axes
    return axes, step.group(rank.trace, axes), span.event.number


def late_waits(step: TracedStep) -> dict[int, list[tuple[Span, int, float]]]:
    """Of each rank its waits, each with the rank that came last to what it waited for, and the seconds until that had come."""
    met, found = meetings(step), dict[int, list[tuple[Span, int, float]]]()
    for rank in step.ranks:
        waits = found.setdefault(rank.trace.rank, [])
        for span in rank.of(WAIT):
            meeting = None if is_message(span.event) else met.get(_meet(step, rank, span))
            if meeting is None or meeting.last == rank.trace.rank:
                waits.append((span, rank.trace.rank, 0.0))
            else:
                here = max(span.start, meeting.spans[rank.trace.rank].start)
                waits.append((span, meeting.last, max(min(span.end, meeting.begun) - here, 0.0)))
    return found


def lateness(step: TracedStep) -> tuple[Lateness, ...]:
    """Every rank among the others."""
    met, last = Counter[int](), Counter[int]()
    for meeting in meetings(step).values():
        met.update(meeting.spans.keys())
        last[meeting.last] += 1
    kept: dict[int, dict[int, dict[str, float]]] = {}
    times = Counter[int]()
    for rank, waits in late_waits(step).items():
        for span, late, seconds in waits:
            times[late] += seconds > step.error_s
            if seconds:
                axes = kept.setdefault(late, {}).setdefault(rank, {})
                axes[axis_of(span.event)] = axes.get(axis_of(span.event), 0.0) + seconds
    found = []
    for rank in (one.trace.rank for one in step.ranks):
        longest = max(kept.get(rank, {}).values(), key=lambda axes: sum(axes.values()), default={})
        found.append(
            Lateness(
                rank=rank, num_met=met[rank], num_last=last[rank], num_kept=times[rank], kept_s=sum(longest.values()),
                by_axis=longest,
            )
        )  # fmt: skip
    return tuple(found)
