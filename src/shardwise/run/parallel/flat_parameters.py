"""Groups of parameters as flat arrays: the weights of a group, the part of them that this rank updates, and their
gradients.

In a tiled group those that products take rest in a narrow format, a scale for each tile, beside a master copy. Weights
that rest in parts (ZeRO-3) are gathered before a unit runs, one unit ahead of it, and freed behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.run.kernels.quantization import TiledWeight
from shardwise.run.mixed_precision import TrainingDtypes
from shardwise.run.parallel.collectives import MeshCollectives, PendingWork, TrafficLabel
from shardwise.run.parallel.world import World
from shardwise.sharding.spec import Axes
from shardwise.step.flat_arrays import WeightSync
from shardwise.step.instructions import GATHER, GRADIENT
from shardwise.step.parameters import GroupMember, ParameterGroup
from shardwise.step.rank_program import RankProgram
from shardwise.values.boxes import Box, Shape, interval_boxes


class ParameterShard(NamedTuple):
    """What of a parameter is this process's to update: `size` elements from `offset` of the flattened part that it uses, at
    `start` of its shard. That part is the `window` of the parameter."""

    member: GroupMember
    offset: int
    start: int
    size: int
    window: Box

    @property
    def name(self) -> str:
        """The parameter's full name."""
        return self.member.parameter.name

    @property
    def whole(self) -> Shape:
        """The parameter's shape."""
        return self.member.global_shape

    @property
    def covers_parameter(self) -> bool:
        """Whether the process uses all of the parameter."""
        return self.window.lengths == self.whole

    def boxes(self) -> Iterator[Box]:
        """Where it lies in the whole parameter, in order."""
        for box in interval_boxes(self.window.lengths, self.offset, self.offset + self.size):
            yield Box(tuple(map(sum, zip(box.offsets, self.window.offsets, strict=True))), box.lengths)


class FlatParameterGroup:
    """The flat arrays of a group on this process.

    `weights` [padded] are what the model's parameters are views of, the `views` by name; with `splits_weights` they have memory
    only while they are gathered. `shard` [shard] is this process's part of them, `state` [shard] what the optimizer updates: the
    master copy where there is one, otherwise `shard` itself. `gradients` rest whole [padded], or with `scatters` [shard];
    `gradient_shard` is this process's part, `update` [shard] a copy of it for the update, where the recipe has one. Frozen groups
    have no gradients.
    """

    def __init__(self, group: ParameterGroup, formats: TrainingDtypes, world: World) -> None:
        self.group, self.formats, self.world = group, formats, world
        sync = group.sync
        self.splits_weights, self.scatters = bool(sync.gather), bool(sync.scatter)
        self.begin = world.position(sync.shard) * group.shard_size
        self.weights_carried, self.gradients_carried = (TrafficLabel(role, group.path) for role in (GATHER, GRADIENT))
        self.on_resize: Callable[[Tensor], None] = lambda weights: None  # called whenever gathered weights come and go
        self._make_weights()
        self.views = self._views()
        if self.splits_weights:
            self.release()
        if group.trained:
            self._make_gradients()

    @property
    def sync(self) -> WeightSync:
        """The axes that it is gathered and reduced over."""
        return self.group.sync

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.world.device)

    def local_slice(self, flat: Tensor) -> Tensor:
        """This process's part of a flat array."""
        return flat[self.begin : self.begin + self.group.shard_size]

    def view(self, flat: Tensor, member: GroupMember) -> Tensor:
        """A parameter's part of a flat array, in its shape."""
        return flat[member.start : member.stop].view(member.shape)

    def _make_weights(self) -> None:
        formats, size = self.formats, self.group.shard_size
        self.weights = self.zeros(self.group.padded_size, formats.weights)
        self.shard = self.zeros(size, formats.weights) if self.splits_weights else self.local_slice(self.weights)
        self.has_master = formats.has_master and self.group.trained
        self.state = self.zeros(size, formats.state) if self.has_master else self.shard
        self.whole = True

    def _views(self) -> dict[str, Any]:
        """What the model uses of each parameter."""
        return {member.parameter.name: self.view(self.weights, member) for member in self.group.members}

    def stored_tensors(self) -> Iterator[Tensor]:
        """The weights as they rest."""
        yield self.shard

    def _make_gradients(self) -> None:
        size = self.group.shard_size if self.scatters else self.group.padded_size
        self.gradients = self.zeros(size, self.formats.held)
        update = self.formats.update
        self.update = None if update is None else self.zeros(self.group.shard_size, update)
        self.gradient_shard = self.gradients if self.scatters else self.local_slice(self.gradients)

    def allocate(self) -> None:
        """Give the gathered weights their memory; the views are of it again."""
        self.weights.untyped_storage().resize_(self.group.padded_size * self.weights.element_size())
        self.whole = True
        self.on_resize(self.weights)

    def release(self) -> None:
        """Take it away. Whatever views a unit holds are good again once the weights are gathered."""
        self.weights.untyped_storage().resize_(0)
        self.whole = False
        self.on_resize(self.weights)

    def intervals(self) -> Iterator[ParameterShard]:
        """This process's part of each parameter; parameters that it has nothing of are left out."""
        end = self.begin + self.group.shard_size
        for member in self.group.members:
            window = self.window(member)
            low, high = max(member.start, self.begin), min(member.start + window.volume, end)
            if low < high:
                yield ParameterShard(member, low - member.start, low - self.begin, high - low, window)

    def local_runs(self) -> Iterator[tuple[frozenset[str], slice]]:
        """Rows of this process's part whose parameters are split over the same axes where they are used, with these."""
        return _group_runs((one.member, one.start, one.size) for one in self.intervals())

    def full_runs(self) -> Iterator[tuple[frozenset[str], slice]]:
        """The same rows of a whole array."""
        return _group_runs((member, member.start, self.window(member).volume) for member in self.group.members)

    def copies(self, axes: Collection[str], among: Axes) -> int:
        """How many processes along `among`, and of the opposite stage, have the same part of gradients whose parameters are split
        over some axes."""
        copies = self.world.mesh.size([axis for axis in among if axis not in axes and axis not in self.sync.shard])
        return copies * (2 if self.group.mirrored else 1)

    def window(self, member: GroupMember) -> Box:
        """The part of a parameter that this process uses; what pads it is behind its last row, and so no part of an interval."""
        places = (self.world.position(axes) for axes in member.parameter.use.axes)
        starts = tuple(
            min(place * length, size)
            for place, length, size in zip(places, member.shape, member.global_shape, strict=True)
        )
        lengths = (
            min(length, size - start)
            for start, length, size in zip(starts, member.shape, member.global_shape, strict=True)
        )
        return Box(starts, tuple(lengths))

    @torch.no_grad()
    def set_weights(self, value: Callable[[ParameterShard], Tensor]) -> None:
        """Set this process's part, interval by interval [size]; `publish` hands it to the weights."""
        for one in self.intervals():
            self.state[one.start : one.start + one.size] = value(one).to(self.state)

    @torch.no_grad()
    def publish(self) -> None:
        """Hand what was updated to this process's part of the weights."""
        if self.has_master:
            self.shard.copy_(self.state)


def _group_runs(places: Iterable[tuple[GroupMember, int, int]]) -> Iterator[tuple[frozenset[str], slice]]:
    """Of parameters, each with where it starts and its size, those in a row that the same axes split."""
    for axes, run in itertools.groupby(places, key=lambda place: place[0].parameter.use.sharded_axes):
        found = list(run)
        yield axes, slice(found[0][1], found[-1][1] + found[-1][2])


class TiledParameterGroup(FlatParameterGroup):
    """A group whose `weights` [padded] are flat but for those of `cast`, parameters by their full names, which have tensors of
    their own. The master copy is whole on each process, so that each casts whole tiles."""

    def __init__(self, group: ParameterGroup, formats: TrainingDtypes, world: World, cast: Set[str]) -> None:
        self.cast = cast
        super().__init__(group, formats, world)

    def _make_weights(self) -> None:
        plain = sum(member.size for member in self.group.members if not self._is_tiled(member))
        self.weights = self.shard = self.zeros(plain, self.formats.weights)
        self.state = self.zeros(self.group.shard_size, self.formats.state)
        self.has_master = self.whole = True
        assert len(self.state) == self.group.padded_size, "the master copy is whole (planning.runnable)"

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
        matrix, narrow = member.parameter.matrix, self.formats.tiled
        assert matrix is not None
        assert narrow is not None
        shape = torch.Size(member.shape)
        return TiledWeight.zeros(
            shape, len(matrix.stack), len(matrix.rows), narrow.operand, narrow.scaling, self.world.device
        )

    def stored_tensors(self) -> Iterator[Tensor]:
        """The weights as they rest, with the scales of their tiles."""
        yield self.weights
        for view in self.views.values():
            if isinstance(view, TiledWeight):
                yield from (view.elements, view.scales)

    @torch.no_grad()
    def publish(self) -> None:
        """Cast what was updated."""
        for member in self.group.members:
            view, values = self.views[member.parameter.name], self.view(self.state, member)
            if isinstance(view, TiledWeight):
                view.store(values)
            else:
                view.copy_(values)


def build_flat_groups(instance: RankProgram, formats: TrainingDtypes, world: World) -> list[FlatParameterGroup]:
    """Those of a process, in the order in which their gradients are ready."""
    if formats.tiled is None:
        return [FlatParameterGroup(group, formats, world) for group in instance.groups]
    cast = frozenset(one.name for one in instance.parameters if one.weight in instance.operands(one.unit))
    return [TiledParameterGroup(group, formats, world, cast) for group in instance.groups]


class WeightGatherer:
    """What is done around the units of a model (`run.engine.model.WeightMovement`), by their places in the forward pass.

    `forward` and `backward` are the groups that each unit needs gathered in a pass, `kept` the units that keep them from the
    one until the other.
    """

    def __init__(
        self, forward: Sequence[Sequence[FlatParameterGroup]], backward: Sequence[Sequence[FlatParameterGroup]], kept: Set[int],
        exchange: MeshCollectives,
    ) -> None:  # fmt: skip
        self.forward, self.backward, self.kept, self.exchange = forward, backward, kept, exchange
        self.pending: dict[int, PendingWork] = {}

    def before_forward(self, place: int, following: int | None) -> None:
        """The unit's weights are there, and the next one's are on their way."""
        self._require(self.forward[place])
        if following is not None:
            self._start(self.forward[following])

    def after_forward(self, place: int) -> None:
        """They leave, unless the backward pass follows at once."""
        for group in self.forward[place] if place not in self.kept else ():
            group.release()

    def before_backward(self, place: int, done: int | None, following: int | None) -> None:
        """The unit before has run backward."""
        if done is not None:
            self._free_after_use(done)
        self._require(self.backward[place])
        if following is not None:
            self._start(self.backward[following])

    def _free_after_use(self, done: int) -> None:
        """Those that are still there: frozen weights have no gradient that says when they are done with, and lent ones have not
        yet all of theirs."""
        for group in (*self.forward[done], *self.backward[done]):
            if group.whole and id(group) not in self.pending:
                group.release()

    def _require(self, groups: Iterable[FlatParameterGroup]) -> None:
        self._start(groups)
        for group in groups:
            pending = self.pending.pop(id(group), None)
            if pending:
                pending.wait()

    def _start(self, groups: Iterable[FlatParameterGroup]) -> None:
        for group in groups:
            if not group.whole:
                group.allocate()
                gathered = group.weights, group.shard, group.sync.gather, group.weights_carried
                self.pending[id(group)] = self.exchange.all_gather(*gathered)

    def end(self) -> None:
        """Free everything at the end of a pass."""
        for groups in (*self.forward, *self.backward):
            for group in groups:
                pending = self.pending.pop(id(group), None)
                if pending:
                    pending.wait()
                if group.whole:
                    group.release()
