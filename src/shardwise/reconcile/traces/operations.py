"""Kernels of a traced step beside the planned ones: seconds of each operation in a step, expected and measured.

A call of the engine may make what several kernels of the plan make, and the other way round. What shares a result is one
operation, which goes by the name of the first kernel of the plan among it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.lowering.instruction import START, WAIT
from shardwise.measurement.trace import KERNEL
from shardwise.reconcile.traces.traced_step import Span, TracedRank
from shardwise.simulate.step import Simulated
from shardwise.simulate.units import UPDATE
from shardwise.simulate.work import Kernel

AROUND = "copies around collectives"  # what starts and waits of collectives do beside them


class Key(NamedTuple):
    """An operation: the kind of unit, the phase, and the name."""

    unit: str
    phase: str
    name: str


@dataclass(slots=True)
class Operation:
    """What an operation takes in a step: `expected_s` as planned, and the kernels that were measured."""

    key: Key
    expected_s: float = 0.0
    spans: list[tuple[TracedRank, Span]] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        return sum(span.seconds for _, span in self.spans)

    @property
    def on_core(self) -> float | None:
        """The part of the time that the thread had a core; None where that is not known, as on a GPU."""
        known = sum(span.event.cpu_ns for _, span in self.spans) / 1e9
        return known / self.measured_s if known and self.measured_s else None

    def beside_traffic(self) -> float | None:
        """How many times as long it takes while traffic is on its way; None where it never, or always, is."""
        beside: list[float] = []
        alone: list[float] = []
        for rank, span in self.spans:
            (beside if rank.moving_s(span.start, span.end) > span.seconds / 2 else alone).append(span.seconds)
        if min(len(beside), len(alone)) < 2 or not sum(alone):
            return None
        return (sum(beside) / len(beside)) / (sum(alone) / len(alone))


def on_core_of(rank: TracedRank) -> float | None:
    """The part of its kernels' time in which a rank's thread had a core; None where that is not known."""
    whole = Operation(Key("", "", ""))
    whole.spans = [(rank, span) for span in rank.of(KERNEL)]
    return whole.on_core


def operations(rank: TracedRank, planned: Simulated) -> dict[Key, Operation]:
    """The kernels of a rank's step, and of its planned stage, by operation."""
    expected, measured = list(_planned(planned, rank.trace.coordinate.get("pp", 0))), list(rank.of(KERNEL))
    joined = _Joined()
    for kernel in expected:
        joined.join(Key(kernel.unit, kernel.phase, kernel.name), kernel.results)
    for span in measured:
        joined.join(_own(span), span.event.results)
    found: dict[Key, Operation] = {}
    for kernel in expected:
        key = joined.key(Key(kernel.unit, kernel.phase, kernel.name))
        found.setdefault(key, Operation(key)).expected_s += kernel.seconds
    for span in measured:
        key = joined.key(_own(span))
        found.setdefault(key, Operation(key)).spans.append((rank, span))
    return found


def _planned(planned: Simulated, stage: int) -> Iterator[Kernel]:
    """The kernels of a stage; those of the update as one."""
    plays = [*planned.plays[stage], planned.updates[stage]]
    kernels = (one.what for played in plays for one in played.events if isinstance(one.what, Kernel))
    for one in kernels:
        is_update = one.phase == UPDATE
        yield Kernel(seconds=one.seconds, unit="", phase=UPDATE, name=UPDATE) if is_update else one


def _own(span: Span) -> Key:
    event = span.event
    if event.phase == UPDATE:
        return Key("", UPDATE, UPDATE)
    if event.name.startswith((f"{START} ", f"{WAIT} ")):
        return Key(event.unit, event.phase, AROUND)
    return Key(event.unit, event.phase, event.name)


class _Joined:
    """Keys with what they make: those that share a result are one."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}
        self.first: dict[Hashable, Key] = {}

    def join(self, key: Key, results: Iterable[str]) -> None:
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

    def key(self, key: Key) -> Key:
        return self.first[self._root(key)]

    def _root(self, one: Hashable) -> Hashable:
        self.parent.setdefault(one, one)
        while self.parent[one] != one:
            one = self.parent[one]
        return one
