"""The optimizer step as a program: its state after a step, then the weights that the next step uses.

Optimizers of whole matrices need to know which weights are matrices of products, and which of their dims are rows and
columns; both are read from the forward program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.model.operations import Contract, Dims, Map, OfMatrix, Operation
from shardwise.model.optimizers.definition import GRADIENT, MASTER, MatrixSizes, Optimizer, Per
from shardwise.model.optimizers.registry import optimizer_named
from shardwise.model.program import Part, Program, ProgramBuilder, Role
from shardwise.values.symbolic import Least, Local, Pairs, product


class Matrix(NamedTuple):
    """A weight's dims: a matrix [rows, columns] for each element of `stack` (of experts each has its own)."""

    stack: Dims
    rows: Dims
    columns: Dims

    @property
    def dims(self) -> Dims:
        return (*self.stack, *self.rows, *self.columns)

    def per(self, per: Per, largest_side: int = 0) -> Dims:
        """The dims of what has one number for each element, row, column or matrix, or for each two rows or columns where there
        are at most `largest_side` of them."""
        return {
            Per.ELEMENT: self.dims, Per.ROW: (*self.stack, *self.rows), Per.COLUMN: (*self.stack, *self.columns),
            Per.TENSOR: self.stack, Per.ROW_PAIR: (*self.stack, Pairs(self.rows, largest_side)),
            Per.COLUMN_PAIR: (*self.stack, Pairs(self.columns, largest_side)),
        }[per]  # fmt: skip

    def sizes(self, largest_side: int) -> MatrixSizes:
        """The sizes of one of the matrices, in symbols."""
        pairs = (product([Pairs(dims, largest_side)]) for dims in (self.rows, self.columns))
        least = product([Least(self.rows, self.columns)])
        return MatrixSizes(product(map(_whole, self.rows)), product(map(_whole, self.columns)), least, *pairs)


def _whole(dim: str) -> Local:
    return Local(dim, ())


def matrices(program: Program, *, tables: bool = False) -> Mapping[str, Matrix]:
    """The matrices of a forward program by the weights' names: what products take; tables of the vocabulary, of positions and
    heads are among them with `tables` only, each with a row for a word or a place.

    Rows are the weight's dims in front of the border between those that the product sums over and those that it leaves.

    >>> from shardwise.model.decoder import UNITS
    >>> from shardwise.model.load import load_model
    >>> found = matrices(UNITS["block"](load_model("qwen3-30b-a3b").structure.sizeless()))
    >>> found["wo"]
    Matrix(stack=(), rows=('K', 'G', 'H'), columns=('D',))
    >>> found["experts_up"]
    Matrix(stack=('E',), rows=('M',), columns=('D',))
    """
    found: dict[str, Matrix] = {}
    for name in program.weights if tables else ():
        dims = program.dims(name)
        found |= {name: Matrix((), dims[:1], dims[1:])} if program.tensors[name].part is Part.VOCABULARY else {}
    for operation in program.operations:
        for name in operation.inputs if isinstance(operation, Contract) and len(operation.inputs) == 2 else ():
            if name in program.weights and program.tensors[name].part is not Part.VOCABULARY:
                (other,) = (one for one in operation.inputs if one != name)
                matrix = _matrix(program.dims(name), program.dims(other), program.dims(operation.outputs[0]))
                found |= {name: matrix} if matrix.rows and matrix.columns else {}
    return found


def _matrix(weight: Dims, other: Dims, result: Dims) -> Matrix:
    """From the dims of a product's operands and result."""
    stack = tuple(dim for dim in weight if dim in other and dim in result)
    rest = weight[len(stack) :]
    border = next((place for place, dim in enumerate(rest) if (dim in result) != (rest[0] in result)), len(rest))
    return Matrix(stack, rest[:border], rest[border:])


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
    # Round by round, since what has to come together in between does so for many weights at once; all end with the last round.
    by_rounds = sorted(updates, key=lambda update: len(update.rounds), reverse=True)
    for round in range(-max((len(update.rounds) for update in updates), default=0), 0):
        for update in by_rounds:
            update.define(round)
    return builder.build([output for update in updates for output in update.outputs])


class _Update:
    """The update of one weight: `found` are its tensors by their names in the optimizer's formulas."""

    def __init__(
        self, builder: ProgramBuilder, function: str, optimizer: Optimizer, name: str, dims: Dims, gradient: str,
        matrix: Matrix | None,
    ) -> None:  # fmt: skip
        self.builder, self.function, self.optimizer = builder, function, optimizer
        self.name, self.dims, self.matrix = name, dims, matrix
        self.rounds, self.outputs = optimizer.rounds, list[str]()
        self.found = {
            part: builder.input(f"{name}.{part}", self.dims_of(part), self.role(part)) for part in optimizer.state
        }
        self.found[GRADIENT] = gradient

    def dims_of(self, part: str) -> Dims:
        """Those of a tensor of the update."""
        per = self.optimizer.per(part)
        if per is Per.ELEMENT:
            return self.dims
        return self.matrix.per(per, self.optimizer.largest_side) if self.matrix else ()

    def role(self, part: str) -> Role:
        """The role of a tensor of the state, or of what is made for it."""
        if f"{part}'" in self.optimizer.passed:
            return Role.DIRECTION
        if part == MASTER or self.optimizer.updates[part].kept:
            return Role.STATE if self.optimizer.per(part) is Per.ELEMENT else Role.FACTOR
        return Role.MEAN

    def define(self, round: int) -> None:
        """Define tensors of the state after the step, or what others of them are made of; `round` counts from the last, -1. With
        the last of them comes what stays."""
        if len(self.rounds) + round < 0:
            return
        for part in self.rounds[round]:
            update = self.optimizer.updates[part]
            reads, dims = tuple(self.found[read] for read in update.reads), self.dims_of(part)
            made = self.builder.tensor(f"{self.name}.{part}'", dims, self.role(part))
            function = f"{self.function}.{part}"
            read = dict.fromkeys(dim for name in reads for dim in self.builder.tensors[name].dims)
            operation: Operation = Map(reads, (made,), function, over=tuple(dim for dim in read if dim not in dims))
            if update.whole and self.matrix:
                sizes = self.matrix.sizes(self.optimizer.largest_side)
                work, passing = update.flops(sizes), update.passing(sizes)
                operation = OfMatrix(
                    reads, (made,), function, *self.matrix, work=work, passing=passing, kept=update.kept
                )
            self.found[f"{part}'"] = self.builder.add(operation)
        if round == -1:
            weight = self.builder.tensor(f"{self.name}'", self.dims, Role.WEIGHT)
            self.outputs.append(self.builder.add(Map((self.found[f"{MASTER}'"],), (weight,), "identity")))
            self.outputs += (self.found[f"{part}'"] for part in self.optimizer.state)


def weight_of(tensor: str) -> str:
    """The weight that a tensor of an update program belongs to, by their names.

    >>> weight_of("mlp_norm.weight.variance'")
    'mlp_norm.weight'
    """
    return tensor.rpartition(".")[0]


def directions(program: Program) -> dict[str, str]:
    """The tensors of an update program that come together for functions of whole matrices: by their names those of their
    weights."""
    whole = [operation for operation in program.operations if isinstance(operation, OfMatrix)]
    made = {name for operation in whole for name in operation.outputs}
    read = dict.fromkeys(name for operation in whole for name in operation.inputs)
    return {name: weight_of(name) for name in read if program.tensors[name].role is Role.DIRECTION and name not in made}
