"""Calls that send token rows to the ranks of their experts and back. Letters: R rows, n ranks of a group, E experts.

The rows of a rank are sorted by expert. The ranks first exchange how many rows go to each expert; then each sorts the
rows that it receives from n ranks by expert again. Where all ranks of a group have the same tokens, each keeps the rows
of its own experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwise.run.engine.calls import CallBuilder, KernelCall
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
from shardwise.sharding import Axes, CollectiveKind, Spec
from shardwise.step import LocalSlice, StartCollective, UnitCollective


@dataclass(frozen=True)
class DispatchedRows(ExpertRows):
    """Rows that a rank has received for its experts, and how they are sent and returned.

    `matrix` [n, E] counts the rows from each rank of the group for each of this rank's experts. `sent` counts the rows
    that this rank sends to each rank (AllToAll); None where all ranks get all rows (AllGather). `num_local_rows` counts all rows
    that this rank has to send.
    """

    collectives: CollectiveOps
    axes: Axes
    matrix: Tensor
    sent: list[int] | None
    num_local_rows: int

    @cached_property
    def counts(self) -> Tensor:  # type: ignore[override]
        """Number of rows of each of this rank's experts [E]."""
        return self.matrix.sum(dim=0)

    @cached_property
    def received(self) -> list[int]:
        """Number of rows from each rank."""
        from_all = self.num_local_rows if self.sent is not None else self.num_local_rows * len(self.matrix)
        return on_host(self.matrix.sum(dim=1), from_all)

    @property
    def num_rows(self) -> int:
        return sum(self.received)

    @property
    def max_received(self) -> int:
        """Number of rows to which an AllGather pads those of each rank."""
        return max(self.received)

    @cached_property
    def order(self) -> Tensor:
        """Index of each row (sorted by expert) among the received rows, which are in the order of the ranks [R]."""
        lengths = self.matrix.t().flatten()
        offsets = self.matrix.cumsum(dim=1) - self.matrix
        rows = self.matrix.sum(dim=1)
        starts = (
            torch.arange(len(rows), device=rows.device) * self.max_received
            if self.sent is None
            else rows.cumsum(0) - rows
        )
        first_rows = (starts[:, None] + offsets).t().flatten()
        shifts = (first_rows - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths, output_size=self.num_rows)
        return shifts + torch.arange(self.num_rows, device=shifts.device)

    @cached_property
    def inverse_order(self) -> Tensor:
        """Index of each received row after sorting by expert: the inverse of `order`."""
        return self.order.argsort()

    def start(self, x: Tensor) -> tuple[CollectiveHandle, Tensor]:
        """Start to send rows [R, D] to the ranks of their experts, or to all ranks of the group."""
        if self.sent is None:
            padded = x.new_zeros(self.max_received, x.shape[1])
            padded[: len(x)] = x
            gathered = x.new_empty(len(self.received) * self.max_received, x.shape[1])
            return self.collectives.all_gather(gathered, padded, self.axes), gathered
        arriving = x.new_empty(self.num_rows, x.shape[1])
        return self.collectives.all_to_all(arriving, x.contiguous(), self.axes, (self.received, self.sent)), arriving

    def sort_received(self, arriving: Tensor) -> Tensor:
        """Sort received rows by expert."""
        return arriving.index_select(0, self.order)

    def start_return(self, x: Tensor) -> tuple[CollectiveHandle, Tensor]:
        """Start to send rows back to their ranks; where all ranks had all rows, each gets the sum of its own."""
        if self.sent is None:
            padded = x.new_zeros(len(self.received) * self.max_received, x.shape[1]).index_copy_(0, self.order, x)
            part = x.new_empty(self.max_received, x.shape[1])
            return self.collectives.reduce_scatter(part, padded, self.axes), part
        arriving = x.new_empty(self.num_local_rows, x.shape[1])
        rows = x.index_select(0, self.inverse_order)
        return self.collectives.all_to_all(arriving, rows, self.axes, (self.sent, self.received)), arriving

    def sort_returned(self, arriving: Tensor) -> Tensor:
        """Return this rank's rows in the order in which they were sent."""
        return arriving[: self.num_local_rows]


@dataclass(frozen=True)
class LocalExpertRows(ExpertRows):
    """Rows of this rank's experts, where all ranks of a group have the same tokens.

    The experts are split into `parts`, one for each rank of the group; this rank is at `place`.
    """

    collectives: CollectiveOps
    axes: Axes
    all_rows: ExpertRows
    place: int
    parts: int

    @cached_property
    def counts(self) -> Tensor:  # type: ignore[override]
        """Number of rows of each of this rank's experts [E]."""
        return self.all_rows.counts.view(self.parts, -1)[self.place]

    @cached_property
    def lengths(self) -> list[int]:
        """Number of rows of each part."""
        width = len(self.all_rows.counts) // self.parts
        return [sum(self.all_rows.sizes[part * width :][:width]) for part in range(self.parts)]

    @property
    def num_rows(self) -> int:
        return self.lengths[self.place]

    def local_part(self, x: Tensor) -> Tensor:
        """Return this rank's rows, a view of all rows."""
        return x.narrow(0, sum(self.lengths[: self.place]), self.num_rows)

    def pad_to_all_experts(self, x: Tensor) -> Tensor:
        """Return all rows, with zeros for those of other ranks."""
        full = x.new_zeros(self.all_rows.num_rows, x.shape[1])
        self.local_part(full).copy_(x)
        return full

    def start_return(self, x: Tensor) -> tuple[CollectiveHandle, Tensor]:
        """Start to send rows to all ranks of the group, padded to the longest part."""
        longest = max(self.lengths)
        padded = x.new_zeros(longest, x.shape[1])
        padded[: len(x)] = x
        gathered = x.new_empty(self.parts * longest, x.shape[1])
        return self.collectives.all_gather(gathered, padded, self.axes), gathered

    def sort_returned(self, arriving: Tensor) -> Tensor:
        """Return all rows, without padding."""
        longest = max(self.lengths)
        return torch.cat([arriving[part * longest :][:length] for part, length in enumerate(self.lengths)])


def dispatch_dx(drows: Tensor, routing: experts.TokenRouting | LocalExpertRows) -> Tensor:
    """Add up, for each token, the gradients of the rows that this rank has, in one order on any device."""
    if isinstance(routing, LocalExpertRows):
        assert isinstance(routing.all_rows, experts.TokenRouting), "what is shared is a router's choice"
        return dispatch_dx(routing.pad_to_all_experts(drows), routing.all_rows)
    return experts.dispatch_dx(drows, routing)


def start_counts(
    rows: ExpertRows, collectives: CollectiveOps, axes: Axes, num_ranks: int, *, to_all: bool, dtype: torch.dtype
) -> tuple[CollectiveHandle, Tensor]:
    """Start to send the ranks of a group the number of rows for each expert [n, E of a rank]."""
    counts = rows.counts.to(dtype)
    if to_all:
        matrix = counts.new_empty(num_ranks * len(counts))
        return collectives.all_gather(matrix, counts, axes), matrix.view(num_ranks, -1)
    matrix = torch.empty_like(counts)
    return collectives.all_to_all(matrix, counts, axes), matrix.view(num_ranks, -1)


def dispatched_rows(
    rows: ExpertRows, collectives: CollectiveOps, axes: Axes, matrix: Tensor, *, to_all: bool
) -> DispatchedRows:
    """Build the received rows' description from the counts that the ranks of a group have sent."""
    sent = None if to_all else torch.tensor(rows.sizes).view(len(matrix), -1).sum(dim=1).tolist()
    return DispatchedRows(collectives, axes, matrix.to(torch.int64), sent, rows.num_rows)


RETURNING_KINDS = {CollectiveKind.REDUCE_SCATTER}  # kinds that bring rows back whatever they do to the experts' dim
ROW_KINDS = (CollectiveKind.ALL_TO_ALL, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def moves_expert_rows(instruction: CollectiveInstruction, builder: CallBuilder) -> bool:
    """Return whether an instruction moves expert rows or slices them, and so needs to know whose they are."""
    if isinstance(instruction, LocalSlice):
        before, after = _specs_around(builder, instruction)
        return before != after and (
            builder.is_routed(instruction.step.tensor.name) or instruction.step.tensor.name == builder.gates
        )
    traffic = instruction.collective
    return is_issued_here(builder, traffic) and traffic.kind in ROW_KINDS and builder.is_routed(traffic.tensors[0])


def _specs_around(builder: CallBuilder, local_slice: LocalSlice) -> tuple[Spec, Spec]:
    before, after = local_slice.step.collective.before, local_slice.step.collective.after
    return builder.rank.sharding(before), builder.rank.sharding(after)


def expert_row_call(builder: CallBuilder, instruction: CollectiveInstruction, phase: str) -> KernelCall:
    """Return the call of a start, a wait or a slice of expert rows."""
    if isinstance(instruction, LocalSlice):
        return _local_rows_call(builder, instruction, phase)
    if instruction.collective.counts_rows_of is not None:
        return _counts_call(
            builder, instruction.collective.counts_rows_of, phase, starts=isinstance(instruction, StartCollective)
        )
    return (
        _start_call(builder, instruction.collective, phase)
        if isinstance(instruction, StartCollective)
        else _wait_call(builder, instruction.collective, phase)
    )


def _local_rows_call(builder: CallBuilder, local_slice: LocalSlice, phase: str) -> KernelCall:
    """Return the call by which ranks with the same tokens keep the rows of their own experts, or describe them."""
    before, after = _specs_around(builder, local_slice)
    name = local_slice.step.tensor.name
    collectives = builder.rank.collectives
    axes = after.axes_of("E")[len(before.axes_of("E")) :]
    position, parts = builder.rank.position(axes), builder.rank.mesh.size(axes)
    key, cut = builder.tensor_key(name, before), builder.tensor_key(name, after)

    def share(routing: ExpertRows) -> LocalExpertRows:
        return LocalExpertRows(collectives, axes, routing, position, parts)

    def rows(x: Tensor, routing: ExpertRows) -> tuple[LocalExpertRows, Tensor]:
        local_rows = share(routing)
        return local_rows, local_rows.local_part(x)

    if name == builder.gates:
        return KernelCall(share, (key,), (cut,), phase)
    return KernelCall(rows, (key, builder.rows(before)), (builder.rows(after), cut), phase, is_view=True)


def _counts_call(builder: CallBuilder, traffic: UnitCollective, phase: str, *, starts: bool) -> KernelCall:
    """Return the call that starts, or waits for, the exchange of row counts, which comes before the rows."""
    collectives = builder.rank.collectives
    before, after, name = endpoints(builder, traffic)
    routing_key = builder.rows(before)
    received_key = builder.rows(after)
    arriving_key = f"{MOVING_PREFIX} rows of {builder.tensor_key(name, after)}"
    axes = builder.rank.nontrivial_axes(traffic.axes)
    to_all = traffic.kind is CollectiveKind.ALL_GATHER
    dtype = builder.statistics
    ranks = builder.rank.mesh.size(axes)

    def start(routing: ExpertRows) -> ArrivingTensor:
        return ArrivingTensor(*start_counts(routing, collectives, axes, ranks, to_all=to_all, dtype=dtype))

    def wait(transfer: ArrivingTensor, routing: ExpertRows) -> DispatchedRows:
        transfer.pending.wait()
        return dispatched_rows(routing, collectives, axes, transfer.arriving, to_all=to_all)

    if starts:
        return KernelCall(start, (routing_key,), (arriving_key,), phase)
    return KernelCall(wait, (arriving_key, routing_key), (received_key,), phase)


def _returns_rows(before: Spec, after: Spec, kind: CollectiveKind) -> bool:
    return kind in RETURNING_KINDS or len(before.axes_of("E")) > len(after.axes_of("E"))


def _start_call(builder: CallBuilder, traffic: UnitCollective, phase: str) -> KernelCall:
    before, after, name = endpoints(builder, traffic)
    returns = _returns_rows(before, after, traffic.kind)
    key, routing_key = builder.tensor_key(name, before), builder.rows(before if returns else after)

    def start(
        x: Tensor, dispatched: DispatchedRows
    ) -> ArrivingTensor:  # or a `LocalExpertRows`, of which rows only come back
        return ArrivingTensor(*(dispatched.start_return(x) if returns else dispatched.start(x)))

    return KernelCall(start, (key, routing_key), (f"{MOVING_PREFIX} {builder.tensor_key(name, after)}",), phase)


def _wait_call(builder: CallBuilder, traffic: UnitCollective, phase: str) -> KernelCall:
    before, after, name = endpoints(builder, traffic)
    returns = _returns_rows(before, after, traffic.kind)
    routing_key = builder.rows(before if returns else after)

    def wait(transfer: ArrivingTensor, x: Tensor, dispatched: DispatchedRows) -> Tensor:
        transfer.pending.wait()
        return dispatched.sort_returned(transfer.arriving) if returns else dispatched.sort_received(transfer.arriving)

    reads = (f"{MOVING_PREFIX} {builder.tensor_key(name, after)}", builder.tensor_key(name, before), routing_key)
    return KernelCall(wait, reads, (builder.tensor_key(name, after),), phase)
