"""Rows of routed tokens on the ranks that have their experts, and back, as calls. Letters: R rows, n ranks of a group, E
experts.

Rows of a rank are in the order of their experts. On the way to the ranks of their experts they are counted first: of
each rank one knows then how many rows it sends for each expert, and what comes from n ranks is put in the order of the
experts again. Where all ranks of a group have the same tokens, each keeps the rows of its own experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwise.run.engine.call_builder import Call, Calls
from shardwise.run.engine.collective_calls import MOVING, Moving, OnWay, ends_of, is_issued
from shardwise.run.engine.rank_coordinates import Exchange, Pending
from shardwise.run.kernels import experts
from shardwise.run.kernels.device_dispatch import on_host
from shardwise.run.kernels.experts import Rows
from shardwise.sharding.collectives import Kind
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.instructions import Slice, Start, Traffic


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


def dispatch_dx(drows: Tensor, routing: experts.Routing | Share) -> Tensor:
    """Add up the gradients of the rows of each token, of those that this rank has, in one order on any device."""
    if isinstance(routing, Share):
        assert isinstance(routing.whole, experts.Routing), "what is shared is a router's choice"
        return dispatch_dx(routing.put(drows), routing.whole)
    return experts.dispatch_dx(drows, routing)


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


BACK = {Kind.REDUCE_SCATTER}  # kinds that bring rows back whatever they do to the experts' dim
OF_LANES = (Kind.ALL_TO_ALL, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def moves_rows(one: Moving, calls: Calls) -> bool:
    """Whether an instruction moves rows, or cuts them in place, and has to know whose they are."""
    if isinstance(one, Slice):
        before, after = _around(calls, one)
        return before != after and (calls.is_routed(one.step.tensor.name) or one.step.tensor.name == calls.gates)
    traffic = one.traffic
    return is_issued(calls, traffic) and traffic.kind in OF_LANES and calls.is_routed(traffic.tensors[0])


def _around(calls: Calls, one: Slice) -> tuple[Spec, Spec]:
    before, after = one.step.collective.before, one.step.collective.after
    return calls.rank.sharding(before), calls.rank.sharding(after)


def row_calls(calls: Calls, one: Moving, phase: str) -> Call:
    """The call of a start, a wait or a slice."""
    if isinstance(one, Slice):
        return _share(calls, one, phase)
    if one.traffic.tells is not None:
        return _counts(calls, one.traffic.tells, phase, starts=isinstance(one, Start))
    return _start(calls, one.traffic, phase) if isinstance(one, Start) else _wait(calls, one.traffic, phase)


def _share(calls: Calls, one: Slice, phase: str) -> Call:
    """Each rank of a group, which all have the same tokens, keeps the rows of its own experts; the router's choice is cut to what
    says which these are."""
    (before, after), name, exchange = _around(calls, one), one.step.tensor.name, calls.rank.exchange
    axes = after.axes_of("E")[len(before.axes_of("E")) :]
    place, parts = calls.rank.position(axes), calls.rank.mesh.size(axes)
    key, cut = calls.key(name, before), calls.key(name, after)
    assert exchange is not None, "a rank of several has an exchange"

    def share(routing: Rows) -> Share:
        return Share(exchange, axes, routing, place, parts)

    def rows(x: Tensor, routing: Rows) -> tuple[Share, Tensor]:
        found = share(routing)
        return found, found.cut(x)

    if name == calls.gates:
        return Call(share, (key,), (cut,), phase, alone=True)
    return Call(rows, (key, calls.rows(before)), (calls.rows(after), cut), phase, is_view=True, alone=True)


def _counts(calls: Calls, traffic: Traffic, phase: str, *, starts: bool) -> Call:
    """The number of rows for each expert is sent before the rows."""
    exchange = calls.rank.exchange
    before, after, name = ends_of(calls, traffic)
    rows, made, on_way = calls.rows(before), calls.rows(after), f"{MOVING} rows of {calls.key(name, after)}"
    axes, to_all, dtype = calls.rank.several(traffic.axes), traffic.kind is Kind.ALL_GATHER, calls.statistics
    ranks = calls.rank.mesh.size(axes)
    assert exchange is not None, "a rank of several has an exchange"

    def start(own: Rows) -> OnWay:
        return OnWay(*start_counts(own, exchange, axes, ranks, to_all=to_all, dtype=dtype))

    def wait(told: OnWay, own: Rows) -> Lane:
        told.pending.wait()
        return lane(own, exchange, axes, told.arriving, to_all=to_all)

    if starts:
        return Call(start, (rows,), (on_way,), phase, alone=True)
    return Call(wait, (on_way, rows), (made,), phase, alone=True)


def _goes_back(before: Spec, after: Spec, kind: Kind) -> bool:
    return kind in BACK or len(before.axes_of("E")) > len(after.axes_of("E"))


def _start(calls: Calls, traffic: Traffic, phase: str) -> Call:
    before, after, name = ends_of(calls, traffic)
    back = _goes_back(before, after, traffic.kind)
    key, rows = calls.key(name, before), calls.rows(before if back else after)

    def start(x: Tensor, way: Lane) -> OnWay:  # or a `Share`, of which rows only come back
        return OnWay(*(way.start_back(x) if back else way.start(x)))

    return Call(start, (key, rows), (f"{MOVING} {calls.key(name, after)}",), phase, alone=True)


def _wait(calls: Calls, traffic: Traffic, phase: str) -> Call:
    before, after, name = ends_of(calls, traffic)
    back = _goes_back(before, after, traffic.kind)
    rows = calls.rows(before if back else after)

    def wait(on_way: OnWay, x: Tensor, way: Lane) -> Tensor:
        on_way.pending.wait()
        return way.arrived_back(on_way.arriving) if back else way.arrived(on_way.arriving)

    reads = (f"{MOVING} {calls.key(name, after)}", calls.key(name, before), rows)
    return Call(wait, reads, (calls.key(name, after),), phase, alone=True)
