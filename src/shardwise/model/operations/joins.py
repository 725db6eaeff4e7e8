"""Concatenation of tensors along a dim, and its transpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.operations.base import Dims, Operation, Placed, ShapeLast
from shardwise.sharding.spec import Spec


@dataclass(frozen=True, slots=True)
class Join(Operation):
    """The operands concatenated along a dim of the result's own; `parts` are their own dims, in order.

    An operand that lacks another dim of the result is repeated along it (a key's rotary part is one for all heads).
    """

    parts: Dims = ()

    @property
    def kind(self) -> str:
        return "map"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        fullest = max(specs, key=lambda spec: len(spec.dims))
        rows = {d: fullest.axes_of(d) for d in fullest.dims if d not in self.parts}
        aligned = tuple(Spec.of(s.dims, {d: a for d, a in rows.items() if d in s.dims}) for s in specs)
        return Placed(aligned, (Spec.of(dims[self.outputs[0]], rows),))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (whole,) = self.outputs
        joined = next(d for d in dims[whole] if all(d not in dims[name] for name in self.inputs))
        return [
            (name, Part((cotangents[whole], name), ("?",), self.parts, joined, position))
            for position, name in enumerate(self.inputs)
        ]


@dataclass(frozen=True, slots=True)
class Part(ShapeLast):
    """The transpose of a join: one operand's part along `joined`, summed over the dims that the operand lacks.

    The second input gives the shape only.
    """

    parts: Dims
    joined: str
    position: int

    @property
    def kind(self) -> str:
        return "map"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        dy, like = specs
        summed = {a for d in dy.dims if d not in (*like.dims, self.joined) for a in dy.axes_of(d)}
        rows = {d: dy.axes_of(d) for d in like.dims if d in dy.dims}
        return Placed((dy, like), (Spec.of(like.dims, rows, summed | set(dy.partial)),))
