"""Weights that rest in parts (ZeRO-3): gathered before a unit runs, one unit ahead of it, and freed behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardwise.train.parallel.exchange import Exchange, Pending
from shardwise.train.parallel.flat import FlatGroup


class WeightGatherer:
    """Hooks on the units of a model. `used` are the groups of each unit, in the order of the forward pass; `backward` the units
    whose backward pass needs its weights gathered again, `kept` those that keep them from the forward pass until then."""

    def __init__(
        self, units: Mapping[str, nn.Module], used: Mapping[str, Sequence[FlatGroup]], backward: frozenset[str],
        kept: frozenset[str], exchange: Exchange,
    ) -> None:  # fmt: skip
        self.used = {path: [group for group in groups if group.splits_weights] for path, groups in used.items()}
        self.backward, self.kept, self.exchange = backward, kept, exchange
        self.paths = list(units)
        self.pending: dict[int, Pending] = {}
        if any(self.used.values()):
            for path, unit in units.items():
                self._hook(path, unit)

    def _hook(self, path: str, unit: nn.Module) -> None:
        unit.register_forward_pre_hook(lambda module, inputs: self._before_forward(path))
        unit.register_forward_hook(lambda module, inputs, output: self._after_forward(path, output))

    def _before_forward(self, path: str) -> None:
        self._require(path)
        self._prefetch(self.paths.index(path) + 1)

    def _after_forward(self, path: str, output: Any) -> None:
        for group in self.used[path] if path not in self.kept else ():
            group.release()
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.requires_grad:
            first.register_hook(lambda gradient: self._before_backward(path))  # type: ignore[no-untyped-call]

    def _before_backward(self, path: str) -> None:
        """The gradient of a unit's output is there: all units behind it have run backward."""
        place = self.paths.index(path)
        if place + 1 < len(self.paths):
            self._free_after_use(self.paths[place + 1], path)
        if path in self.backward:
            self._require(path)
        if place and self.paths[place - 1] in self.backward:
            self._prefetch(place - 1)

    def _free_after_use(self, done: str, path: str) -> None:
        """Frozen weights have no gradient that says when they are done with."""
        for group in self.used[done]:
            if not group.group.trained and group.whole and group not in self.used[path]:
                group.release()

    def _require(self, path: str) -> None:
        for group in self.used[path]:
            self._start(group)
            pending = self.pending.pop(id(group), None)
            if pending:
                pending.wait()

    def _prefetch(self, place: int) -> None:
        if place < len(self.paths):
            for group in self.used[self.paths[place]]:
                self._start(group)

    def _start(self, group: FlatGroup) -> None:
        if not group.whole:
            group.allocate()
            self.pending[id(group)] = self.exchange.all_gather(group.weights, group.shard, group.sync.gather)

    def end(self) -> None:
        """Let go of everything at the end of a micro-batch."""
        for groups in self.used.values():
            for group in groups:
                pending = self.pending.pop(id(group), None)
                if pending:
                    pending.wait()
                if group.whole:
                    group.release()
