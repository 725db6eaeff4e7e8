"""A group of parameters as flat arrays: its weights, the part of them that this process updates, and their gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.lowering.groups import Group, Member
from shardwise.lowering.weights import Sync
from shardwise.sharding.spec import Axes
from shardwise.simulate.work import GATHER, GRADIENT
from shardwise.train.box import Box, Shape, interval_boxes
from shardwise.train.formats import Formats
from shardwise.train.parallel.exchange import Carried
from shardwise.train.world import World


class Interval(NamedTuple):
    """What of a parameter is this process's to update: `size` elements from `offset` of the flattened part that it uses, at
    `start` of its shard. That part is the `window` of the parameter."""

    member: Member
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
        return self.member.whole

    @property
    def is_of_whole(self) -> bool:
        """Whether the process uses all of the parameter."""
        return self.window.lengths == self.whole

    def boxes(self) -> Iterator[Box]:
        """Where it lies in the whole parameter, in order."""
        for box in interval_boxes(self.window.lengths, self.offset, self.offset + self.size):
            yield Box(tuple(map(sum, zip(box.offsets, self.window.offsets, strict=True))), box.lengths)


class FlatGroup:
    """The flat arrays of a group on this process.

    `weights` [padded] are what the model's parameters are views of, the `views` by name; with `splits_weights` they have memory
    only while they are gathered. `shard` [shard] is this process's part of them, `state` [shard] what the optimizer updates: the
    master copy where there is one, otherwise `shard` itself. `gradients` rest whole [padded], or with `scatters` [shard];
    `gradient_shard` is this process's part, `update` [shard] a copy of it for the update, where the recipe has one. Frozen groups
    have no gradients.
    """

    def __init__(self, group: Group, formats: Formats, world: World) -> None:
        self.group, self.formats, self.world = group, formats, world
        sync = group.sync
        self.splits_weights, self.scatters = bool(sync.gather), bool(sync.scatter)
        self.begin = world.position(sync.shard) * group.shard_size
        self.weights_carried, self.gradients_carried = (Carried(role, group.path) for role in (GATHER, GRADIENT))
        self.resized: Callable[[Tensor], None] = lambda weights: None  # called whenever gathered weights come and go
        self._make_weights()
        self.views = self._views()
        if self.splits_weights:
            self.release()
        if group.trained:
            self._make_gradients()

    @property
    def sync(self) -> Sync:
        """The axes that it is gathered and reduced over."""
        return self.group.sync

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self.world.device)

    def own(self, flat: Tensor) -> Tensor:
        """This process's part of a flat array."""
        return flat[self.begin : self.begin + self.group.shard_size]

    def view(self, flat: Tensor, member: Member) -> Tensor:
        """A parameter's part of a flat array, in its shape."""
        return flat[member.start : member.stop].view(member.shape)

    def _make_weights(self) -> None:
        formats, size = self.formats, self.group.shard_size
        self.weights = self.zeros(self.group.padded_size, formats.weights)
        self.shard = self.zeros(size, formats.weights) if self.splits_weights else self.own(self.weights)
        self.has_master = formats.has_master and self.group.trained
        self.state = self.zeros(size, formats.state) if self.has_master else self.shard
        self.whole = True

    def _views(self) -> dict[str, Any]:
        """What the model uses of each parameter."""
        return {member.parameter.name: self.view(self.weights, member) for member in self.group.members}

    def resting(self) -> Iterator[Tensor]:
        """The weights as they rest."""
        yield self.shard

    def _make_gradients(self) -> None:
        size = self.group.shard_size if self.scatters else self.group.padded_size
        self.gradients = self.zeros(size, self.formats.held)
        update = self.formats.update
        self.update = None if update is None else self.zeros(self.group.shard_size, update)
        self.gradient_shard = self.gradients if self.scatters else self.own(self.gradients)

    def allocate(self) -> None:
        """Give the gathered weights their memory; the views are of it again."""
        self.weights.untyped_storage().resize_(self.group.padded_size * self.weights.element_size())
        self.whole = True
        self.resized(self.weights)

    def release(self) -> None:
        """Take it away. Whatever views a unit holds are good again once the weights are gathered."""
        self.weights.untyped_storage().resize_(0)
        self.whole = False
        self.resized(self.weights)

    def intervals(self) -> Iterator[Interval]:
        """This process's part of each parameter; parameters that it has nothing of are left out."""
        end = self.begin + self.group.shard_size
        for member in self.group.members:
            window = self.window(member)
            low, high = max(member.start, self.begin), min(member.start + window.volume, end)
            if low < high:
                yield Interval(member, low - member.start, low - self.begin, high - low, window)

    def alike(self) -> Iterator[tuple[frozenset[str], slice]]:
        """Rows of this process's part whose parameters are split over the same axes where they are used, with these."""
        return _runs((one.member, one.start, one.size) for one in self.intervals())

    def used_alike(self) -> Iterator[tuple[frozenset[str], slice]]:
        """The same rows of a whole array."""
        return _runs((member, member.start, self.window(member).volume) for member in self.group.members)

    def copies(self, axes: Collection[str], among: Axes) -> int:
        """How many processes along `among`, and of the opposite stage, have the same part of gradients whose parameters are split
        over some axes."""
        copies = self.world.mesh.size([axis for axis in among if axis not in axes and axis not in self.sync.shard])
        return copies * (2 if self.group.shared else 1)

    def window(self, member: Member) -> Box:
        """The part of a parameter that this process uses; what pads it is behind its last row, and so no part of an interval."""
        places = (self.world.position(axes) for axes in member.parameter.use.axes)
        starts = tuple(
            min(place * length, size) for place, length, size in zip(places, member.shape, member.whole, strict=True)
        )
        lengths = (
            min(length, size - start) for start, length, size in zip(starts, member.shape, member.whole, strict=True)
        )
        return Box(starts, tuple(lengths))

    @torch.no_grad()
    def fill(self, value: Callable[[Interval], Tensor]) -> None:
        """Set this process's part, interval by interval [size]; `publish` hands it to the weights."""
        for one in self.intervals():
            self.state[one.start : one.start + one.size] = value(one).to(self.state)

    @torch.no_grad()
    def publish(self) -> None:
        """Hand what was updated to this process's part of the weights."""
        if self.has_master:
            self.shard.copy_(self.state)


def _runs(places: Iterable[tuple[Member, int, int]]) -> Iterator[tuple[frozenset[str], slice]]:
    """Of parameters, each with where it starts and its size, those in a row that the same axes split."""
    for axes, run in itertools.groupby(places, key=lambda place: place[0].parameter.use.sharded_axes):
        found = list(run)
        yield axes, slice(found[0][1], found[-1][1] + found[-1][2])
