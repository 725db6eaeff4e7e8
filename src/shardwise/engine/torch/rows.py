"""Rows of routed tokens on the ranks that have their experts, and back. Letters: R rows, n ranks of a group, E experts.

Rows of a rank are in the order of their experts. On the way to their experts' ranks they are counted first: of each rank one
knows then how many rows it sends for each expert, and what comes from n ranks is put in the order of the experts again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwise.engine.torch.devices import on_host
from shardwise.engine.torch.rank import Exchange, Pending
from shardwise.sharding.spec import Axes


class Rows(ABC):
    """Rows in the order of their experts; `counts` [E] are those of each."""

    counts: Tensor

    @cached_property
    def sizes(self) -> list[int]:
        """Rows of each expert, on the host."""
        return on_host(self.counts, self.num_rows)

    @cached_property
    def ends(self) -> Tensor:
        """Where each expert's rows end, as grouped products take it."""
        return self.counts.cumsum(0).to(torch.int32)

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Of all experts together."""

    @cached_property
    def owners(self) -> Tensor:
        """The expert of each row [R]."""
        experts = torch.arange(len(self.counts), device=self.counts.device)
        return experts.repeat_interleave(self.counts, output_size=self.num_rows)

    def expanded(self, vectors: Tensor) -> Tensor:
        """A vector of each expert [E, M] for each of its rows."""
        return vectors.repeat_interleave(self.counts, dim=0, output_size=self.num_rows)


@dataclass(frozen=True)
class Lane(Rows):
    """A rank's rows of the tokens of a group, and how they come and go.

    `matrix` [n, E] are the rows that come from each rank of the group for each of this rank's experts; `sent` the rows that this
    rank sends to each, where each gets its own (AllToAll), and None where all get all (AllGather); `own` all rows that it has to
    send.
    """

    exchange: Exchange
    axes: Axes
    matrix: Tensor
    sent: list[int] | None
    own: int

    @cached_property
    def counts(self) -> Tensor:  # type: ignore[override]
        """Of each of this rank's experts [E]."""
        return self.matrix.sum(dim=0)

    @cached_property
    def received(self) -> list[int]:
        """Rows that come from each rank."""
        from_all = self.own if self.sent is not None else self.own * len(self.matrix)
        return on_host(self.matrix.sum(dim=1), from_all)

    @property
    def num_rows(self) -> int:
        return sum(self.received)

    @property
    def longest(self) -> int:
        """Of an AllGather the rows that each rank's are padded to."""
        return max(self.received)

    @cached_property
    def order(self) -> Tensor:
        """Of each row where it is among those that came, which are in the order of the ranks [R]."""
        lengths = self.matrix.t().flatten()
        within = self.matrix.cumsum(dim=1) - self.matrix
        rows = self.matrix.sum(dim=1)
        starts = (
            torch.arange(len(rows), device=rows.device) * self.longest if self.sent is None else rows.cumsum(0) - rows
        )
        begins = (starts[:, None] + within).t().flatten()
        shifts = (begins - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths, output_size=self.num_rows)
        return shifts + torch.arange(self.num_rows, device=shifts.device)

    @cached_property
    def places(self) -> Tensor:
        """The inverse: of each row that came where it is now."""
        return self.order.argsort()

    def start(self, x: Tensor) -> tuple[Pending, Tensor]:
        """Send rows [R, D] to where their experts are, or to all of the group."""
        if self.sent is None:
            padded = x.new_zeros(self.longest, x.shape[1])
            padded[: len(x)] = x
            whole = x.new_empty(len(self.received) * self.longest, x.shape[1])
            return self.exchange.all_gather(whole, padded, self.axes), whole
        arriving = x.new_empty(self.num_rows, x.shape[1])
        return self.exchange.all_to_all(arriving, x.contiguous(), self.axes, (self.received, self.sent)), arriving

    def arrived(self, arriving: Tensor) -> Tensor:
        """What came in the order of the experts."""
        return arriving.index_select(0, self.order)

    def start_back(self, x: Tensor) -> tuple[Pending, Tensor]:
        """Send rows back to where they came from; where all got all, each gets the sum of its own."""
        if self.sent is None:
            padded = x.new_zeros(len(self.received) * self.longest, x.shape[1]).index_copy_(0, self.order, x)
            part = x.new_empty(self.longest, x.shape[1])
            return self.exchange.reduce_scatter(part, padded, self.axes), part
        arriving = x.new_empty(self.own, x.shape[1])
        rows = x.index_select(0, self.places)
        return self.exchange.all_to_all(arriving, rows, self.axes, (self.sent, self.received)), arriving

    def arrived_back(self, arriving: Tensor) -> Tensor:
        """This rank's own, as they were."""
        return arriving[: self.own]


@dataclass(frozen=True)
class Share(Rows):
    """Of the rows of tokens that all ranks of a group have those of a part of the experts, one for each rank; this one is at
    `place` of so many `parts`."""

    exchange: Exchange
    axes: Axes
    whole: Rows
    place: int
    parts: int

    @cached_property
    def counts(self) -> Tensor:  # type: ignore[override]
        """Of each of this rank's experts [E]."""
        return self.whole.counts.view(self.parts, -1)[self.place]

    @cached_property
    def lengths(self) -> list[int]:
        """Rows of each part."""
        width = len(self.whole.counts) // self.parts
        return [sum(self.whole.sizes[place * width :][:width]) for place in range(self.parts)]

    @property
    def num_rows(self) -> int:
        return self.lengths[self.place]

    def cut(self, x: Tensor) -> Tensor:
        """This rank's of all rows."""
        return x.narrow(0, sum(self.lengths[: self.place]), self.num_rows)

    def put(self, x: Tensor) -> Tensor:
        """All rows, with 0 for those of other ranks."""
        whole = x.new_zeros(self.whole.num_rows, x.shape[1])
        self.cut(whole).copy_(x)
        return whole

    def start_back(self, x: Tensor) -> tuple[Pending, Tensor]:
        """Send rows to all of the group, padded to the longest part."""
        longest = max(self.lengths)
        padded = x.new_zeros(longest, x.shape[1])
        padded[: len(x)] = x
        whole = x.new_empty(self.parts * longest, x.shape[1])
        return self.exchange.all_gather(whole, padded, self.axes), whole

    def arrived_back(self, arriving: Tensor) -> Tensor:
        """All rows."""
        longest = max(self.lengths)
        return torch.cat([arriving[place * longest :][:length] for place, length in enumerate(self.lengths)])


def start_counts(
    rows: Rows, exchange: Exchange, axes: Axes, num_ranks: int, *, to_all: bool, dtype: torch.dtype
) -> tuple[Pending, Tensor]:
    """Tell the ranks of a group how many rows go to each expert [n, E of a rank]."""
    counts = rows.counts.to(dtype)
    if to_all:
        matrix = counts.new_empty(num_ranks * len(counts))
        return exchange.all_gather(matrix, counts, axes), matrix.view(num_ranks, -1)
    matrix = torch.empty_like(counts)
    return exchange.all_to_all(matrix, counts, axes), matrix.view(num_ranks, -1)


def lane(rows: Rows, exchange: Exchange, axes: Axes, matrix: Tensor, *, to_all: bool) -> Lane:
    """From what the ranks of a group have told."""
    sent = None if to_all else torch.tensor(rows.sizes).view(len(matrix), -1).sum(dim=1).tolist()
    return Lane(exchange, axes, matrix.to(torch.int64), sent, rows.num_rows)
