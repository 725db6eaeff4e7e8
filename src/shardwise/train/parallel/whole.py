"""The update of a group's matrices by an optimizer that takes them whole, such as Muon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.torch.functions import at_least_fp32
from shardwise.lowering.groups import Member
from shardwise.optimizer.optimizer import GRADIENT, MASTER, Optimizer, values_of
from shardwise.train.box import Box
from shardwise.train.parallel.exchange import Exchange
from shardwise.train.parallel.flat import FlatGroup, Interval


class WholeUpdate:
    """What makes of this process's part of the gradients the step of its part of the weights, and the state for that.

    What is elementwise is done on the part. What the function of whole matrices reads is gathered: over ZeRO's axes as one flat
    array, over those of tensor parallelism matrix by matrix. Each process works out the matrices that it has a part of.
    """

    def __init__(
        self, group: FlatGroup, slots: Sequence[Interval], exchange: Exchange, optimizer: Optimizer,
        fields: Mapping[str, float],
    ) -> None:  # fmt: skip
        self.group, self.exchange, self.optimizer, self.fields = group, exchange, optimizer, fields
        assert optimizer.whole is not None
        self.function, (self.read,) = optimizer.whole, optimizer.updates[optimizer.whole].reads
        formats = group.formats
        dtypes = {
            n: formats.squares if update.of_squares else formats.moments for n, update in optimizer.moments.items()
        }
        self.moments = {one: {name: group.zeros(one.size, dtype) for name, dtype in dtypes.items()} for one in slots}
        self.steps = 0
        # every other process of the group gathers as often, whichever parameters it has a part of
        self.members = [member for member in group.group.members if member.parameter.matrix]

    def step(self, gradients: Tensor, learning_rate: float) -> None:
        """Update the weights and the moments from the gradients [shard]."""
        self.steps += 1
        values = values_of(self.fields, learning_rate=learning_rate, step=self.steps)
        direction = self.group.zeros(self.group.group.shard_size, self.group.formats.activations)
        for one, moments in self.moments.items():
            rows = slice(one.start, one.start + one.size)
            direction[rows] = self._before(values, self.group.state[rows], gradients[rows], moments)
        whole = self._gathered(direction)
        for member in self.members:
            matrices = self._matrices(whole, member)
            for one in (one for one in self.moments if one.member is member):
                self._after(values, one, matrices)

    def _before(self, values: Any, weight: Tensor, gradient: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        """The moments after the step, in place, and what the function of whole matrices reads."""
        fine = at_least_fp32(weight.dtype)
        found = {name: one.to(fine) for name, one in {MASTER: weight, GRADIENT: gradient, **moments}.items()}
        for name in self.optimizer.rounds[0]:
            update = self.optimizer.updates[name]
            found[f"{name}'"] = update.formula(values, *(found[read] for read in update.reads))
        for name, moment in moments.items():
            moment.copy_(found[f"{name}'"])
        return found[self.read]

    def _gathered(self, direction: Tensor) -> Tensor:
        """The parts [shard] of all processes along ZeRO's axes [padded]."""
        axes = self.group.sync.whole_gather
        if not axes:
            return direction
        whole = self.group.zeros(self.group.group.padded_size, direction.dtype)
        self.exchange.all_gather(whole, direction, axes).wait()
        return whole

    def _matrices(self, whole: Tensor, member: Member) -> Tensor:
        """A parameter's matrices, of a stack this process's, with all their rows and columns, in the dims of the parameter."""
        found = self.group.view(whole, member)
        for place, axes in enumerate(self._split(member)):
            if axes:
                parts = found.new_empty((self.group.world.mesh.size(axes), *found.shape))
                self.exchange.all_gather(parts.view(-1), found.reshape(-1), axes).wait()
                found = torch.cat(parts.unbind(), dim=place)
        return found

    def _split(self, member: Member) -> Iterator[tuple[str, ...]]:
        """The axes of several processes that split the rows and columns, dim by dim; none of a stack's."""
        use, matrix = member.parameter.use, member.parameter.matrix
        assert matrix is not None
        for dim, axes in zip(use.dims, use.axes, strict=True):
            several = tuple(axis for axis in axes if self.group.world.mesh.size(axis) > 1)
            yield () if dim in matrix.stack else several

    def _after(self, values: Any, one: Interval, matrices: Tensor) -> None:
        """Update this process's part of a parameter."""
        matrix = one.member.parameter.matrix
        assert matrix is not None
        stack = matrices.shape[: len(matrix.stack)]
        rows = matrices.shape[len(stack) : len(stack) + len(matrix.rows)].numel()
        if matrices.device.type == "cpu":  # PyTorch's products of 16 bits take 60 times as long where a CPU has none
            matrices = matrices.to(at_least_fp32(matrices.dtype))
        made = self.optimizer.updates[self.function].formula(values, matrices.reshape(*stack, rows, -1))
        window = Box((*(0 for _ in stack), *one.window.offsets[len(stack) :]), one.window.lengths)
        part = made.reshape(matrices.shape)[window.slices].reshape(-1)[one.offset : one.offset + one.size]
        weight = self.group.state[one.start : one.start + one.size]
        fine = at_least_fp32(weight.dtype)
        found = {MASTER: weight.to(fine), f"{self.function}'": part.to(fine)}
        update = self.optimizer.updates[MASTER]
        weight.copy_(update.formula(values, *(found[read] for read in update.reads)))
