"""The optimizer step as a program: its state after a step, then the weights that the next step uses. Number formats and
bytes of that state follow from a precision recipe and an optimizer together.

Optimizers of whole matrices need to know which weights are matrices of products, and which of their dims are rows and columns;
both are read from the forward program.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import NamedTuple

from shardwise.model.operations import Contract, Dims, Map, MatrixFunction, Operation
from shardwise.model.optimizers.definition import (
    GRADIENT,
    MASTER,
    PAIR_GRANULARITIES,
    Granularity,
    MatrixSizes,
    Optimizer,
    get_optimizer,
)
from shardwise.model.program import ModelPart, Program, ProgramBuilder, Role
from shardwise.values import LocalDim, Precision, bytes_per_element, get_precision, multiply_symbols
from shardwise.values.symbolic import ElementPairs, FewestElements


def bytes_per_parameter(precision: Precision) -> float:
    """Return `state_bytes` with AdamW's two moments, as the sources of the recipes count.

    >>> from shardwise.values.precision import PRECISIONS
    >>> bytes_per_parameter(PRECISIONS["bf16"])
    16.0
    """
    return state_bytes(precision, get_optimizer("adamw"))


def state_bytes(precision: Precision, optimizer: Optimizer) -> float:
    """Return the bytes of a parameter's weight, gradient, master copy and moments."""
    return sum(state_parts(precision, optimizer))


def state_parts(precision: Precision, optimizer: Optimizer) -> tuple[float, float, float, float]:
    """Return the bytes of a parameter's weight, gradient, master copy and moments, one by one."""
    return (
        bytes_per_element(precision.weights), precision.gradient_bytes, precision.master_bytes,
        moment_bytes(precision, optimizer),
    )  # fmt: skip


def nearest_precision(precision: Precision, names: Iterable[str], optimizer: Optimizer) -> str | None:
    """Return the recipe of some, by name, that is nearest to another: with its format of matmuls, if any has it, then as few
    other bytes of state per parameter as possible. None without names.

    >>> from shardwise.model import get_optimizer
    >>> from shardwise.values import get_precision
    >>> nearest_precision(get_precision("bf16"), ["fp32", "bf16_fp32_gradients"], get_optimizer("adamw"))
    'bf16_fp32_gradients'
    """
    recipes = [get_precision(name) for name in names]
    with_format = [recipe for recipe in recipes if recipe.matmul_format == precision.matmul_format] or recipes
    return (
        min(with_format, key=lambda recipe: precision_distance(precision, optimizer, recipe)).name if recipes else None
    )


def precision_distance(planned: Precision, optimizer: Optimizer, candidate: Precision) -> tuple[float, int]:
    """Return how far a recipe is from a planned one: bytes of state per parameter first, then the number of differing choices."""
    state_pairs = zip(state_parts(planned, optimizer), state_parts(candidate, optimizer), strict=True)
    choices = (getattr(planned, field.name) != getattr(candidate, field.name) for field in fields(planned))
    return sum(abs(ours - theirs) for ours, theirs in state_pairs), sum(choices)


def state_formats(precision: Precision, optimizer: Optimizer) -> dict[str, str]:
    """Return the number format of each tensor of an optimizer's state.

    There is no master copy where a recipe keeps none, and the gradient where the update has a copy of its own.
    """
    formats = {
        MASTER: precision.master, **moment_formats(precision, optimizer), GRADIENT: precision.update_gradients,
    }  # fmt: skip
    return {name: format for name, format in formats.items() if format is not None}


def moment_formats(precision: Precision, optimizer: Optimizer) -> dict[str, str]:
    """Return the number format of each moment by name.

    Moments with a number for each two rows or columns are in fp32 at least: rounded to 16 bits such a matrix has negative
    eigenvalues, and no root.
    """
    _, squares = precision.moment_dtypes
    fine_format = squares if bytes_per_element(squares) >= bytes_per_element("fp32") else "fp32"
    return {
        name: moment.format
        or (
            fine_format
            if moment.granularity in PAIR_GRANULARITIES
            else squares
            if moment.is_second_moment
            else precision.moments
        )
        for name, moment in optimizer.moments.items()
    }


def moment_bytes(precision: Precision, optimizer: Optimizer) -> float:
    """Return the bytes of a parameter's moments, and of the gradient that is cast for the update."""
    copy = bytes_per_element(precision.update_gradients) if precision.update_gradients else 0.0
    return sum(map(bytes_per_element, element_moments(precision, optimizer).values())) + copy


def element_moments(precision: Precision, optimizer: Optimizer) -> dict[str, str]:
    """Return the number format of each moment that has a number for each element of a parameter."""
    formats = moment_formats(precision, optimizer)
    return {name: format for name, format in formats.items() if optimizer.granularity(name) is Granularity.ELEMENT}


def factor_bytes(precision: Precision, optimizer: Optimizer) -> float:
    """Return the bytes of each number of the moments that have fewer numbers than elements (a row, a column, a pair); 0
    without any."""
    formats = moment_formats(precision, optimizer)
    return max(
        (bytes_per_element(formats[n]) for n in formats if optimizer.granularity(n) is not Granularity.ELEMENT),
        default=0.0,
    )


class WeightMatrix(NamedTuple):
    """A weight's dims: a matrix [rows, columns] for each element of `stack` (each expert has its own)."""

    stack: Dims
    rows: Dims
    columns: Dims

    @property
    def dims(self) -> Dims:
        return (*self.stack, *self.rows, *self.columns)

    def dims_at(self, granularity: Granularity, largest_side: int = 0) -> Dims:
        """Return the dims of a tensor with one number for each element, row, column, matrix, or pair of rows or columns.

        Pairs exist where there are at most `largest_side` rows or columns.
        """
        return {
            Granularity.ELEMENT: self.dims, Granularity.ROW: (*self.stack, *self.rows),
            Granularity.COLUMN: (*self.stack, *self.columns),
            Granularity.TENSOR: self.stack, Granularity.ROW_PAIR: (*self.stack, ElementPairs(self.rows, largest_side)),
            Granularity.COLUMN_PAIR: (*self.stack, ElementPairs(self.columns, largest_side)),
        }[granularity]  # fmt: skip

    def sizes(self, largest_side: int) -> MatrixSizes:
        """Return the sizes of one of the matrices, in symbols."""
        pairs = (multiply_symbols([ElementPairs(dims, largest_side)]) for dims in (self.rows, self.columns))
        fewest = multiply_symbols([FewestElements(self.rows, self.columns)])
        return MatrixSizes(
            multiply_symbols(map(_unsharded_dim, self.rows)),
            multiply_symbols(map(_unsharded_dim, self.columns)),
            fewest,
            *pairs,
        )


def _unsharded_dim(dim: str) -> LocalDim:
    return LocalDim(dim, ())


def weight_matrices(program: Program, *, tables: bool = False) -> Mapping[str, WeightMatrix]:
    """Return the matrices of a forward program by the weights' names: what products take.

    Tables of the vocabulary, of positions and heads, which have a row for a word or a position, are among them with `tables`
    only. Rows are the weight's leading dims up to the border between those that the product sums over and those that it
    leaves.

    >>> from shardwise.model.decoder import unit_program
    >>> from shardwise.model.load import load_model
    >>> matrices = weight_matrices(unit_program(load_model("qwen3-30b-a3b").structure, "block"))
    >>> matrices["wo"]
    WeightMatrix(stack=(), rows=('K', 'G', 'H'), columns=('D',))
    >>> matrices["experts_up"]
    WeightMatrix(stack=('E',), rows=('M',), columns=('D',))
    """
    matrices: dict[str, WeightMatrix] = {}
    for name in program.weights if tables else ():
        dims = program.dims(name)
        if program.tensors[name].part is ModelPart.VOCABULARY:
            matrices[name] = WeightMatrix((), dims[:1], dims[1:])
    for operation in program.operations:
        for name in operation.inputs if isinstance(operation, Contract) and len(operation.inputs) == 2 else ():
            if name in program.weights and program.tensors[name].part is not ModelPart.VOCABULARY:
                (operand,) = (input_name for input_name in operation.inputs if input_name != name)
                matrix = _weight_matrix(program.dims(name), program.dims(operand), program.dims(operation.outputs[0]))
                matrices |= {name: matrix} if matrix.rows and matrix.columns else {}
    return matrices


def _weight_matrix(weight: Dims, operand: Dims, result: Dims) -> WeightMatrix:
    """Split a weight's dims into stack, rows and columns, by those of the product's other operand and result."""
    stack = tuple(dim for dim in weight if dim in operand and dim in result)
    product_dims = weight[len(stack) :]
    border = next(
        (index for index, dim in enumerate(product_dims) if (dim in result) != (product_dims[0] in result)),
        len(product_dims),
    )
    return WeightMatrix(stack, product_dims[:border], product_dims[border:])


def build_optimizer_program(
    weights: Mapping[str, Dims],
    gradients: Mapping[str, str],
    optimizer: str,
    matrices: Mapping[str, WeightMatrix] | None = None,
) -> Program:
    """Return the update of `weights` (name -> dims), whose gradients have the names in `gradients`; `matrices` are those among
    them.

    For a weight w it reads the gradient and each tensor of the optimizer's state (`w.master`, ...), and defines the same with
    an appended prime, and `w'`. Raises `InputError` for an optimizer that is not known.
    """
    builder, definition = ProgramBuilder(), get_optimizer(optimizer)
    updates = []
    for name, dims in weights.items():
        builder.input(gradients[name], dims, Role.WEIGHT_GRADIENT)
        matrix = (matrices or {}).get(name)
        weight_optimizer = definition.for_weight(is_matrix=matrix is not None)
        function = optimizer if weight_optimizer is definition else f"{optimizer}.others"
        weight = _UpdatedWeight(name, dims, gradients[name], matrix)
        updates.append(_WeightUpdate(builder, function, weight_optimizer, weight))
    # Round by round, since what has to come together in between does so for many weights at once; all end with the last round.
    by_rounds = sorted(updates, key=lambda update: len(update.rounds), reverse=True)
    for index in range(-max((len(update.rounds) for update in updates), default=0), 0):
        for update in by_rounds:
            update.add_round(index)
    return builder.build([output for update in updates for output in update.outputs])


class _UpdatedWeight(NamedTuple):
    name: str
    dims: Dims
    gradient: str
    matrix: WeightMatrix | None


class _WeightUpdate:
    """The update of one weight: `tensors` has the names of its tensors by those in the optimizer's formulas."""

    def __init__(self, builder: ProgramBuilder, function: str, optimizer: Optimizer, weight: _UpdatedWeight) -> None:
        self.builder, self.function, self.optimizer = builder, function, optimizer
        self.name, self.dims, gradient, self.matrix = weight
        self.rounds, self.outputs = optimizer.rounds, list[str]()
        self.tensors = {
            tensor: builder.input(f"{self.name}.{tensor}", self.dims_of(tensor), self.role(tensor))
            for tensor in optimizer.state
        }
        self.tensors[GRADIENT] = gradient

    def dims_of(self, tensor: str) -> Dims:
        granularity = self.optimizer.granularity(tensor)
        if granularity is Granularity.ELEMENT:
            return self.dims
        return self.matrix.dims_at(granularity, self.optimizer.max_preconditioned_side) if self.matrix else ()

    def role(self, tensor: str) -> Role:
        """Return the role of a tensor of the state, or of one that is computed for it."""
        if f"{tensor}'" in self.optimizer.direction_tensors:
            return Role.DIRECTION
        if tensor == MASTER or self.optimizer.updates[tensor].is_state:
            return Role.STATE if self.optimizer.granularity(tensor) is Granularity.ELEMENT else Role.FACTOR
        return Role.MEAN

    def add_round(self, index: int) -> None:
        """Add the operations of one round; `index` counts from the last, -1, which also defines the weight and the outputs."""
        if len(self.rounds) + index < 0:
            return
        for tensor in self.rounds[index]:
            update = self.optimizer.updates[tensor]
            reads, dims = tuple(self.tensors[operand] for operand in update.reads), self.dims_of(tensor)
            result = self.builder.tensor(f"{self.name}.{tensor}'", dims, self.role(tensor))
            function = f"{self.function}.{tensor}"
            union = dict.fromkeys(dim for name in reads for dim in self.builder.tensors[name].dims)
            operation: Operation = Map(reads, (result,), function, over=tuple(dim for dim in union if dim not in dims))
            if update.takes_whole_matrix and self.matrix:
                sizes = self.matrix.sizes(self.optimizer.max_preconditioned_side)
                operation = MatrixFunction(
                    reads, (result,), function, *self.matrix, flops_per_matrix=update.flops(sizes),
                    workspace=update.workspace(sizes), is_state=update.is_state,
                )  # fmt: skip
            self.tensors[f"{tensor}'"] = self.builder.add(operation)
        if index == -1:
            weight = self.builder.tensor(f"{self.name}'", self.dims, Role.WEIGHT)
            self.outputs.append(self.builder.add(Map((self.tensors[f"{MASTER}'"],), (weight,), "identity")))
            self.outputs += (self.tensors[f"{tensor}'"] for tensor in self.optimizer.state)


def owning_weight(tensor: str) -> str:
    """Return the name of the weight that a tensor of an update program belongs to.

    >>> owning_weight("mlp_norm.weight.variance'")
    'mlp_norm.weight'
    """
    return tensor.rpartition(".")[0]


def whole_matrix_inputs(program: Program) -> dict[str, str]:
    """Return the tensors that are gathered for functions of whole matrices, with the names of their weights."""
    matrix_functions = [operation for operation in program.operations if isinstance(operation, MatrixFunction)]
    computed = {name for operation in matrix_functions for name in operation.outputs}
    reads = dict.fromkeys(name for operation in matrix_functions for name in operation.inputs)
    return {
        name: owning_weight(name)
        for name in reads
        if program.tensors[name].role is Role.DIRECTION and name not in computed
    }
