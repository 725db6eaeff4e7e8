"""Collectives on flat arrays. Every one that the engine issues is issued here."""

from __future__ import annotations

from dataclasses import dataclass, replace

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

    work: dist.Work
    term: str
    clock: Clock
    kind: str
    axes: Axes
    num_bytes: int

    def wait(self) -> None:
        """Until it is done. Raises `LostRankError` where it fails."""
        with (
            self.clock(self.term),
            waits_for(f"{self.kind} over {', '.join(self.axes)} ({format_bytes(self.num_bytes)})"),
        ):
            self.work.wait()


class Exchange:
    """Collectives over axes of the mesh, in the background."""

    def __init__(self, world: World, clock: Clock) -> None:
        self.world, self.clock = world, clock

    def all_gather(self, whole: Tensor, part: Tensor, axes: Axes) -> Pending:
        """Parts [n] of all processes, one after the other, into `whole` [degree · n]."""
        work = dist.all_gather_single(whole, part, group=self.world.group(axes), async_op=True)
        return self._pending("AllGather", work, whole, axes)

    def reduce_scatter(self, part: Tensor, whole: Tensor, axes: Axes) -> Pending:
        """The sum of all processes' `whole` [degree · n], each process its `part` [n]."""
        work = dist.reduce_scatter_single(part, whole, group=self.world.group(axes), async_op=True)
        return self._pending("ReduceScatter", work, whole, axes)

    def all_reduce(self, values: Tensor, axes: Axes, reduction: str = "sum") -> Pending:
        """The sum, or the maximum, over all processes, in place."""
        work = dist.all_reduce(values, REDUCTIONS[reduction], group=self.world.group(axes), async_op=True)
        return self._pending("AllReduce", work, values, axes)

    def all_to_all(self, received: Tensor, sent: Tensor, axes: Axes) -> Pending:
        """The parts [degree, ...] of `sent` each to its process; into `received` what comes from each."""
        work = dist.all_to_all_single(received, sent, group=self.world.group(axes), async_op=True)
        return self._pending("AllToAll", work, sent, axes)

    def sum_now(self, values: Tensor, axes: Axes) -> Tensor:
        """Control traffic: a sum that is waited for, in place."""
        if axes:
            replace(self.all_reduce(values, axes), term="control").wait()
        return values

    def _pending(self, kind: str, work: dist.Work, payload: Tensor, axes: Axes) -> Pending:
        num_bytes = payload.numel() * payload.element_size()
        return Pending(work, axis_group(axes), self.clock, kind, axes, num_bytes)
