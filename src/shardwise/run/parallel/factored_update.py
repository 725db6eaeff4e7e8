"""Updates of a unit's weights by an optimizer that takes means over rows, columns or all of each, such as Adafactor.

A weight's part on this rank is [stack, rows, columns]; one without rows and columns is one row. A statistic has one
number for each row, column or matrix of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.model import GRADIENT, MASTER, Granularity, Optimizer, formula_values
from shardwise.model.optimizer_program import WeightMatrix
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.optimizers import block_elements, write_where
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, ParameterShard
from shardwise.run.parallel.mesh_collectives import MeshCollectives, TrafficLabel
from shardwise.step import CONTROL, GroupMember, UnitCollective
from shardwise.values import Box, Shape, interval_boxes


class FactoredWeight:
    """A weight's part on this rank (none, where its `interval` is None), its state, and the means in progress."""

    def __init__(
        self, group: FlatParameterGroup, member: GroupMember, optimizer: Optimizer, fields: Mapping[str, float]
    ) -> None:  # fmt: skip
        self.group, self.member, self.optimizer, self.fields = group, member, optimizer, fields
        self.interval = next((shard for shard in group.intervals() if shard.member is member), None)
        self.window = group.window(member)
        self.extents = MatrixExtents.of(member, self.window)
        self.fine = at_least_fp32(group.state.dtype)
        self.moments: dict[str, Tensor] = {}
        self.means: dict[str, Tensor] = {}  # padded; filled in a step
        self.allows: Tensor | None = None  # whether this step changes anything, a scalar on the device; None: it does
        for name, update in optimizer.moments.items():
            dtype = group.formats.squares if update.is_second_moment else group.formats.moments
            size = 0 if self.interval is None else self.interval.size
            is_element = update.granularity is Granularity.ELEMENT
            self.moments[name] = (
                group.zeros(size, dtype) if is_element else self.extents.zeros(update.granularity, group.state, dtype)
            )

    def update(self, round: int, formula_inputs: Any, gradient: Tensor) -> None:
        """Run one of the optimizer's rounds (the last is -1) on the state and the partial sums of means."""
        rounds = self.optimizer.rounds
        if len(rounds) + round < 0:
            return
        names = rounds[round]
        element_names = [name for name in names if Granularity.ELEMENT in self._read(name)]
        for name in names:
            if name not in element_names:
                self._update_rows_and_columns(name, formula_inputs)
        for name in element_names:
            if self.optimizer.is_mean(name):
                self.means[f"{name}'"] = self.extents.zeros(
                    self.optimizer.granularity(name), self.group.state, self.fine
                )
        if self.interval is not None and element_names:
            for box, block in self._blocks(self.interval):
                self._update_block(self.interval, element_names, formula_inputs, gradient, box, block)

    def _read(self, name: str) -> set[Granularity]:
        return {self.optimizer.granularity(read) for read in self.optimizer.updates[name].reads}

    def row_or_column(self, name: str) -> Tensor:
        """Return a row or column statistic, or a mean, without padding, in the accumulation dtype."""
        statistic = self.means[name] if name in self.means else self.moments[name.removesuffix("'")]
        return self.extents.unpadded(self.optimizer.granularity(name), statistic).to(self.fine)

    def _update_rows_and_columns(self, name: str, formula_inputs: Any) -> None:
        """Compute an update that reads only row and column statistics, and means."""
        update = self.optimizer.updates[name]
        updated = update.formula(formula_inputs, *map(self.row_or_column, update.reads))
        if update.is_state:
            write_where(self.extents.unpadded(update.granularity, self.moments[name]), updated, self.allows)
            return
        mean = self.means[f"{name}'"] = self.extents.zeros(update.granularity, self.group.state, self.fine)
        self._add(mean, updated, name)

    def _add(self, mean: Tensor, contribution: Tensor, name: str, box: Box | None = None) -> None:
        """Add the contribution of a part of a weight to a mean."""
        granularity = self.optimizer.granularity(name)
        unpadded = self.extents.unpadded(granularity, mean)
        unpadded = unpadded if box is None else unpadded[index_in(box, unpadded)]
        unpadded += contribution.sum(REDUCED_DIMS[granularity], keepdim=True) / self.extents.count(
            granularity, self._read(name)
        )

    def _update_block(
        self, shard: ParameterShard, names: Sequence[str], formula_inputs: Any, gradient: Tensor, box: Box, block: slice
    ) -> None:
        """Compute updates on a block of elements: `block` of this rank's elements, `box` of the weight."""
        tensors = _BlockTensors(self, shard, names, formula_inputs, gradient, box, block)
        updated = {
            name: tensors.read(f"{name}'")
            if self.optimizer.granularity(name) is Granularity.ELEMENT
            else tensors.formula(name)
            for name in names
        }
        for name, result in updated.items():
            if self.optimizer.is_mean(name):
                self._add(self.means[f"{name}'"], result, name, box)
            elif name == MASTER:
                write_where(self.group.state[shard.rows][block], result.reshape(-1), self.allows)
            elif self.optimizer.updates[name].is_state:
                write_where(self.moments[name][block], result.reshape(-1), self.allows)

    def _blocks(self, interval: ParameterShard) -> Iterator[tuple[Box, slice]]:
        """Yield boxes of [stack, rows, columns] with their slices of this rank's elements, each one contiguous."""
        offset = 0
        max_elements = block_elements(self.group.state)
        for box in interval_boxes(self.extents.window, interval.offset, interval.offset + interval.size):
            for part in split_box(box, max_elements):
                yield part, slice(offset, offset + part.volume)
                offset += part.volume

    def checkpoint_tensors(self) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """Yield the moments by name, each with the part of the parameter's that it is."""
        matrix, dims = self.member.parameter.matrix, self.member.parameter.use.dims
        for name, moment in self.moments.items():
            granularity = self.optimizer.granularity(name)
            if granularity is not Granularity.ELEMENT:
                assert isinstance(matrix, WeightMatrix)
                dim_indices = [dims.index(dim) for dim in matrix.dims_at(granularity)]
                yield (
                    name,
                    self._row_or_column_shard(dim_indices),
                    self.extents.unpadded(granularity, moment).reshape(-1),
                )
            elif self.interval is not None:
                yield name, self.interval, moment

    def _row_or_column_shard(self, dim_indices: Sequence[int]) -> ParameterShard:
        global_shape, shape = (
            tuple(sizes[i] for i in dim_indices) for sizes in (self.member.global_shape, self.member.shape)
        )
        offsets, lengths = (
            tuple(sizes[i] for i in dim_indices) for sizes in (self.window.offsets, self.window.lengths)
        )
        member = GroupMember(self.member.parameter, global_shape, shape, 0)
        return ParameterShard(member, 0, 0, math.prod(lengths), Box(offsets, lengths))


@dataclass(frozen=True, slots=True)
class _BlockTensors:
    """Tensors that updates of a block read, each loaded or computed once.

    An object and no nested functions: those would refer to each other, so that the block's tensors stayed in memory until the
    garbage collector ran.
    """

    weight: FactoredWeight
    shard: ParameterShard
    names: Sequence[str]
    formula_inputs: Any
    gradient: Tensor
    box: Box
    block: slice
    loaded: dict[str, Tensor] = field(default_factory=dict)

    def read(self, name: str) -> Tensor:
        """Return a tensor, or statistic, of the block by its name."""
        if name not in self.loaded:
            self.loaded[name] = self._load(name)
        return self.loaded[name]

    def formula(self, name: str) -> Tensor:
        """Return what an update computes."""
        update = self.weight.optimizer.updates[name]
        result: Tensor = update.formula(self.formula_inputs, *map(self.read, update.reads))
        return result

    def _load(self, name: str) -> Tensor:
        weight, base_name = self.weight, name.removesuffix("'")
        if weight.optimizer.granularity(name) is not Granularity.ELEMENT:
            statistic = weight.row_or_column(name)
            return statistic[index_in(self.box, statistic)]
        if name in (MASTER, GRADIENT):
            flat = (weight.group.state if name == MASTER else self.gradient)[self.shard.rows]
        elif base_name in weight.moments and (base_name == name or base_name not in self.names):
            flat = weight.moments[base_name]
        else:
            return self.formula(base_name)
        return flat[self.block].to(weight.fine).view(self.box.lengths)


class FactoredUpdate:
    """The update of all weights of a unit on this rank, whichever groups they are in.

    Partial sums of means are reduced as in the unit's instructions: `traffic`, in order.
    """

    def __init__(
        self, weights: Iterable[FactoredWeight], traffic: Iterable[UnitCollective], exchange: MeshCollectives
    ) -> None:
        self.weights = {weight.member.parameter.weight: weight for weight in weights}
        self.exchange, self.steps = exchange, 0
        self.traffic = [collective for collective in traffic if set(collective.tensors) <= set(self.weights)]
        self.num_rounds = max(len(weight.optimizer.rounds) for weight in self.weights.values())

    def step(
        self, gradients: Mapping[FlatParameterGroup, Tensor], learning_rate: float, allows: Tensor | None = None
    ) -> None:
        """Update weights and moments from the gradients [shard] of each group, if the scalar `allows` is true."""
        self.steps += 1
        pending = list(self.traffic)
        for weight in self.weights.values():
            weight.means.clear()
            weight.allows = allows
        for round in range(-self.num_rounds, 0):
            for weight in self.weights.values():
                formula_inputs = formula_values(weight.fields, learning_rate=learning_rate, step=self.steps)
                weight.update(round, formula_inputs, gradients[weight.group])
            for collective in tuple(pending):
                if all(name in weight.means for weight, name in self._carried(collective)):
                    pending.remove(collective)
                    self._sum(collective)

    def _carried(self, collective: UnitCollective) -> Iterator[tuple[FactoredWeight, str]]:
        for step in collective.derived:
            weight, _, mean = step.tensor.name.rpartition(".")
            yield self.weights[weight], mean

    def _sum(self, collective: UnitCollective) -> None:
        """Sum partial means over all ranks."""
        means = [weight.means[name] for weight, name in self._carried(collective)]
        axes = tuple(axis for axis in collective.axes if self.exchange.world.mesh.size(axis) > 1)
        if axes:
            flat_means = torch.cat([mean.reshape(-1) for mean in means])
            path = next(iter(self.weights.values())).member.parameter.path
            self.exchange.all_reduce(flat_means, axes, carries=TrafficLabel(CONTROL, path)).wait()
            for mean, part in zip(means, torch.split(flat_means, [mean.numel() for mean in means]), strict=True):
                mean.copy_(part.view(mean.shape))


REDUCED_DIMS: Mapping[Granularity, tuple[int, ...]] = {  # dims of [stack, rows, columns] over which a statistic reduces
    Granularity.ELEMENT: (), Granularity.ROW: (2,), Granularity.COLUMN: (1,), Granularity.TENSOR: (1, 2)
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixExtents:
    """A weight as [stack, rows, columns]: padded `shape`, `window` without padding, `full` over all ranks."""

    shape: Shape
    window: Shape
    full: Shape

    @classmethod
    def of(cls, member: GroupMember, window: Box) -> MatrixExtents:
        """Return the extents of a parameter of which a rank uses a window."""
        matrix = member.parameter.matrix

        def folded(sizes: Sequence[int]) -> Shape:
            if matrix is None:
                return 1, 1, math.prod(sizes)
            ends = len(matrix.stack), len(matrix.stack) + len(matrix.rows)
            return math.prod(sizes[: ends[0]]), math.prod(sizes[ends[0] : ends[1]]), math.prod(sizes[ends[1] :])

        return cls(folded(member.shape), folded(window.lengths), folded(member.global_shape))

    def zeros(self, granularity: Granularity, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return zeros for each row, column or matrix, padding included."""
        sizes = [1 if dim in REDUCED_DIMS[granularity] else size for dim, size in enumerate(self.shape)]
        return torch.zeros(sizes, dtype=dtype, device=like.device)

    def unpadded(self, granularity: Granularity, statistic: Tensor) -> Tensor:
        """Return a view without padding."""
        return statistic[
            tuple(
                slice(None) if dim in REDUCED_DIMS[granularity] else slice(size) for dim, size in enumerate(self.window)
            )
        ]

    def count(self, granularity: Granularity, operands: Iterable[Granularity]) -> int:
        """Return how many numbers of some tensors one number of another is the mean of."""
        dims = {dim for operand in operands for dim in range(3) if dim not in REDUCED_DIMS[operand]}
        return math.prod(self.full[dim] for dim in REDUCED_DIMS[granularity] if dim in dims)


def index_in(box: Box, statistic: Tensor) -> tuple[slice, ...]:
    """Return the slices of a row or column statistic for a box of elements."""
    return tuple(slice(None) if size == 1 else part for size, part in zip(statistic.shape, box.slices, strict=True))


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Yield contiguous boxes of at most `max_elements` elements that make up a contiguous box."""
    if box.volume <= max_elements:
        yield box
        return
    dim = next(dim for dim, length in enumerate(box.lengths) if length > 1)
    size, width = box.lengths[dim], max(1, max_elements // math.prod(box.lengths[dim + 1 :]))
    for part in box.cut(dim, [min(width, size - start) for start in range(0, size, width)]):
        yield from split_box(part, max_elements)
