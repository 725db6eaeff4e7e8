"""Products: einsums of two operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.operations.base import Dims, Operation, Placed
from shardwise.sharding.einsum import contract
from shardwise.sharding.spec import Spec
from shardwise.symbolic import Local, Polynomial, product


@dataclass(frozen=True, slots=True)
class Contract(Operation):
    """`result = left * right`, summed over the dims that the result lacks (an einsum of two operands)."""

    @property
    def kind(self) -> str:
        return "contract"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        left, right = self.inputs
        keep = "left" if fixed(left) else "right" if fixed(right) else None
        case = contract(specs[0], specs[1], dims[self.outputs[0]], fixed=keep, goal=goal)
        reasons = tuple("; ".join(why for s, why in case.moves if s == side) for side in ("left", "right"))
        return Placed((case.left, case.right), (case.result,), reasons)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        left, right = self.inputs
        dy = cotangents[self.outputs[0]]
        return [(left, Contract((dy, right), ("?",))), (right, Contract((left, dy), ("?",)))]

    def flops(self, placed: Placed) -> Polynomial:
        """2 per element of the index space; 1 where nothing is summed (an elementwise or outer product)."""
        sizes = {Local(d, a) for spec in placed.inputs for d, a in zip(spec.dims, spec.axes, strict=True)}
        summed = {size.dim for size in sizes} - set(placed.outputs[0].dims)
        return product(sizes, 2.0 if summed else 1.0)
