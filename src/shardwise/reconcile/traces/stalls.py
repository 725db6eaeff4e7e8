"""Work that took far longer than the same work elsewhere: on another rank, in another layer, or for another micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median_low

from shardwise.measurement.trace import KERNEL
from shardwise.reconcile.traces.traced_step import Span, TracedRank, TracedStep

# What is taken for a stall: a part of the step, and so many times as long as is usual. Below either it is noise: on two shared
# cores the longest of some hundred kernels is often three times their median (measured, 2026-11).
LEAST_SHARE, LEAST_TIMES = 0.02, 5.0


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


def stalls(step: TracedStep) -> tuple[Stall, ...]:
    """All of a step, the longest first."""
    seen: dict[tuple[str, ...], list[Stall]] = {}
    for rank in step.ranks:
        for key, one in _work(rank):
            seen.setdefault(key, []).append(one)
    found = []
    for alike in seen.values():
        usual = median_low(one.seconds for one in alike)
        found += [_with_usual(one, usual) for one in alike if _stalls(one.seconds, usual, step.seconds)]
    return tuple(sorted(found, key=lambda one: -one.excess_s))


def _stalls(seconds: float, usual_s: float, step_s: float) -> bool:
    return seconds - usual_s >= LEAST_SHARE * step_s and seconds >= LEAST_TIMES * usual_s


def _with_usual(one: Stall, usual_s: float) -> Stall:
    return replace(one, usual_s=usual_s)


def _work(rank: TracedRank) -> Iterator[tuple[tuple[str, ...], Stall]]:
    """Each kernel and each gap in front of one, with what is alike."""
    end = rank.begin
    for place, span in enumerate(rank.computing):
        if span.event.kind == KERNEL:
            kind = (span.event.unit, span.event.phase, span.event.name)
            yield ("kernel", *kind), _stall(rank, span, span.start, span.seconds, in_gap=False)
            if place:
                yield ("gap", *kind), _stall(rank, span, end, max(span.start - end, 0.0), in_gap=True)
        end = max(end, span.end)


def _stall(rank: TracedRank, span: Span, start: float, seconds: float, *, in_gap: bool) -> Stall:
    event = span.event
    return Stall(
        rank=rank.trace.rank, in_gap=in_gap, name=event.name, path=event.path, phase=event.phase, action=event.action,
        start_s=start, seconds=seconds, usual_s=0.0,
    )  # fmt: skip
