"""The update of a group's matrices by an optimizer that takes them whole, such as Muon or Shampoo."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.model.optimizers.definition import GRADIENT, MASTER, Granularity, Optimizer, formula_values
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.parallel.collectives import MeshCollectives
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, ParameterShard
from shardwise.step.parameters import GroupMember
from shardwise.values.boxes import Box


class WholeMatrixUpdate:
    """What makes of this process's part of the gradients the step of its part of the weights, and the state for that.

    What is elementwise is done on the part. What functions of whole matrices read is gathered: over ZeRO's axes as one flat
    array, over those of tensor parallelism matrix by matrix. Each process works out the matrices that it has a part of. The
    `squares`, which have numbers for two rows or columns, every process has of every matrix that it uses, and updates alike.
    """

    def __init__(
        self, group: FlatParameterGroup, slots: Sequence[ParameterShard], exchange: MeshCollectives, optimizer: Optimizer,
        fields: Mapping[str, float],
    ) -> None:  # fmt: skip
        self.group, self.exchange, self.optimizer, self.fields = group, exchange, optimizer, fields
        (self.read,) = optimizer.gathered_tensors
        self.before, self.after = optimizer.rounds
        formats = group.formats
        dtypes = {
            n: formats.squares if update.is_second_moment else formats.moments
            for n, update in optimizer.moments.items()
        }
        of_elements = {
            name: dtype for name, dtype in dtypes.items() if optimizer.granularity(name) is Granularity.ELEMENT
        }
        self.moments = {
            one: {name: group.zeros(one.size, dtype) for name, dtype in of_elements.items()} for one in slots
        }
        self.steps = 0
        # every other process of the group gathers as often, whichever parameters it has a part of
        self.members = [member for member in group.group.members if member.parameter.matrix]
        self.squares = {
            member: {name: self._square(member, name) for name in dtypes if name not in of_elements}
            for member in self.members
        }

    def step(self, gradients: Tensor, learning_rate: float) -> None:
        """Update the weights and the moments from the gradients [shard]."""
        self.steps += 1
        values = formula_values(self.fields, learning_rate=learning_rate, step=self.steps)
        direction = self.group.zeros(self.group.group.shard_size, self.group.formats.activations)
        for one, moments in self.moments.items():
            rows = slice(one.start, one.start + one.size)
            direction[rows] = self._update_direction(values, self.group.state[rows], gradients[rows], moments)
        whole = self._gathered(direction)
        for member in self.members:
            matrices = self._matrices(whole, member)
            own = [one for one in self.moments if one.member is member]
            made = self._functions(values, member, matrices, needed=bool(own))
            for one in own:
                self._apply_whole(values, one, made)

    def _update_direction(self, values: Any, weight: Tensor, gradient: Tensor, moments: Mapping[str, Tensor]) -> Tensor:
        """The moments after the step, in place, and what the function of whole matrices reads."""
        fine = at_least_fp32(weight.dtype)
        found = {name: one.to(fine) for name, one in {MASTER: weight, GRADIENT: gradient, **moments}.items()}
        self._elementwise(values, self.before, found, moments)
        return found[self.read]

    def _elementwise(
        self, values: Any, names: Iterable[str], found: dict[str, Tensor], kept: Mapping[str, Tensor]
    ) -> None:
        """Make the elementwise ones of some updates of what is `found`; those that are `kept` are put in place."""
        for name in names:
            update = self.optimizer.updates[name]
            if not update.takes_whole_matrix:
                found[f"{name}'"] = update.formula(values, *(found[read] for read in update.reads))
                if name in kept:
                    kept[name].copy_(found[f"{name}'"])

    def _gathered(self, direction: Tensor) -> Tensor:
        """The parts [shard] of all processes along ZeRO's axes [padded]."""
        axes = self.group.sync.whole_gather
        if not axes:
            return direction
        whole = self.group.zeros(self.group.group.padded_size, direction.dtype)
        self.exchange.all_gather(whole, direction, axes).wait()
        return whole

    def _matrices(self, whole: Tensor, member: GroupMember) -> Tensor:
        """A parameter's matrices, of a stack this process's, with all their rows and columns, in the dims of the parameter."""
        found = self.group.view(whole, member)
        for place, axes in enumerate(self._split(member)):
            if axes:
                parts = found.new_empty((self.group.world.mesh.size(axes), *found.shape))
                self.exchange.all_gather(parts.view(-1), found.reshape(-1), axes).wait()
                found = torch.cat(parts.unbind(), dim=place)
        return found

    def _split(self, member: GroupMember) -> Iterator[tuple[str, ...]]:
        """The axes of several processes that split the rows and columns, dim by dim; none of a stack's."""
        use, matrix = member.parameter.use, member.parameter.matrix
        assert matrix is not None
        for dim, axes in zip(use.dims, use.axes, strict=True):
            several = tuple(axis for axis in axes if self.group.world.mesh.size(axis) > 1)
            yield () if dim in matrix.stack else several

    def _functions(self, values: Any, member: GroupMember, matrices: Tensor, *, needed: bool) -> dict[str, Tensor]:
        """What functions of a parameter's whole matrices make, in the dims of the parameter; squares in place, and of the rest
        nothing where it is not `needed`."""
        (stack, rows, _), squares = _fold_dims(member, matrices.shape), self.squares[member]
        if matrices.device.type == "cpu" or squares:  # PyTorch's products of 16 bits are slow where a CPU has none
            matrices = matrices.to(at_least_fp32(matrices.dtype))
        found = {self.read: matrices.reshape(*stack, rows, -1)}
        found |= {name: square.to(matrices.dtype) for name, square in squares.items()}
        for name in self.after:
            update = self.optimizer.updates[name]
            if update.takes_whole_matrix and (name in squares or needed):
                found[f"{name}'"] = update.formula(values, *(found[read] for read in update.reads))
            if name in squares:  # at once, so that no more than one is there twice; none reads it as it was
                found[f"{name}'"] = squares[name].copy_(found.pop(f"{name}'")).to(matrices.dtype)
                del found[name]
        made = self.optimizer.direction_tensors - {self.read}
        return {name: found[name].reshape(matrices.shape) for name in found if name in made}

    def _apply_whole(self, values: Any, one: ParameterShard, made: Mapping[str, Tensor]) -> None:
        """Update this process's part of a parameter, and its moments, from what was `made` of whole matrices."""
        matrix, moments = one.member.parameter.matrix, self.moments[one]
        assert matrix is not None
        stack = len(matrix.stack)
        window = Box((*(0 for _ in matrix.stack), *one.window.offsets[stack:]), one.window.lengths)
        weight = self.group.state[one.start : one.start + one.size]
        parts = {name: all[window.slices].reshape(-1)[one.offset : one.offset + one.size] for name, all in made.items()}
        fine = at_least_fp32(weight.dtype)
        found = {name: part.to(fine) for name, part in {MASTER: weight, **moments, **parts}.items()}
        self._elementwise(values, self.after, found, {MASTER: weight, **moments})

    def _square(self, member: GroupMember, name: str) -> Tensor:
        """A tensor of the state [stack, rows, rows] of a parameter's rows or columns; empty where there are too many of them."""
        stack, *sides = _fold_dims(
            member, member.shape[: _num_stacked(member)] + member.global_shape[_num_stacked(member) :]
        )
        side = sides[self.optimizer.granularity(name) is Granularity.COLUMN_PAIR]
        side = side if side <= self.optimizer.max_preconditioned_side else 0
        dtype = at_least_fp32(self.group.formats.squares)
        return self.group.zeros(math.prod(stack) * side * side, dtype).view(*stack, side, side)

    def checkpoint_tensors(self) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """The moments by name, each with the part of the parameter's that it is."""
        for one, kept in self.moments.items():
            yield from ((name, one, values) for name, values in kept.items())
        for member, squares in self.squares.items():
            for name, square in squares.items():
                if square.numel():
                    yield name, self._whole_sides(member, square), square.view(-1)

    def _whole_sides(self, member: GroupMember, square: Tensor) -> ParameterShard:
        """Where a square is: with this process's part of a stack, and whole in its sides."""
        stacked, window = _num_stacked(member), self.group.window(member)
        sides = tuple(square.shape[stacked:])
        whole = GroupMember(member.parameter, (*member.global_shape[:stacked], *sides), tuple(square.shape), 0)
        offsets = (*window.offsets[:stacked], 0, 0)
        return ParameterShard(whole, 0, 0, square.numel(), Box(offsets, tuple(square.shape)))


def _num_stacked(member: GroupMember) -> int:
    matrix = member.parameter.matrix
    assert matrix is not None
    return len(matrix.stack)


def _fold_dims(member: GroupMember, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """Of a parameter's matrices in some shape the sizes of the stack, and the rows and columns of each."""
    matrix, stacked = member.parameter.matrix, _num_stacked(member)
    assert matrix is not None
    rows = stacked + len(matrix.rows)
    return tuple(shape[:stacked]), math.prod(shape[stacked:rows]), math.prod(shape[rows:])
