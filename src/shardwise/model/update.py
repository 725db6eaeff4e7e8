"""The optimizer's program: its state after a step, then the weights that the next step uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardwise.model.matrices import Matrix
from shardwise.model.operations import Map, OfMatrix, Operation
from shardwise.model.program import Program, ProgramBuilder, Role
from shardwise.optimizer.optimizer import GRADIENT, MASTER, Optimizer
from shardwise.optimizer.table import optimizer_named

Dims = tuple[str, ...]


def update_program(
    weights: Mapping[str, Dims],
    gradients: Mapping[str, str],
    optimizer: str,
    matrices: Mapping[str, Matrix] | None = None,
) -> Program:
    """The update of `weights` (name -> dims), whose gradients have the names in `gradients`; `matrices` are those among them.

    For a weight w it reads the gradient and each tensor of the optimizer's state (`w.master`, ...), and defines the same with an
    appended prime, and `w'`. Raises `InputError` for an optimizer that is not known.
    """
    builder, one = ProgramBuilder(), optimizer_named(optimizer)
    updates = []
    for name, dims in weights.items():
        builder.input(gradients[name], dims, Role.WEIGHT_GRADIENT)
        matrix = (matrices or {}).get(name)
        own = one.of(matrix=matrix is not None)
        function = optimizer if own is one else f"{optimizer}.others"
        updates.append(_Update(builder, function, own, name, dims, gradients[name], matrix))
    for update in updates:  # elementwise first, since matrices come together in groups
        update.define(update.optimizer.before_whole)
    return builder.build([output for update in updates for output in update.outputs()])


class _Update:
    """The update of one weight: `found` are its tensors by their names in the optimizer's formulas."""

    def __init__(
        self, builder: ProgramBuilder, function: str, optimizer: Optimizer, name: str, dims: Dims, gradient: str,
        matrix: Matrix | None,
    ) -> None:  # fmt: skip
        self.builder, self.function, self.optimizer = builder, function, optimizer
        self.name, self.dims, self.matrix = name, dims, matrix
        self.found = {part: builder.input(f"{name}.{part}", dims, Role.STATE) for part in optimizer.state}
        self.found[GRADIENT] = gradient

    def define(self, parts: Iterable[str]) -> None:
        """Define tensors of the state after the step, or what others of them are made of."""
        for part in parts:
            update, passed = self.optimizer.updates[part], f"{part}'" in self.optimizer.passed
            reads, role = tuple(self.found[read] for read in update.reads), Role.DIRECTION if passed else Role.STATE
            made, function = self.builder.tensor(f"{self.name}.{part}'", self.dims, role), f"{self.function}.{part}"
            operation: Operation = Map(reads, (made,), function)
            if update.whole and self.matrix:
                operation = OfMatrix(reads, (made,), function, self.matrix.rows, self.matrix.columns)
            self.found[f"{part}'"] = self.builder.add(operation)

    def outputs(self) -> Iterator[str]:
        """Define the rest, and give the names of what stays."""
        self.define([part for part in self.optimizer.updates if f"{part}'" not in self.found])
        weight = self.builder.tensor(f"{self.name}'", self.dims, Role.WEIGHT)
        yield self.builder.add(Map((self.found[f"{MASTER}'"],), (weight,), "identity"))
        yield from (self.found[f"{part}'"] for part in self.optimizer.state)


def directions(program: Program) -> dict[str, str]:
    """The tensors of an update program that functions of whole matrices read: by their names those of their weights."""
    read = (operation.inputs[0] for operation in program.operations if isinstance(operation, OfMatrix))
    return {name: name.rpartition(".")[0] for name in read}
