"""Gradients on their way: into the flat arrays as they become ready, over the mesh as soon as a group of them is, or later.

A step's loss is divided by the targets of the whole step, so gradients are summed, never averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwise.layout.groups import Member
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
        self.made: Callable[[Tensor], None] = lambda whole: (
            None
        )  # called with gradients that are scattered, and as they arrive

    def _low(self) -> Tensor | None:
        """The copy in which products give gradients, where they are added up in another."""
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


class GradientReducer:
    """The gradients of all groups. `groups` in the order in which they are ready; they are sent in this order on every process.

    `reduction`: "after" the backward pass, or as soon as a group is ready. `each_micro_batch`: not only in a step's last.
    """

    def __init__(
        self, groups: Sequence[FlatGroup], exchange: Exchange, *, reduction: str, each_micro_batch: bool
    ) -> None:
        self.groups = [GroupGradients(group, exchange) for group in groups]
        self.after, self.each_micro_batch = reduction == "after", each_micro_batch
        self.last = True
        self.num_sent = 0
        for one in self.groups:
            for number, (member, parameter) in enumerate(one.flat.members):
                self._hook(one, number, member, parameter)

    def _hook(self, one: GroupGradients, number: int, member: Member, parameter: nn.Parameter) -> None:
        def ready(parameter: nn.Parameter) -> None:
            one.take(number, member, parameter)
            if not one.absent:
                self._ready(one)

        parameter.register_post_accumulate_grad_hook(ready)  # type: ignore[no-untyped-call]

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
        for one in self.groups:
            one.do_without()
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
