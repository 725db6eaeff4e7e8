"""When gradients are summed over the mesh: as soon as a group of them is ready, in one order on every process, or later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.train.parallel.exchange import Exchange
from shardwise.train.parallel.flat import FlatGroup
from shardwise.train.parallel.gradients import GroupGradients

Names = Mapping[str, Mapping[str, str]]  # by unit's path, of each trained weight that it uses the parameter's full name


@dataclass(frozen=True, slots=True)
class UnitGradients:
    """Where one unit's gradients go (`engine.torch.calls.Gradients`)."""

    reducer: GradientReducer
    names: Mapping[str, str]

    def target(self, weight: str) -> tuple[Tensor | None, bool]:
        name = self.names[weight]
        return self.reducer.group_of[name].target(name)

    def give(self, weight: str, gradient: Tensor | None) -> None:
        self.reducer.take(self.names[weight], gradient)


class GradientReducer:
    """The gradients of all groups. `groups` in the order in which they are ready; they are sent in this order on every process.

    `names` are those of the weights whose gradients each unit gives. `reduction`: "after" the backward pass, or as soon as a
    group is ready. `each_micro_batch`: not only in a step's last.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], names: Names, exchange: Exchange, *, reduction: str, each_micro_batch: bool
    ) -> None:
        uses = Counter(name for of_unit in names.values() for name in of_unit.values())
        self.groups = [GroupGradients(group, exchange, _uses(group, uses)) for group in groups]
        self.group_of = {name: one for one in self.groups for name in one.members}
        self.names = names
        self.after, self.each_micro_batch = reduction == "after", each_micro_batch
        self.last = True
        self.num_sent = 0

    def of_unit(self, path: str) -> UnitGradients:
        """Where the gradients of the unit at a path go."""
        return UnitGradients(self, self.names[path])

    def take(self, name: str, gradient: Tensor | None) -> None:
        """A parameter's gradient is ready; None: at its target."""
        one = self.group_of[name]
        if one.take(name, gradient):
            self._ready(one)

    def begin_step(self) -> None:
        for one in self.groups:
            one.begin_step()

    def begin_micro_batch(self, *, last: bool) -> None:
        """`last`: of the step's micro-batches."""
        self.last, self.num_sent = last, 0
        for one in self.groups:
            one.begin_micro_batch()

    def _ready(self, one: GroupGradients) -> None:
        if one.flat.splits_weights:
            one.flat.release()
        if one.flat.scatters or not self.after:
            self._send_ready()

    def _sends(self, one: GroupGradients) -> bool:
        return one.flat.scatters or self.last or self.each_micro_batch

    def _send_ready(self) -> None:
        """Send the groups that are ready, in their order; of scattered ones the one before has arrived by then."""
        while self.num_sent < len(self.groups) and not self.groups[self.num_sent].absent:
            one = self.groups[self.num_sent]
            if one.flat.scatters and self.num_sent:
                self.groups[self.num_sent - 1].receive()
            if self._sends(one):
                one.send()
            self.num_sent += 1

    def end_micro_batch(self) -> None:
        """Send what is left, wait for all of it; after the step's last micro-batch each process has the whole sum of its part."""
        self._send_ready()
        for one in self.groups:
            one.receive()
            if not one.flat.scatters:
                one.fresh = False
        if self.last or self.each_micro_batch:
            self._end_sum()

    def _end_sum(self) -> None:
        summed = [one for one in self.groups if self.last or not one.flat.scatters]
        for one in summed:
            one.reduce_shards()
        for one in summed:
            one.receive_shards()
            if not self.last:
                one.keep_own()


def _uses(group: FlatGroup, uses: Counter[str]) -> Counter[str]:
    return Counter({member.parameter.name: uses[member.parameter.name] for member in group.group.members})
