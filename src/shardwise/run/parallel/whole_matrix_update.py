"""Updates of a group's matrices by an optimizer that takes them whole, such as Muon or Shampoo."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.model import GRADIENT, MASTER, Granularity, Optimizer, formula_values
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.optimizers import write_where
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, ParameterShard
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.step import GroupMember
from shardwise.values import Box


class WholeMatrixUpdate:
    """Turns this rank's part of the gradients into the step of its part of the weights, and keeps the state for that.

    Elementwise formulas run on the part. What functions of whole matrices read is gathered: over ZeRO's axes as one
    flat array, over those of tensor parallelism matrix by matrix. Each rank computes the matrices of which it has a
    part. `squares`, the state with a number for each pair of rows or columns, is the same on every rank that uses the
    matrix, and is updated on each.
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
            name: formats.squares if update.is_second_moment else formats.moments
            for name, update in optimizer.moments.items()
        }
        element_dtypes = {
            name: dtype for name, dtype in dtypes.items() if optimizer.granularity(name) is Granularity.ELEMENT
        }
        self.moments = {
            shard: {name: group.zeros(shard.size, dtype) for name, dtype in element_dtypes.items()} for shard in slots
        }
        self.steps = 0
        self.allows: Tensor | None = None  # whether this step changes anything, a scalar on the device; None: it does
        # All ranks of the group gather every matrix, in one order, whichever of them they have a part of.
        self.members = [member for member in group.group.members if member.parameter.matrix]
        self.squares = {
            member: {name: self._square(member, name) for name in dtypes if name not in element_dtypes}
            for member in self.members
        }

    def step(self, gradients: Tensor, learning_rate: float, allows: Tensor | None = None) -> None:
        """Update the weights and the moments from the gradients [shard], if the scalar `allows` is true."""
        self.steps += 1
        self.allows = allows
        formula_inputs = formula_values(self.fields, learning_rate=learning_rate, step=self.steps)
        direction = self.group.zeros(self.group.group.shard_size, self.group.formats.activations)
        for shard, moments in self.moments.items():
            rows = shard.rows
            direction[rows] = self._update_direction(formula_inputs, self.group.state[rows], gradients[rows], moments)
        directions = self._gathered(direction)
        for member in self.members:
            matrices = self._matrices(directions, member)
            shards = [shard for shard in self.moments if shard.member is member]
            outputs = self._functions(formula_inputs, member, matrices, has_shard=bool(shards))
            for shard in shards:
                self._apply_whole(formula_inputs, shard, outputs)

    def _update_direction(
        self, formula_inputs: Any, weight: Tensor, gradient: Tensor, moments: Mapping[str, Tensor]
    ) -> Tensor:
        """Update the moments in place, and return what the function of whole matrices reads."""
        dtype = at_least_fp32(weight.dtype)
        tensors = {name: tensor.to(dtype) for name, tensor in {MASTER: weight, GRADIENT: gradient, **moments}.items()}
        self._elementwise(formula_inputs, self.before, tensors, moments)
        return tensors[self.read]

    def _elementwise(
        self, formula_inputs: Any, names: Iterable[str], tensors: dict[str, Tensor], stored: Mapping[str, Tensor]
    ) -> None:
        """Compute the elementwise formulas of some updates into `tensors`; write those that are `stored` in place."""
        for name in names:
            update = self.optimizer.updates[name]
            if not update.takes_whole_matrix:
                tensors[f"{name}'"] = update.formula(formula_inputs, *(tensors[read] for read in update.reads))
                if name in stored:
                    write_where(stored[name], tensors[f"{name}'"], self.allows)

    def _gathered(self, direction: Tensor) -> Tensor:
        """Gather the parts [shard] of all ranks along ZeRO's axes into [padded]."""
        axes = self.group.sync.whole_gather
        if not axes:
            return direction
        gathered = self.group.zeros(self.group.group.padded_size, direction.dtype)
        self.exchange.all_gather(gathered, direction, axes).wait()
        return gathered

    def _matrices(self, directions: Tensor, member: GroupMember) -> Tensor:
        """Return a parameter's matrices with all their rows and columns; of a stack, this rank's."""
        matrices = self.group.view(directions, member)
        for dim, axes in enumerate(self._split(member)):
            if axes:
                parts = matrices.new_empty((self.group.world.mesh.size(axes), *matrices.shape))
                self.exchange.all_gather(parts.view(-1), matrices.reshape(-1), axes).wait()
                matrices = torch.cat(parts.unbind(), dim=dim)
        return matrices

    def _split(self, member: GroupMember) -> Iterator[tuple[str, ...]]:
        """Yield the nontrivial axes that split the rows and columns, dim by dim; none for the dims of a stack."""
        use, matrix = member.parameter.use, member.parameter.matrix
        assert matrix is not None
        for dim, axes in zip(use.dims, use.axes, strict=True):
            nontrivial = tuple(axis for axis in axes if self.group.world.mesh.size(axis) > 1)
            yield () if dim in matrix.stack else nontrivial

    def _functions(
        self, formula_inputs: Any, member: GroupMember, matrices: Tensor, *, has_shard: bool
    ) -> dict[str, Tensor]:
        """Return functions of whole matrices (with `has_shard`), after updating squares in place."""
        (stack, rows, _), squares = _fold_dims(member, matrices.shape), self.squares[member]
        if matrices.device.type == "cpu" or squares:  # PyTorch's products of 16 bits are slow where a CPU has none
            matrices = matrices.to(at_least_fp32(matrices.dtype))
        tensors = {self.read: matrices.reshape(*stack, rows, -1)}
        tensors |= {name: square.to(matrices.dtype) for name, square in squares.items()}
        for name in self.after:
            update = self.optimizer.updates[name]
            if update.takes_whole_matrix and (name in squares or has_shard):
                tensors[f"{name}'"] = update.formula(formula_inputs, *(tensors[read] for read in update.reads))
            if name in squares:  # replaced at once, so that at most one exists twice; no formula reads the old one
                write_where(squares[name], tensors.pop(f"{name}'"), self.allows)
                tensors[f"{name}'"] = squares[name].to(matrices.dtype)
                del tensors[name]
        direction_names = self.optimizer.direction_tensors - {self.read}
        return {name: tensors[name].reshape(matrices.shape) for name in tensors if name in direction_names}

    def _apply_whole(self, formula_inputs: Any, shard: ParameterShard, outputs: Mapping[str, Tensor]) -> None:
        """Update this rank's part of a parameter, and its moments, from the results on whole matrices."""
        matrix, moments = shard.member.parameter.matrix, self.moments[shard]
        assert matrix is not None
        stack = len(matrix.stack)
        window = Box((*(0 for _ in matrix.stack), *shard.window.offsets[stack:]), shard.window.lengths)
        weight = self.group.state[shard.rows]
        parts = {
            name: output[window.slices].reshape(-1)[shard.offset : shard.offset + shard.size]
            for name, output in outputs.items()
        }
        dtype = at_least_fp32(weight.dtype)
        tensors = {name: part.to(dtype) for name, part in {MASTER: weight, **moments, **parts}.items()}
        self._elementwise(formula_inputs, self.after, tensors, {MASTER: weight, **moments})

    def _square(self, member: GroupMember, name: str) -> Tensor:
        """Return the state [stack, rows, rows] of pairs of rows or columns; empty where there are too many."""
        stack, *sides = _fold_dims(
            member, member.shape[: _num_stacked(member)] + member.global_shape[_num_stacked(member) :]
        )
        side = sides[self.optimizer.granularity(name) is Granularity.COLUMN_PAIR]
        side = side if side <= self.optimizer.max_preconditioned_side else 0
        dtype = at_least_fp32(self.group.formats.squares)
        return self.group.zeros(math.prod(stack) * side * side, dtype).view(*stack, side, side)

    def checkpoint_tensors(self) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """Yield the moments by name, each with the part of the parameter's that it is."""
        for shard, moments in self.moments.items():
            yield from ((name, shard, moment) for name, moment in moments.items())
        for member, squares in self.squares.items():
            for name, square in squares.items():
                if square.numel():
                    yield name, self._whole_sides(member, square), square.view(-1)

    def _whole_sides(self, member: GroupMember, square: Tensor) -> ParameterShard:
        """Return the shard that a square is: this rank's part of a stack, with full sides."""
        stacked, window = _num_stacked(member), self.group.window(member)
        sides = tuple(square.shape[stacked:])
        full_member = GroupMember(member.parameter, (*member.global_shape[:stacked], *sides), tuple(square.shape), 0)
        offsets = (*window.offsets[:stacked], 0, 0)
        return ParameterShard(full_member, 0, 0, square.numel(), Box(offsets, tuple(square.shape)))


def _num_stacked(member: GroupMember) -> int:
    matrix = member.parameter.matrix
    assert matrix is not None
    return len(matrix.stack)


def _fold_dims(member: GroupMember, shape: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
    """Return the sizes of the stack, and the number of rows and of columns, of a parameter's matrices in some shape."""
    matrix, stacked = member.parameter.matrix, _num_stacked(member)
    assert matrix is not None
    rows = stacked + len(matrix.rows)
    return tuple(shape[:stacked]), math.prod(shape[stacked:rows]), math.prod(shape[rows:])
