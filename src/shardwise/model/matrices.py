"""Which weights are matrices of products, and which of their dims are rows and columns: read off the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.model.operations import Contract, Dims
from shardwise.model.program import Part, Program
from shardwise.optimizer.optimizer import MatrixSizes, Per
from shardwise.symbolic import Least, Local, Pairs, product


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
