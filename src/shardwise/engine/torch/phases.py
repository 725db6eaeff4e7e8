"""What is done in a phase of a unit, and groups of it that run as one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shardwise.derive.walk import Compute
from shardwise.engine.torch.calls import Call
from shardwise.engine.torch.moving import Moving
from shardwise.engine.torch.ringing import Around
from shardwise.model.operations import Map, Operation


class Fused(NamedTuple):
    """A call, the operations that it stands for, and what of their results it has no need to make."""

    call: Call
    operations: tuple[Operation, ...]
    dropped: frozenset[str] = frozenset()


class Phase(NamedTuple):
    """What is done in a phase, in order."""

    name: str
    parts: Sequence[Compute | Moving | Around]

    @property
    def steps(self) -> list[Compute]:
        """Its computations."""
        return [part for part in self.parts if isinstance(part, Compute)]

    @property
    def maps(self) -> Iterator[Map]:
        return (step.operation for step in self.steps if isinstance(step.operation, Map))

    def made_by(self, operations: Iterable[Operation]) -> list[Compute]:
        """The steps of some operations."""
        wanted = {id(operation) for operation in operations}
        return [step for step in self.steps if id(step.operation) in wanted]
