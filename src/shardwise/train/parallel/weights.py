"""Weights that rest in parts (ZeRO-3): gathered before a unit runs, one unit ahead of it, and freed behind it."""

from __future__ import annotations

from collections.abc import Sequence, Set

from shardwise.train.parallel.exchange import Exchange, Pending
from shardwise.train.parallel.flat import FlatGroup


class WeightGatherer:
    """What is done around the units of a model (`engine.torch.model.Movement`), by their places in the forward pass.

    `used` are the groups of each unit; `backward` the units whose backward pass needs its weights gathered again, `kept` those
    that keep them from the forward pass until then.
    """

    def __init__(
        self, used: Sequence[Sequence[FlatGroup]], backward: Set[int], kept: Set[int], exchange: Exchange
    ) -> None:
        self.used = [[group for group in groups if group.splits_weights] for groups in used]
        self.backward, self.kept, self.exchange = backward, kept, exchange
        self.pending: dict[int, Pending] = {}

    def before_forward(self, place: int) -> None:
        """The unit's weights are there, and the next one's are on their way."""
        self._require(place)
        self._prefetch(place + 1)

    def after_forward(self, place: int) -> None:
        """They leave, unless the backward pass follows at once."""
        for group in self.used[place] if place not in self.kept else ():
            group.release()

    def before_backward(self, place: int) -> None:
        """All units behind this one have run backward."""
        if place + 1 < len(self.used):
            self._free_after_use(place + 1, place)
        if place in self.backward:
            self._require(place)
        if place - 1 in self.backward:
            self._prefetch(place - 1)

    def _free_after_use(self, done: int, place: int) -> None:
        """Frozen weights have no gradient that says when they are done with."""
        for group in self.used[done]:
            if not group.group.trained and group.whole and group not in self.used[place]:
                group.release()

    def _require(self, place: int) -> None:
        for group in self.used[place]:
            self._start(group)
            pending = self.pending.pop(id(group), None)
            if pending:
                pending.wait()

    def _prefetch(self, place: int) -> None:
        if place < len(self.used):
            for group in self.used[place]:
                self._start(group)

    def _start(self, group: FlatGroup) -> None:
        if not group.whole:
            group.allocate()
            self.pending[id(group)] = self.exchange.all_gather(group.weights, group.shard, group.sync.gather)

    def end(self) -> None:
        """Let go of everything at the end of a micro-batch."""
        for groups in self.used:
            for group in groups:
                pending = self.pending.pop(id(group), None)
                if pending:
                    pending.wait()
                if group.whole:
                    group.release()
