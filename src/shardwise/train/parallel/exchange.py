"""Collectives on flat arrays. Every one that the engine issues is issued here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwise.lowering.traffic import axis_group
from shardwise.sharding.spec import Axes
from shardwise.train.clock import Clock
from shardwise.train.waits import waits_for
from shardwise.train.world import World
from shardwise.units import format_bytes

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective of `num_bytes` on its way over `axes`. Waiting for it counts for the parallel axis that it goes over, or for
    control."""

    works: Sequence[Any]
    term: str
    clock: Clock
    kind: str
    axes: Axes
    num_bytes: int

    @property
    def is_done(self) -> bool:
        """Whether it is known to be done; a transport may not say before it is waited for (gloo does not, NCCL does)."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        """Until it is done. Raises `LostRankError` where it fails."""
        with (
            self.clock(self.term),
            waits_for(f"{self.kind} over {', '.join(self.axes)} ({format_bytes(self.num_bytes)})"),
        ):
            for work in self.works:
                work.wait()


class Exchange:
    """Collectives over axes of the mesh, in the background."""

    def __init__(self, world: World, clock: Clock) -> None:
        self.world, self.clock = world, clock

    def all_gather(self, whole: Tensor, part: Tensor, axes: Axes) -> Pending:
        """Parts [n] of all processes, one after the other, into `whole` [degree · n]."""
        work = dist.all_gather_single(whole, part, group=self.world.group(axes), async_op=True)
        return self._pending("AllGather", [work], [whole], axes)

    def reduce_scatter(self, part: Tensor, whole: Tensor, axes: Axes) -> Pending:
        """The sum of all processes' `whole` [degree · n], each process its `part` [n]."""
        work = dist.reduce_scatter_single(part, whole, group=self.world.group(axes), async_op=True)
        return self._pending("ReduceScatter", [work], [whole], axes)

    def all_reduce(self, values: Tensor, axes: Axes, reduction: str = "sum") -> Pending:
        """The sum, or the maximum, over all processes, in place."""
        work = dist.all_reduce(values, REDUCTIONS[reduction], group=self.world.group(axes), async_op=True)
        return self._pending("AllReduce", [work], [values], axes)

    def all_to_all(
        self, received: Tensor, sent: Tensor, axes: Axes, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> Pending:
        """The parts of `sent` each to its process; into `received` what comes from each. `rows` are those of each part of either;
        None: parts are even."""
        into, out_of = (None, None) if rows is None else (list(rows[0]), list(rows[1]))
        work = dist.all_to_all_single(received, sent, into, out_of, group=self.world.group(axes), async_op=True)
        return self._pending("AllToAll", [work], [sent], axes)

    def shift(self, received: Sequence[Tensor], sent: Sequence[Tensor], axes: Axes) -> Pending:
        """Tensors to the next process, the last one's to the first; those of the process before into `received`."""
        group, place, degree = self.world.group(axes), self.world.position(axes), self.world.mesh.size(axes)
        onward, back = (place + 1) % degree, (place - 1) % degree
        operations = [dist.P2POp(dist.isend, one, group=group, group_peer=onward) for one in sent]
        operations += [dist.P2POp(dist.irecv, one, group=group, group_peer=back) for one in received]
        return self._pending("Permute", dist.batch_isend_irecv(operations), sent, axes)

    def send(self, values: Tensor, peer: int, axes: Axes) -> Pending:
        """To the process at the place `peer` along the axes."""
        group = self.world.group(axes, onward=peer > self.world.position(axes))
        works = [dist.isend(values, group=group, group_dst=peer)]
        return self._pending("Send", works, [values], axes)

    def receive(self, values: Tensor, peer: int, axes: Axes) -> Pending:
        """Into `values` from the process at the place `peer` along the axes, in the order in which it sends."""
        group = self.world.group(axes, onward=peer < self.world.position(axes))
        works = [dist.irecv(values, group=group, group_src=peer)]
        return self._pending("Receive", works, [values], axes)

    def sum_now(self, values: Tensor, axes: Axes) -> Tensor:
        """Control traffic: a sum that is waited for, in place."""
        if axes:
            replace(self.all_reduce(values, axes), term="control").wait()
        return values

    def _pending(self, kind: str, works: Sequence[Any], payloads: Sequence[Tensor], axes: Axes) -> Pending:
        num_bytes = sum(one.numel() * one.element_size() for one in payloads)
        return Pending(works, axis_group(axes), self.clock, kind, axes, num_bytes)
