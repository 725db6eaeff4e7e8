"""An optimizer as a value: its hyperparameters, the state that it keeps of a weight, and how a step updates it; all by name.

A formula is arithmetic alone (+ - * / ** and comparisons), so that it takes NumPy arrays and PyTorch's tensors alike; those of
whole matrices have products too, and methods that both kinds of arrays have (`sum`, `mean`, `clip`, `cumsum`, `mT`). The first
parameter of a formula, `v`, has the values of the hyperparameters, the learning rate and the step (`formula_values`).

Every file of this folder that has an `OPTIMIZER` is an optimizer under the file's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from shardwise.values import ZERO, Polynomial, did_you_mean, lookup, raise_problems
from shardwise.values.dtypes import BLOCK_SCALED_DTYPES

Array = TypeVar("Array")
MASTER, GRADIENT = "master", "gradient"


class Granularity(StrEnum):
    """Granularity of a tensor of an update: what it has one number for.

    For a matrix: each element, row or column, the whole matrix, or each pair of its rows or columns. For a weight that is no
    matrix: each element, or the tensor.
    """

    ELEMENT = "element"
    ROW = "row"
    COLUMN = "column"
    TENSOR = "tensor"
    ROW_PAIR = "pair of rows"
    COLUMN_PAIR = "pair of columns"


PAIR_GRANULARITIES = (Granularity.ROW_PAIR, Granularity.COLUMN_PAIR)


class MatrixSizes(NamedTuple):
    """Rows and columns of a matrix, the fewer of the two, and the pairs of rows and of columns that an update has numbers for.

    There are no pairs where there are too many rows or columns (`Optimizer.max_preconditioned_side`).
    """

    rows: Polynomial
    columns: Polynomial
    least: Polynomial
    row_pairs: Polynomial = ZERO
    column_pairs: Polynomial = ZERO


def _no_elements(sizes: MatrixSizes) -> Polynomial:
    return ZERO


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameter:
    """A number that a recipe may set: its default, its minimum and the first value that is too large, and what it means.

    `matrices_only`: it is 0 for a weight that is no matrix (norms, biases), as GPT-2 and its successors have their decay.
    `integer_only`: it is a whole number.
    """

    default: float
    limits: tuple[float, float]
    help: str
    matrices_only: bool = False
    integer_only: bool = False

    @property
    def required(self) -> str:
        """The allowed values, in words."""
        low, high = self.limits
        return f"a {'whole ' if self.integer_only else ''}number of at least {low:g}, below {high:g}, is required"

    def allows(self, value: float) -> bool:
        low, high = self.limits
        return low <= value < high and (not self.integer_only or value == int(value))


class StateUpdate(NamedTuple):
    """One update within a step: `formula` takes `formula_values` and the tensors that it `reads`.

    These are tensors of the state from before the step, with a prime ("master'") from after it, or the `GRADIENT`.
    `is_second_moment`: a moment of squared gradients, which a precision recipe may keep in a format of its own. `is_state`:
    the result is kept; otherwise it is computed for another update of the same step. `takes_whole_matrix`: the formula is not
    elementwise but a function of whole matrices. It reads tensors that are not kept [..., rows, columns] and tensors with a
    number for each pair of rows [..., rows, rows] or columns; every device has the latter whole, and only such formulas read
    and compute them. `flops` are those of its products for one matrix, as a mean over steps, and `workspace` the elements that
    exist beside operands and results meanwhile.

    `granularity`: the result has one number for each element, or fewer. Formulas are elementwise over all that they read; a
    result with fewer numbers is the mean of the formula: one for each row is the mean over columns, and so on. Means are not
    kept.

    `format`: for a moment one of `values.dtypes.BLOCK_SCALED_DTYPES`, in which it is kept whatever the precision recipe; None:
    the recipe's.
    """

    reads: tuple[str, ...]
    formula: Callable[..., Any]
    is_second_moment: bool = False
    is_state: bool = True
    takes_whole_matrix: bool = False
    granularity: Granularity = Granularity.ELEMENT
    format: str | None = None
    flops: Callable[[MatrixSizes], Polynomial] = _no_elements
    workspace: Callable[[MatrixSizes], Polynomial] = _no_elements


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """All that an optimizer decides: the `fields` that people may set, and the `updates` of its state in order.

    The state is the `MASTER` copy of the weight (the weight itself where a recipe keeps no copy) and the moments, called as in
    PyTorch; checkpoints have them under these names. With a `fallback`, whose fields it has too, the `updates` are only for
    matrices of products between the embedding and the head (`model.optimizer_program`), with `covers_vocabulary` also for
    those over the vocabulary; the fallback updates all other weights. For a matrix with more rows, or columns, than
    `max_preconditioned_side`, tensors with numbers for pairs of these are empty.
    """

    fields: Mapping[str, Hyperparameter]
    updates: Mapping[str, StateUpdate]
    source: str
    fallback: Optimizer | None = None
    covers_vocabulary: bool = False
    max_preconditioned_side: int = 0

    def __post_init__(self) -> None:
        formats = [update.format for update in self.updates.values() if update.format is not None]
        if formats and (self.updates_whole_matrices or any(map(self.is_mean, self.updates))):
            raise ValueError(
                f"moments in {', '.join(formats)}: found means or functions of matrices; neither is required"
            )

    def for_weight(self, *, is_matrix: bool) -> Optimizer:
        """Return the optimizer of a weight: this one for matrices of products, the fallback for others."""
        return self if is_matrix or self.fallback is None else self.fallback

    @property
    def moments(self) -> Mapping[str, StateUpdate]:
        """Updates of the state beside the master copy, by name."""
        return {name: update for name, update in self.updates.items() if name != MASTER and update.is_state}

    @property
    def block(self) -> int:
        """Number of elements that each shard of a flat array holds a multiple of, so that no cut splits a block with a common
        scale.

        >>> from shardwise.model.optimizers.definition import get_optimizer
        >>> get_optimizer("adamw").block, get_optimizer("adamw_8bit").block
        (1, 256)
        """
        return math.lcm(
            *(BLOCK_SCALED_DTYPES[update.format].size for update in self.updates.values() if update.format is not None)
        )

    @property
    def updates_whole_matrices(self) -> bool:
        """True if any of its updates is a function of whole matrices."""
        return any(update.takes_whole_matrix for update in self.updates.values())

    @property
    def gathered_tensors(self) -> frozenset[str]:
        """Names, with a prime, of the elementwise results that are gathered because a whole-matrix update reads them."""
        reads = (name for update in self.updates.values() if update.takes_whole_matrix for name in update.reads)
        return frozenset(
            name for name in reads
            if name.endswith("'") and self.granularity(name) is Granularity.ELEMENT
            and not self.updates[name.removesuffix("'")].takes_whole_matrix
        )  # fmt: skip

    def granularity(self, tensor_name: str) -> Granularity:
        """Return what a tensor that an update reads has one number for."""
        update = self.updates.get(tensor_name.removesuffix("'"))
        return Granularity.ELEMENT if update is None else update.granularity

    def is_mean(self, name: str) -> bool:
        """Return whether an update computes the mean of its formula: it reads a tensor that has more numbers."""
        update = self.updates[name]
        return any(self.granularity(read) in FINER_GRANULARITIES[update.granularity] for read in update.reads)

    @property
    def reduces_means(self) -> bool:
        """True if any of its updates, or of its fallback's, computes a mean."""
        return any(map(self.is_mean, self.updates)) or (self.fallback is not None and self.fallback.reduces_means)

    @property
    def rounds(self) -> tuple[tuple[str, ...], ...]:
        """Updates in order, split into rounds where tensors are communicated: before an update that reads a mean or whole
        matrices.

        >>> from shardwise.model.optimizers.definition import get_optimizer
        >>> get_optimizer("lion").rounds
        (('master', 'exp_avg'),)
        >>> get_optimizer("muon").rounds
        (('momentum_buffer', 'direction'), ('orthogonal', 'master'))
        """
        rounds: list[list[str]] = [[]]
        for name, update in self.updates.items():
            boundary = {f"{last}'" for last in rounds[-1] if self.is_mean(last) or f"{last}'" in self.gathered_tensors}
            if not boundary.isdisjoint(update.reads):
                rounds.append([])
            rounds[-1].append(name)
        return tuple(map(tuple, rounds))

    @property
    def direction_tensors(self) -> frozenset[str]:
        """Tensors of elements that whole-matrix updates read and compute, and that are not kept."""
        computed = {
            f"{name}'"
            for name, update in self.updates.items()
            if update.takes_whole_matrix and update.granularity is Granularity.ELEMENT
        }
        return self.gathered_tensors | computed

    @property
    def state(self) -> tuple[str, ...]:
        """Names of all that it keeps, the master copy first."""
        return (MASTER, *self.moments)

    def resolve_hyperparameters(self, fields: Mapping[str, float]) -> dict[str, float]:
        """Return the value of every field; those that are left out have their defaults. Raises `InputError` with all that is
        wrong."""
        wrong = [f"recipe: found {name!r}{did_you_mean(name, self.fields)}; the plan's optimizer has {', '.join(self.fields)}"
                 for name in fields if name not in self.fields]  # fmt: skip
        resolved = {name: fields.get(name, hyperparameter.default) for name, hyperparameter in self.fields.items()}
        for name, value in resolved.items():
            field = self.fields[name]
            wrong += [] if field.allows(value) else [f"recipe: {name} is {value!r}; {field.required}"]
        raise_problems(wrong)
        return resolved

    def hyperparameters_for(self, fields: Mapping[str, float], *, matrix: bool) -> dict[str, float]:
        """Return the values of the fields for matrices, or for other weights."""
        return {name: value if matrix or not self.fields[name].matrices_only else 0.0 for name, value in fields.items()}

    def step(self, values: Any, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Return the state after a step, by name, from the state before it and the gradient; `values` are `formula_values`.

        For matrices [..., rows, columns], moments of rows are [..., rows, 1], those of columns [..., 1, columns], and those of
        pairs of rows [..., rows, rows]. A weight that is no matrix is [n].
        """
        tensor_by_name: dict[str, Any] = dict(tensors)
        for name, update in self.updates.items():
            result = update.formula(values, *(tensor_by_name[read] for read in update.reads))
            axes = (
                tuple(range(-min(2, result.ndim), 0))
                if update.granularity is Granularity.TENSOR
                else MEAN_AXES[update.granularity]
            )
            tensor_by_name[f"{name}'"] = result.mean(axis=axes, keepdims=True) if self.is_mean(name) else result
        return {name: tensor_by_name[f"{name}'"] for name in self.updates if self.updates[name].is_state}


def formula_values(fields: Mapping[str, float], *, learning_rate: float, step: int) -> Any:
    """Return the first argument of formulas: fields, `learning_rate` and `step` (from 1) as attributes."""
    return SimpleNamespace(**fields, learning_rate=learning_rate, step=step)


MEAN_AXES: Mapping[Granularity, tuple[int, ...]] = {
    Granularity.ELEMENT: (), Granularity.ROW: (-1,), Granularity.COLUMN: (-2,),
    Granularity.ROW_PAIR: (), Granularity.COLUMN_PAIR: (),
}  # fmt: skip
# Of what has one number for each of these, what has more.
FINER_GRANULARITIES: Mapping[Granularity, tuple[Granularity, ...]] = {
    Granularity.ELEMENT: (), Granularity.ROW: (Granularity.ELEMENT,), Granularity.COLUMN: (Granularity.ELEMENT,),
    Granularity.TENSOR: (Granularity.ELEMENT, Granularity.ROW, Granularity.COLUMN),
    Granularity.ROW_PAIR: (), Granularity.COLUMN_PAIR: (),
}  # fmt: skip
DECAY_LIMITS = (0.0, 1.0)  # limits of the decay of an average


def matrix_weight_decay(
    default: float, help: str = "decay of a matrix in a step, times the learning rate"
) -> Hyperparameter:
    """Return the hyperparameter of a weight decay, which only matrices have."""
    return Hyperparameter(default=default, limits=(0.0, 1e3), help=help, matrices_only=True)


DEFAULT_OPTIMIZER = "adamw"  # the one that a job has by default
PACKAGE, _, THIS_MODULE = __name__.rpartition(".")
FOLDERS = [str(Path(__file__).parent)]


def discover_optimizers() -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers of this folder's files with their names, the default first."""
    names = {module.name for module in iter_modules(FOLDERS)} - {THIS_MODULE}
    for name in sorted(names, key=lambda name: (name != DEFAULT_OPTIMIZER, name)):
        optimizer = getattr(import_module(f"{PACKAGE}.{name}"), "OPTIMIZER", None)
        if isinstance(optimizer, Optimizer):
            yield name, optimizer


OPTIMIZERS: dict[str, Optimizer] = dict(discover_optimizers())


def optimizer_names() -> tuple[str, ...]:
    """Return the names that a job may give."""
    return tuple(OPTIMIZERS)


def get_optimizer(name: str) -> Optimizer:
    """Return an optimizer by name. Raises `InputError` that lists the names.

    >>> get_optimizer("lion").state
    ('master', 'exp_avg')
    """
    return lookup(OPTIMIZERS, name, "optimizer")


def optimizer_fields() -> dict[str, str]:
    """Return the help text of each field of all optimizers: the meaning, the optimizers that have it, their defaults."""
    defaults_by_field: dict[str, dict[str, list[str]]] = {}
    for optimizer, definition in OPTIMIZERS.items():
        for name, field in definition.fields.items():
            defaults_by_field.setdefault(name, {}).setdefault(field.help, []).append(f"{optimizer} {field.default:g}")
    return {
        name: "; ".join(f"{help_text} ({', '.join(defaults)})" for help_text, defaults in helps.items())
        for name, helps in defaults_by_field.items()
    }
