"""When gradients are summed over the mesh: as soon as a group of them is ready, in one order on every process, or later."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.lowering.groups import Member
from shardwise.train.parallel.exchange import Exchange
from shardwise.train.parallel.flat import FlatGroup
from shardwise.train.parallel.gradients import GroupGradients


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
