"""Weights that rest in parts (ZeRO-3): gathered before a unit runs, one unit ahead of it, and freed behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from shardwise.train.parallel.exchange import Exchange, Pending
from shardwise.train.parallel.flat import FlatGroup


class WeightGatherer:
    """What is done around the units of a model (`engine.torch.model.Movement`), by their places in the forward pass.

    `forward` and `backward` are the groups that each unit needs gathered in a pass, `kept` the units that keep them from the
    one until the other.
    """

    def __init__(
        self, forward: Sequence[Sequence[FlatGroup]], backward: Sequence[Sequence[FlatGroup]], kept: Set[int],
        exchange: Exchange,
    ) -> None:  # fmt: skip
        self.forward, self.backward, self.kept, self.exchange = forward, backward, kept, exchange
        self.pending: dict[int, Pending] = {}

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

    def _require(self, groups: Iterable[FlatGroup]) -> None:
        self._start(groups)
        for group in groups:
            pending = self.pending.pop(id(group), None)
            if pending:
                pending.wait()

    def _start(self, groups: Iterable[FlatGroup]) -> None:
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
