"""Functions of whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.operations.base import Dims, Operation, Placed
from shardwise.sharding.spec import Spec
from shardwise.symbolic import Least, Local, Polynomial, product

STEPS = 5  # of a Newton-Schulz iteration. Source: Jordan et al. 2024, "Muon", and torch.optim.Muon


@dataclass(frozen=True, slots=True)
class OfMatrix(Operation):
    """`result = function(matrix)` by a Newton-Schulz iteration. The operand's last dims are `rows` and `columns` of a matrix,
    which each device has whole; over the dims in front of them, a stack of matrices, it may be split."""

    function: str = ""
    rows: Dims = ()
    columns: Dims = ()

    @property
    def kind(self) -> str:
        return "of_matrix"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        (spec,) = specs
        stack = {dim: spec.axes_of(dim) for dim in spec.dims if dim not in (*self.rows, *self.columns)}
        whole = Spec.of(spec.dims, stack)
        return Placed((whole,), (whole,), ("a function of whole matrices",))

    def flops(self, placed: Placed) -> Polynomial:
        """Each step has three products: X·Xᵀ, its square, and with X; X has the fewer of rows and columns as its rows:
        2·(2·least·rows·columns + least^3)."""
        stack = [Local(d, a) for d, a in zip(*_spec(placed), strict=True) if d not in (*self.rows, *self.columns)]
        least, sides = self.least, [Local(dim, ()) for dim in (*self.rows, *self.columns)]
        return product([*stack, least, *sides], 4.0 * STEPS) + product([*stack, least, least, least], 2.0 * STEPS)

    @property
    def least(self) -> Least:
        """The fewer of rows and columns."""
        return Least(self.rows, self.columns)


def _spec(placed: Placed) -> tuple[Dims, tuple[Dims, ...]]:
    return placed.inputs[0].dims, placed.inputs[0].axes
