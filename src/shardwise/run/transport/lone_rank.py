"""The transport of a rank without others.

One process trains with it, whose groups have one rank: what comes out of a collective is what went in. A rehearsal runs one
rank of any world, on tensors without data: collectives are issued and observed, and bring nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor

from shardwise.run.transport.interface import TIMEOUT, Observer, PeerTensor
from shardwise.sharding import CollectiveKind


class DoneWork:
    """An operation that is done when it is issued."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Any:
        """Raise `RuntimeError`: nothing is on its way."""
        raise RuntimeError("an operation of a lone rank has no future")


DONE_WORK = DoneWork()


@dataclass(eq=False)
class LoneGroup:
    """A group of which this rank alone is there. Where it has further ranks, outputs stay as they are."""

    ranks: tuple[int, ...]
    transport: LoneRank

    def all_reduce(self, tensor: Tensor, reduction: str = "sum") -> DoneWork:
        """Leave `tensor` as they are."""
        return self._issue(CollectiveKind.ALL_REDUCE, tensor, [])

    def all_gather(self, full: Tensor, part: Tensor) -> DoneWork:
        """Copy the part of a lone rank."""
        return self._issue(CollectiveKind.ALL_GATHER, full, [(full, part)])

    def reduce_scatter(self, part: Tensor, full: Tensor) -> DoneWork:
        """Copy the sum of a lone rank."""
        return self._issue(CollectiveKind.REDUCE_SCATTER, full, [(part, full)])

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: list[int] | None, sent_rows: list[int] | None
    ) -> DoneWork:
        """Copy what a lone rank sends to itself."""
        return self._issue(CollectiveKind.ALL_TO_ALL, sent, [(received, sent)])

    def send(self, tensor: Tensor, peer: int) -> DoneWork:
        """Send nothing."""
        return self._issue(CollectiveKind.SEND, tensor, [])

    def receive(self, tensor: Tensor, peer: int) -> DoneWork:
        """Leave `tensor` as they are."""
        return self._issue(CollectiveKind.RECEIVE, tensor, [])

    def exchange(self, sent: Sequence[PeerTensor], received: Sequence[PeerTensor]) -> list[DoneWork]:
        """Send nothing, and leave what is received as it is."""
        sending = [self.send(*message) for message in sent]
        return sending + [self.receive(*message) for message in received]

    def broadcast(self, tensor: Tensor, source: int) -> DoneWork:
        """Leave `tensor` as they are."""
        return DONE_WORK

    def gather(self, parts: Sequence[Tensor] | None, part: Tensor) -> DoneWork:
        """Copy the part of a lone rank."""
        return self._copy([] if parts is None else [(parts[0], part)])

    def scatter(self, part: Tensor, parts: Sequence[Tensor] | None) -> DoneWork:
        """Copy the part of a lone rank."""
        return self._copy([] if parts is None else [(part, parts[0])])

    def close(self) -> None:
        """Do nothing: the group holds nothing."""

    def _issue(self, kind: CollectiveKind, payload: Tensor, copies: Sequence[tuple[Tensor, Tensor]]) -> DoneWork:
        for observer in self.transport.observers:
            observer(kind, [payload], self)
        return self._copy(copies)

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]]) -> DoneWork:
        for output, tensor in copies if len(self.ranks) == 1 else ():
            output.copy_(tensor.view(output.shape))
        return DONE_WORK


@dataclass(eq=False)
class LoneRank:
    """A rank of a world of `size`, of which it alone is there."""

    rank: int = 0
    size: int = 1
    observers: list[Observer] = field(default_factory=list)

    @property
    def world(self) -> LoneGroup:
        """The group of all ranks."""
        return LoneGroup(tuple(range(self.size)), self)

    def new_group(self, groups: Sequence[Sequence[int]], timeout: timedelta = TIMEOUT) -> LoneGroup:
        """Return the group that has this rank."""
        return LoneGroup(tuple(next(ranks for ranks in groups if self.rank in ranks)), self)

    def host_group(self, timeout: timedelta = TIMEOUT) -> LoneGroup:
        """Return a group of all ranks."""
        return self.world

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call `observer` for every collective that is issued within."""
        self.observers.append(observer)
        try:
            yield
        finally:
            self.observers.remove(observer)
