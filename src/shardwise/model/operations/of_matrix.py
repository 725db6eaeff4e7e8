"""Functions of whole matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.operations.base import Dims, Operation, Placed
from shardwise.sharding.spec import Spec
from shardwise.symbolic import ZERO, Local, Polynomial, product


@dataclass(frozen=True, slots=True)
class OfMatrix(Operation):
    """`result = function(matrices)`. Dims of operands and result in front of `rows` and `columns`, or of their pairs, are a
    `stack` of matrices, which may be split; what is behind them each device has whole. `work` are the FLOPs for a matrix,
    `passing` the elements that are there while it is worked out. `kept`: the result is state, which every device that uses the
    matrices has; of what is not, a device needs the matrices that it updates a part of."""

    function: str = ""
    stack: Dims = ()
    rows: Dims = ()
    columns: Dims = ()
    work: Polynomial = ZERO
    passing: Polynomial = ZERO
    kept: bool = False

    @property
    def kind(self) -> str:
        return "of_matrix"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        split = {dim: specs[0].axes_of(dim) for dim in self.stack}
        whole = tuple(Spec.of(spec.dims, split) for spec in specs)
        reasons = ("a function of whole matrices",) * len(whole)
        return Placed(whole, (Spec.of(dims[self.outputs[0]], split),), reasons)

    def flops(self, placed: Placed) -> Polynomial:
        """Those of all matrices of a device."""
        return self.work * self.num_matrices(placed)

    def passing_elements(self, placed: Placed) -> Polynomial:
        """Elements beside operands and results, of all matrices of a device."""
        return self.passing * self.num_matrices(placed)

    def num_matrices(self, placed: Placed) -> Polynomial:
        """How many a device has."""
        return product(Local(dim, placed.inputs[0].axes_of(dim)) for dim in self.stack)
