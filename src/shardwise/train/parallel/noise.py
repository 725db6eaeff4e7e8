"""The norm of the gradient of each micro-batch of each replica, for the gradient noise scale (`batch.noise`).

The gradient is the one that the backward pass has just made, before replicas are added up. Where ranks have parts of the same
sequences' gradient (`Sync.within`: context parallelism, experts, norms under sequence parallelism) these are summed first, since
squares of parts do not add up; all else is one sum of squares, to which each rank adds its own part of the parameters.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from shardwise.lowering.instance import Instance
from shardwise.lowering.noise import divided
from shardwise.lowering.traffic import OPPOSITE
from shardwise.sharding.spec import Axes
from shardwise.train.formats import DTYPES
from shardwise.train.parallel.exchange import Exchange
from shardwise.train.parallel.flat import FlatGroup
from shardwise.train.parallel.gradients import GroupGradients
from shardwise.train.parallel.update import sum_of_squares


class SmallNorms:
    """Adds up the squared norms of a step's micro-batches. Without `measures` it does nothing."""

    def __init__(self, instance: Instance, exchange: Exchange) -> None:
        self.exchange, self.mesh = exchange, instance.mesh
        self.axes, self.replicas = instance.noise_axes, instance.family.replica_axes
        self.divided = divided(instance) if instance.policy.noise_scale else frozenset[str]()
        self.control = DTYPES[instance.control_dtype]
        self.measures, self.micro_batch = False, 0
        self._squares: list[Tensor] = []
        self._parts: dict[FlatGroup, dict[int, Tensor]] = {}

    def begin_step(self, *, measures: bool) -> None:
        """A step begins in which norms are taken, or not."""
        self.measures = measures
        self._squares, self._parts = [], {}

    def take(self, one: GroupGradients) -> None:
        """A group's gradients of the micro-batch are there, or the part of them that one pass gives."""
        if not self.measures:
            return
        flat, within = one.flat, one.flat.sync.within(self.replicas)
        whole = self._summed(flat, one.array, within) if within else one.array
        if self.divided.isdisjoint(one.members):
            self._square(flat, whole)
            return
        parts = self._parts.setdefault(flat, {})
        earlier = parts.get(self.micro_batch)
        parts[self.micro_batch] = whole.clone() if earlier is None else earlier.add_(whole)

    def end_step(self) -> Tensor | None:
        """The sum over all micro-batches of all replicas, a scalar, the same on every rank; None where none was taken."""
        if not self.measures:
            return None
        for flat, parts in self._parts.items():
            for _, values in sorted(parts.items()):
                if flat.group.shared:
                    self._square(flat, self._summed(flat, values, OPPOSITE), num_ends=2)
                else:
                    self._square(flat, values)
        total = torch.stack(self._squares).sum().to(self.control)
        self._squares, self._parts = [], {}
        return self.exchange.sum_now(total, self.axes)

    def _summed(self, flat: FlatGroup, values: Tensor, axes: Axes) -> Tensor:
        """The sum over ranks that have parts of the same gradient."""
        found = values.to(flat.formats.reduced, copy=True)
        self.exchange.all_reduce(found, axes, carries=flat.gradients_carried).wait()
        return found

    def _square(self, flat: FlatGroup, values: Tensor, num_ends: int = 1) -> None:
        """Add the squares of a gradient that so many ends of the pipeline have alike."""
        for split, rows in flat.used_alike():
            self._squares.append(sum_of_squares(values[rows]) / (num_ends * self._copies(split)))

    def _copies(self, split: Collection[str]) -> int:
        """Of the ranks that add up squares, those that have the same gradient of a parameter split over some axes."""
        apart = {"pp", *self.replicas, *split}
        return self.mesh.size([axis for axis in self.axes if axis not in apart])
