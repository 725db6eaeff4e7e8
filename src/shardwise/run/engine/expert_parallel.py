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

from shardwise.run.engine.call_builder import CallBuilder, KernelCall
from shardwise.run.engine.collective_calls import (
    MOVING_PREFIX,
    ArrivingTensor,
    CollectiveInstruction,
    endpoints,
    is_issued_here,
)
from shardwise.run.engine.rank_coordinates import CollectiveHandle, CollectiveOps
from shardwise.run.kernels import experts
from shardwise.run.kernels.device_dispatch import on_host
from shardwise.run.kernels.experts import ExpertRows
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.instructions import LocalSlice, StartCollective, UnitCollective


@dataclass(frozen=True)
class DispatchedRows(ExpertRows):
    """A rank's rows of the tokens of a group, and how they come and go.

    `matrix` [n, E] are the rows that come from each rank of the group for each of this rank's experts; `sent` the rows that this
    rank sends to each, where each gets its own (AllToAll), and None where all get all (AllGather); `own` all rows that it has to
    send.
    """

    exchange: CollectiveOps
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
    def max_received(self) -> int:
        """Of an AllGather the rows that each rank's are padded to."""
        return max(self.received)

    @cached_property
    def order(self) -> Tensor:
        """Of each row where it is among those that came, which are in the order of the ranks [R]."""
        lengths = self.matrix.t().flatten()
        within = self.matrix.cumsum(dim=1) - self.matrix
        rows = self.matrix.sum(dim=1)
        starts = (
            torch.arange(len(rows), device=rows.device) * self.max_received
            if self.sent is None
            else rows.cumsum(0) - rows
        )
        begins = (starts[:, None] + within).t().flatten()
        shifts = (begins - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths, output_size=self.num_rows)
        return shifts + torch.arange(self.num_rows, device=shifts.device)

    @cached_property
    def places(self) -> Tensor:
        """The inverse: of each row that came where it is now."""
        return self.order.argsort()

    def start(self, x: Tensor) -> tuple[CollectiveHandle, Tensor]:
        """Send rows [R, D] to where their experts are, or to all of the group."""
        if self.sent is None:
            padded = x.new_zeros(self.max_received, x.shape[1])
            padded[: len(x)] = x
            whole = x.new_empty(len(self.received) * self.max_received, x.shape[1])
            return self.exchange.all_gather(whole, padded, self.axes), whole
        arriving = x.new_empty(self.num_rows, x.shape[1])
        return self.exchange.all_to_all(arriving, x.contiguous(), self.axes, (self.received, self.sent)), arriving

    def arrived(self, arriving: Tensor) -> Tensor:
        """What came in the order of the experts."""
        return arriving.index_select(0, self.order)

    def start_return(self, x: Tensor) -> tuple[CollectiveHandle, Tensor]:
        """Send rows back to where they came from; where all got all, each gets the sum of its own."""
        if self.sent is None:
            padded = x.new_zeros(len(self.received) * self.max_received, x.shape[1]).index_copy_(0, self.order, x)
            part = x.new_empty(self.max_received, x.shape[1])
            return self.exchange.reduce_scatter(part, padded, self.axes), part
        arriving = x.new_empty(self.own, x.shape[1])
        rows = x.index_select(0, self.places)
        return self.exchange.all_to_all(arriving, rows, self.axes, (self.sent, self.received)), arriving

    def sort_returned(self, arriving: Tensor) -> Tensor:
        """This rank's own, as they were."""
        return arriving[: self.own]


@dataclass(frozen=True)
class LocalExpertRows(ExpertRows):
    """Of the rows of tokens that all ranks of a group have those of a part of the experts, one for each rank; this one is at
    `place` of so many `parts`."""

    exchange: CollectiveOps
    axes: Axes
    whole: ExpertRows
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

    def start_return(self, x: Tensor) -> tuple[CollectiveHandle, Tensor]:
        """Send rows to all of the group, padded to the longest part."""
        longest = max(self.lengths)
        padded = x.new_zeros(longest, x.shape[1])
        padded[: len(x)] = x
        whole = x.new_empty(self.parts * longest, x.shape[1])
        return self.exchange.all_gather(whole, padded, self.axes), whole

    def sort_returned(self, arriving: Tensor) -> Tensor:
        """All rows."""
        longest = max(self.lengths)
        return torch.cat([arriving[place * longest :][:length] for place, length in enumerate(self.lengths)])


def dispatch_dx(drows: Tensor, routing: experts.Routing | LocalExpertRows) -> Tensor:
    """Add up the gradients of the rows of each token, of those that this rank has, in one order on any device."""
    if isinstance(routing, LocalExpertRows):
        assert isinstance(routing.whole, experts.Routing), "what is shared is a router's choice"
        return dispatch_dx(routing.put(drows), routing.whole)
    return experts.dispatch_dx(drows, routing)


def start_counts(
    rows: ExpertRows, exchange: CollectiveOps, axes: Axes, num_ranks: int, *, to_all: bool, dtype: torch.dtype
) -> tuple[CollectiveHandle, Tensor]:
    """Tell the ranks of a group how many rows go to each expert [n, E of a rank]."""
    counts = rows.counts.to(dtype)
    if to_all:
        matrix = counts.new_empty(num_ranks * len(counts))
        return exchange.all_gather(matrix, counts, axes), matrix.view(num_ranks, -1)
    matrix = torch.empty_like(counts)
    return exchange.all_to_all(matrix, counts, axes), matrix.view(num_ranks, -1)


def dispatched_rows(
    rows: ExpertRows, exchange: CollectiveOps, axes: Axes, matrix: Tensor, *, to_all: bool
) -> DispatchedRows:
    """From what the ranks of a group have told."""
    sent = None if to_all else torch.tensor(rows.sizes).view(len(matrix), -1).sum(dim=1).tolist()
    return DispatchedRows(exchange, axes, matrix.to(torch.int64), sent, rows.num_rows)


RETURNING_KINDS = {CollectiveKind.REDUCE_SCATTER}  # kinds that bring rows back whatever they do to the experts' dim
ROW_KINDS = (CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def moves_expert_rows(one: CollectiveInstruction, calls: CallBuilder) -> bool:
    """Whether an instruction moves rows, or cuts them in place, and has to know whose they are."""
    if isinstance(one, LocalSlice):
        before, after = _specs_around(calls, one)
        return before != after and (calls.is_routed(one.step.tensor.name) or one.step.tensor.name == calls.gates)
    traffic = one.collective
    return is_issued_here(calls, traffic) and traffic.kind in ROW_KINDS and calls.is_routed(traffic.tensors[0])


def _specs_around(calls: CallBuilder, one: LocalSlice) -> tuple[Spec, Spec]:
    before, after = one.step.collective.before, one.step.collective.after
    return calls.rank.sharding(before), calls.rank.sharding(after)


def expert_row_call(calls: CallBuilder, one: CollectiveInstruction, phase: str) -> KernelCall:
    """The call of a start, a wait or a slice."""
    if isinstance(one, LocalSlice):
        return _local_rows_call(calls, one, phase)
    if one.collective.counts_rows_of is not None:
        return _counts_call(calls, one.collective.counts_rows_of, phase, starts=isinstance(one, StartCollective))
    return (
        _start_call(calls, one.collective, phase)
        if isinstance(one, StartCollective)
        else _wait_call(calls, one.collective, phase)
    )


def _local_rows_call(calls: CallBuilder, one: LocalSlice, phase: str) -> KernelCall:
    """Each rank of a group, which all have the same tokens, keeps the rows of its own experts; the router's choice is cut to what
    says which these are."""
    (before, after), name, exchange = _specs_around(calls, one), one.step.tensor.name, calls.rank.exchange
    axes = after.axes_of("E")[len(before.axes_of("E")) :]
    place, parts = calls.rank.position(axes), calls.rank.mesh.size(axes)
    key, cut = calls.key(name, before), calls.key(name, after)
    assert exchange is not None, "a rank of several has an exchange"

    def share(routing: ExpertRows) -> LocalExpertRows:
        return LocalExpertRows(exchange, axes, routing, place, parts)

    def rows(x: Tensor, routing: ExpertRows) -> tuple[LocalExpertRows, Tensor]:
        found = share(routing)
        return found, found.cut(x)

    if name == calls.gates:
        return KernelCall(share, (key,), (cut,), phase, never_compiled=True)
    return KernelCall(
        rows, (key, calls.rows(before)), (calls.rows(after), cut), phase, is_view=True, never_compiled=True
    )


def _counts_call(calls: CallBuilder, traffic: UnitCollective, phase: str, *, starts: bool) -> KernelCall:
    """The number of rows for each expert is sent before the rows."""
    exchange = calls.rank.exchange
    before, after, name = endpoints(calls, traffic)
    rows, made, on_way = calls.rows(before), calls.rows(after), f"{MOVING_PREFIX} rows of {calls.key(name, after)}"
    axes, to_all, dtype = (
        calls.rank.nontrivial_axes(traffic.axes),
        traffic.kind is CollectiveKind.ALL_GATHER,
        calls.statistics,
    )
    ranks = calls.rank.mesh.size(axes)
    assert exchange is not None, "a rank of several has an exchange"

    def start(own: ExpertRows) -> ArrivingTensor:
        return ArrivingTensor(*start_counts(own, exchange, axes, ranks, to_all=to_all, dtype=dtype))

    def wait(told: ArrivingTensor, own: ExpertRows) -> DispatchedRows:
        told.pending.wait()
        return dispatched_rows(own, exchange, axes, told.arriving, to_all=to_all)

    if starts:
        return KernelCall(start, (rows,), (on_way,), phase, never_compiled=True)
    return KernelCall(wait, (on_way, rows), (made,), phase, never_compiled=True)


def _returns_rows(before: Spec, after: Spec, kind: CollectiveKind) -> bool:
    return kind in RETURNING_KINDS or len(before.axes_of("E")) > len(after.axes_of("E"))


def _start_call(calls: CallBuilder, traffic: UnitCollective, phase: str) -> KernelCall:
    before, after, name = endpoints(calls, traffic)
    back = _returns_rows(before, after, traffic.kind)
    key, rows = calls.key(name, before), calls.rows(before if back else after)

    def start(x: Tensor, way: DispatchedRows) -> ArrivingTensor:  # or a `LocalExpertRows`, of which rows only come back
        return ArrivingTensor(*(way.start_return(x) if back else way.start(x)))

    return KernelCall(start, (key, rows), (f"{MOVING_PREFIX} {calls.key(name, after)}",), phase, never_compiled=True)


def _wait_call(calls: CallBuilder, traffic: UnitCollective, phase: str) -> KernelCall:
    before, after, name = endpoints(calls, traffic)
    back = _returns_rows(before, after, traffic.kind)
    rows = calls.rows(before if back else after)

    def wait(on_way: ArrivingTensor, x: Tensor, way: DispatchedRows) -> Tensor:
        on_way.pending.wait()
        return way.sort_returned(on_way.arriving) if back else way.arrived(on_way.arriving)

    reads = (f"{MOVING_PREFIX} {calls.key(name, after)}", calls.key(name, before), rows)
    return KernelCall(wait, reads, (calls.key(name, after),), phase, never_compiled=True)
