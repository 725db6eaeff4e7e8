"""The gradients of a group: into its flat arrays as they become ready, and from there over the mesh and back.

A step's loss is divided by the targets of the whole step, so gradients are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from shardwise.lowering.groups import Member
from shardwise.train.parallel.exchange import Exchange, Pending
from shardwise.train.parallel.flat import FlatGroup


class GroupGradients:
    """The gradients of one group in one micro-batch after the other."""

    def __init__(self, flat: FlatGroup, exchange: Exchange) -> None:
        self.flat, self.exchange = flat, exchange
        self.fresh = True  # nothing has been added up in this step yet
        self.absent = set(range(len(flat.parameters)))  # of this micro-batch's gradients
        self.low = self._low()
        self.moving: Tensor | None = None
        self.arriving: Tensor | None = None
        self.pending: Pending | None = None
        self.made: Callable[[Tensor], None] = lambda part: None  # called with what is scattered, and with what arrives

    def _low(self) -> Tensor | None:
        """The copy in which products give gradients, where they are added up in another. It rests, as S1's 20 bytes have it;
        recipes that keep fp32 gradients alone need none."""
        formats, flat = self.flat.formats, self.flat
        if formats.accumulated is None or flat.scatters:
            return None
        return flat.zeros(flat.group.padded_size, formats.gradients)

    def begin_step(self) -> None:
        self.fresh = True
        for parameter in self.flat.parameters:
            parameter.grad = None

    def begin_micro_batch(self) -> None:
        self.absent = set(range(len(self.flat.parameters)))

    @torch.no_grad()
    def take(self, number: int, member: Member, parameter: nn.Parameter) -> None:
        """A parameter's gradient is ready, the `number`th of the group's."""
        self.absent.discard(number)
        gradient = parameter.grad
        assert gradient is not None
        if self.flat.scatters:
            if self.moving is None:
                self.moving = self.flat.zeros(self.flat.group.padded_size, self.flat.formats.reduced)
                self.made(self.moving)
            self.flat.view(self.moving, member).copy_(gradient)
            parameter.grad = None
        else:
            self._keep(member, parameter, gradient)

    def _keep(self, member: Member, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient to those that rest whole. Where it rests as products give it, the next one is added by autograd."""
        resting = self.flat.view(self.flat.gradients, member)
        if self.low is not None:
            low = self.flat.view(self.low, member)
            low.copy_(gradient)
            gradient = low
        if resting.dtype != parameter.dtype:
            parameter.grad = None
        elif parameter.grad is not None and parameter.grad.data_ptr() == resting.data_ptr():
            return
        else:
            parameter.grad = resting
        resting.copy_(gradient) if self.fresh else resting.add_(gradient)

    @torch.no_grad()
    def do_without(self) -> None:
        """Whatever this micro-batch did not use has no gradient in it."""
        for number in self.absent if self.fresh and not self.flat.scatters else ():
            self.flat.view(self.flat.gradients, self.flat.group.members[number]).zero_()
        self.absent = set()

    @torch.no_grad()
    def send(self) -> None:
        """All are there: begin to sum them over the mesh."""
        flat = self.flat
        if flat.scatters:
            whole = flat.zeros(flat.group.padded_size, flat.formats.reduced) if self.moving is None else self.moving
            self.moving = whole  # until it has been sent
            self._scatter(whole, flat.sync.scatter)
        elif flat.sync.step_scatter:
            self._scatter(flat.gradients.to(flat.formats.reduced), flat.sync.step_scatter)
        elif flat.sync.reduce:
            self.arriving = flat.gradients.to(flat.formats.reduced)
            self.pending = self.exchange.all_reduce(self.arriving, flat.sync.reduce)

    def _scatter(self, whole: Tensor, axes: tuple[str, ...]) -> None:
        self.arriving = self.flat.zeros(self.flat.group.shard_size, self.flat.formats.reduced)
        self.made(self.arriving)
        self.pending = self.exchange.reduce_scatter(self.arriving, whole, axes)

    @torch.no_grad()
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

    @torch.no_grad()
    def reduce_shards(self) -> None:
        """Begin to sum what was scattered over the axes that replicate it."""
        flat = self.flat
        if flat.sync.reduce and (flat.scatters or flat.sync.step_scatter):
            self.arriving = flat.gradient_shard.to(flat.formats.reduced)
            self.pending = self.exchange.all_reduce(self.arriving, flat.sync.reduce)

    @torch.no_grad()
    def receive_shards(self) -> None:
        """Wait for these."""
        if self.pending is not None and self.arriving is not None:
            self.pending.wait()
            if self.arriving.data_ptr() != self.flat.gradient_shard.data_ptr():
                self.flat.gradient_shard.copy_(self.arriving)
        self.arriving = self.pending = None

    @torch.no_grad()
    def keep_own(self) -> None:
        """After a sum that is not the step's last: of what was summed one process keeps each part, so that it is counted once."""
        flat, world = self.flat, self.flat.world
        if flat.scatters:
            return
        kept = flat.gradient_shard.clone() if world.position(flat.sync.reduce) == 0 else None
        if flat.sync.reduce or flat.sync.step_scatter:
            flat.gradients.zero_()
            if kept is not None:
                flat.gradient_shard.copy_(kept)
