"""The update of a unit's weights by an optimizer that takes means over rows, columns or all of each, such as Adafactor.

A weight's part on this rank is [stack, rows, columns]; what has no rows and columns is one row. A statistic has one
number for each row, column or matrix of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.model.optimizer_program import WeightMatrix
from shardwise.model.optimizers.definition import GRADIENT, MASTER, Granularity, Optimizer, formula_values
from shardwise.run.kernels.device_dispatch import at_least_fp32
from shardwise.run.kernels.optimizers import block_elements
from shardwise.run.parallel.collectives import MeshCollectives, TrafficLabel
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, ParameterShard
from shardwise.step.instructions import CONTROL, UnitCollective
from shardwise.step.parameters import GroupMember
from shardwise.values.boxes import Box, Shape, interval_boxes


class FactoredWeight:
    """A weight's part on this process (none, where its `interval` is None), its state, and what its means are made of."""

    def __init__(
        self, group: FlatParameterGroup, member: GroupMember, optimizer: Optimizer, fields: Mapping[str, float]
    ) -> None:  # fmt: skip
        self.group, self.member, self.optimizer, self.fields = group, member, optimizer, fields
        self.interval = next((one for one in group.intervals() if one.member is member), None)
        self.window = group.window(member)
        self.extents = MatrixExtents.of(member, self.window)
        self.fine = at_least_fp32(group.state.dtype)
        self.moments: dict[str, Tensor] = {}
        self.means: dict[str, Tensor] = {}  # with those that pad them; made in a step
        for name, update in optimizer.moments.items():
            dtype = group.formats.squares if update.is_second_moment else group.formats.moments
            size = 0 if self.interval is None else self.interval.size
            is_element = update.granularity is Granularity.ELEMENT
            self.moments[name] = (
                group.zeros(size, dtype) if is_element else self.extents.zeros(update.granularity, group.state, dtype)
            )

    def update(self, round: int, values: Any, gradient: Tensor) -> None:
        """One of the optimizer's rounds, from the last, -1: the state in place, of means this process's part of their sums."""
        rounds = self.optimizer.rounds
        if len(rounds) + round < 0:
            return
        names = rounds[round]
        of_elements = [name for name in names if Granularity.ELEMENT in self._read(name)]
        for name in names:
            if name not in of_elements:
                self._update_rows_and_columns(name, values)
        for name in of_elements:
            if self.optimizer.is_mean(name):
                self.means[f"{name}'"] = self.extents.zeros(
                    self.optimizer.granularity(name), self.group.state, self.fine
                )
        if self.interval is not None and of_elements:
            for box, place in self._blocks(self.interval):
                self._update_block(of_elements, values, gradient, box, place)

    def _read(self, name: str) -> set[Granularity]:
        return {self.optimizer.granularity(read) for read in self.optimizer.updates[name].reads}

    def _row_or_column(self, read: str) -> Tensor:
        """A moment of rows or columns, as it is now, or a mean; without what pads it."""
        found = self.means[read] if read in self.means else self.moments[read.removesuffix("'")]
        return self.extents.own(self.optimizer.granularity(read), found).to(self.fine)

    def _update_rows_and_columns(self, name: str, values: Any) -> None:
        """What is made of moments of rows and columns, and of means."""
        update = self.optimizer.updates[name]
        made = update.formula(values, *map(self._row_or_column, update.reads))
        if update.is_state:
            self.extents.own(update.granularity, self.moments[name]).copy_(made)
            return
        found = self.means[f"{name}'"] = self.extents.zeros(update.granularity, self.group.state, self.fine)
        self._add(found, made, name)

    def _add(self, sums: Tensor, made: Tensor, name: str, box: Box | None = None) -> None:
        """Add what a part of a weight adds to means."""
        per = self.optimizer.granularity(name)
        own = self.extents.own(per, sums)
        own = own if box is None else own[index_in(box, own)]
        own += made.sum(REDUCED_DIMS[per], keepdim=True) / self.extents.count(per, self._read(name))

    def _update_block(self, names: Sequence[str], values: Any, gradient: Tensor, box: Box, place: slice) -> None:
        """What is made of a block of elements: those at a `place` of this process's, a box of the weight."""
        found: dict[str, Tensor] = {}

        def read(name: str) -> Tensor:
            if name not in found:
                found[name] = made(name)
            return found[name]

        def made(name: str) -> Tensor:
            bare, (start, size) = name.removesuffix("'"), self._rows()
            if self.optimizer.granularity(name) is not Granularity.ELEMENT:
                small = self._row_or_column(name)
                return small[index_in(box, small)]
            if name in (MASTER, GRADIENT):
                flat = (self.group.state if name == MASTER else gradient)[start : start + size]
            elif bare in self.moments and (bare == name or bare not in names):
                flat = self.moments[bare]
            else:
                return formula(bare)
            return flat[place].to(self.fine).view(box.lengths)

        def formula(name: str) -> Tensor:
            update = self.optimizer.updates[name]
            result: Tensor = update.formula(values, *map(read, update.reads))
            return result

        new = {
            name: read(f"{name}'") if self.optimizer.granularity(name) is Granularity.ELEMENT else formula(name)
            for name in names
        }
        start, size = self._rows()
        for name, result in new.items():
            if self.optimizer.is_mean(name):
                self._add(self.means[f"{name}'"], result, name, box)
            elif name == MASTER:
                self.group.state[start : start + size][place].copy_(result.reshape(-1))
            elif self.optimizer.updates[name].is_state:
                self.moments[name][place].copy_(result.reshape(-1))

    def _rows(self) -> tuple[int, int]:
        assert self.interval is not None
        return self.interval.start, self.interval.size

    def _blocks(self, interval: ParameterShard) -> Iterator[tuple[Box, slice]]:
        """Boxes of [stack, rows, columns] with their places among this process's elements, each one contiguous."""
        done = 0
        most = block_elements(self.group.state)
        for box in interval_boxes(self.extents.window, interval.offset, interval.offset + interval.size):
            for part in split_box(box, most):
                yield part, slice(done, done + part.volume)
                done += part.volume

    def checkpoint_tensors(self) -> Iterator[tuple[str, ParameterShard, Tensor]]:
        """The moments by name, each with the part of the parameter's that it is."""
        matrix, dims = self.member.parameter.matrix, self.member.parameter.use.dims
        for name, values in self.moments.items():
            per = self.optimizer.granularity(name)
            if per is not Granularity.ELEMENT:
                assert isinstance(matrix, WeightMatrix)
                places = [dims.index(dim) for dim in matrix.dims_at(per)]
                yield name, self._row_or_column_shard(places), self.extents.own(per, values).reshape(-1)
            elif self.interval is not None:
                yield name, self.interval, values

    def _row_or_column_shard(self, places: Sequence[int]) -> ParameterShard:
        whole, shape = (
            tuple(sizes[place] for place in places) for sizes in (self.member.global_shape, self.member.shape)
        )
        offsets, lengths = (
            tuple(sizes[place] for place in places) for sizes in (self.window.offsets, self.window.lengths)
        )
        member = GroupMember(self.member.parameter, whole, shape, 0)
        return ParameterShard(member, 0, 0, math.prod(lengths), Box(offsets, lengths))


class FactoredUpdate:
    """The update of all weights of a unit on this process, whichever groups they are in. Partial sums of means move as the unit's
    instructions have it: `traffic`, in order."""

    def __init__(
        self, weights: Iterable[FactoredWeight], traffic: Iterable[UnitCollective], exchange: MeshCollectives
    ) -> None:
        self.weights = {one.member.parameter.weight: one for one in weights}
        self.exchange, self.steps = exchange, 0
        self.traffic = [one for one in traffic if set(one.tensors) <= set(self.weights)]
        self.num_rounds = max(len(one.optimizer.rounds) for one in self.weights.values())

    def step(self, gradients: Mapping[FlatParameterGroup, Tensor], learning_rate: float) -> None:
        """Update weights and moments from the gradients [shard] of each group."""
        self.steps += 1
        left = list(self.traffic)
        for weight in self.weights.values():
            weight.means.clear()
        for round in range(-self.num_rounds, 0):
            for weight in self.weights.values():
                values = formula_values(weight.fields, learning_rate=learning_rate, step=self.steps)
                weight.update(round, values, gradients[weight.group])
            for one in [one for one in left if all(name in weight.means for weight, name in self._carried(one))]:
                left.remove(one)
                self._sum(one)

    def _carried(self, one: UnitCollective) -> Iterator[tuple[FactoredWeight, str]]:
        for step in one.derived:
            weight, _, mean = step.tensor.name.rpartition(".")
            yield self.weights[weight], mean

    def _sum(self, one: UnitCollective) -> None:
        """Make means of their partial sums on all processes."""
        means = [weight.means[name] for weight, name in self._carried(one)]
        axes = tuple(axis for axis in one.axes if self.exchange.world.mesh.size(axis) > 1)
        if axes:
            together = torch.cat([mean.reshape(-1) for mean in means])
            path = next(iter(self.weights.values())).member.parameter.path
            self.exchange.all_reduce(together, axes, carries=TrafficLabel(CONTROL, path)).wait()
            for mean, part in zip(means, torch.split(together, [mean.numel() for mean in means]), strict=True):
                mean.copy_(part.view(mean.shape))


REDUCED_DIMS: Mapping[Granularity, tuple[int, ...]] = {  # that a tensor lacks of [stack, rows, columns]
    Granularity.ELEMENT: (), Granularity.ROW: (2,), Granularity.COLUMN: (1,), Granularity.TENSOR: (1, 2)
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MatrixExtents:
    """A weight as [stack, rows, columns]: `shape` as it is used, with what pads it, its `window` without, and the `whole` one."""

    shape: Shape
    window: Shape
    whole: Shape

    @classmethod
    def of(cls, member: GroupMember, window: Box) -> MatrixExtents:
        """Those of a parameter, of which a process uses a window."""
        matrix = member.parameter.matrix

        def folded(sizes: Sequence[int]) -> Shape:
            if matrix is None:
                return 1, 1, math.prod(sizes)
            ends = len(matrix.stack), len(matrix.stack) + len(matrix.rows)
            return math.prod(sizes[: ends[0]]), math.prod(sizes[ends[0] : ends[1]]), math.prod(sizes[ends[1] :])

        return cls(folded(member.shape), folded(window.lengths), folded(member.global_shape))

    def zeros(self, per: Granularity, like: Tensor, dtype: torch.dtype) -> Tensor:
        """One number for each row, column or matrix, with those that pad it."""
        sizes = [1 if dim in REDUCED_DIMS[per] else size for dim, size in enumerate(self.shape)]
        return torch.zeros(sizes, dtype=dtype, device=like.device)

    def own(self, per: Granularity, small: Tensor) -> Tensor:
        """A view without what pads it."""
        return small[
            tuple(slice(None) if dim in REDUCED_DIMS[per] else slice(size) for dim, size in enumerate(self.window))
        ]

    def count(self, per: Granularity, of: Iterable[Granularity]) -> int:
        """How many of the numbers of some tensors a number of another is the mean of."""
        kept = {dim for one in of for dim in range(3) if dim not in REDUCED_DIMS[one]}
        return math.prod(self.whole[dim] for dim in REDUCED_DIMS[per] if dim in kept)


def index_in(box: Box, small: Tensor) -> tuple[slice, ...]:
    """What of a tensor of rows or columns a box of elements takes."""
    return tuple(slice(None) if size == 1 else part for size, part in zip(small.shape, box.slices, strict=True))


def split_box(box: Box, most: int) -> Iterator[Box]:
    """A contiguous box in contiguous boxes of at most so many elements."""
    if box.volume <= most:
        yield box
        return
    dim = next(dim for dim, length in enumerate(box.lengths) if length > 1)
    size, each = box.lengths[dim], max(1, most // math.prod(box.lengths[dim + 1 :]))
    for part in box.cut(dim, [min(each, size - start) for start in range(0, size, each)]):
        yield from split_box(part, most)
