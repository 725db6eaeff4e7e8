"""Where a rank's time went: busy with kernels, exposed by axis, and gaps in which the compute stream had nothing to do.

On one rank the three add up to its step. Traffic is hidden as long as kernels run beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardwise.measurement.trace import COLLECTIVE, KERNEL, PASS, WAIT
from shardwise.reconcile.traces.intervals import Interval, common, merged, total
from shardwise.reconcile.traces.traced_step import TracedRank, axis_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
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
    overlaps: tuple[Overlap, ...]

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


def occupancy(rank: TracedRank) -> Occupancy:
    """Where a rank's step went."""
    busy: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for span in rank.of(KERNEL):
        busy[span.event.phase] = busy.get(span.event.phase, 0.0) + span.seconds
    for span in rank.of(WAIT):
        axis = axis_of(span.event)
        exposed[axis] = exposed.get(axis, 0.0) + span.seconds
    passes = merged((span.start, span.end) for span in rank.of(PASS))
    idle = gaps(rank)
    within = common(idle, passes)
    gaps_s = total(within)
    return Occupancy(
        rank=rank.trace.rank, step_s=rank.seconds, busy=busy, exposed=exposed, gaps_s=gaps_s, num_gaps=len(within),
        between_s=total(idle) - gaps_s, overlaps=tuple(overlaps(rank)),
    )  # fmt: skip


def overlaps(rank: TracedRank) -> Iterable[Overlap]:
    """The traffic of each axis, and what of it is hidden."""
    computed = merged((span.start, span.end) for span in rank.of(KERNEL))
    moving: dict[str, list[Interval]] = {}
    for span in rank.of(COLLECTIVE):
        moving.setdefault(span.event.stream, []).append((span.start, span.end))
    for axis, intervals in moving.items():
        traffic = merged(intervals)
        yield Overlap(axis=axis, traffic_s=total(traffic), hidden_s=total(common(traffic, computed)))


def gaps(rank: TracedRank) -> list[Interval]:
    """When the compute stream of a rank had nothing to do, and waited for nothing."""
    found, now = [], rank.begin
    for start, end in merged((span.start, span.end) for span in rank.computing):
        if start > now:
            found.append((now, start))
        now = max(now, end)
    return [*found, (now, rank.end)] if rank.end > now else found
