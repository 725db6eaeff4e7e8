"""Groups of parameters of which those that products take rest in a narrow format, a scale for each tile, beside a master copy."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.torch.tiled import Tiled
from shardwise.lowering.groups import Group, Member
from shardwise.lowering.instance import Instance
from shardwise.train.formats import Formats
from shardwise.train.parallel.flat import FlatGroup
from shardwise.train.world import World


class TiledGroup(FlatGroup):
    """A group whose `weights` [padded] are flat but for those of `cast`, parameters by their full names, which have tensors of
    their own. The master copy is whole on each process, so that each casts whole tiles."""

    def __init__(self, group: Group, formats: Formats, world: World, cast: Set[str]) -> None:
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

    def _is_tiled(self, member: Member) -> bool:
        return member.parameter.name in self.cast

    def _tiled(self, member: Member) -> Tiled:
        matrix, narrow = member.parameter.matrix, self.formats.tiled
        assert matrix is not None
        assert narrow is not None
        shape = torch.Size(member.shape)
        return Tiled.zeros(
            shape, len(matrix.stack), len(matrix.rows), narrow.operand, narrow.scaling, self.world.device
        )

    def resting(self) -> Iterator[Tensor]:
        """The weights as they rest, with the scales of their tiles."""
        yield self.weights
        for view in self.views.values():
            if isinstance(view, Tiled):
                yield from (view.elements, view.scales)

    @torch.no_grad()
    def publish(self) -> None:
        """Cast what was updated."""
        for member in self.group.members:
            view, values = self.views[member.parameter.name], self.view(self.state, member)
            if isinstance(view, Tiled):
                view.assign(values)
            else:
                view.copy_(values)


def flat_groups(instance: Instance, formats: Formats, world: World) -> list[FlatGroup]:
    """Those of a process, in the order in which their gradients are ready."""
    if formats.tiled is None:
        return [FlatGroup(group, formats, world) for group in instance.groups]
    cast = frozenset(one.name for one in instance.parameters if one.weight in instance.operands(one.unit))
    return [TiledGroup(group, formats, world, cast) for group in instance.groups]
