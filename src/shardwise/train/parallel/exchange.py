"""Collectives on flat arrays. Every one that the engine issues is issued here."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from shardwise.layout.realise import axis_group
from shardwise.sharding.spec import Axes
from shardwise.train.clock import Clock
from shardwise.train.world import World


@dataclass(frozen=True, slots=True)
class Pending:
    """A collective on its way. Waiting for it counts for the parallel axis that it goes over, or for control."""

    work: dist.Work
    term: str
    clock: Clock

    def wait(self) -> None:
        with self.clock(self.term):
            self.work.wait()


class Exchange:
    """Collectives over axes of the mesh, in the background."""

    def __init__(self, world: World, clock: Clock) -> None:
        self.world, self.clock = world, clock

    def all_gather(self, whole: Tensor, part: Tensor, axes: Axes) -> Pending:
        """Parts [n] of all processes, one after the other, into `whole` [degree · n]."""
        return self._pending(dist.all_gather_single(whole, part, group=self.world.group(axes), async_op=True), axes)

    def reduce_scatter(self, part: Tensor, whole: Tensor, axes: Axes) -> Pending:
        """The sum of all processes' `whole` [degree · n], each process its `part` [n]."""
        group = self.world.group(axes)
        return self._pending(dist.reduce_scatter_single(part, whole, group=group, async_op=True), axes)

    def all_reduce(self, values: Tensor, axes: Axes) -> Pending:
        """The sum over all processes, in place."""
        return self._pending(dist.all_reduce(values, group=self.world.group(axes), async_op=True), axes)

    def sum_now(self, values: Tensor, axes: Axes) -> Tensor:
        """Control traffic: a sum that is waited for, in place."""
        if axes:
            Pending(dist.all_reduce(values, group=self.world.group(axes), async_op=True), "control", self.clock).wait()
        return values

    def _pending(self, work: dist.Work, axes: Axes) -> Pending:
        return Pending(work, axis_group(axes), self.clock)
