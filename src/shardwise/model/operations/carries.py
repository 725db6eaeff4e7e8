"""From one pipeline stage to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.operations.base import Dims, Operation, Placed
from shardwise.sharding.spec import Spec


@dataclass(frozen=True, slots=True)
class Carry(Operation):
    """Hands a tensor to the next pipeline stage unchanged: a send and a receive over `pp`."""

    axis: str = "pp"

    @property
    def kind(self) -> str:
        return "carry"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        return Placed(tuple(specs), tuple(specs))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        return [(self.inputs[0], Carry((cotangents[self.outputs[0]],), ("?",), self.axis))]
