"""Protocols of a transport: groups of ranks, the collectives that they issue, and handles to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from shardwise.sharding import CollectiveKind

TIMEOUT = timedelta(minutes=10)


class IssuedWork(Protocol):
    """An operation that has been issued. Its outputs may be read, and its inputs written, after `wait`."""

    def wait(self) -> object:
        """Block until the operation is done. Raises `RuntimeError` where it fails."""

    def is_completed(self) -> bool:
        """Return whether the operation is known to be done; some transports know only after `wait`."""

    def get_future(self) -> Any:
        """Return a future of the operation. Raises `RuntimeError` where the transport has none."""


class PeerTensor(NamedTuple):
    """A tensor to send to, or to receive from, the rank at a position of a group."""

    values: Tensor
    peer: int


class CollectiveGroup(Protocol):
    """Ranks that issue collectives together. Every operation is asynchronous and is issued by all of them in the same order.

    `ranks` are in the order of the group; peers, sources and parts of tensors follow that order. Tensors are contiguous.
    """

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def all_reduce(self, tensor: Tensor, reduction: str = "sum") -> IssuedWork:
        """Reduce `tensor` over all ranks, in place; `reduction` is "sum" or "max"."""

    def all_gather(self, full: Tensor, part: Tensor) -> IssuedWork:
        """Gather the parts of all ranks, [n] each, into `full` [size · n]."""

    def reduce_scatter(self, part: Tensor, full: Tensor) -> IssuedWork:
        """Sum `full` [size · n] over all ranks, and write this rank's part [n] of the sum."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_rows: list[int] | None, sent_rows: list[int] | None
    ) -> IssuedWork:
        """Send each part of `sent` to its rank. Rows are those of the first dimension for each peer; None: even parts."""

    def send(self, tensor: Tensor, peer: int) -> IssuedWork:
        """Send a tensor to a peer."""

    def receive(self, tensor: Tensor, peer: int) -> IssuedWork:
        """Receive a tensor from a peer, in the order in which it sends."""

    def exchange(self, sent: Sequence[PeerTensor], received: Sequence[PeerTensor]) -> Sequence[IssuedWork]:
        """Send and receive tensors in one batch, so that ranks that send to each other do not wait for each other."""

    def broadcast(self, tensor: Tensor, source: int) -> IssuedWork:
        """Copy the tensor of one rank to all."""

    def gather(self, parts: Sequence[Tensor] | None, part: Tensor) -> IssuedWork:
        """Gather the parts of all ranks on the first one, which gives a tensor for each."""

    def scatter(self, part: Tensor, parts: Sequence[Tensor] | None) -> IssuedWork:
        """Give each rank its part, from the first one, which has them all."""

    def close(self) -> None:
        """Leave the group, all ranks together."""


# Called with the kind of a collective, its payload and its group, before it is issued.
Observer = Callable[[CollectiveKind, Sequence[Tensor], CollectiveGroup], None]


class Transport(Protocol):
    """Transport between a rank and the others: its number, how many there are, and their groups."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def world(self) -> CollectiveGroup:
        """The group of all ranks."""

    def new_group(self, groups: Sequence[Sequence[int]], timeout: timedelta = TIMEOUT) -> CollectiveGroup:
        """Make groups of ranks that together are all ranks, and return the one of this rank.

        All ranks call this with the same groups, in the same order. No operation of them waits longer than `timeout`.
        """

    def host_group(self, timeout: timedelta = TIMEOUT) -> CollectiveGroup:
        """Make a further group of all ranks, for tensors in host memory, whatever the device of the run is."""

    def observed(self, observer: Observer) -> AbstractContextManager[object]:
        """Call `observer` for every collective of this rank within. Messages of `exchange` count one by one."""
