"""The gradients of a group: into its flat arrays as they become ready, and from there over the mesh and back.

A step's loss is divided by the targets of the whole step, so gradients are summed, never averaged. Where gradients are
added up in another format than products give them in, a staging copy has the latter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardwise.run.kernels.optimizers import ScaledTensor
from shardwise.run.parallel.collectives import MeshCollectives, PendingWork
from shardwise.run.parallel.flat_parameters import FlatParameterGroup
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import MIRROR_RANKS
from shardwise.step.parameters import GroupMember


class GradientBuffer:
    """The gradients of one group in one backward pass after the other."""

    def __init__(self, flat: FlatParameterGroup, exchange: MeshCollectives) -> None:
        self.flat, self.exchange = flat, exchange
        self.members = {member.parameter.name: member for member in flat.group.members}
        self.fresh = True  # nothing has been scattered in this step yet
        self.begun: set[str] = set()  # members that have a gradient from an earlier pass of this step
        self.uses = Counter[str]()  # how many units of this pass give a gradient of each member
        self.absent = Counter[str]()  # of these gradients
        self.left = 0  # passes of this step that are still to come
        self.measured = False  # the norm of each pass's gradients is taken
        formats = flat.formats
        self.given = None if formats.accumulated is None or flat.scatters else GradientStaging(flat)
        self.moving: Tensor | None = None
        self.arriving: Tensor | None = None
        self.pending: PendingWork | None = None
        self.on_allocated: Callable[[Tensor], None] = lambda part: (
            None
        )  # called with what is scattered, and with what arrives

    def begin_step(self, num_passes: int, *, measured: bool) -> None:
        """So many passes will give gradients of the group. `measured`: the norm of those of each is taken."""
        self.fresh, self.begun, self.left, self.measured = True, set(), num_passes, measured

    def begin_pass(self, uses: Counter[str]) -> None:
        """So many units are going to give a gradient of each member."""
        self.uses, self.absent = uses, Counter(uses)
        self.left -= 1

    def end_pass(self) -> None:
        """All have been given."""
        self.begun |= set(self.uses)

    @property
    def last(self) -> bool:
        """Whether this pass is the step's last that gives gradients of the group."""
        return self.left == 0

    @property
    def uses_separate_buffer(self) -> bool:
        """Whether this pass's gradients have an array of their own: those that are scattered, and behind the first pass those
        whose norm is taken."""
        is_first = not self.begun and len(self.uses) == len(self.members)
        return self.flat.scatters or (self.measured and not is_first)

    @property
    def array(self) -> Tensor:
        """Where this micro-batch's gradients are put, or added up."""
        flat = self.flat
        if not self.uses_separate_buffer:
            return flat.gradients
        if self.moving is None:
            dtype = flat.formats.reduced if flat.scatters else flat.gradients.dtype
            self.moving = flat.zeros(flat.group.padded_size, dtype)
            self.on_allocated(self.moving)
        return self.moving

    def accumulates(self, name: str) -> bool:
        """Whether a gradient is added to what is there."""
        first = self.absent[name] == self.uses[name]
        return not first or (name in self.begun and not self.uses_separate_buffer)

    def target(self, name: str) -> tuple[Tensor | None, bool]:
        """Where products may write a parameter's gradient, and whether they add it; nowhere, where formats differ."""
        member, formats = self.members[name], self.flat.formats
        if self.given is not None:
            return self.given.target(member), False
        if self.array.dtype != formats.activations:
            return None, False
        return self.flat.view(self.array, member), self.accumulates(name)

    def accept(self, name: str, gradient: Tensor | None) -> bool:
        """A parameter's gradient is ready (None: at its target). Whether it was the last of the group's."""
        member = self.members[name]
        if self.given is not None:
            gradient = self.given.accept(member, gradient)
        if gradient is not None:
            resting = self.flat.view(self.array, member)
            resting.add_(gradient) if self.accumulates(name) else resting.copy_(gradient)
        self.absent[name] -= 1
        self.absent += Counter()  # what is there of is not absent
        return not self.absent

    def fold_separate_buffer(self) -> None:
        """What had an array of its own for its norm's sake is added to where gradients rest."""
        if self.moving is None or self.flat.scatters:
            return
        for name in self.uses:
            resting, given = (self.flat.view(one, self.members[name]) for one in (self.flat.gradients, self.moving))
            resting.add_(given) if name in self.begun else resting.copy_(given)
        self.moving = None

    def send(self) -> None:
        """All are there: begin to sum them over the mesh."""
        flat = self.flat
        if flat.scatters:
            self._scatter(self.array, flat.sync.scatter)
        elif flat.sync.step_scatter:
            self._scatter(flat.gradients.to(flat.formats.reduced), flat.sync.step_scatter)
        elif flat.sync.reduce:
            self.arriving = flat.gradients.to(flat.formats.reduced)
            self.pending = self._summed(self.arriving, flat.sync.reduce)

    def _scatter(self, whole: Tensor, axes: tuple[str, ...]) -> None:
        self.arriving = self.flat.zeros(self.flat.group.shard_size, self.flat.formats.reduced)
        self.on_allocated(self.arriving)
        self.pending = self.exchange.reduce_scatter(self.arriving, whole, axes, self.flat.gradients_carried)

    def _summed(self, values: Tensor, axes: Axes) -> PendingWork:
        return self.exchange.all_reduce(values, axes, carries=self.flat.gradients_carried)

    def receive(self) -> None:
        """Wait for the sum, and put it where gradients rest."""
        if self.pending is None or self.arriving is None:
            return
        self.pending.wait()
        flat, arrived = self.flat, self.arriving
        target = flat.gradients if len(arrived) == len(flat.gradients) else flat.gradient_shard
        if flat.scatters and not self.fresh:
            target.add_(arrived)
        elif target.data_ptr() != arrived.data_ptr():
            target.copy_(arrived)
        self.moving = self.arriving = self.pending = None
        self.fresh = self.fresh and not flat.scatters

    def reduce_shards(self) -> None:
        """Begin to sum what was scattered over the axes that replicate it."""
        flat = self.flat
        if flat.sync.reduce and (flat.scatters or flat.sync.step_scatter):
            self.arriving = flat.gradient_shard.to(flat.formats.reduced)
            self.pending = self._summed(self.arriving, flat.sync.reduce)

    def receive_shards(self) -> None:
        """Wait for these."""
        if self.pending is not None and self.arriving is not None:
            self.pending.wait()
            if self.arriving.data_ptr() != self.flat.gradient_shard.data_ptr():
                self.flat.gradient_shard.copy_(self.arriving)
        self.arriving = self.pending = None

    def sum_shared_copies(self) -> None:
        """Where another stage has a copy of the parameters, the sum of both."""
        flat = self.flat
        if flat.group.mirrored:
            both = flat.gradient_shard.to(flat.formats.reduced, copy=True)
            self._summed(both, MIRROR_RANKS).wait()
            flat.gradient_shard.copy_(both)

    def keep_local_once(self) -> None:
        """After a sum that is not the step's last: of what was summed one process keeps each part, so that it is counted once."""
        flat, world = self.flat, self.flat.world
        if flat.scatters:
            return
        kept = flat.gradient_shard.clone() if world.position(flat.sync.reduce) == 0 else None
        if flat.sync.reduce or flat.sync.step_scatter:
            flat.gradients.zero_()
            if kept is not None:
                flat.gradient_shard.copy_(kept)


class GradientStaging:
    """That of a group: `values` [padded]; in a format of one byte each parameter's have a scale, that of the last pass.

    It rests, as S1's 20 bytes have it; recipes that keep fp32 gradients alone need none.
    """

    def __init__(self, flat: FlatParameterGroup) -> None:
        self.flat = flat
        self.values = flat.zeros(flat.group.padded_size, flat.formats.gradients)
        self.scaled: dict[str, ScaledTensor] = {}
        if self.values.element_size() == 1:
            self.scaled = {one.parameter.name: self._scaled(one) for one in flat.group.members}

    def _scaled(self, member: GroupMember) -> ScaledTensor:
        scale = torch.ones(1, device=self.values.device)
        return ScaledTensor(self.values[member.start : member.stop], scale)

    def target(self, member: GroupMember) -> Tensor | None:
        """Where products write a parameter's gradient; None: nowhere, for it is cast when all of it is known."""
        return None if self.scaled else self.flat.view(self.values, member)

    def accept(self, member: GroupMember, gradient: Tensor | None) -> Tensor:
        """A parameter's gradient is ready (None: at its target): as it rests here, to be added up."""
        if gradient is None:
            return self.flat.view(self.values, member)
        if self.scaled:
            kept = self.scaled[member.parameter.name].copy_(gradient.reshape(-1))
            return kept.to(torch.float32).view(member.shape)
        return self.flat.view(self.values, member).copy_(gradient)

    def stored_tensors(self) -> Iterator[Tensor]:
        """The values, and the scales of narrow ones."""
        yield self.values
        yield from (one.scale for one in self.scaled.values())
