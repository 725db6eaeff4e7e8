"""Collectives over mesh axes. Every one that the engine issues is issued here."""

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
from shardwise.sharding import Axes
from shardwise.step import CONTROL, charged_axis
from shardwise.values import format_bytes

IssueCollective = Callable[[], Sequence[IssuedWork]]


class TrafficLabel(NamedTuple):
    """The role of a collective on a flat array (`price.simulation.streams`), and its unit's path."""

    role: str
    path: str


class RecordedWork(Protocol):
    """A collective whose start a recorder has seen."""

    def follow(self, works: Sequence[IssuedWork]) -> None:
        """Take the issued operations of the collective."""

    def record_wait(self) -> AbstractContextManager[None]:
        """Return a context that is entered around the wait for it."""


class CollectiveRecorder(Protocol):
    """Records collectives as they are issued."""

    def begins(self, kind: str, num_bytes: int, axes: Axes, carries: TrafficLabel | None) -> RecordedWork:
        """Record that a collective is about to be issued."""


@dataclass(frozen=True, slots=True)
class PendingWork:
    """A collective of `num_bytes` over `axes` that has been issued.

    The time of its wait counts for `term`: the parallel axis that it goes over, or control. `noted` is a recorder's
    record of it.
    """

    works: Sequence[IssuedWork]
    term: str
    clock: StepClock
    kind: str
    axes: Axes
    num_bytes: int
    noted: RecordedWork | None = None

    @property
    def is_done(self) -> bool:
        """True if it is known to be done; some transports know only after the wait (gloo; NCCL knows before)."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Wait until it is done. Raises `LostRankError` where it fails."""
        with (
            nullcontext() if self.noted is None else self.noted.record_wait(),
            self.clock(self.term),
            wait_for_ranks(f"{self.kind} over {', '.join(self.axes)} ({format_bytes(self.num_bytes)})"),
        ):
            for work in self.works:
                work.wait()


class MeshCollectives:
    """Collectives over axes of the mesh, in the background.

    `carries` labels a flat array for recorders; activations are labelled by the call that moves them.
    """

    def __init__(self, world: World, clock: StepClock) -> None:
        self.world, self.clock = world, clock
        self.recorder: CollectiveRecorder | None = None

    def all_gather(self, full: Tensor, part: Tensor, axes: Axes, carries: TrafficLabel | None = None) -> PendingWork:
        """Gather the parts [n] of all ranks into `full` [degree · n]."""
        group = self.world.group(axes)
        return self._issue("AllGather", lambda: [group.all_gather(full, part)], [full], axes, carries)

    def reduce_scatter(
        self, part: Tensor, full: Tensor, axes: Axes, carries: TrafficLabel | None = None
    ) -> PendingWork:
        """Sum `full` [degree · n] over all ranks, and write this rank's `part` [n]."""
        group = self.world.group(axes)
        return self._issue("ReduceScatter", lambda: [group.reduce_scatter(part, full)], [full], axes, carries)

    def all_reduce(
        self, tensor: Tensor, axes: Axes, reduction: str = "sum", carries: TrafficLabel | None = None
    ) -> PendingWork:
        """Sum over all ranks, or take their maximum, in place."""
        group = self.world.group(axes)
        return self._issue("AllReduce", lambda: [group.all_reduce(tensor, reduction)], [tensor], axes, carries)

    def all_to_all(
        self, received: Tensor, sent: Tensor, axes: Axes, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> PendingWork:
        """Send each part of `sent` to its rank, and write what each rank sends into `received`.

        `rows` are the number of rows of each part of `received` and of `sent`; None: all parts are equal.
        """
        received_rows, sent_rows = (None, None) if rows is None else (list(rows[0]), list(rows[1]))
        group = self.world.group(axes)
        return self._issue(
            "AllToAll", lambda: [group.all_to_all(received, sent, received_rows, sent_rows)], [sent], axes
        )

    def shift(self, received: Sequence[Tensor], sent: Sequence[Tensor], axes: Axes) -> PendingWork:
        """Send tensors to the next rank, the last rank's to the first; write those of the rank before into `received`."""
        group, position, degree = self.world.group(axes), self.world.position(axes), self.world.mesh.size(axes)
        next_position, previous_position = (position + 1) % degree, (position - 1) % degree
        sending = [PeerTensor(tensor, next_position) for tensor in sent]
        receiving = [PeerTensor(tensor, previous_position) for tensor in received]
        return self._issue("Permute", lambda: group.exchange(sending, receiving), sent, axes)

    def send(self, tensor: Tensor, peer: int, axes: Axes) -> PendingWork:
        """Send a tensor to the rank at position `peer` along the axes."""
        group = self.world.group(axes, onward=peer > self.world.position(axes))
        return self._issue("Send", lambda: [group.send(tensor, peer)], [tensor], axes)

    def receive(self, tensor: Tensor, peer: int, axes: Axes) -> PendingWork:
        """Receive a tensor from the rank at position `peer` along the axes, in the order in which it sends."""
        group = self.world.group(axes, onward=peer < self.world.position(axes))
        return self._issue("Receive", lambda: [group.receive(tensor, peer)], [tensor], axes)

    def sum_and_wait(self, tensor: Tensor, axes: Axes) -> Tensor:
        """Control traffic: sum a tensor over all ranks in place, and wait."""
        if axes:
            replace(self.all_reduce(tensor, axes, carries=TrafficLabel(CONTROL, "")), term=CONTROL).wait()
        return tensor

    def max_and_wait(self, tensor: Tensor, axes: Axes) -> Tensor:
        """Control traffic: take the maximum over all ranks in place, and wait."""
        if axes:
            replace(self.all_reduce(tensor, axes, "max", TrafficLabel(CONTROL, "")), term=CONTROL).wait()
        return tensor

    def _issue(
        self,
        kind: str,
        issue: IssueCollective,
        payloads: Sequence[Tensor],
        axes: Axes,
        carries: TrafficLabel | None = None,
    ) -> PendingWork:
        num_bytes = sum(payload.numel() * payload.element_size() for payload in payloads)
        if self.recorder is None:
            return PendingWork(issue(), charged_axis(axes), self.clock, kind, axes, num_bytes)
        recorded = self.recorder.begins(kind, num_bytes, axes, carries)
        works = issue()
        recorded.follow(works)
        return PendingWork(works, charged_axis(axes), self.clock, kind, axes, num_bytes, recorded)
