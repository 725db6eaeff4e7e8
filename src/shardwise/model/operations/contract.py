"""Products: einsums of one operand or two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.operations.base import Dims, Operation, Placed
from shardwise.model.operations.maps import Map
from shardwise.sharding.einsum import contract, natural
from shardwise.sharding.spec import Spec
from shardwise.symbolic import Local, Polynomial, product


@dataclass(frozen=True, slots=True)
class Contract(Operation):
    """`result = left * right`, summed over the dims that the result lacks: an einsum of two operands.

    Of one operand it is the sum over some of its dims, or the operand with its dims in another order.
    """

    @property
    def kind(self) -> str:
        return "contract"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        if len(self.inputs) == 1:
            return Placed((specs[0],), (natural(specs, dims[self.outputs[0]]),))
        left, right = self.inputs
        keep = "left" if fixed(left) else "right" if fixed(right) else None
        case = contract(specs[0], specs[1], dims[self.outputs[0]], fixed=keep, goal=goal)
        reasons = tuple("; ".join(why for s, why in case.moves if s == side) for side in ("left", "right"))
        return Placed((case.left, case.right), (case.result,), reasons)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        dy = cotangents[self.outputs[0]]
        if len(self.inputs) == 1:
            return [(self.inputs[0], Map((dy,), ("?",), "sum_to"))]
        left, right = self.inputs
        return [(left, Contract((dy, right), ("?",))), (right, Contract((left, dy), ("?",)))]

    def flops(self, placed: Placed) -> Polynomial:
        """2 per element of the index space; 1 where nothing is summed (an elementwise or outer product).

        Of one operand 1 per element, for the additions; none where only the order of its dims changes.
        """
        sizes = {Local(d, a) for spec in placed.inputs for d, a in zip(spec.dims, spec.axes, strict=True)}
        summed = bool({size.dim for size in sizes} - set(placed.outputs[0].dims))
        return product(sizes, float(len(placed.inputs) - 1 + summed))
