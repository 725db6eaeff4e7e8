"""Collectives on flat arrays. Every one that the engine issues is issued here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from shardwise.run.faults.rank_status import wait_for_ranks
from shardwise.run.parallel.world import World
from shardwise.run.step_clock import StepClock
from shardwise.run.transport.interface import IssuedWork, PeerTensor
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import CONTROL, charged_axis
from shardwise.values.units import format_bytes

IssueCollective = Callable[[], Sequence[IssuedWork]]


class TrafficLabel(NamedTuple):
    """What a collective on a flat array carries: its role (`price.simulation.streams`), and the path of the unit
    that it belongs to."""

    role: str
    path: str


class RecordedWork(Protocol):
    """A collective that a recorder has seen begin."""

    def follow(self, works: Sequence[IssuedWork]) -> None:
        """It has been issued, and goes on as these."""

    def record_wait(self) -> AbstractContextManager[None]:
        """Entered around the wait for it."""


class CollectiveRecorder(Protocol):
    """What watches collectives."""

    def begins(self, kind: str, num_bytes: int, axes: Axes, carries: TrafficLabel | None) -> RecordedWork:
        """One is about to be issued."""


@dataclass(frozen=True, slots=True)
class PendingWork:
    """A collective of `num_bytes` on its way over `axes`. Waiting for it counts for the parallel axis that it goes over, or for
    control. `noted` is what a recorder knows of it, where one watches."""

    works: Sequence[IssuedWork]
    term: str
    clock: StepClock
    kind: str
    axes: Axes
    num_bytes: int
    noted: RecordedWork | None = None

    @property
    def is_done(self) -> bool:
        """Whether it is known to be done; a transport may not say before it is waited for (gloo does not, NCCL does)."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Until it is done. Raises `LostRankError` where it fails."""
        with (
            nullcontext() if self.noted is None else self.noted.record_wait(),
            self.clock(self.term),
            wait_for_ranks(f"{self.kind} over {', '.join(self.axes)} ({format_bytes(self.num_bytes)})"),
        ):
            for work in self.works:
                work.wait()


class MeshCollectives:
    """Collectives over axes of the mesh, in the background. `carries` says what a flat array has, for whoever watches: what moves
    activations is given by the call that moves it."""

    def __init__(self, world: World, clock: StepClock) -> None:
        self.world, self.clock = world, clock
        self.recorder: CollectiveRecorder | None = None

    def all_gather(self, whole: Tensor, part: Tensor, axes: Axes, carries: TrafficLabel | None = None) -> PendingWork:
        """Parts [n] of all processes, one after the other, into `whole` [degree · n]."""
        group = self.world.group(axes)
        return self._issue("AllGather", lambda: [group.all_gather(whole, part)], [whole], axes, carries)

    def reduce_scatter(
        self, part: Tensor, whole: Tensor, axes: Axes, carries: TrafficLabel | None = None
    ) -> PendingWork:
        """The sum of all processes' `whole` [degree · n], each process its `part` [n]."""
        group = self.world.group(axes)
        return self._issue("ReduceScatter", lambda: [group.reduce_scatter(part, whole)], [whole], axes, carries)

    def all_reduce(
        self, values: Tensor, axes: Axes, reduction: str = "sum", carries: TrafficLabel | None = None
    ) -> PendingWork:
        """The sum, or the maximum, over all processes, in place."""
        group = self.world.group(axes)
        return self._issue("AllReduce", lambda: [group.all_reduce(values, reduction)], [values], axes, carries)

    def all_to_all(
        self, received: Tensor, sent: Tensor, axes: Axes, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> PendingWork:
        """The parts of `sent` each to its process; into `received` what comes from each. `rows` are those of each part of either;
        None: parts are even."""
        into, out_of = (None, None) if rows is None else (list(rows[0]), list(rows[1]))
        group = self.world.group(axes)
        return self._issue("AllToAll", lambda: [group.all_to_all(received, sent, into, out_of)], [sent], axes)

    def shift(self, received: Sequence[Tensor], sent: Sequence[Tensor], axes: Axes) -> PendingWork:
        """Tensors to the next process, the last one's to the first; those of the process before into `received`."""
        group, place, degree = self.world.group(axes), self.world.position(axes), self.world.mesh.size(axes)
        onward, back = (place + 1) % degree, (place - 1) % degree
        sending = [PeerTensor(values, onward) for values in sent]
        receiving = [PeerTensor(values, back) for values in received]
        return self._issue("Permute", lambda: group.exchange(sending, receiving), sent, axes)

    def send(self, values: Tensor, peer: int, axes: Axes) -> PendingWork:
        """To the process at the place `peer` along the axes."""
        group = self.world.group(axes, onward=peer > self.world.position(axes))
        return self._issue("Send", lambda: [group.send(values, peer)], [values], axes)

    def receive(self, values: Tensor, peer: int, axes: Axes) -> PendingWork:
        """Into `values` from the process at the place `peer` along the axes, in the order in which it sends."""
        group = self.world.group(axes, onward=peer < self.world.position(axes))
        return self._issue("Receive", lambda: [group.receive(values, peer)], [values], axes)

    def sum_and_wait(self, values: Tensor, axes: Axes) -> Tensor:
        """Control traffic: a sum that is waited for, in place."""
        if axes:
            replace(self.all_reduce(values, axes, carries=TrafficLabel(CONTROL, "")), term=CONTROL).wait()
        return values

    def max_and_wait(self, values: Tensor, axes: Axes) -> Tensor:
        """Control traffic: the largest of each that any process has, in place."""
        if axes:
            replace(self.all_reduce(values, axes, "max", TrafficLabel(CONTROL, "")), term=CONTROL).wait()
        return values

    def _issue(
        self,
        kind: str,
        issue: IssueCollective,
        payloads: Sequence[Tensor],
        axes: Axes,
        carries: TrafficLabel | None = None,
    ) -> PendingWork:
        num_bytes = sum(one.numel() * one.element_size() for one in payloads)
        if self.recorder is None:
            return PendingWork(issue(), charged_axis(axes), self.clock, kind, axes, num_bytes)
        noted = self.recorder.begins(kind, num_bytes, axes, carries)
        works = issue()
        noted.follow(works)
        return PendingWork(works, charged_axis(axes), self.clock, kind, axes, num_bytes, noted)
