"""Groups of parameters as flat arrays: the weights of a group, the part that this rank updates, and their gradients.

In a tiled group, weights of products are stored in FP8 with a scale for each tile, beside a master copy. Sharded
weights (ZeRO-3) are gathered one unit ahead and freed after the unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.run.kernels.quantized_weights import TiledWeight
from shardwise.run.mixed_precision import TrainingDtypes
from shardwise.run.parallel.mesh_collectives import MeshCollectives, PendingWork, TrafficLabel
from shardwise.run.parallel.world import World
from shardwise.sharding import Axes
from shardwise.step import GATHER, GRADIENT, GroupMember, RankProgram
from shardwise.step.flat_arrays import WeightSync
from shardwise.step.parameters import ParameterGroup
from shardwise.values import Box, Shape, interval_boxes


class ParameterShard(NamedTuple):
    """The part of a parameter that this rank updates: `size` elements from `offset` of the flattened part that it uses.

    They are at `start` of the rank's flat shard. The part that the rank uses is the `window` of the parameter.
    """

    member: GroupMember
    offset: int
    start: int
    size: int
    window: Box

    @property
    def rows(self) -> slice:
        """The parameter's elements in the rank's flat shard."""
        return slice(self.start, self.start + self.size)

    @property
    def name(self) -> str:
        """Full name of the parameter."""
        return self.member.parameter.name

    @property
    def global_shape(self) -> Shape:
        """Shape of the full parameter."""
        return self.member.global_shape

    @property
    def covers_parameter(self) -> bool:
        """True if the rank uses all of the parameter."""
        return self.window.lengths == self.global_shape

    def boxes(self) -> Iterator[Box]:
        """Yield the boxes of the full parameter that it covers, in order."""
        for box in interval_boxes(self.window.lengths, self.offset, self.offset + self.size):
            yield Box(tuple(map(sum, zip(box.offsets, self.window.offsets, strict=True))), box.lengths)


class FlatParameterGroup:
    """Flat arrays of a group on this rank.

    The model's parameters are `views`, by name, of `weights` [padded]; with `splits_weights` these have memory only
    while gathered. `shard` [shard] is this rank's part of them, and `state` [shard] what the optimizer updates: the
    master copy where there is one, otherwise `shard` itself. `gradients` are stored in full [padded], or with
    `scatters` as [shard]; `gradient_shard` is this rank's part, `update` [shard] a copy of it for the update, where the
    recipe has one. Frozen groups have no gradients.
    """

    def __init__(self, group: ParameterGroup, formats: TrainingDtypes, world: World) -> None:
        self.group, self.formats, self.world = group, formats, world
        sync = group.sync
        self.splits_weights, self.scatters = bool(sync.gather), bool(sync.scatter)
        self.begin = world.position(sync.shard) * group.shard_size
        self.weights_carried, self.gradients_carried = (TrafficLabel(role, group.path) for role in (GATHER, GRADIENT))
        self.on_resize: Callable[[Tensor], None] = lambda weights: None  # called when weights are allocated or freed
        self._make_weights()
        self.views = self._views()
        if self.splits_weights:
            self.release()
        if group.trained:
            self._make_gradients()

    @property
    def has_plain_copy(self) -> bool:
        """True if `shard` is a copy of a master copy, element by element, in another dtype."""
        return self.has_master

    @property
    def sync(self) -> WeightSync:
        """Axes over which the group is gathered and reduced."""
        return self.group.sync

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.world.device)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return memory that is written before it is read."""
        return torch.empty(size, dtype=dtype, device=self.world.device)

    def local_slice(self, flat: Tensor) -> Tensor:
        """Return this rank's part of a flat array."""
        return flat[self.begin : self.begin + self.group.shard_size]

    def view(self, flat: Tensor, member: GroupMember) -> Tensor:
        """Return a parameter's part of a flat array, in its shape."""
        return flat[member.start : member.stop].view(member.shape)

    def _make_weights(self) -> None:
        formats, size = self.formats, self.group.shard_size
        self.weights = self.zeros(self.group.padded_size, formats.weights)
        self.shard = self.zeros(size, formats.weights) if self.splits_weights else self.local_slice(self.weights)
        self.has_master = formats.has_master and self.group.trained
        self.state = self.zeros(size, formats.state) if self.has_master else self.shard
        self.is_gathered = True

    def _views(self) -> dict[str, Any]:
        """Return the tensors of the parameters that the model uses."""
        return {member.parameter.name: self.view(self.weights, member) for member in self.group.members}

    def stored_tensors(self) -> Iterator[Tensor]:
        """Yield the weights that are stored between steps."""
        yield self.shard

    def _make_gradients(self) -> None:
        size = self.group.shard_size if self.scatters else self.group.padded_size
        self.gradients = self.zeros(size, self.formats.stored_gradients)
        update = self.formats.update
        self.update = None if update is None else self.zeros(self.group.shard_size, update)
        self.gradient_shard = self.gradients if self.scatters else self.local_slice(self.gradients)

    def allocate(self) -> None:
        """Give the gathered weights their memory; views refer to it again."""
        self.weights.untyped_storage().resize_(self.group.padded_size * self.weights.element_size())
        self.is_gathered = True
        self.on_resize(self.weights)

    def release(self) -> None:
        """Free it. Views that a unit has become valid again when the weights are gathered."""
        self.weights.untyped_storage().resize_(0)
        self.is_gathered = False
        self.on_resize(self.weights)

    def intervals(self) -> Iterator[ParameterShard]:
        """Yield this rank's part of each parameter; parameters of which it has nothing are left out."""
        end = self.begin + self.group.shard_size
        for member in self.group.members:
            window = self.window(member)
            low, high = max(member.start, self.begin), min(member.start + window.volume, end)
            if low < high:
                yield ParameterShard(member, low - member.start, low - self.begin, high - low, window)

    def local_runs(self) -> Iterator[tuple[frozenset[str], slice]]:
        """Yield runs of rows of this rank's part whose parameters are split over the same axes, with these axes."""
        return _group_runs((shard.member, shard.start, shard.size) for shard in self.intervals())

    def full_runs(self) -> Iterator[tuple[frozenset[str], slice]]:
        """Yield the same runs of a full array."""
        return _group_runs((member, member.start, self.window(member).volume) for member in self.group.members)

    def copies(self, axes: Collection[str], reduced_axes: Axes) -> int:
        """Return how many ranks along some axes, and in the mirrored stage, have the same gradients.

        `axes` split the parameters of these gradients.
        """
        copies = self.world.mesh.size(
            [axis for axis in reduced_axes if axis not in axes and axis not in self.sync.shard]
        )
        return copies * (2 if self.group.mirrored else 1)

    def window(self, member: GroupMember) -> Box:
        """Return the part of a parameter that this rank uses, without padding, which follows its last row."""
        starts, lengths = [], []
        for axes, length, size in zip(member.parameter.use.axes, member.shape, member.global_shape, strict=True):
            starts.append(min(self.world.position(axes) * length, size))
            lengths.append(min(length, size - starts[-1]))
        return Box(tuple(starts), tuple(lengths))

    @torch.no_grad()
    def set_weights(self, weight_of: Callable[[ParameterShard], Tensor]) -> None:
        """Set this rank's part, one shard of a parameter [size] after the other; `publish` copies it to the weights."""
        for shard in self.intervals():
            self.state[shard.rows] = weight_of(shard).to(self.state)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy what was updated to this rank's part of the weights."""
        if self.has_master:
            self.shard.copy_(self.state)


def _group_runs(members: Iterable[tuple[GroupMember, int, int]]) -> Iterator[tuple[frozenset[str], slice]]:
    """Yield runs of consecutive parameters that the same axes split; each parameter comes with its start and size."""
    for axes, run in itertools.groupby(members, key=lambda member: member[0].parameter.use.sharded_axes):
        run_members = list(run)
        yield axes, slice(run_members[0][1], run_members[-1][1] + run_members[-1][2])


class TiledParameterGroup(FlatParameterGroup):
    """A group whose `weights` [padded] are flat, except the parameters of `cast`, by full name, which have tensors of
    their own.

    The master copy is full on each rank, so that each casts whole tiles.
    """

    def __init__(self, group: ParameterGroup, formats: TrainingDtypes, world: World, cast: Set[str]) -> None:
        self.cast = cast
        super().__init__(group, formats, world)

    def _make_weights(self) -> None:
        plain = sum(member.size for member in self.group.members if not self._is_tiled(member))
        self.weights = self.shard = self.zeros(plain, self.formats.weights)
        self.state = self.zeros(self.group.shard_size, self.formats.state)
        self.has_master = self.is_gathered = True
        assert len(self.state) == self.group.padded_size, "the master copy is whole (layout.rules.engine)"

    def _views(self) -> dict[str, Any]:
        views: dict[str, Any] = {}
        start = 0
        for member in self.group.members:
            if self._is_tiled(member):
                views[member.parameter.name] = self._tiled(member)
            else:
                views[member.parameter.name] = self.weights[start : start + member.size].view(member.shape)
                start += member.size
        return views

    def _is_tiled(self, member: GroupMember) -> bool:
        return member.parameter.name in self.cast

    def _tiled(self, member: GroupMember) -> TiledWeight:
        matrix, tiled_format = member.parameter.matrix, self.formats.tiled
        assert matrix is not None
        assert tiled_format is not None
        shape = torch.Size(member.shape)
        return TiledWeight.zeros(
            shape, len(matrix.stack), len(matrix.rows), tiled_format.operand, tiled_format.scaling, self.world.device
        )

    @property
    def has_plain_copy(self) -> bool:
        """False: some of it is cast with scales."""
        return False

    def stored_tensors(self) -> Iterator[Tensor]:
        """Yield the stored weights, and the scales of their tiles."""
        yield self.weights
        for view in self.views.values():
            if isinstance(view, TiledWeight):
                yield from (view.elements, view.scales)

    @torch.no_grad()
    def publish(self) -> None:
        """Cast what was updated."""
        for member in self.group.members:
            view, master = self.views[member.parameter.name], self.view(self.state, member)
            if isinstance(view, TiledWeight):
                view.store(master)
            else:
                view.copy_(master)


def build_flat_groups(instance: RankProgram, formats: TrainingDtypes, world: World) -> list[FlatParameterGroup]:
    """Return the groups of a rank, in the order in which their gradients are ready."""
    if formats.tiled is None:
        return [FlatParameterGroup(group, formats, world) for group in instance.groups]
    cast = frozenset(
        parameter.name for parameter in instance.parameters if parameter.weight in instance.operands(parameter.unit)
    )
    return [TiledParameterGroup(group, formats, world, cast) for group in instance.groups]


class WeightGatherer:
    """Gathers and frees weights around the units of a model (`run.engine.model.WeightMovement`), by their index in the
    forward pass.

    `forward` and `backward` are the groups that each unit needs gathered in a pass; units in `kept_units` keep them from the
    forward to the backward pass.
    """

    def __init__(
        self, forward: Sequence[Sequence[FlatParameterGroup]], backward: Sequence[Sequence[FlatParameterGroup]],
        kept_units: Set[int], exchange: MeshCollectives,
    ) -> None:  # fmt: skip
        self.forward, self.backward, self.kept_units, self.exchange = forward, backward, kept_units, exchange
        self.pending: dict[int, PendingWork] = {}

    def before_forward(self, unit_index: int, next_unit: int | None) -> None:
        """Wait for the unit's weights, and start to gather the next unit's."""
        self._require(self.forward[unit_index])
        if next_unit is not None:
            self._start(self.forward[next_unit])

    def after_forward(self, unit_index: int) -> None:
        """Free them, unless the backward pass follows at once."""
        for group in self.forward[unit_index] if unit_index not in self.kept_units else ():
            group.release()

    def before_backward(self, unit_index: int, previous_unit: int | None, next_unit: int | None) -> None:
        """Free the weights of the unit that has run backward, wait for this unit's, and start to gather the next one's."""
        if previous_unit is not None:
            self._free_after_use(previous_unit)
        self._require(self.backward[unit_index])
        if next_unit is not None:
            self._start(self.backward[next_unit])

    def _free_after_use(self, unit_index: int) -> None:
        """Free the weights of a unit that are still there."""
        for group in (*self.forward[unit_index], *self.backward[unit_index]):
            # Frozen weights have no gradient whose arrival would free them, and shared ones still wait for other units'.
            if group.is_gathered and id(group) not in self.pending:
                group.release()

    def _require(self, groups: Iterable[FlatParameterGroup]) -> None:
        self._start(groups)
        for group in groups:
            pending = self.pending.pop(id(group), None)
            if pending:
                pending.wait()

    def _start(self, groups: Iterable[FlatParameterGroup]) -> None:
        for group in groups:
            if not group.is_gathered:
                group.allocate()
                arguments = group.weights, group.shard, group.sync.gather, group.weights_carried
                self.pending[id(group)] = self.exchange.all_gather(*arguments)

    def end(self) -> None:
        """Free everything at the end of a pass."""
        for groups in (*self.forward, *self.backward):
            for group in groups:
                pending = self.pending.pop(id(group), None)
                if pending:
                    pending.wait()
                if group.is_gathered:
                    group.release()
